"""Every second of a step is some part's, and of the part that it was spent on."""

import pytest
import torch

from ropewalk.load_tests.micro.profile_engine import (
    ACTIVATION,
    ATTENTION,
    AUDIT,
    BATCH,
    DECODER,
    EMBEDDING,
    HEAD,
    LINEAR,
    METRICS,
    NORM,
    PARTS,
    POSITION,
    RESIDUAL,
    REST,
    SAMPLING,
    SCHEDULER,
    STORE,
    step_times,
)
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.layers import executor
from ropewalk.server.engine.engine import Engine, Runner
from ropewalk.server.engine.integrity import Auditor
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.scheduling.scheduler import Scheduler
from tests.model.attention.triton_here import DEVICE
from tests.model.tiny import CONFIG, on_kernels, on_triton, tiny

STEPS = 4
OUTSIDE = {SAMPLING, SCHEDULER, BATCH, AUDIT, METRICS, REST}
OPS = {*(LINEAR, HEAD, ATTENTION, POSITION, NORM, ACTIVATION, STORE, RESIDUAL, EMBEDDING, DECODER)}


def times(decoder, steps=STEPS, **more):
    return step_times(decoder, 3, 20, steps, **{"kernels": "not asked for"} | more)


class Clock:
    """Stands still but for what is late."""

    def __init__(self):
        self.now = 0.0

    def late(self, act):
        """`act`, which takes a second more."""

        def acting(*arguments):
            self.now += 1
            return act(*arguments)

        return acting

    def slow(self, decoder, **more):
        """Seconds of the parts that took any, and of a step that is not watched."""
        found = times(decoder, clock=lambda: self.now, **more)
        assert found.unwatched == found.step
        return {part: seconds for part, seconds in found.parts.items() if seconds}


def test_ops_are_watched_one_by_one():
    found = times(tiny("rope"))
    assert set(found.parts) == OPS | OUTSIDE
    assert all(seconds > 0 for seconds in found.parts.values())
    assert found.step == pytest.approx(sum(found.parts.values())) and found.unwatched > 0


def test_kernels_tell_their_own_times(kernels):
    found = times(on_kernels(tiny("rope", dtype=torch.float32), kernels), kernels=kernels)
    assert list(found.parts) == [
        part for part in PARTS if part != ACTIVATION
    ]  # linear layers do it
    assert set(PARTS) == OPS | OUTSIDE
    assert all(seconds > 0 for seconds in found.parts.values())


def test_norms_and_activations_of_other_models_are_watched():
    found = times(tiny("learned", norm="layer", gated=False, activation="gelu"))
    assert set(found.parts) == OPS | OUTSIDE


@pytest.mark.triton
def test_parts_that_triton_computes_are_watched():
    pytest.importorskip("triton", reason="Triton is not installed")
    one_layer = {"num_layers": 1, "windows": (None,)}  # interpreted, each takes long
    decoder = on_triton(tiny("rope", dtype=torch.float32, device=DEVICE, **one_layer))
    found = times(decoder, steps=1)
    # Linear layers do it, with the norm before and the residual after them.
    assert set(found.parts) == (OPS | OUTSIDE) - {ACTIVATION, NORM, POSITION} | {POSITION}
    assert all(seconds > 0 for seconds in found.parts.values())


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [
        (Runner, "build", {BATCH: 1}),
        (Runner, "sample", {SAMPLING: 1}),
        (Scheduler, "plan", {SCHEDULER: 1}),
        (Scheduler, "record", {SCHEDULER: 1}),
        (Auditor, "look", {AUDIT: 3}),
        (Auditor, "sample", {AUDIT: 1}),
        (PositionMeter, "measure", {METRICS: 1}),
        (Metrics, "observe_step", {METRICS: 1}),
        (Engine, "step", {REST: 1}),
    ],
)
def test_a_slow_part_of_the_engine_is_that_part(owner, name, found, monkeypatch):
    clock, act = Clock(), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *rest: clock.late(act)(self, *rest))
    assert clock.slow(tiny("rope")) == found


def test_slow_attention_is_attention():
    clock = Clock()

    class Late(ReferenceAttention):
        def __call__(self, *arguments):
            return clock.late(super().__call__)(*arguments)

    assert clock.slow(tiny("alibi", Late)) == {ATTENTION: CONFIG.num_layers}


@pytest.mark.parametrize(
    ("compute", "part", "count"),
    [("linear", LINEAR, 4 * CONFIG.num_layers), ("norm", NORM, 1 + 2 * CONFIG.num_layers)],
)
def test_a_slow_op_is_its_part(compute, part, count, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(executor, compute, clock.late(getattr(executor, compute)))
    found = clock.slow(tiny("rope"))
    assert found == {part: count} | ({HEAD: 1} if part == LINEAR else {})


def test_what_executors_do_not_tell_of_is_the_rest(kernels):
    clock = Clock()
    decoder = on_kernels(tiny("rope", dtype=torch.float32), kernels)
    late = clock.late(decoder.executor)
    late.fixed_tensors = decoder.executor.fixed_tensors
    decoder.executor = late
    found = times(decoder, clock=lambda: clock.now, kernels=kernels).parts
    told = (NORM, LINEAR, POSITION, STORE, ATTENTION, RESIDUAL, EMBEDDING, HEAD)
    assert sum(found[part] for part in (DECODER, *told)) == pytest.approx(1)
    assert 0 < found[DECODER] < 1


@pytest.mark.parametrize(("encoding", "name"), [("learned", "embed"), ("rope", "rotate")])
def test_slow_work_for_positions_is_position(encoding, name):
    clock, decoder = Clock(), tiny(encoding)
    setattr(decoder.encoding, name, clock.late(getattr(decoder.encoding, name)))
    assert clock.slow(decoder) == {POSITION: 1 if name == "embed" else CONFIG.num_layers}
