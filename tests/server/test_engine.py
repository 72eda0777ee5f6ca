"""One model's loop body over a fake model: faults stay with their request, counts are exact."""

import itertools
import weakref

import pytest
import torch

from ropewalk.model.sampler import Picking, Sampler
from ropewalk.server.errors import NumericalError, RequestFailed
from ropewalk.server.scheduling.request import FinishReason, PassTimes, Phase
from tests.server.fake_engine import CPU, VOCAB, counting, make_engine, make_request

POISON = 49
both = pytest.mark.parametrize("ahead", [False, True])


def run(engine):
    """Every event until idle, and the stats of each step."""
    events, stats = [], []
    while engine.busy:
        step = engine.step()
        events += step.events
        stats.append(step.stats)
    return events, stats


def tokens_of(events, name):
    return [event.token for event in events if event.request_id == name and event.token is not None]


def poisoned(batch, kv):
    if (batch.to(CPU).tokens == POISON).any():
        raise RuntimeError("the kernel gave up")
    return counting(batch, kv)


@both
@pytest.mark.parametrize("guilty", [0, 7, 15])
def test_a_request_that_breaks_the_forward_fails_alone(guilty, ahead, caplog):
    engine, manager = make_engine(poisoned, ahead=ahead)
    for i in range(16):
        engine.submit(make_request(f"r{i}", [POISON if i == guilty else i, 20 + i]))
    events, stats = run(engine)
    (failure,) = [event for event in events if event.error is not None]
    assert failure.request_id == f"r{guilty}"
    assert isinstance(failure.error, RequestFailed)
    assert "gave up" not in failure.error.message  # what broke inside is the log's business
    assert "gave up" in caplog.text
    for i in set(range(16)) - {guilty}:
        assert tokens_of(events, f"r{i}") == [(21 + i + n) % VOCAB for n in range(5)]
    finishes = [ended.finish for step in stats for ended in step.ended]
    assert sorted(finishes) == [FinishReason.ERROR] + [FinishReason.LENGTH] * 15
    assert manager.counts().active == 0


def test_what_a_failed_batch_took_is_free_before_its_halves_are_computed():
    """Else a batch that ran out of memory would leave none for them."""
    taken = []

    def hungry(batch, kv):
        assert all(each() is None for each in taken)
        activations = torch.zeros(len(batch.context_lens))
        taken.append(weakref.ref(activations))
        if len(activations) > 1:
            raise RuntimeError("out of memory")
        return counting(batch, kv)

    engine, _ = make_engine(hungry)
    for i in range(4):
        engine.submit(make_request(f"r{i}", [i]))
    events, _ = run(engine)
    assert all(event.error is None for event in events)
    assert len(tokens_of(events, "r3")) == 5


def test_a_failing_chunk_of_a_long_prompt_ends_its_request(caplog):
    engine, manager = make_engine(poisoned, max_step_tokens=16)
    engine.submit(make_request("long", [POISON, *range(40)]))
    events, _ = run(engine)
    assert [event.finish for event in events] == [FinishReason.ERROR]
    assert manager.counts().active == manager.counts().cached == 0
    assert "gave up" in caplog.text


@both
def test_a_generated_token_that_breaks_the_forward_ends_its_request_alone(ahead, caplog):
    engine, manager = make_engine(poisoned, ahead=ahead)
    for name, prompt in (("good", [1]), ("bad", [POISON - 3]), ("fine", [4, 5])):
        engine.submit(make_request(name, prompt))
    events, _ = run(engine)
    assert tokens_of(events, "good") == [2, 3, 4, 5, 6]
    assert tokens_of(events, "bad") == [POISON - 2, POISON - 1, POISON]
    assert tokens_of(events, "fine") == [6, 7, 8, 9, 10]
    assert [event.request_id for event in events if event.error is not None] == ["bad"]
    assert ("launched ahead" in caplog.text) is ahead
    assert manager.counts().active == 0


