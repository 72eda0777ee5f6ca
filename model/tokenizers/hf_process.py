"""What a confined process does with a tokenizer.json: shows that the library can read and use it.

The library bounds neither its time nor its memory on a hostile file, and may abort.
"""

import tokenizers

from ropewalk.model.confined.inside import answer
from ropewalk.model.tokenizers.base import refuse_ids
from ropewalk.model.tokenizers.trial import PROBE


def tried(file: bytes) -> bytes:
    """Nothing, or what is wrong."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(file)
        refuse_ids(tokenizer.get_vocab_size() - 1)
        tokenizer.encode(PROBE)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        return str(error).encode()
    return b""


if __name__ == "__main__":
    answer(tried)
