"""An external audit of a generation: what each step does to bytes that are already stored.

The whole cache is copied after every step and compared byte by byte with the copy before, and
with keys and values computed from scratch. Nothing is taken on trust from an encoding, except its
count of positional work. Slow and exact, for short runs. Knows no requests and no server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.types import BLOCK_SIZE, KeyStorage
from ropewalk.model.batch import in_order, of_one
from ropewalk.model.catalogue import hooks
from ropewalk.model.decoder import Decoder

# Relative to an entry's norm. In float64, one pass and token-by-token passes agree to 1e-12.
TOLERANCE = 1e-9

# Called before a step that takes the cache from `start` to `stop` tokens: rotates stored keys
# where the new length requires it, and returns how many it rotated, or the step will rewrite.
Rewrite = Callable[[KVCache, int, int], int]


@dataclass(frozen=True, slots=True)
class Arm:
    """One encoding in a decoder to be audited."""

    name: str
    note: str  # what its weights are worth, in words
    decoder: Decoder
    rewrite: Rewrite | None = None
    trained_length: int | None = None  # past it frequencies follow the length; None: never


class Entry(NamedTuple):
    """One stored vector."""

    kind: Literal["key", "value"]
    layer: int
    kv_head: int
    position: int


class Touched(NamedTuple):
    """How many keys and values of a position were touched, over all layers and heads."""

    position: int
    keys: int
    values: int


@dataclass(frozen=True, slots=True)
class AuditStep:
    """What one step did. Positions in order, without those where nothing happened."""

    length: int  # tokens stored after the step
    tokens: int  # of these, the step's own
    written: tuple[Touched, ...]  # where nothing was stored before
    changed: tuple[Touched, ...]  # earlier entries whose bytes now differ
    should_change: tuple[Touched, ...]  # earlier entries that were wrong for this length
    stale: tuple[Touched, ...]  # of those, the ones still wrong
    unexpected: tuple[Entry, ...]  # changed, although they were correct
    first_term: int  # positions from here on got a positional term; equals `length` if none did
    rotations: int  # of one head's query or key
    bias_values: int  # scores that got a bias


@dataclass(frozen=True, slots=True)
class Audit:
    """One arm's steps; the first one is the prompt."""

    name: str
    note: str
    trained_length: int | None
    steps: tuple[AuditStep, ...]

    @property
    def unexpected(self) -> int:
        """Entries that changed although they were correct, over all steps."""
        return sum(len(step.unexpected) for step in self.steps)


def entries(touched: Sequence[Touched]) -> int:
    """The number of keys and values together."""
    return sum(one.keys + one.values for one in touched)


def audit(
    arm: Arm, prompt: Sequence[int], steps: int, stepped: Callable[[], object] = lambda: None
) -> Audit:
    """Run the prompt in one step, then `steps` greedy steps of one token.

    `stepped` is called after each step.
    """
    watch = Watch(arm, len(prompt) + steps)
    found = []
    tokens = list(prompt)
    for _ in range(steps + 1):
        found.append(watch.step(tokens))
        tokens = [watch.likeliest]
        stepped()
    return Audit(arm.name, arm.note, arm.trained_length, tuple(found))