@both
@pytest.mark.parametrize("before", [0, 3])
def test_a_row_that_is_not_finite_fails_its_request_alone(before, ahead):
    def broken(batch, kv):
        logits, batch = counting(batch, kv), batch.to(CPU)
        logits[batch.tokens[batch.output_rows] == POISON, 3] = torch.nan
        return logits

    engine, _ = make_engine(broken, ahead=ahead)
    engine.submit(make_request("good", [1]))
    engine.submit(make_request("bad", [POISON - before]))
    events, _ = run(engine)
    assert tokens_of(events, "good") == [2, 3, 4, 5, 6]
    assert len(tokens_of(events, "bad")) == before
    (failure,) = [event for event in events if event.error is not None]
    assert failure.request_id == "bad"
    assert isinstance(failure.error, NumericalError)


@both
def test_a_row_that_cannot_be_sampled_draws_for_nobody_twice(ahead, caplog):
    """The others keep their draws: none is sampled again because of it."""

    def seeded(name):
        return make_request(name, [1], temperature=5.0, max_tokens=20)

    alone, _ = make_engine()
    alone.submit(seeded("a"))
    expected = tokens_of(run(alone)[0], "a")
    engine, _ = make_engine(ahead=ahead)
    engine.submit(seeded("a"))
    engine.submit(make_request("bad", [2], logprobs=VOCAB + 1))
    engine.submit(seeded("b"))
    events, _ = run(engine)
    assert tokens_of(events, "a") == tokens_of(events, "b") == expected
    (failure,) = [event for event in events if event.error is not None]
    assert failure.request_id == "bad"
    assert isinstance(failure.error, RequestFailed)
    assert "sampling failed" in caplog.text


@both
@pytest.mark.parametrize("place", ["forward", "sampling", "reading"])
def test_a_lost_device_is_no_requests_fault(place, ahead, monkeypatch):
    def lost(*_, **__):
        raise torch.AcceleratorError("device-side assert")

    if place == "sampling":
        monkeypatch.setattr(Sampler, "begin", lost)
    if place == "reading":
        monkeypatch.setattr(Picking, "read", lost)
    engine, _ = make_engine(lost if place == "forward" else counting, ahead=ahead)
    engine.submit(make_request("a", [1]))
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_what_cannot_be_read_is_computed_again(monkeypatch):
    """And what was launched after it with it, should another token be drawn."""
    read, fails = Picking.read, [False, False, True, False]
    computed = {}

    def noted(batch, kv):
        there = batch.to(CPU)
        computed.update(zip(there.positions.tolist(), there.tokens.tolist(), strict=True))
        return counting(batch, kv)

    def reading(picking):
        if fails and fails.pop(0):
            request.draws.clear()
            raise ValueError("nonsense")
        return read(picking)

    monkeypatch.setattr(Picking, "read", reading)
    engine, manager = make_engine(noted, ahead=True)
    request = make_request("a", [1, 2], max_tokens=8, temperature=5.0)
    engine.submit(request)
    events, _ = run(engine)
    assert not fails
    assert tokens_of(events, "a") == request.tokens[2:]
    assert [computed[position] for position in range(9)] == request.tokens[:9]
    assert manager.counts().active == 0


def test_an_id_can_be_used_again_while_a_step_of_its_first_owner_is_under_way():
    engine, manager = make_engine(ahead=True)
    engine.submit(make_request("a", [1], max_tokens=9))
    engine.submit(make_request("b", [20], max_tokens=9))
    events = engine.step().events
    engine.abort("a")
    engine.submit(make_request("a", [31, 32], max_tokens=3))
    events += run(engine)[0]
    assert tokens_of(events, "a") == [2, 33, 34, 35]
    assert tokens_of(events, "b") == [*range(21, 30)]
    assert manager.counts().active == 0


def test_passes_are_told_with_the_step_that_they_are_of():
    times = []

    def timed(batch, kv):
        times.append(PassTimes(float(batch.max_query), 0.0, None))
        return counting(batch, kv)

    def drain():
        drained = tuple(times)
        times.clear()
        return drained

    engine, _ = make_engine(timed, ahead=True, drain_times=drain)
    engine.submit(make_request("a", [1, 2, 3], max_tokens=3))
    _, stats = run(engine)
    assert [[each.forward for each in step.timed] for step in stats] == [[3.0], [1.0], [1.0]]


