"""The arms of an audit: one decoder under several encodings, including length-dependent RoPE.

All arms share the decoder's weights and differ in the encoding alone. They compute in float64, so
that rounding is never mistaken for a change.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.types import BLOCK_SIZE, KeyStorage
from ropewalk.model import recipes
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.catalogue import example
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import (
    EncodingError,
    PositionalEncoding,
    create,
    find,
    freeze_all,
    names,
)
from ropewalk.model.encodings.common.rotary import rotate_pairs
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.inspect import path
from ropewalk.model.inspect.audit import Arm
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.loading.checkpoints import Checkpoint, load_program
from ropewalk.model.program import Program

Encoding = TypeVar("Encoding", bound=PositionalEncoding)

CPU = torch.device("cpu")
DTYPE = torch.float64
FACTOR = 2.0  # scaling of the dynamic arms, as in published models
SEED = 0
TINY = ModelConfig(
    vocab_size=256,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    norm_eps=1e-5,
    trained_context=256,
    encoding=EncodingSpec("nope", {}),
    windows=(None, None),
)
DYNAMIC, REWRITTEN, PATH = "rope:dynamic", "rope:dynamic-rewrite", "path"
# name: (encoding, options in which it differs from the plain one)
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rope:raw": ("rope", {"storage": "raw"}),
    "rope:block": ("rope", {"storage": "block"}),
    "t5:table": ("t5", {"form": "table"}),
    "t5:materialised": ("t5", {"form": "materialised"}),
}
NOTES = {
    DYNAMIC: "stored keys are left unchanged",
    REWRITTEN: "stored keys are rotated again whenever the frequencies change, which repairs only "
    "those of layer 0",
    "rope:raw": "keys are stored unrotated, and rotated in every step",
    "rope:block": f"keys are rotated by their offset in the block, and the query once for each "
    f"block of {BLOCK_SIZE}",
    "t5:materialised": "the bias of every key is looked up and stored before it is added",
    PATH: "PaTH: each token rewrites the keys of all before it; its weights are random",
}
_FIRST = ("rope", DYNAMIC, REWRITTEN, "rope:raw", "rope:block", "t5", "t5:materialised", "alibi")
_LAST = ("learned", "sinusoidal", "nope", PATH)
# Encodings that are added to the folder come between those that leave the cache as it is and those
# that every stored entry depends on.
ALL = (*_FIRST, *(name for name in names() if name not in _FIRST + _LAST), *_LAST)


class FollowingRoPE(RoPE):
    """RoPE as in published models with `dynamic` scaling: frequencies depend on the length.

    Not for serving: a key that was stored at one length is wrong at the next.
    """

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate by the frequencies for the length that these positions reach."""
        speeds = self.frequencies_at(int(positions.max()) + 1).double()
        angles = positions[:, None] * speeds
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return rotate_pairs(q, cos, sin, self.layout), rotate_pairs(k, cos, sin, self.layout)

    def retune(self, kv: KVCache, start: int, stop: int) -> int:
        """Re-rotate the stored keys of `start` tokens for a length of `stop`; returns how many.

        A server that stores rotated keys would have to do this. It corrects the keys of layer 0;
        deeper keys and values resulted from attention at the old frequencies and stay wrong.
        """
        change = self.frequencies_at(stop).double() - self.frequencies_at(start).double()
        if not start or not change.any():
            return 0
        angles = torch.arange(start)[:, None] * change
        rotated = 0
        for layer in range(kv.num_layers):
            if self.rotates(layer):
                keys = kv.layer(layer).keys.flatten(0, 1)[:start]  # a view
                keys.copy_(rotate_pairs(keys, angles.cos(), angles.sin(), self.layout))
                rotated += start * kv.num_kv_heads
        return rotated


def tiny(context: int) -> Program:
    """A small decoder with random weights and no encoding, for runs of `context` tokens."""
    config = replace(TINY, trained_context=max(context, TINY.trained_context))
    encoding = create(config.encoding, config, context, CPU)
    weights = recipes.allocate(config, encoding, dtype=DTYPE, device=CPU)
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in weights.items():
        weight.normal_(0, 0.35, generator=generator)
        if name.endswith("norm.weight"):
            weight.add_(1)
    return recipes.program(config, weights, encoding)


