"""What operations do to the tensors, with rules that make every change visible."""

import pytest
import torch

from ropewalk.cache.kv import KVCache
from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.operations import Operations
from ropewalk.cache.types import (
    Audit,
    Capability,
    Evict,
    Fork,
    Move,
    NoRoom,
    Op,
    Truncate,
    Unsupported,
)
from tests.cache.shape import Shape

BLOCK, BLOCKS, HEADS = 4, 16, 3
MOVES = (Op.EVICT_RENUMBER, Op.MOVE_SPAN)


class Rules:
    """One layer's. Under `rewrite` a key carries its position as a sum."""

    WHY_FIXED = ""

    def __init__(self, moved=Capability.FREE):
        self.moved = moved
        if moved is Capability.IMPOSSIBLE:
            self.WHY_FIXED = "positions are in the values"

    def capability(self, op, dtype):
        return self.moved if op in MOVES else Capability.FREE

    def shift(self, keys, delta):
        return keys + delta


class FakeLedger:
    """Keeps what it was told, and in which order."""

    def __init__(self):
        self.calls = []

    def observe(self, events):
        self.calls.append(("observe", [event.kind.value for event in events]))

    def verify(self, blocks, seq):
        if blocks:
            self.calls.append(("verify", list(blocks), seq))

    def seal(self, blocks):
        self.calls.append(("seal", list(blocks)))


class World:
    """Two layers; every entry is its own random number, the same in no two."""

    def __init__(self, *moved, blocks=BLOCKS, dtype=torch.float64):
        self.kv = KVCache(
            Shape(2, HEADS, 5),
            blocks=blocks,
            block_size=BLOCK,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        generator = torch.Generator().manual_seed(3)
        for part in self.kv.whole:
            part.copy_(torch.randn(part.shape, generator=generator))
        self.manager = CacheManager(blocks, BLOCK)
        self.ledger = FakeLedger()
        self.operations = Operations(self.manager, self.kv, [Rules(m) for m in moved], self.ledger)
        self.tokens = 0

    def store(self, seq, length):
        """A sequence of tokens that no other one has."""
        tokens = range(self.tokens, self.tokens + length)
        self.tokens += length
        self.manager.reserve(seq, tokens, length)
        self.manager.commit(seq, tokens, length)

    def read(self, seq):
        """Keys and values [layers, tokens, heads, head_dim] as a sequence finds them."""
        table, count = self.manager.table(seq), self.manager.computed(seq)
        where = torch.tensor(table.blocks)
        parts = self.kv._keys[:, where], self.kv._values[:, where]
        return tuple(part.flatten(1, 2)[:, :count].clone() for part in parts)

    def apply(self, operation):
        """The report, which the dry run foretold and the bytes bear out."""
        before = self.kv._keys.clone(), self.kv._values.clone()
        foretold = self.operations.dry_run(operation)
        assert self.unchanged(before)
        report = self.operations.apply(operation)
        assert report == foretold
        assert report.stale == 0
        self.manager.check()
        return report

    def unchanged(self, before):
        return torch.equal(before[0], self.kv._keys) and torch.equal(before[1], self.kv._values)


FREE, REWRITE = Capability.FREE, Capability.REWRITE
ENTRIES = 2 * 2 * HEADS  # of a token: keys and values of two layers


def test_a_fork_reads_the_same_and_each_then_writes_alone():
    world = World(FREE, FREE)
    world.store("a", 10)
    keys, values = world.read("a")
    report = world.apply(Fork("a", "b", 9))
    assert report.copied == ENTRIES  # the ninth token's
    assert report.bytes_moved == 2 * ENTRIES * 5 * 8
    child = world.read("b")
    assert torch.equal(child[0], keys[:, :9]) and torch.equal(child[1], values[:, :9])
    shared = set(world.manager.table("a").blocks) & set(world.manager.table("b").blocks)
    assert len(shared) == 2


def test_truncating_a_shared_block_leaves_the_other_holder_alone():
    world = World(FREE, FREE)
    world.store("a", 12)
    world.apply(Fork("a", "b", 8))
    before = world.read("a")
    report = world.apply(Truncate("b", 6))
    assert report.copied == 2 * ENTRIES
    assert torch.equal(world.read("b")[0], before[0][:, :6])
    assert set(world.manager.table("a").blocks).isdisjoint(world.manager.table("b").blocks[1:])
    assert world.apply(Truncate("a", 5)).copied == 0


@pytest.mark.parametrize("renumber", [False, True])
def test_a_free_eviction_writes_nothing(renumber):
    world = World(FREE, FREE)
    world.store("a", 14)
    stored = world.kv._keys.clone(), world.kv._values.clone()
    keys, values = world.read("a")
    report = world.apply(Evict("a", 1, 1, renumber))
    assert (report.capability, report.copied, report.rewritten, report.bytes_moved) == (
        FREE,
        0,
        0,
        0,
    )
    assert world.unchanged(stored)
    kept = [*range(4), *range(8, 14)]
    assert torch.equal(world.read("a")[0], keys[:, kept])
    assert torch.equal(world.read("a")[1], values[:, kept])


def test_renumbering_rewrites_the_keys_that_carry_their_position():
    """Those of the second layer alone, once, by the whole distance."""
    world = World(FREE, REWRITE)
    world.store("a", 14)
    keys, values = world.read("a")
    report = world.apply(Evict("a", 1, 1, renumber=True))
    assert (report.capability, report.copied, report.rewritten) == (REWRITE, 0, 6 * HEADS)
    assert report.bytes_moved == 2 * 6 * HEADS * 5 * 8
    kept = [*range(4), *range(8, 14)]
    moved_keys, moved_values = world.read("a")
    assert torch.equal(moved_values, values[:, kept])
    assert torch.equal(moved_keys[0], keys[0, kept])
    assert torch.equal(moved_keys[1, :4], keys[1, :4])
    assert torch.equal(moved_keys[1, 4:], keys[1, 8:] - 4)


def test_keys_that_a_broken_operation_leaves_are_stale(monkeypatch):
    world = World(REWRITE, REWRITE)
    world.store("a", 14)
    monkeypatch.setattr(
        "ropewalk.cache.operations._batched", lambda some: [some[:1]] if some else []
    )
    report = world.operations.apply(Evict("a", 1, 1, renumber=True))
    assert (report.should_change, report.rewritten) == (2 * 6 * HEADS, 2 * BLOCK * HEADS)
    assert report.stale == 2 * 2 * HEADS  # the last block's two slots, in both layers


def test_renumbering_copies_what_others_hold():
    world = World(REWRITE, REWRITE)
    world.store("a", 14)
    world.apply(Fork("a", "b", 14))
    before = world.read("b")
    report = world.apply(Evict("a", 0, 2, renumber=True))
    # The third block is shared; the fourth was copied by the fork.
    assert report.copied == 4 * ENTRIES
    assert report.rewritten == 2 * 6 * HEADS
    assert torch.equal(world.read("a")[0], before[0][:, 8:] - 8)
    after = world.read("b")
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])


