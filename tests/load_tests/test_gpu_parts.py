from dataclasses import replace

import pytest
import torch

from ropewalk.load_tests.gpu import parts, peer
from ropewalk.load_tests.gpu.parts import (
    BY_TORCH,
    NO_TIME,
    OWN,
    Budget,
    Cell,
    Encodings,
    LeftOut,
    Purse,
    Setting,
    encodings_of,
    passes_of,
    steps_of,
)
from ropewalk.load_tests.gpu.peer import steady_steps
from ropewalk.load_tests.micro.in_process import decoders, new_cache, step
from ropewalk.load_tests.micro.roofline import Ceiling
from ropewalk.model.kernels.triton.launches import FEW_ROWS, TritonLinear
from tests.model.attention.triton_here import DEVICE
from tests.model.tiny import on_triton, tiny

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.float32, "processor", "0", 2, Ceiling(1e9, 1e9))
CELLS = [Cell(2, 48), Cell(1, 16)]


@pytest.fixture(scope="module")
def made():
    words = {"context": 256, "dtype": torch.float32, "device": CPU, "kernels": "not asked for"}
    return decoders("tiny", ("nope", "rope"), **words)


def test_budget():
    now = [5.0]
    budget = Budget(2, clock=lambda: now[0])
    assert not budget.over
    now[0] = 7.0
    assert budget.over


def test_what_a_part_leaves_is_for_those_after_it():
    now = [0.0]
    purse = Purse(Budget(100, lambda: now[0]), weights=10)

    def lasts(weight, seconds):
        """Whether a part of that weight is over then and not before."""
        began, budget = now[0], purse.budget(weight)
        now[0] = began + seconds - 1
        early = budget.over
        now[0] = began + seconds
        return budget.over and not early

    assert lasts(2, 20)  # of 100 seconds, 2 of 10 parts
    now[0] = 4  # it took 4 of them
    assert lasts(4, 48)  # of 96, 4 of 8
    purse.forgo(2)
    assert lasts(1, 24)  # of 48, 1 of 2
    now[0] = 200
    assert purse.budget(1).over


def test_cells_go_from_few_tokens_to_many(made):
    found = list(passes_of("tiny", made["rope"], CELLS, SETTING, Budget(60)))
    assert [each.cell for each in found] == CELLS[::-1]
    assert all(len(each.samples) == 2 for each in found)
    assert found[0].least == SETTING.ceiling.decode_seconds(
        made["rope"].config, torch.float32, 1, 16
    )


