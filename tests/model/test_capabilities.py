"""What each encoding declares of each operation is what happens to stored entries.

A tiny decoder stores a context; the operation is applied; every stored byte is compared with what
was there, and every entry of the first layer with one computed anew at the position that it has
now. There an entry rests on its own token and position alone, so what differs is position error;
in later layers context error comes in, under every encoding alike.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.operations import Operations
from ropewalk.cache.types import (
    Audit,
    Capability,
    Evict,
    Fork,
    KeyStorage,
    Move,
    Op,
    Truncate,
    Unsupported,
)
from ropewalk.model.program import Keep
from tests.model.running import Running, entries, make_batch, new_cache
from tests.model.tiny import ABSOLUTE, ENCODINGS, in_torch, program_of, tiny
from tests.products import combined

BLOCK, BLOCKS = 4, 24
MOVES = (Op.EVICT_RENUMBER, Op.MOVE_SPAN)
TOKENS = random.Random(0).choices(range(61), k=23)  # of "a", the last one not stored at first
OTHER = random.Random(1).choices(range(61), k=4)  # of "b"
STORED = len(TOKENS) - 1

# What is done, to which sequence, and that one's tokens and positions afterwards.
KEPT = [*range(4), *range(12, STORED)]
CASES = {
    Op.APPEND: (None, "a", TOKENS, [*range(STORED + 1)]),
    Op.FORK: (Fork("a", "c", 18), "c", TOKENS[:18], [*range(18)]),
    Op.TRUNCATE: (Truncate("a", 18), "a", TOKENS[:18], [*range(18)]),
    Op.EVICT_KEEP: (Evict("a", 1, 2, renumber=False), "a", [TOKENS[n] for n in KEPT], KEPT),
    Op.EVICT_RENUMBER: (
        Evict("a", 1, 2, renumber=True),
        "a",
        [TOKENS[n] for n in KEPT],
        [*range(len(KEPT))],
    ),
    Op.MOVE_SPAN: (Move("a", 2, 2, "b"), "b", [*OTHER, *TOKENS[8:16]], [*range(12)]),
}
CONTRACT = [
    (name, storage)
    for name, spec in ENCODINGS.items()
    if "storage" not in spec.options
    for storage in (KeyStorage if spec.name == "rope" and "near" not in spec.options else [None])
]


def expected(encoding, storage, op, dtype):
    if op in MOVES and encoding in ABSOLUTE:
        return Capability.IMPOSSIBLE
    if op in MOVES and storage is KeyStorage.ABSOLUTE:
        return Capability.APPROXIMATE if dtype is torch.bfloat16 else Capability.REWRITE
    return Capability.FREE


@cache
def decoder_of(encoding, storage, dtype):
    """Nothing that is tried changes it."""
    return tiny(encoding, dtype=dtype, options={} if storage is None else {"storage": storage})


@cache
def first_layer_of(encoding, storage, dtype):
    """The same without the layers that what the first one stores does not depend on."""
    decoder = tiny(encoding, dtype=dtype, options={} if storage is None else {"storage": storage})
    ops = program_of(decoder).ops
    second = next(i for i, op in enumerate(ops) if getattr(op, "name", "").startswith("layers.1."))
    last = ops[-2:]  # the norm and the head
    kept = next(op for op in ops if isinstance(op, Keep))
    ops = (*ops[:second], replace(kept, reads="x", writes="x"), *last)
    return in_torch(replace(program_of(decoder), ops=ops))


class World:
    """A decoder, and a cache in which "a" and "b" are stored."""

    def __init__(self, encoding, storage, dtype):
        self.decoder = decoder_of(encoding, storage, dtype)
        self.first_layer = first_layer_of(encoding, storage, dtype)
        self.kv = new_cache(self.decoder, BLOCKS, BLOCK)
        for part in self.kv.whole:
            part.zero_()
        self.manager = CacheManager(BLOCKS, BLOCK)
        layers = range(self.decoder.config.num_layers)
        self.rules = [self.decoder.encoding.for_layer(layer) for layer in layers]
        self.ledger = Ledger(self.kv, Audit.FULL)
        self.operations = Operations(self.manager, self.kv, self.rules, self.ledger)
        self.compute(a=TOKENS[:STORED], b=OTHER)

    def compute(self, **sequences):
        """Store those of the sequences' tokens that are not yet."""
        work = []
        for name, tokens in sequences.items():
            held = self.manager.reserve(name, tokens, len(tokens))
            sequence = Running(tokens, self.blocks(name), computed=held)
            work.append((sequence, len(tokens) - held))
        self.decoder(make_batch(work, BLOCK), self.kv)
        for name, tokens in sequences.items():
            self.manager.commit(name, tokens, len(tokens))
        self.ledger.observe(self.manager.drain_events())

    def apply(self, operation):
        if operation is not None:
            return self.operations.apply(operation)
        self.compute(a=TOKENS)
        return None

    def blocks(self, name):
        return list(self.manager.table(name).blocks)

    def slots(self, name):
        """Block and offset of each token that is stored."""
        places = [(block, offset) for block in self.blocks(name) for offset in range(BLOCK)]
        return places[: self.manager.computed(name)]

    def read(self, slots):
        """A copy of the keys and values there, [2, layers, tokens, heads, head_dim]."""
        blocks, offsets = torch.tensor(slots).T
        return entries(self.kv.whole)[:, :, blocks, offsets]

    def memory(self):
        """A copy of every byte of the cache."""
        return torch.cat([part.flatten().view(torch.uint8) for part in self.kv.whole])

    def positions(self, name):
        places = [base + n for base in self.manager.table(name).bases for n in range(BLOCK)]
        return places[: self.manager.computed(name)]

    def anew(self, tokens, positions):
        """Keys and values of the first layer [2, tokens, heads, head_dim], each token by itself.

        Each stands at the offset that it has in its own block, for storages that go by it.
        """
        alone = []
        for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            offset = row % BLOCK
            before = [0] * offset
            alone.append(Running([*before, token], [row + 1], offset, position - offset))
        kv = new_cache(self.decoder, len(tokens) + 1, BLOCK)
        for part in kv.whole:
            part.zero_()
        self.first_layer(make_batch([(each, 1) for each in alone], BLOCK), kv)
        rows = torch.arange(len(tokens))
        return entries(kv.layer(0))[:, rows + 1, rows % BLOCK]


