"""Decoders of realistic shapes with random weights, made without files: for costs, not answers.

The cost of a step follows from shape and encoding, never from the weights. So one shape can be
combined with every encoding, with a learned table of any length.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ropewalk.model.architectures.base import by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.ropewalk import shapes
from ropewalk.model.architectures.stored import Stored
from ropewalk.model.config import EncoderDecoderConfig, EncodingSpec, ModelConfig
from ropewalk.model.encodings.base import find
from ropewalk.model.loading.checkpoints import RANDOM, Checkpoint
from ropewalk.model.tokenizers.numbers import NumberTokenizer
from ropewalk.model.weights.base import MAX_CONFIG, CheckpointError, read_json

CONTEXT = 8192  # by default: no training implies a context


def _llama(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
) -> ModelConfig:
    """The architecture of all shapes here, with heads of 64."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        intermediate_size=intermediate_size,
        norm_eps=1e-5,
        trained_context=CONTEXT,
        encoding=EncodingSpec("rope", {"base": 10000.0, "width": 64, "layout": "half"}),
        windows=(None,) * num_layers,
        tied_embeddings=True,
    )


SHAPES: Mapping[str, ModelConfig] = {
    # No model's: for trying out measurement programs.
    "tiny": _llama(
        vocab_size=256,
        hidden_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=256,
    ),
    # The shape of the family of small models that Ropewalk trains.
    "small": _llama(
        vocab_size=4096,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=704,
    ),
    # SmolLM2-135M.
    "smollm2": _llama(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        intermediate_size=1536,
    ),
    # Llama 3.2 1B.
    "llama-1b": _llama(
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=8192,
    ),
}


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A `WeightFile` that generates each tensor when it is read, always the same for a name.

    Matrices preserve the magnitude of their inputs: uniform with variance 1 / columns. So do norms
    of ones and biases of zeros, and logits have a standard deviation of about 1.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def in_4_bits(self) -> bool:
        return False

    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, part: int | None = None) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        bound = (3 / shape[-1]) ** 0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def random_checkpoint(source: str, encoding: str | None, context: int | None) -> Checkpoint:
    """`shape:SHAPE` or `shape:SHAPE:ENCODING`; SHAPE is one of SHAPES or the path of a config.json.

    `encoding` replaces the one that the source names. Raises CheckpointError or EncodingError.
    """
    shape, _, named = source.removeprefix(RANDOM).partition(":")
    config = SHAPES[shape] if shape in SHAPES else _described(shape)
    config = replace(config, trained_context=context or config.trained_context)
    config = replace(config, encoding=_encoding(config, encoding or named))
    found = shapes(config)
    return Checkpoint(
        path=Path(source),
        architecture="random",
        config=config,
        tokenizer=NumberTokenizer(config.vocab_size),
        chat_template=None,
        stop_ids=frozenset(),
        weights=RandomWeights(found),
        parameters={name: (Stored(name, shape),) for name, shape in found.items()},
        copies={},
    )


def _described(shape: str) -> ModelConfig:
    """The shape in a config.json."""
    path = Path(shape).expanduser()
    if not path.is_file():
        raise CheckpointError(
            f"{RANDOM}{shape} is no shape known here; use {', '.join(SHAPES)} or the path of a "
            "config.json."
        )
    fields = Fields(str(path), read_json(path, MAX_CONFIG))
    architecture = by_model_type(fields.text("model_type"), str(path))
    config = architecture.config_from_hf(fields, RandomWeights({}))
    if isinstance(config, EncoderDecoderConfig):
        raise CheckpointError(f"{path} has an encoder, too; use the config of a decoder alone.")
    return config


def _encoding(config: ModelConfig, name: str) -> EncodingSpec:
    """The encoding `name` with its usual options; the config's own if `name` is that or empty."""
    own = config.encoding
    options = own.options if name in ("", own.name) else find(name).usual_options(config)
    if "positions" in options:  # a learned table is as long as the context
        options = {**options, "positions": config.trained_context}
    return EncodingSpec(name or own.name, options)