@pytest.mark.triton
def test_few_rows_are_measured_with_linear_layers_by_torch_too(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    one_layer = {"num_layers": 1, "windows": (None,)}  # interpreted, each takes long
    decoder = on_triton(tiny("rope", dtype=torch.float32, device=DEVICE, **one_layer))
    # Without graphs, which would hide what is launched.
    monkeypatch.setattr(parts, "replayed", lambda decoder, *_: decoder)
    monkeypatch.setattr(parts, "recorder", lambda decoder: None)
    few, launched = TritonLinear.__call__, []
    monkeypatch.setattr(
        TritonLinear, "__call__", lambda *of, **more: launched.append(1) or few(*of, **more)
    )
    cells, found = [Cell(1, 16), Cell(FEW_ROWS + 1, 16)], []
    setting = replace(SETTING, device=DEVICE, rounds=1)
    for each in passes_of("tiny", decoder, cells, setting, Budget(60)):
        found.append((each.system, each.cell.batch, bool(launched)))
        launched.clear()
    assert found == [(OWN, 1, True), (BY_TORCH, 1, False), (OWN, FEW_ROWS + 1, False)]
    kv = new_cache(decoder, 2)
    decoder(step(1, 16, 1, CPU), kv)
    assert launched  # as before


def test_what_there_is_no_time_for_is_named(made):
    over = Budget(0)
    left = [
        *passes_of("tiny", made["rope"], CELLS, SETTING, over),
        *steps_of("tiny", made["rope"], CELLS, SETTING, "none", over),
        *encodings_of("tiny", made, CELLS, SETTING, over),
    ]
    assert {type(each) for each in left} == {LeftOut}
    assert {each.reason for each in left} == {NO_TIME} and len(left) == 6


@pytest.mark.filterwarnings("ignore")
def test_steps_that_fail_are_no_figures(made, monkeypatch):
    """An engine ends the requests that fail and goes on, faster than before."""

    def fails(*_):
        raise ValueError("no kernel")

    monkeypatch.setattr(type(made["rope"]), "__call__", fails)
    found = list(steps_of("tiny", made["rope"], CELLS, SETTING, "none", Budget(60)))
    assert [each.cell for each in found] == CELLS[::-1] and all(each.failed for each in found)
    assert found[0].reason == "RuntimeError: a step gave 0 tokens; the log has the reason"


def test_a_cell_that_fails_leaves_the_others(made, monkeypatch):
    whole = parts.replayed

    def fails(decoder, kv, requests, context):
        if requests == CELLS[0].batch:
            raise torch.OutOfMemoryError("more than there is\nof memory")
        return whole(decoder, kv, requests, context)

    monkeypatch.setattr(parts, "replayed", fails)
    measured, left = passes_of("tiny", made["rope"], CELLS, SETTING, Budget(60))
    assert measured.cell == CELLS[1] and left.cell == CELLS[0] and left.failed
    assert left.reason == "OutOfMemoryError: more than there is"


def test_a_lost_device_is_no_cells_failure(made, monkeypatch):
    def lost(*_, **__):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(parts, "replayed", lost)
    with pytest.raises(torch.AcceleratorError):
        list(passes_of("tiny", made["rope"], CELLS, SETTING, Budget(60)))
    monkeypatch.setattr(peer, "_continuous", lost)
    with pytest.raises(torch.AcceleratorError):
        list(peer.steps_of("tiny", None, CELLS, SETTING, Budget(60)))


def test_prefill_has_half_of_the_time_for_encodings(made, monkeypatch):
    """Of 8 seconds, where each round takes one."""
    now = [0.0]

    def rounds(calls, count, clock, seed):
        for _ in range(100):
            now[0] += 1
            yield dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(parts, "rounds", rounds)
    found = encodings_of("tiny", made, CELLS, SETTING, Budget(8, lambda: now[0]))
    assert [len(each.samples) for each in found] == [4, 4]


def test_encodings_are_compared_at_the_largest_cell_that_is_not_too_large(made):
    def cell(cells):
        found = list(encodings_of("tiny", made, cells, SETTING, Budget(60)))
        assert {type(each) for each in found} == {Encodings}
        return found[0].cell

    assert cell([Cell(1, 16), Cell(8, 16), Cell(4, 16), Cell(9, 16)]) == Cell(8, 16)
    assert cell([Cell(10, 16), Cell(9, 16)]) == Cell(9, 16)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, ValueError])
def test_a_cell_that_another_system_cannot_hold_leaves_the_others(error, monkeypatch):
    def full(model, cell, budget):
        if cell == CELLS[1]:
            raise error("more than there is\nof memory")
        return [[0.0, 1.0, 2.0]] * cell.batch, "sdpa"

    monkeypatch.setattr(peer, "_continuous", full)
    left, measured = peer.steps_of("tiny", None, CELLS, SETTING, Budget(60))
    assert (left.cell, left.reason, left.failed) == (CELLS[1], "more than there is", False)
    assert measured.samples == [1.0, 1.0]


def test_steps_are_those_of_all_requests_together():
    """The second begins at 3 and the first ends at 6; before and after, steps are others'."""
    times = [[0, 1, 3, 4, 6], [3, 4, 6, 9]]
    assert steady_steps(times) == [1, 2]
    assert steady_steps([[0, 1], [2, 3]]) == []