def error(found, wanted):
    """The largest relative error of an entry."""
    off = (found.double() - wanted.double()).norm(dim=-1)
    return float((off / wanted.double().norm(dim=-1)).max())


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # the latter: of a product and of a turn


@pytest.mark.parametrize(
    ("of", "op", "dtype"),
    combined(
        CONTRACT,
        Op,
        (torch.float32, torch.bfloat16),
        # Moves may be rounded. The others are free everywhere: each encoding shows two.
        always=lambda of, op, dtype: (
            op in MOVES
            or (dtype is torch.float32 and (CONTRACT.index(of) + list(Op).index(op)) % 2 == 0)
        ),
    ),
)
def test_capability(of, op, dtype, record_property) -> None:
    encoding, storage = of
    world = World(encoding, storage, dtype)
    operation, name, tokens, positions = CASES[op]
    capability = world.operations.capability(op)
    assert capability is expected(encoding, storage, op, dtype)
    assert all(
        rules.capability(op, dtype) in (capability, Capability.FREE) for rules in world.rules
    )
    if capability is Capability.IMPOSSIBLE:
        refused_and_unchanged(world, operation, tokens, positions)
        return

    foretold = None if operation is None else world.operations.dry_run(operation)
    slots = world.slots("a") + world.slots("b")
    was, memory = world.read(slots), world.memory()
    report = world.apply(operation)
    assert report == foretold
    world.manager.check()

    changed = (world.read(slots).view(torch.uint8) != was.view(torch.uint8)).any(-1)
    # A moved span is copied before it is turned; its source stays as it was.
    turned = 0 if report is None or op is Op.MOVE_SPAN else report.rewritten
    assert int(changed.sum()) == turned
    assert not changed[1].any()  # values never
    if report is not None:
        assert report.stale == 0
        assert (report.rewritten > 0) == (capability is not Capability.FREE)
        if capability is Capability.FREE and not report.copied:
            assert torch.equal(world.memory(), memory)

    assert world.positions(name) == positions
    stored = world.read(world.slots(name))[:, 0]
    wrong = error(stored, world.anew(tokens, positions))
    record_property("position_error", wrong)
    assert wrong < ROUNDING[dtype]
    if capability is Capability.APPROXIMATE:
        assert wrong > 1e-4  # it is not exact, and says so


def refused_and_unchanged(world, operation, tokens, positions):
    """And with reason: were entries to stay as they are, they would be wrong."""
    was = world.memory()
    tables = [(world.blocks(name), world.positions(name)) for name in "ab"]
    for attempt in (world.operations.dry_run, world.operations.apply):
        with pytest.raises(Unsupported, match="the position is part of"):
            attempt(operation)
    assert torch.equal(world.memory(), was)
    assert [(world.blocks(name), world.positions(name)) for name in "ab"] == tables
    assert world.manager.drain_events() == []
    old = [*range(4), *range(8, 16)] if isinstance(operation, Move) else KEPT
    moved = slice(4, None)
    as_stored, right = (world.anew(tokens, where)[:, moved] for where in (old, positions))
    assert error(as_stored[0], right[0]) > 0.1
    assert error(as_stored[1], right[1]) > 0.1
