"""Blocks in host memory: their bytes come back, or are known to have changed."""

import pytest
import torch

from ropewalk.cache.keeper import Moves
from ropewalk.cache.kv import KVCache
from ropewalk.cache.ledger import Ledger
from ropewalk.cache.spill import HostMemory
from ropewalk.cache.types import Audit
from tests.cache.shape import Shape

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.int8)


def place_of(dtype=torch.float32, *, slots=4, audit=Audit.SAMPLE):
    kv = KVCache(Shape(3, 2, 5), blocks=9, block_size=4, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for part in kv.whole:
        part.copy_(torch.randint(-100, 100, part.shape, generator=generator))
    ledger = Ledger(kv, audit)
    return kv, ledger, HostMemory(kv, slots, ledger)


def content(kv, *blocks):
    return [part[:, list(blocks)].clone() for part in kv.whole]


def equal(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("audit", [Audit.SAMPLE, Audit.OFF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_come_back_as_they_were(dtype, audit):
    kv, ledger, place = place_of(dtype, audit=audit)
    before, others = content(kv, 3, 7, 5), content(kv, 1, 4, 6)
    ledger.seal([3, 7])  # 5 is not full
    place.put([3, 7, 5], [2, 1, 4])
    for part in kv.whole:
        part[:, [3, 7, 5, 2, 8]] = 0
    ledger.forget([3, 7])
    assert place.take([2, 1, 4], [8, 2, 3]) == [True] * 3
    assert equal(content(kv, 8, 2, 3), before)
    assert equal(content(kv, 1, 4, 6), others)
    assert ledger.sealed == ({8, 2} if audit is Audit.SAMPLE else set())
    assert place.moves == Moves(out=3, back=3)
    ledger.verify([8, 2])
    assert not ledger.drain().faults


@pytest.mark.parametrize("part", [0, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_changed_outside_does_not_pass(dtype, part, caplog):
    """Neither in a full block nor in the last, partly filled one; not in a scale either."""
    _, ledger, place = place_of(dtype)
    ledger.seal([3])
    place.put([3, 5, 6], [1, 2, 3])
    for row in (0, 1):
        kept = place._parts[part][row]
        kept.view(torch.uint8)[-1, -1].flatten()[-1:].bitwise_xor_(1)
    assert place.take([1, 2, 3], [7, 8, 2]) == [False, False, True]
    assert ledger.sealed == {3}
    assert place.moves == Moves(out=3, back=1, changed=2)
    assert "2 blocks changed before they came back to the cache" in caplog.text


def test_what_has_changed_before_it_leaves_does_not_come_back():
    kv, ledger, place = place_of()
    ledger.seal([3, 4])
    kv.whole.values[1, 4, 2, 1, 3] += 1
    place.put([3, 4, 5], [1, 2, 3])
    assert place.take([1, 2, 3], [6, 7, 8]) == [True, False, True]
    ledger.verify([4])  # which is still what does not hold what was sealed
    assert [fault.block for fault in ledger.drain().faults] == [4]


def test_a_block_loses_the_seal_of_what_it_held():
    _, ledger, place = place_of()
    ledger.seal([3, 8])
    place.put([5], [1])  # not full, so that nothing says what it will hold
    place.take([1], [8])
    assert ledger.sealed == {3}


def test_a_step_moves_little(monkeypatch):
    _, _, place = place_of()
    assert place.at_once > 1000
    monkeypatch.setattr("ropewalk.cache.spill.BYTES_AT_ONCE", 3 * 960)
    assert place_of()[2].at_once == 3
    monkeypatch.setattr("ropewalk.cache.spill.BYTES_AT_ONCE", 1)
    assert place_of()[2].at_once == 1