@both
def test_abort_between_steps_frees_the_blocks(ahead):
    engine, manager = make_engine(ahead=ahead)
    engine.submit(make_request("a", [1, 2, 3]))
    engine.step()
    assert manager.counts().active > 0
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    step = engine.step()
    assert manager.counts().active == 0
    assert step.stats.running == step.stats.waiting == 0
    assert [ended.finish for ended in step.stats.ended] == [FinishReason.ABORT]
    assert not engine.busy


def test_a_request_that_was_cut_ends_as_its_caller_says():
    engine, _ = make_engine()
    request = make_request("a", [1])
    engine.submit(request)
    engine.step()
    request.abort_as = FinishReason.STOP
    engine.abort("a")
    (ended,) = engine.step().stats.ended
    assert ended.finish is FinishReason.STOP


@both
def test_stats_add_up(ahead):
    ticks = itertools.count()
    engine, _ = make_engine(clock=lambda: float(next(ticks)), ahead=ahead)
    prompt = list(range(9))
    engine.submit(make_request("first", prompt, max_tokens=3))
    _, first = run(engine)
    engine.submit(make_request("again", prompt, max_tokens=1))
    events, again = run(engine)
    assert [step.computed_prompt_tokens for step in first] == [9, 0, 0]
    assert [step.generated_tokens for step in first] == [1, 1, 1]
    assert [step.written_entries for step in first] == [9 * 12, 12, 12]  # 2 · 2 layers · 3 heads
    assert [step.written_bytes for step in first] == [9 * 96, 96, 96]  # of 2 float32 each
    # A step reads this clock three times: it begins, its tokens are out, it ends.
    assert [step.seconds for step in first] == [2, 2, 2]
    assert [step.inter_token_seconds for step in first] == [(), (3,), (3,)]
    # Two full blocks of four are shared; the ninth token is computed.
    assert [step.prefix_queried_tokens for step in first + again] == [9, 0, 0, 9]
    assert [step.cached_prompt_tokens for step in first + again] == [0, 0, 0, 8]
    assert [step.computed_prompt_tokens for step in again] == [1]
    assert events[0].cached_tokens == 8
    (ended,) = again[0].ended
    assert (ended.prompt_tokens, ended.cached_tokens, ended.output_tokens) == (9, 8, 1)


@both
def test_block_counts_and_preemptions_are_told(ahead):
    engine, _ = make_engine(blocks=9, ahead=ahead)
    for i in range(4):
        engine.submit(make_request(f"r{i}", [i, i + 1, i + 2], max_tokens=12))
    events, stats = run(engine)
    assert sum(step.preemptions for step in stats) > 0
    for step in stats:
        blocks = (step.blocks.free, step.blocks.active, step.blocks.cached)
        assert sum(blocks) == 8
        assert step.blocks.quarantined == step.mutated_entries == 0
        if step.decode_context is not None:
            assert step.written_entries == step.batch_requests * 12  # 2 · 2 layers · 3 heads
    # Many tokens are computed at once after a preemption, which is no step of decoding.
    assert any(step.phase is Phase.DECODE and step.decode_context is None for step in stats)
    for i in range(4):
        assert tokens_of(events, f"r{i}") == [(i + 3 + n) % VOCAB for n in range(12)]
    # What is computed again after a preemption is not counted as prompt again.
    assert sum(step.computed_prompt_tokens + step.cached_prompt_tokens for step in stats) == 12


@both
def test_a_step_says_what_it_computes_and_with_how_much_context(ahead):
    """A step that was launched ahead comes before whatever was asked for since."""
    engine, _ = make_engine(max_step_tokens=8, ahead=ahead)
    engine.submit(make_request("long", list(range(10)), max_tokens=3))
    engine.step()
    engine.submit(make_request("short", [1], max_tokens=3))
    _, stats = run(engine)
    told = [(step.phase, step.decode_context) for step in stats]
    assert told == [(Phase.PREFILL, None), (Phase.DECODE, 11), (Phase.DECODE, 12)]
    engine.submit(make_request("first", [1, 2], max_tokens=3 + ahead))
    engine.step()
    engine.submit(make_request("second", [1, 2, 3, 4], max_tokens=2))
    if ahead:
        assert engine.step().stats.phase is Phase.DECODE
    assert engine.step().stats.phase is Phase.MIXED
    assert engine.step().stats.decode_context == 5
    idle = engine.step().stats
    assert (idle.phase, idle.decode_context, idle.timed) == (None, None, ())
