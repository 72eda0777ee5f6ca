"""What a confined process does with a SentencePiece model: shows that the library can use it.

The library trusts the tables in a model, and may abort.
"""

import sentencepiece

from ropewalk.model.confined.inside import answer
from ropewalk.model.tokenizers.trial import PROBE


def tried(file: bytes) -> bytes:
    """Nothing, or what is wrong."""
    try:
        sentencepiece.SentencePieceProcessor(model_proto=file).encode(PROBE)
    except MemoryError:
        raise
    except Exception as error:
        return str(error).encode()
    return b""


if __name__ == "__main__":
    answer(tried)
