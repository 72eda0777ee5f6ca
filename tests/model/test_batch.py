"""A step's integers on their way to the device."""

from dataclasses import replace

import torch

from ropewalk.model.batch import Cross, in_one_copy
from tests.model.running import CPU, Running, make_batch

META = torch.device("meta")


def batch():
    return make_batch([(Running([5, 6, 7], [3]), 3), (Running([8] * 9, [2, 1], computed=7), 2)], 8)


def test_one_copy_keeps_every_tensor_apart():
    """What is read from is free at once, so another step may be laid out in it."""
    given = [torch.arange(3), torch.arange(6).view(2, 3).t(), torch.empty(0, dtype=torch.int64)]
    wanted = [each.clone() for each in given]
    made = in_one_copy(given, CPU)
    for each in given:
        each.zero_()
    assert all(torch.equal(*pair) for pair in zip(made, wanted, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in made}) == 1


def test_a_batch_is_moved_whole():
    crossed = replace(batch(), cross=Cross(new=batch(), seen=batch()))
    moved = crossed.to(META)
    for part, given in ((moved, crossed), (moved.cross.new, batch()), (moved.cross.seen, batch())):
        assert part.block_tables.device.type == part.tokens.device.type == "meta"
        assert part.block_tables.shape == given.block_tables.shape == (2, 2)
        assert (part.max_query, part.max_context) == (3, 9)
    assert replace(crossed, cross=Cross(new=None, seen=batch())).to(META).cross.new is None
    assert moved.to(META) is moved and crossed.to(CPU) is crossed


def test_every_row_has_its_request():
    assert batch().row_requests().tolist() == [0, 0, 0, 1, 1]
