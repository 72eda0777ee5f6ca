"""Tiny random models in folders, and texts: stand-ins for trained models and their corpus."""

import json
from pathlib import Path

import numpy as np
import torch

from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import create
from ropewalk.model.family.texts.corpus import Corpus, Split
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.loading.save import save_checkpoint
from ropewalk.model.recipes import allocate, program
from tests.model.tiny import in_torch, parameters_of

CPU = torch.device("cpu")
VOCAB = 4096
TRAINED = 64
LEARNED = EncodingSpec("learned", {"positions": TRAINED, "offset": 0})
ENCODINGS = {
    "rope": EncodingSpec("rope", {"base": 10000.0, "width": 8, "layout": "half"}),
    "t5": EncodingSpec("t5", {"buckets": 32, "max_distance": 128}),
    "alibi": EncodingSpec("alibi", {}),
    "learned": LEARNED,
    "sinusoidal": EncodingSpec("sinusoidal", {"layout": "interleaved"}),
    "nope": EncodingSpec("nope", {}),
}


def config(encoding: EncodingSpec, layers: int = 2) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        norm_eps=1e-5,
        trained_context=TRAINED,
        encoding=encoding,
        windows=(None,) * layers,
        tied_embeddings=True,
    )


def random_decoder(encoding: EncodingSpec, scale: float = 0.3, layers: int = 2) -> Decoder:
    """Weights drawn once; `scale` 0 makes every token as likely as any."""
    shape = config(encoding, layers)
    made = create(encoding, shape, 4096, CPU)
    told = program(shape, allocate(shape, made, dtype=torch.float32, device=CPU), made)
    drawn = torch.Generator().manual_seed(0)
    for name, parameter in told.named_parameters():
        values = torch.randn(parameter.shape, generator=drawn) * scale
        parameter.copy_(values + 1 if name.endswith("norm.weight") else values)
    made.freeze()
    return in_torch(told, SdpaAttention)


def save(folder: Path, encoding: EncodingSpec, log: bool = True) -> Path:
    """Write a folder as training leaves it."""
    decoder = random_decoder(encoding)
    save_checkpoint(parameters_of(decoder), decoder.config, folder, tokenizer=[SHIPPED_TOKENIZER])
    if log:
        write_log(folder)
    return folder


def write_log(folder: Path, end: float = 3.0) -> None:
    """100 steps of 1,000 tokens in half a second each, from a loss of 8 down to `end`."""
    lines = []
    for step in range(1, 101):
        loss = end + (8 - end) * 0.95**step
        row = {"step": step, "tokens": 1000 * step, "seconds": 0.5 * step, "loss": loss, "rate": 1}
        lines.append(row | ({"held_out_loss": loss + 0.1} if step % 50 == 0 else {}))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def corpus(documents: int = 3, length: int = 900) -> Corpus:
    """<s> and drawn tokens, none of them the tokenizer's own signs."""
    drawn = np.random.default_rng(3)
    pieces = [
        (f"tales/{n}", [1, *drawn.integers(300, VOCAB, length - 1)]) for n in range(documents)
    ]
    tokenizer = SHIPPED_TOKENIZER.read_bytes()
    return Corpus(Split.of(pieces[:1]), Split.of(pieces), "f" * 64, tokenizer)