def test_the_ledger_sees_blocks_before_and_after():
    world = World(REWRITE, REWRITE)
    world.store("a", 14)
    world.ledger.calls.clear()
    world.apply(Evict("a", 1, 1, renumber=True))
    assert world.ledger.calls == [
        ("verify", [3, 4], "a"),
        ("observe", ["taken"] * 4 + ["filled"] * 3 + ["released"] + ["taken"] * 2),
        ("seal", [3]),
    ]


@pytest.mark.parametrize(
    ("operation", "changed"),
    [
        (Fork("a", "b", 7), "b"),  # its last block is a copy of a's
        (Truncate("shares", 6), "shares"),
        (Evict("shares", 0, 1, renumber=True), "shares"),
        (Move("a", 1, 1, "c"), "c"),
    ],
    ids=lambda value: getattr(value, "op", None),
)
def test_who_gets_a_copy_of_a_changed_block_is_named(operation, changed):
    world = World(REWRITE, REWRITE)
    ledger = Ledger(world.kv, Audit.SAMPLE)
    operations = Operations(world.manager, world.kv, world.operations._rules, ledger)
    world.store("a", 8)
    world.store("c", 4)
    world.manager.rearranger.fork("a", "shares", 8)
    ledger.observe(world.manager.drain_events())
    block = world.manager.table("a").blocks[1]
    world.kv.layer(0).keys[block] += 1
    operations.apply(operation)
    ledger.observe(world.manager.drain_events())
    (fault,) = ledger.drain().faults
    assert fault.block == block
    assert changed in fault.sequences


@pytest.mark.parametrize("moved", [FREE, REWRITE])
def test_a_span_is_reused_at_another_offset(moved):
    world = World(moved, moved)
    world.store("a", 12)
    world.store("b", 8)
    source, target = world.read("a"), world.read("b")
    report = world.apply(Move("a", 0, 2, "b"))
    expected = source[0][:, :8] + (8 if moved is REWRITE else 0)
    assert torch.equal(world.read("b")[0], torch.cat((target[0], expected), dim=1))
    assert torch.equal(world.read("b")[1], torch.cat((target[1], source[1][:, :8]), dim=1))
    after = world.read("a")
    assert torch.equal(after[0], source[0]) and torch.equal(after[1], source[1])
    moved_tokens = 8 if moved is REWRITE else 0
    assert report.copied == moved_tokens * ENTRIES
    assert report.rewritten == moved_tokens * 2 * HEADS