def from_checkpoint(checkpoint: Checkpoint, context: int) -> Program:
    """A decoder with its trained weights in float64. Raises EncodingError, CheckpointError.

    The encoding's settings are those that `serve` uses for the trained context.
    """
    config = checkpoint.config
    encoding = create(config.encoding, config, max(context, config.trained_context), CPU)
    return load_program(checkpoint, encoding, dtype=DTYPE, device=CPU)


def arm(
    name: str, program: Program, context: int, trained_length: int, served: int | None = None
) -> Arm:
    """`program` under an encoding, for runs of `context` tokens.

    name: an encoding, one of ALL or VARIANTS, or "package.module:Class". The dynamic arms behave
    as if trained for `trained_length` tokens. served: the context to build the encoding for, by
    default the trained one or `context` if that is longer. Raises EncodingError.
    """
    served = served or max(context, program.config.trained_context)
    if name in (DYNAMIC, REWRITTEN):
        return _dynamic(name, program, context, trained_length, served)
    if name == PATH:
        made, rewrite = path.decoder(program), path.count_rewritten
        return Arm(name, NOTES[name], made, rewrite=rewrite)
    family, colon, _ = name.partition(":")
    if colon and name not in VARIANTS and family in names():
        known = [one for one in (DYNAMIC, REWRITTEN, *VARIANTS) if one.startswith(f"{family}:")]
        raise EncodingError(
            f"There is no {name!r} to audit; use one of {', '.join([family, *known])}."
        )
    plain, options = VARIANTS.get(name, (name, {}))
    encoding = _built(find(plain), plain, options, program, context, served)
    notes = [NOTES[name]] if name in NOTES else []
    if plain == program.config.encoding.name:
        _copy_weights(program.encoding, encoding)
    elif any(True for _ in encoding.parameters()):
        notes.append("the encoding's weights are random")
    return Arm(name, "; ".join(notes), _with_encoding(program, plain, encoding))


def _dynamic(name: str, program: Program, context: int, trained_length: int, served: int) -> Arm:
    scaling = {"type": "dynamic", "factor": FACTOR, "original_context": trained_length}
    # It rotates keys by their positions, whatever the program's own RoPE does.
    options = {"scaling": scaling, "storage": KeyStorage.ABSOLUTE}
    encoding = _built(FollowingRoPE, "rope", options, program, context, served)
    return Arm(
        name,
        f"as if trained for {trained_length} tokens, scaled by {FACTOR:g}; {NOTES[name]}",
        _with_encoding(program, "rope", encoding),
        rewrite=encoding.retune if name == REWRITTEN else None,
        trained_length=trained_length,
    )


def _built(
    kind: type[Encoding],
    name: str,
    options: Mapping[str, Any],
    program: Program,
    context: int,
    served: int,
) -> Encoding:
    """Uses the program's own options if this is the program's own encoding."""
    own = program.config.encoding
    if name == own.name:
        options = {**own.options, **options}
        if options.get("storage", KeyStorage.RAW) != KeyStorage.RAW:
            # Only keys that are stored raw can have another rotation where they are far.
            options = {option: options[option] for option in options.keys() - {"near", "group"}}
    encoding = example(kind, program.config, served, options)
    if encoding.max_positions is not None and encoding.max_positions < context:
        raise EncodingError(
            f"{name} has positions for only {encoding.max_positions} tokens, so it cannot be "
            f"audited over {context}; ask for fewer tokens or steps."
        )
    assert isinstance(encoding, kind)
    return encoding


def _copy_weights(source: PositionalEncoding, target: PositionalEncoding) -> None:
    trained = dict(source.named_parameters())
    with torch.inference_mode():
        for name, parameter in target.named_parameters():
            parameter.copy_(trained[name])
        freeze_all(target)


def _with_encoding(program: Program, name: str, encoding: PositionalEncoding) -> Decoder:
    """A decoder with these weights under another encoding."""
    config = replace(program.config, encoding=EncodingSpec(name, {}))
    made = recipes.program(config, program.weights, encoding)
    return Decoder(made, TorchExecutor(made, SdpaAttention))
