"""A changed bit in a sealed block is found and placed; what the cache does by itself never is."""

import pytest
import torch

from ropewalk.cache import ledger as ledgers
from ropewalk.cache.kv import KVCache
from ropewalk.cache.ledger import (
    SAMPLED_TOGETHER,
    Checksums,
    Fault,
    Ledger,
    LedgerCounts,
    Part,
    Place,
)
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Audit
from tests.cache.events import filled, released, reused, taken
from tests.cache.shape import Shape

BLOCKS, LAYERS, HEADS, WIDTH = 9, 3, 2, 2
ENTRIES = 4 * HEADS  # of one layer and part of a block of four


def cache(dtype=torch.float32, block_size=4, heads=HEADS, width=WIDTH) -> KVCache:
    kv = KVCache(
        Shape(LAYERS, heads, width),
        blocks=BLOCKS,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    for part in kv.whole:
        part.copy_(torch.randn(part.shape, generator=generator))
    return kv


def part_of(kv: KVCache, place: Place) -> torch.Tensor:
    layer = kv.layer(place.layer)
    return layer.keys if place.part is Part.KEYS else layer.values


def flip(kv: KVCache, block: int, place: Place, bit: int) -> None:
    """One bit of the block's bytes in one layer and part."""
    stored = part_of(kv, place)[block].view(-1).view(torch.uint8).numpy()
    stored[bit // 8] ^= 1 << bit % 8


def found(ledger: Ledger, blocks) -> list[Fault]:
    ledger.verify(blocks)
    return list(ledger.drain().faults)


PLACES = [Place(layer, part) for layer in range(LAYERS) for part in Part]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
def test_any_flipped_bit_is_found_and_placed(dtype, place):
    kv = cache(dtype)
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.seal(range(1, BLOCKS))
    bits = range(8 * ENTRIES * WIDTH * dtype.itemsize)
    for begin in bits[:: BLOCKS - 2]:  # a bit for each block but the first
        flipped = dict(enumerate(bits[begin : begin + BLOCKS - 2], start=2))
        for block, bit in flipped.items():
            flip(kv, block, place, bit)
        faults = [Fault(block, (place,)) for block in flipped]
        assert found(ledger, range(1, BLOCKS)) == faults, flipped
        for block, bit in flipped.items():
            flip(kv, block, place, bit)
        ledger.seal(flipped)


@pytest.mark.parametrize(
    ("dtype", "block_size", "width"),
    [(torch.bfloat16, 1, 1), (torch.bfloat16, 3, 1), (torch.bfloat16, 1, 3), (torch.float32, 3, 1)],
)
def test_blocks_whose_bytes_fill_no_word(dtype, block_size, width):
    kv = cache(dtype, block_size, heads=1, width=width)
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.seal([4])
    for bit in range(8 * block_size * width * dtype.itemsize):
        flip(kv, 4, Place(1, Part.VALUES), bit)
        assert [fault.places for fault in found(ledger, [4])] == [((1, Part.VALUES),)], bit
        flip(kv, 4, Place(1, Part.VALUES), bit)
        ledger.seal([4])


def test_any_two_flipped_bits_are_found():
    """The highest bits of two words too, whose odd multiples alone would cancel."""
    kv = cache()
    sums = Checksums(kv)
    place = Place(0, Part.KEYS)
    for part in kv.whole:
        part[:] = part[:, 1:2]
    right = sums.of([1])
    bits = 8 * ENTRIES * WIDTH * 4
    pairs = [
        (first, second)
        for first in range(bits)
        for second in {first, *range(first % 61, bits, 61), *range(63, bits, 64)}
    ]
    for begin in range(0, len(pairs), BLOCKS):  # a pair for each block
        some = dict(enumerate(pairs[begin : begin + BLOCKS]))
        for block, (first, second) in some.items():
            flip(kv, block, place, first)
            flip(kv, block, place, second)
        same = (sums.of(list(some)) == right).flatten(1).all(1).tolist()
        assert same == [first == second for first, second in some.values()], some
        for block, (first, second) in some.items():
            flip(kv, block, place, first)
            flip(kv, block, place, second)


def test_moved_and_negated_entries_are_found():
    kv = cache()
    ledger = Ledger(kv, Audit.SAMPLE)
    for disturb in (
        lambda keys: keys[1].copy_(keys[1].flip(0).clone()),  # tokens in another order
        lambda keys: keys[1].copy_(keys[1].flip(1).clone()),  # heads
        lambda keys: keys[1].copy_(keys[1].flip(2).clone()),  # coordinates
        lambda keys: keys[1].neg_(),
        lambda keys: keys[1].zero_(),
        lambda keys: keys[1].copy_(keys[2].clone()),
    ):
        ledger.seal([1, 2])
        disturb(kv.layer(2).keys)
        assert found(ledger, [1, 2]) == [Fault(1, ((2, Part.KEYS),))]


def test_a_checksum_is_of_the_content_alone():
    kv = cache()
    for part in kv.whole:
        part[:, 5] = part[:, 2]
    first, second, other = Checksums(kv).of([2, 5, 3])
    assert torch.equal(first, second)
    assert not (first == other).any()
    many = Checksums(kv).of([2] * 40)
    assert many.shape == (40, 2, LAYERS) and (many == first).all()


def test_not_a_number_is_a_stored_byte_like_any_other():
    kv = cache()
    kv.layer(0).keys[3] = torch.nan
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.seal([3])
    assert found(ledger, [3]) == []


def with_filled(kv, block):
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.observe([taken(block, "a"), filled(block, "a")])
    return ledger


@pytest.mark.parametrize(
    ("event", "base"), [(reused, None), (lambda block, seq: released(block, seq, 8), 8)]
)
def test_what_is_shared_or_given_up_is_verified(event, base):
    kv = cache()
    ledger = with_filled(kv, 3)
    ledger.observe([event(3, "b")])
    assert ledger.drain() == LedgerCounts(sealed=1, verified=1)
    flip(kv, 3, Place(2, Part.VALUES), 77)
    flip(kv, 3, Place(0, Part.KEYS), 5)
    # Given up and handed out again before the next look: still its old content.
    ledger.observe([event(3, "b"), event(3, "c"), event(3, "b"), taken(3, "d")])
    fault = Fault(3, ((0, Part.KEYS), (2, Part.VALUES)), ("b", "c"), base)
    assert ledger.drain() == LedgerCounts(verified=1, mutated=2 * ENTRIES, faults=(fault,))
    assert ledger.drain() == LedgerCounts()


def test_who_takes_a_block_anew_has_no_part_in_what_it_held():
    kv = cache()
    ledger = with_filled(kv, 3)
    flip(kv, 3, Place(0, Part.KEYS), 1)
    ledger.observe([released(3, "a", 0), taken(3, "b"), released(3, "b", 0)])
    (fault,) = ledger.drain().faults
    assert fault.sequences == ("a",)


def test_a_block_is_not_verified_once_it_may_be_written():
    kv = cache()
    ledger = with_filled(kv, 3)
    ledger.observe([released(3, "a", 0), taken(3, "b")])
    flip(kv, 3, Place(0, Part.KEYS), 1)
    ledger.observe([released(3, "b", 0)])
    ledger.sample()
    assert ledger.drain() == LedgerCounts(sealed=1, verified=1)
    assert ledger.sealed == frozenset()


def test_a_block_filled_anew_has_a_new_seal():
    kv = cache()
    ledger = with_filled(kv, 3)
    flip(kv, 3, Place(0, Part.KEYS), 1)
    ledger.observe([released(3, "a", 0), taken(3, "b"), filled(3, "b"), released(3, "b", 0)])
    ledger.observe([reused(3, "c")])
    assert ledger.drain().faults == ()
    flip(kv, 3, Place(0, Part.KEYS), 1)
    assert found(ledger, [3])


def test_a_fault_is_told_once_and_forgotten_blocks_never():
    kv = cache()
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.seal([1, 2])
    flip(kv, 1, Place(0, Part.KEYS), 0)
    flip(kv, 2, Place(0, Part.KEYS), 0)
    ledger.forget([2, 5])
    assert [fault.block for fault in found(ledger, [1, 2, 7])] == [1]
    assert found(ledger, [1, 2]) == []


def test_sampling_goes_round(monkeypatch):
    monkeypatch.setattr("ropewalk.cache.ledger.SAMPLED_TOGETHER", 4)
    kv = cache()
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.seal(range(1, BLOCKS))
    damaged = Place(1, Part.KEYS)
    for block in range(1, BLOCKS):
        flip(kv, block, damaged, block)
    found, verified = [], []
    for _ in range(BLOCKS - 1):
        ledger.sample()
        counts = ledger.drain()
        verified.append(counts.verified)
        found += [fault.block for fault in counts.faults]
    assert verified == [0, 0, 0, 4] * 2
    assert found == list(range(1, BLOCKS))
    for _ in range(4):
        ledger.sample()
    assert ledger.drain() == LedgerCounts()


def test_the_longest_unseen_are_sampled_first(monkeypatch):
    monkeypatch.setattr("ropewalk.cache.ledger.SAMPLED_TOGETHER", 2)
    kv = cache()
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.seal([1, 2, 3, 4, 5])
    ledger.verify([2])
    for block in (2, 3, 4):
        flip(kv, block, Place(0, Part.KEYS), 0)
    ledger.sample()
    ledger.sample()
    assert [fault.block for fault in ledger.drain().faults] == [3]


def test_a_full_audit_looks_at_everything_each_time():
    kv = cache()
    ledger = Ledger(kv, Audit.FULL)
    ledger.seal(range(1, BLOCKS))
    ledger.sample()
    ledger.sample()
    assert ledger.drain() == LedgerCounts(sealed=8, verified=16)


def test_off_does_nothing():
    kv = cache()
    ledger = Ledger(kv, Audit.OFF)
    ledger.observe([filled(1, "a")])
    ledger.seal([1, 2])
    flip(kv, 1, Place(0, Part.KEYS), 0)
    ledger.observe([released(1, "a", 0)])
    for _ in range(SAMPLED_TOGETHER):
        ledger.sample()
    assert found(ledger, [1, 2]) == []
    assert ledger.drain() == LedgerCounts()


def test_a_managers_events_seal_what_is_full_and_nothing_else():
    kv = cache()
    manager = CacheManager(BLOCKS, 4)
    ledger = Ledger(kv, Audit.FULL)
    tokens = list(range(11))
    manager.reserve("a", tokens, 11)
    manager.commit("a", tokens, 11)
    ledger.observe(manager.drain_events())
    assert ledger.sealed == {1, 2}
    manager.release("a")
    manager.reserve("b", tokens, 11)
    ledger.observe(manager.drain_events())
    # Two given up and found again; the third was never full.
    assert ledger.drain() == LedgerCounts(sealed=2, verified=2)
    assert ledger.sealed == {1, 2}


def test_any_flipped_bit_in_8_bits_is_found_in_numbers_and_in_scales():
    kv = cache(torch.int8)
    ledger = Ledger(kv, Audit.SAMPLE)
    for part, tensors in zip(Part, kv.layer(2).parts, strict=True):
        for tensor in tensors:
            stored = tensor[4].view(-1).view(torch.uint8)
            for bit in range(8 * len(stored)):
                ledger.seal([4])
                stored[bit // 8] ^= 1 << bit % 8
                assert found(ledger, [4]) == [Fault(4, ((2, part),))], bit


def test_entries_whose_numbers_and_scales_changed_are_counted_once():
    kv = cache(torch.int8)
    ledger = Ledger(kv, Audit.SAMPLE)
    ledger.seal([4])
    for tensor in kv.layer(0).parts[1]:
        tensor[4] += 1
    ledger.verify([4])
    assert ledger.drain().mutated == ENTRIES


@pytest.mark.parametrize(
    ("device", "size", "expected"),
    [("cpu", 1 << 19, [*[4] * 17, 2]), ("cpu", 1 << 15, [32, 32, 6]), ("meta", 1, [64, 6])],
)
def test_as_many_blocks_are_summed_at_once_as_is_fastest(device, size, expected, monkeypatch):
    """size: bytes of a block. On a GPU each time starts some kernels, whatever the number."""
    sizes = []

    def sums(stored, blocks, multipliers):
        sizes.append(len(blocks))
        return blocks[:, None]

    monkeypatch.setattr(ledgers, "_sums_of_some", sums)
    stored, blocks = torch.empty(1, 1, size, dtype=torch.int8, device=device), torch.arange(70)
    assert torch.equal(ledgers.fold_sums(stored, blocks, blocks)[:, 0], blocks)
    assert sizes == expected