def test_a_span_at_its_own_offset_is_shared_by_every_encoding():
    world = World(REWRITE, REWRITE)
    world.store("a", 12)
    world.store("b", 4)
    report = world.apply(Move("a", 1, 2, "b"))
    assert (report.copied, report.rewritten) == (0, 0)
    assert world.manager.table("b").blocks[1:] == world.manager.table("a").blocks[1:]


def test_a_span_with_a_gap_inside_is_moved_by_two_distances():
    world = World(REWRITE, REWRITE)
    world.store("a", 16)
    keys, _ = world.read("a")
    world.apply(Evict("a", 1, 1, renumber=False))
    world.store("b", 8)
    world.apply(Move("a", 0, 3, "b"))
    moved = world.read("b")[0][:, 8:]
    assert torch.equal(moved[:, :4], keys[:, :4] + 8)
    assert torch.equal(moved[:, 4:], keys[:, 8:] + 4)


def test_many_blocks_are_moved_in_batches(monkeypatch):
    monkeypatch.setattr("ropewalk.cache.operations.BLOCKS_AT_ONCE", 3)
    world = World(REWRITE, REWRITE, blocks=30)
    world.store("a", 46)
    keys, _ = world.read("a")
    world.apply(Fork("a", "b", 46))
    world.apply(Evict("a", 1, 2, renumber=True))
    assert torch.equal(world.read("a")[0][:, 4:], keys[:, 12:] - 8)
    assert torch.equal(world.read("b")[0], keys)


@pytest.mark.parametrize("operation", [Evict("a", 1, 1, True), Move("a", 1, 1, "b")])
def test_the_impossible_is_refused_with_its_reason_and_changes_nothing(operation):
    world = World(FREE, Capability.IMPOSSIBLE)
    world.store("a", 12)
    world.store("b", 4)
    stored = world.kv._keys.clone(), world.kv._values.clone()
    with pytest.raises(Unsupported, match=f"{operation.op.value} is impossible.*in the values"):
        world.operations.apply(operation)
    assert world.unchanged(stored)
    assert world.manager.computed("a") == 12
    assert world.apply(Evict("a", 1, 1, renumber=False)).capability is FREE


def test_without_room_nothing_changes():
    world = World(REWRITE, REWRITE, blocks=5)
    world.store("a", 16)
    world.apply(Fork("a", "b", 16))
    stored, table = world.kv._keys.clone(), list(world.manager.table("a").blocks)
    with pytest.raises(NoRoom):
        world.operations.apply(Evict("a", 1, 1, renumber=True))
    assert torch.equal(stored, world.kv._keys)
    assert list(world.manager.table("a").blocks) == table


def test_the_hardest_layer_decides():
    world = World(FREE, Capability.APPROXIMATE)
    assert world.operations.capability(Op.MOVE_SPAN) is Capability.APPROXIMATE
    assert world.operations.capability(Op.APPEND) is FREE
    assert world.operations.why_not(Op.MOVE_SPAN) is None


def in_8_bits(world, blocks):
    """Bytes of numbers and scales of some blocks, all layers."""
    where = torch.tensor(blocks)
    return [part[:, where].clone().view(torch.uint8) for part in world.kv.whole]


def test_in_8_bits_copies_take_the_scales_with_the_numbers():
    world = World(FREE, FREE, dtype=torch.int8)
    world.store("a", 10)
    report = world.apply(Fork("a", "b", 9))
    assert (report.copied, report.bytes_moved) == (ENTRIES, 2 * ENTRIES * (5 + 4))
    copies = [world.manager.table(seq).blocks[-1] for seq in "ab"]
    for part in in_8_bits(world, copies):
        assert torch.equal(part[:, 0], part[:, 1])


def test_in_8_bits_moved_keys_are_rounded_again():
    """Of one layer; of those that stay, nothing changes."""
    world = World(FREE, Capability.APPROXIMATE, dtype=torch.int8)
    world.store("a", 14)
    (survivor, _) = world.manager.table("a").blocks[2:4]
    keys, values = world.kv.layer(1).read(torch.tensor([survivor]), dtype=torch.float64)
    before = in_8_bits(world, range(BLOCKS))
    world.apply(Evict("a", 1, 1, renumber=True))
    moved, same = world.kv.layer(1).read(torch.tensor([survivor]), dtype=torch.float64)
    assert torch.equal(same, values)
    error = (moved - (keys - 4)).abs()
    assert 0 < error.max() <= (keys - 4).abs().max() / 127 / 2 * 1.001
    for old, new in zip(before, in_8_bits(world, range(BLOCKS)), strict=True):
        assert torch.equal(old[0], new[0])  # the layer whose moves are free
