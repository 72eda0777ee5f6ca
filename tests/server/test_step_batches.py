"""Batches that are changed from step to step equal those that are built anew."""

from array import array
from dataclasses import fields

import pytest
import torch

from ropewalk.cache.manager import Table
from ropewalk.cache.types import Audit
from ropewalk.model.batch import Cross
from ropewalk.server.engine.batch import StepBatches, build_batch
from ropewalk.server.engine.engine import Runner
from ropewalk.server.scheduling.request import Work
from tests.model.tiny import tiny
from tests.server.fake_engine import make_request
from tests.server.recording import engine
from tests.server.test_ahead import LIMITS, WAYS, answers, workload


def used_columns(batch, block_size):
    """[R, columns] bool: where a block table says something."""
    columns = torch.arange(batch.block_tables.shape[1])
    return columns < -(-batch.context_lens[:, None] // block_size)


def assert_same(batch, anew, block_size):
    assert batch.samples == anew.samples and batch.prompts == anew.prompts
    assert_same_forward(batch.forward, anew.forward, block_size)


def assert_same_forward(forward, anew, block_size):
    used = used_columns(anew, block_size)
    for each in fields(anew):
        ours, theirs = getattr(forward, each.name), getattr(anew, each.name)
        if isinstance(theirs, Cross):
            assert_same_forward(ours.seen, theirs.seen, block_size)
            assert (ours.new is None) == (theirs.new is None)
            if theirs.new is not None:
                assert_same_forward(ours.new, theirs.new, block_size)
            continue
        if each.name in ("block_tables", "block_bases"):
            columns = min(ours.shape[1], theirs.shape[1])
            assert not used[:, columns:].any()
            ours, theirs = (of[:, :columns] * used[:, :columns] for of in (ours, theirs))
        assert torch.equal(ours, theirs) if torch.is_tensor(theirs) else ours == theirs, each.name


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [20, 100])  # few enough that requests are preempted, and not
def test_every_batch_of_an_engine(blocks, ahead):
    """With requests that begin, end, are preempted, forked, shortened and aborted."""
    same, places = [], []

    class Checked(Runner):
        def build(self, work):
            batch = super().build(work)
            anew = build_batch(work, manager.table, self._kv.block_size)
            assert_same(batch, anew, self._kv.block_size)
            places.append(batch.forward.slots.data_ptr())
            same.append(len(places) > 1 and places[-1] == places[-2])
            return batch

    decoder = tiny("rope", num_layers=1, windows=(None,))
    options = {"ahead": ahead, "runner": Checked, "audit": Audit.OFF}
    running, manager, _ = engine(decoder, decoder, blocks, LIMITS, **options)
    answers(running, workload(WAYS, seed=2, count=20))
    assert sum(same) > len(same) // 5


def answering(count):
    """A request with so many tokens, the last of which is of its answer: a step only decodes."""
    made = make_request("r", range(count - 1))
    made.tokens.append(count - 1)
    return made


def test_a_request_that_came_back_in_other_blocks():
    """Preempted and admitted again between two steps, all but its last token found in the cache."""
    tables = {"r": Table(array("q", [3, 5]), array("q", [0, 4]))}
    batches = StepBatches(tables.__getitem__, 4)
    going = answering(5)
    first = batches.of((Work(going, 4, 1),))
    assert first.forward.slots.tolist() == [20]
    going.tokens.append(7)
    tables["r"] = Table(array("q", [3, 6]), array("q", [0, 4]))
    second = batches.of((Work(going, 5, 1),))
    assert second.forward.slots.tolist() == [25]
    assert second.forward.block_tables.tolist() == [[3, 6]]


def test_a_step_that_is_computed_again():
    tables = {"r": Table(array("q", [3, 5]), array("q", [0, 4]))}
    batches = StepBatches(tables.__getitem__, 4)
    work = (Work(answering(6), 5, 1),)
    for _ in range(3):
        batch = batches.of(work)
        assert (batch.forward.slots.tolist(), batch.forward.tokens.tolist()) == ([21], [5])


def test_encoded_prompts_are_seen_as_before():
    """While answers grow, into another block too, after a step in which one was encoded."""
    requests = [make_request("r", range(1)), make_request("s", range(5))]
    tables = {
        "r": Table(array("q", [3, 5]), array("q", [0, 4])),
        "s": Table(array("q", [6, 7, 8]), array("q", [0, 4, 8])),
    }
    for blocks, (request, count) in enumerate(zip(requests, (5, 3), strict=True)):
        request.source = tuple(range(count))
        tables[request.encoded] = Table(array("q", [9 + 2 * blocks, 10]), array("q", [0, 4]))
    batches, places = StepBatches(tables.__getitem__, 4), []
    for token in range(6):
        work = tuple(Work(request, len(request.tokens) - 1, 1) for request in requests)
        batch = batches.of(work)
        assert_same(batch, build_batch(work, tables.__getitem__, 4), 4)
        places.append(batch.forward.slots.data_ptr())
        for request in requests:
            request.tokens.append(token)
    assert len(set(places[1:])) == 1


def test_a_context_that_became_shorter():
    """In the blocks that stay, which keep their list."""
    blocks, bases = array("q", [3, 5, 6]), array("q", [0, 4, 8])
    batches = StepBatches(lambda name: Table(blocks, bases), 4)
    going = answering(10)
    batches.of((Work(going, 9, 1),))
    going.tokens.append(7)
    going.front, going.dropped = 4, 4
    del blocks[1], bases[2]
    forward = batches.of((Work(going, 6, 1),)).forward
    assert (forward.slots.tolist(), forward.tokens.tolist()) == ([26], [7])
    assert forward.positions.tolist() == [6] and forward.block_tables.tolist() == [[3, 6]]
