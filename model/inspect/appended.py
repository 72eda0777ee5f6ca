"""What appending tokens does to the blocks before them: an audit of a served model's first layers.

Entries of the first layers depend on no later ones, so that auditing some is exact for these. They
are computed in float64 from the checkpoint's weights, and only for the tokens that occur.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.model import recipes
from ropewalk.model.catalogue import example
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.encodings.base import EncodingError, create, find
from ropewalk.model.inspect import audit_arms
from ropewalk.model.inspect.audit import AuditStep, Watch, bytes_differ
from ropewalk.model.loading.checkpoints import InUse, load_encoding, read_parameter
from ropewalk.model.program import Program, of_norms

OWN = "own"
MOST_WORK = 1e11  # operations, for which a CPU takes some seconds
MOST_BYTES = 4 << 30  # of weights in float64
USUAL_LAYERS, USUAL_STEPS = 4, 8


class TooMuch(ValueError):
    """Even the least that could be audited of the model takes too long."""


@dataclass(frozen=True, slots=True)
class Block:
    """What `count` entries of one block became, from before anything was appended to the end."""

    first: int  # position
    tokens: int  # that it had before
    before: str  # checksums of their bytes
    after: str
    changed: int  # entries with other bytes


@dataclass(frozen=True, slots=True)
class Appended:
    """steps: those that append, without the one that computes the prompt."""

    arm: str
    note: str
    trained_length: int | None
    layers: int
    entries_per_token: int
    steps: tuple[AuditStep, ...]
    blocks: tuple[Block, ...]


def arms_for(config: ModelConfig) -> dict[str, str]:
    """The arms that such a model can have, with what is to know of each."""
    own = config.encoding.name
    found = {OWN: f"{own}, as it is served"}
    for name in (*audit_arms.ALL, *audit_arms.VARIANTS):
        plain, options = audit_arms.VARIANTS.get(name, (name.partition(":")[0], {}))
        if name == own:
            continue
        try:
            if name != audit_arms.PATH:  # fits every decoder, and is no encoding to be found
                example(find(plain), config, config.trained_context, options)
        except EncodingError:
            continue  # impossible with this number of heads or this width
        found[name] = audit_arms.NOTES.get(name, "" if plain == own else "another encoding")
    return found


@torch.inference_mode()
def append(
    used: InUse,
    arm: str,
    prompt: Sequence[int],
    more: Sequence[int],
    *,
    trained_length: int | None,
    layers: int | None,
    steps: int | None,
) -> Appended:
    """Compute the prompt, then `more` in some steps. Raises EncodingError, TooMuch.

    trained_length: of the arms whose frequencies follow the length; by default that of the prompt.
    """
    config, length = used.checkpoint.config, len(prompt) + len(more)
    layers = min(layers or USUAL_LAYERS, config.num_layers)
    steps = min(steps or USUAL_STEPS, len(more))
    layers, steps = _affordable(config, length, layers, steps)
    vocabulary = sorted({*prompt, *more})
    program = first_layers(used, layers, vocabulary)
    number = {token: index for index, token in enumerate(vocabulary)}
    name = config.encoding.name if arm == OWN else arm
    chosen = audit_arms.arm(name, program, length, trained_length or len(prompt), used.context)
    watch = Watch(chosen, length)
    watch.step([number[token] for token in prompt])
    before = watch.left
    size = -(-len(more) // steps)
    parts = [more[first : first + size] for first in range(0, len(more), size)]
    taken = tuple(watch.step([number[token] for token in part]) for part in parts)
    return Appended(
        arm=arm,
        note=chosen.note,
        trained_length=chosen.trained_length,
        layers=layers,
        entries_per_token=watch.kv.entries_per_token,
        steps=taken,
        blocks=tuple(_blocks(before, watch.left, len(prompt))),
    )


def first_layers(used: InUse, layers: int, vocabulary: Sequence[int]) -> Program:
    """In float64, for these tokens alone, with the embedding as a head that nobody reads."""
    checkpoint, config = used.checkpoint, used.checkpoint.config
    options = dict(config.encoding.options)
    if "layers" in options:
        options["layers"] = [layer for layer in options["layers"] if layer < layers]
    short = replace(
        config,
        num_layers=layers,
        windows=config.windows[:layers],
        vocab_size=len(vocabulary),
        tied_embeddings=True,
        head_bias=False,
        encoding=EncodingSpec(config.encoding.name, options),
    )
    encoding = create(short.encoding, short, used.context, audit_arms.CPU)
    load_encoding(checkpoint, encoding)
    weights = recipes.allocate(short, encoding, dtype=audit_arms.DTYPE, device=audit_arms.CPU)
    norms = of_norms(recipes.program(short, {}, encoding).ops)
    for name, weight in weights.items():
        if name != "head.weight":
            dtype = torch.float32 if name in norms else used.dtype
            stored = read_parameter(checkpoint, name, dtype)
            weight.copy_(stored[list(vocabulary)] if name == "embed.weight" else stored)
    return recipes.program(short, weights, encoding)


def _affordable(config: ModelConfig, length: int, layers: int, steps: int) -> tuple[int, int]:
    """Fewer steps, then fewer layers, if that is what it takes."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    mlp = (3 if config.gated else 2) * config.intermediate_size
    used, stored = (1, 1) if config.experts is None else (config.experts.used, config.experts.count)

    def work() -> float:
        # Each step is computed anew from the beginning, to compare with.
        weights = config.hidden_size * (attention + used * mlp)
        return 2.0 * weights * layers * length * (steps + 3)

    layer = audit_arms.DTYPE.itemsize * config.hidden_size * (attention + stored * mlp)
    layers = min(layers, MOST_BYTES // layer)
    if layers == 0:
        raise TooMuch("one of its layers takes too much memory in float64")
    while work() > MOST_WORK and steps > 1:
        steps //= 2
    while work() > MOST_WORK and layers > 1:
        layers -= 1
    if work() > 4 * MOST_WORK:
        raise TooMuch("one of its layers takes too long in float64")
    return layers, steps


def _blocks(before: Tensor, after: Tensor, length: int) -> list[Block]:
    """before, after: [2, layers, slots, kv_heads, head_dim]. Of the first `length` positions."""
    found = []
    for first in range(0, length, BLOCK_SIZE):
        slots = slice(first, min(first + BLOCK_SIZE, length))
        old, new = before[:, :, slots], after[:, :, slots]
        sums = [
            hashlib.blake2b(each.contiguous().numpy().tobytes(), digest_size=8).hexdigest()
            for each in (old, new)
        ]
        changed = int(bytes_differ(old, new).sum())
        found.append(Block(first, slots.stop - first, sums[0], sums[1], changed))
    return found