class Watch:
    """One sequence in its own cache.

    Changes to the cache between two steps are seen by the second: each step's result is compared
    with what the step before left behind.
    """

    def __init__(self, arm: Arm, capacity: int) -> None:
        self.arm = arm
        self.config = arm.decoder.config
        self.kv = self._cache(capacity)
        self.known: list[int] = []
        self.left = _copy(self.kv)
        self.likeliest = 0

    def step(self, tokens: Sequence[int]) -> AuditStep:
        """Append tokens to the sequence. At most `capacity` fit in all."""
        start, stop = len(self.known), len(self.known) + len(tokens)
        self.known += tokens
        rewritten = 0
        if self.arm.rewrite is not None:
            rewritten = self.arm.rewrite(self.kv, start, stop)
        logits = self._run(self.kv, start)
        self.likeliest = int(logits[-1].argmax())
        before, after = self.left, _copy(self.kv)
        self.left = after

        differs = bytes_differ(before, after)
        should = torch.zeros_like(differs)
        stale = torch.zeros_like(differs)
        right = self._from_scratch()
        past = slice(0, start)
        should[:, :, past] = _far_apart(before[:, :, past], right[:, :, past])
        stale[:, :, past] = should[:, :, past] & _far_apart(after[:, :, past], right[:, :, past])
        written = differs.clone()
        written[:, :, past] = False
        changed = differs & ~written

        counted = [
            self.arm.decoder.encoding.work(self.config, n, BLOCK_SIZE)
            for n in range(start + 1, stop + 1)
        ]
        first_term = 0 if rewritten else first_positional_term(self.arm.decoder, start, stop)
        return AuditStep(
            length=stop,
            tokens=len(tokens),
            written=_by_position(written),
            changed=_by_position(changed),
            should_change=_by_position(should),
            stale=_by_position(stale),
            unexpected=_listed(changed & ~should),
            first_term=first_term,
            rotations=rewritten + sum(work.rotations for work in counted),
            bias_values=sum(work.bias_values for work in counted),
        )

    def _from_scratch(self) -> Tensor:
        kv = self._cache(len(self.known))
        self._run(kv, 0)
        return _copy(kv)

    def _run(self, kv: KVCache, start: int) -> Tensor:
        """Compute and store the known tokens from `start` on; returns the last token's logits."""
        end = len(self.known)
        table = in_order(-(-end // BLOCK_SIZE), BLOCK_SIZE)
        new = self.known[start:]
        batch = of_one(new, start, table, BLOCK_SIZE, wanted=1, device=kv.device)
        logits: Tensor = self.arm.decoder(batch, kv)
        return logits

    def _cache(self, capacity: int) -> KVCache:
        kv = KVCache(
            self.config,
            blocks=-(-capacity // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            dtype=self.arm.decoder.dtype,
            device=self.arm.decoder.device,
            gates=self.arm.decoder.gates,
        )
        for layer in range(kv.num_layers):
            for tensor in kv.layer(layer):
                tensor.fill_(torch.nan)  # so that every write is visible
        return kv


def first_positional_term(decoder: Decoder, start: int, stop: int) -> int:
    """Positions from here to `stop` take part in a step's positional computations.

    These are embeddings and keys of new tokens; every key where keys are stored unrotated; and
    the newest keys that get a bias from a new query, as many as the encoding counts in `work`.
    """
    encoding, config = decoder.encoding, decoder.config
    rotation = encoding.rotation()
    if rotation is not None and rotation.storage is KeyStorage.RAW:
        return 0
    first = start if {"embed", "rotate"} & set(hooks(type(encoding))) else stop
    for context in range(start + 1, stop + 1):
        values = encoding.work(config, context, BLOCK_SIZE).bias_values
        if biased := values // (config.num_layers * config.num_heads):  # keys, from one query
            first = min(first, context - biased)
    return first


def _copy(kv: KVCache) -> Tensor:
    """[2, layers, slots, kv_heads, head_dim]: keys, then values; after a key the gates with it."""
    keys, values, gates = kv.whole.keys, kv.whole.values, kv.whole.gates
    if gates is not None:
        gates = gates.transpose(2, 3).reshape(*keys.shape[:-1], -1).to(keys.dtype)
        keys = torch.cat((keys, gates), dim=-1)
        values = torch.cat((values, torch.zeros_like(gates)), dim=-1)
    return torch.stack((keys, values)).flatten(2, 3)


def bytes_differ(a: Tensor, b: Tensor) -> Tensor:
    """[..., head_dim] → [...]: compares bytes, so that NaN equals itself and -0 differs from 0."""
    return (a.view(torch.uint8) != b.view(torch.uint8)).any(dim=-1)


def _far_apart(stored: Tensor, right: Tensor) -> Tensor:
    """[..., head_dim] → [...]: whether the difference exceeds the tolerance or is NaN."""
    close: Tensor = (stored - right).norm(dim=-1) <= TOLERANCE * right.norm(dim=-1)
    return ~close


def _by_position(mask: Tensor) -> tuple[Touched, ...]:
    """mask: [2, layers, positions, kv_heads]."""
    keys, values = mask.sum(dim=(1, 3)).tolist()
    counts = enumerate(zip(keys, values, strict=True))
    return tuple(Touched(position, k, v) for position, (k, v) in counts if k or v)


def _listed(mask: Tensor) -> tuple[Entry, ...]:
    found = mask.nonzero().tolist()
    return tuple(
        Entry("value" if kind else "key", layer, head, position)
        for kind, layer, position, head in found
    )
