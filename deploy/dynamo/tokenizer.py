"""Writes the bundled models' tokenizer as Dynamo's frontend reads it.

    python deploy/dynamo/tokenizer.py FOLDER

FOLDER gets a tokenizer.json with the same tokens, and what else the frontend looks for.
"""

import json
import sys
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from ropewalk.server.download import family


def write(folder: Path) -> None:
    model = family()[0]
    config = json.loads((model / "config.json").read_text())
    tokens = SentencePieceProcessor(model_file=str(model.parent / "tokenizer.model"))
    pieces = [tokens.id_to_piece(number) for number in range(tokens.get_piece_size())]
    ids = {piece: number for number, piece in enumerate(pieces)}
    # A longer piece is made of any two others, those first whose result has the lower id.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    made = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", tokens.bos_id())])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    known = {
        "architectures": ["LlamaForCausalLM"],  # required, and without effect
        "model_type": "llama",
        "max_position_embeddings": config["trained_context"],
        "eos_token_id": tokens.eos_id(),
    }
    (folder / "config.json").write_text(json.dumps(known))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
