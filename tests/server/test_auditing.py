"""A changed block ends exactly those who depend on it, and is never used again."""

import contextlib
import threading
from itertools import pairwise

import pytest
import torch

from ropewalk.cache.types import Audit
from ropewalk.server.errors import CacheChanged
from ropewalk.server.scheduling.request import FinishReason
from tests.cache.shape import Shape
from tests.server.fake_engine import BLOCK, VOCAB, counting, engine_app, make_engine, make_request
from tests.server.toy import LABELS, asking, sample, toy

SHAPE = Shape(3, 2, 8)
ENTRIES = BLOCK * SHAPE.num_kv_heads  # of one layer and part of a block


class Watched:
    """An engine over a fake model, whose cache tests may damage."""

    def __init__(self, mode=Audit.FULL, *, forward=counting, **options):
        self.forwards = 0

        def counted(batch, kv):
            self.forwards += 1
            return forward(batch, kv)

        self.engine, self.manager = make_engine(counted, shape=SHAPE, audit=mode, **options)
        self.scheduler, self.kv = self.engine._scheduler, self.engine._kv
        for part in self.kv.whole:
            part.normal_()
        self.events, self.stats = [], []

    def step(self):
        step = self.engine.step()
        self.events += step.events
        self.stats.append(step.stats)
        self.manager.check()
        self.scheduler.check()
        return step

    def run(self):
        while self.engine.busy:
            self.step()

    def blocks(self, name):
        return list(self.manager.table(name).blocks)

    def damage(self, block, layer=0):
        """One bit of one key."""
        damage(self.kv, block, layer)

    def tokens(self, name):
        return [e.token for e in self.events if e.request_id == name and e.token is not None]

    def failed(self):
        return [event.request_id for event in self.events if event.error is not None]

    def total(self, field):
        return sum(getattr(stats, field) for stats in self.stats)


def damage(kv, block, layer=0):
    word = kv.layer(layer).keys[block].view(torch.int32)
    word[1, 0, 2] ^= 1 << 9


def counted_from(first, count):
    return [(first + n) % VOCAB for n in range(count)]


def test_who_holds_the_block_ends_and_nobody_else(caplog):
    world = Watched()
    shared = list(range(8))
    world.engine.submit(make_request("first", [*shared, 20], max_tokens=30))
    world.step()
    world.engine.submit(make_request("second", [*shared, 30], max_tokens=30))
    world.engine.submit(make_request("other", [1, 2, 3, 4, 5], max_tokens=30))
    world.step()
    block = world.blocks("first")[1]
    assert block == world.blocks("second")[1]
    world.damage(block, layer=1)
    ended = world.step()
    assert sorted(event.request_id for event in ended.events) == ["first", "other", "second"]
    assert sorted(world.failed()) == ["first", "second"]
    for event in ended.events:
        if event.request_id != "other":
            assert isinstance(event.error, CacheChanged) and event.token is None
    assert ended.stats.generated_tokens == 1
    assert ended.stats.mutated_entries == ENTRIES
    assert ended.stats.blocks.quarantined == 1
    assert world.engine.mutated_blocks == 1
    world.run()
    assert world.tokens("other") == counted_from(6, 30)
    (line,) = [record.message for record in caplog.records]
    assert line == (
        f"a cached block of fake changed: block {block}, layer 1 keys, positions 4 to 7; "
        "sequences first, second"
    )


@pytest.mark.parametrize("others", [0, 1])
def test_who_is_under_way_when_the_change_is_found_ends_too(others, caplog):
    """Given up by one that is aborted, the block is looked at before the next step is launched."""
    world = Watched(Audit.SAMPLE, ahead=True)
    shared = list(range(8))
    world.engine.submit(make_request("leaves", [*shared, 20], max_tokens=30))
    world.step()
    world.engine.submit(make_request("stays", [*shared, 30], max_tokens=30))
    for n in range(others):
        world.engine.submit(make_request(f"other{n}", [5, 6], max_tokens=30))
    for _ in range(3):
        world.step()
    world.damage(world.blocks("stays")[1])
    world.engine.abort("leaves")
    world.run()
    assert world.failed() == ["stays"]
    for n in range(others):
        assert world.tokens(f"other{n}") == counted_from(7, 30)
    assert [record.message[:24] for record in caplog.records] == ["a cached block of fake c"]
    assert world.manager.counts().active == 0


def test_the_block_never_comes_back():
    world = Watched(blocks=6)
    world.engine.submit(make_request("a", range(9), max_tokens=5))
    world.step()
    block = world.blocks("a")[0]
    world.damage(block)
    world.step()
    for n in range(6):
        world.engine.submit(make_request(f"r{n}", [n] * 9, max_tokens=5))
        world.step()
        assert block not in world.blocks(f"r{n}")
        world.run()
    assert world.failed() == ["a"]
    assert world.manager.counts().quarantined == 1


@pytest.mark.parametrize("kept", ["", "seq-a"])
def test_an_answer_is_verified_as_it_ends_even_if_its_blocks_are_kept(kept):
    """Many other blocks are to be sampled before the one that changed."""
    world = Watched(Audit.SAMPLE, blocks=60)
    world.engine.submit(make_request("others", [9] * 60, max_tokens=30))
    world.step()
    world.engine.submit(make_request("a", range(9), max_tokens=4, keep=kept))
    for _ in range(3):
        world.step()
    world.damage(world.blocks("a")[0])
    world.step()
    assert world.failed() == ["a"]
    assert [*world.scheduler.kept.ids] == []
    world.run()
    assert world.failed() == ["a"] and world.manager.counts().active == 0


def test_an_answer_that_was_complete_in_this_very_step_is_an_error():
    world = Watched(Audit.SAMPLE)
    world.engine.submit(make_request("a", range(5), max_tokens=2))
    world.step()
    world.damage(world.blocks("a")[0])
    ended = world.step()
    (event,) = ended.events
    assert event.finish is FinishReason.ERROR and event.token is None
    (summary,) = ended.stats.ended
    assert summary.finish is FinishReason.ERROR
    assert ended.stats.generated_tokens == 0
    assert world.manager.counts().quarantined == 1


def test_what_is_found_at_admission_is_never_computed(caplog):
    world = Watched()
    world.engine.submit(make_request("a", range(9), max_tokens=1))
    world.run()
    world.damage(1)
    before = world.forwards
    world.engine.submit(make_request("b", range(9), max_tokens=1))
    (event,) = world.step().events
    assert (event.request_id, event.finish) == ("b", FinishReason.ERROR)
    assert world.forwards == before
    assert "positions 0 to 3" in caplog.text and "sequences b" in caplog.text
    world.engine.submit(make_request("again", range(9), max_tokens=3))
    world.run()
    assert world.tokens("again") == counted_from(9, 3)


def test_a_preempted_request_ends_before_it_is_computed_again():
    world = Watched(Audit.SAMPLE)
    world.engine.submit(make_request("a", range(5), max_tokens=20))
    world.engine.submit(make_request("b", range(10, 15), max_tokens=20))
    world.step()
    world.damage(world.blocks("b")[0])
    world.scheduler._preempt_newest()
    world.step()
    assert world.failed() == ["b"]
    world.run()
    assert world.tokens("a") == counted_from(5, 20)
    assert world.tokens("b") == counted_from(15, 1)


def parked():
    """A world of which one request was preempted just now, and the blocks that it had."""
    world = Watched(Audit.SAMPLE, blocks=11, spill=20)
    world.engine.submit(make_request("a", range(5), max_tokens=30))
    world.engine.submit(make_request("b", range(10, 19), max_tokens=20))
    world.step()
    while not world.manager.parked:
        held = world.blocks("b")
        world.step()
    assert world.manager.parked == {"b"}
    return world, held


def spoil_in_the_cache(world, held):
    world.damage(held[0])


def spoil_outside(world, held):
    while world.manager.spilled().moves.out < len(held):
        world.step()
    for part in world.manager._keeper._place._parts:
        part[:, 1, 2] += 1


@pytest.mark.parametrize("spoil", [None, spoil_in_the_cache, spoil_outside])
def test_what_changed_while_it_was_parked_is_computed_again(spoil, caplog):
    world, held = parked()
    if spoil is not None:
        spoil(world, held)
    world.run()
    assert world.failed() == []
    assert world.tokens("a") == counted_from(5, 30)
    assert world.tokens("b") == counted_from(19, 20)
    spill = world.manager.spilled()
    assert (spill.moves.changed > 0) == (spoil is spoil_outside)
    assert (world.engine.mutated_blocks > 0) == (spoil is spoil_in_the_cache)
    assert bool(caplog.messages) == (spoil is not None)
    assert spill.moves.back > 0 or spoil is not None
    assert sum(stats.spill.moves.out for stats in world.stats) == spill.moves.out > 0
    assert spill.waiting == world.manager.counts().active == 0


def test_a_parked_request_can_be_aborted():
    world, _ = parked()
    world.engine.abort("b")
    world.run()
    assert world.tokens("a") == counted_from(5, 30)
    assert (world.manager.parked, world.manager.spilled().waiting) == (set(), 0)


def test_an_aborted_request_is_told_nothing():
    world = Watched()
    world.engine.submit(make_request("a", range(5), max_tokens=20))
    world.step()
    world.damage(world.blocks("a")[0])
    world.engine.abort("a")
    step = world.step()
    assert step.events == []
    assert [ended.finish for ended in step.stats.ended] == [FinishReason.ABORT]
    assert step.stats.blocks.quarantined == 1


def test_two_changed_blocks_of_one_request_are_two_faults_and_one_end():
    world = Watched()
    world.engine.submit(make_request("a", range(9), max_tokens=20))
    world.step()
    for block in world.blocks("a")[:2]:
        world.damage(block)
    assert len(world.step().events) == 1
    assert world.engine.mutated_blocks == 2
    assert world.manager.counts().quarantined == 2


def test_giving_up_a_failed_requests_blocks_finds_the_next_fault():
    """Sampling comes to one block only; ending its holder brings the other one to light."""
    world = Watched(Audit.SAMPLE)
    world.engine.submit(make_request("a", range(33), max_tokens=20))
    world.engine.submit(make_request("b", [*range(16), *range(30, 47)], max_tokens=20))
    world.step()
    blocks = world.blocks("a")
    world.damage(blocks[0])
    world.damage(blocks[7])
    while not world.failed():
        world.step()
    assert world.engine.mutated_blocks == 2


def test_what_no_longer_fits_ends_and_what_fits_waits_its_turn():
    world = Watched(blocks=8, max_seqs=1)
    world.engine.submit(make_request("running", range(9), max_tokens=8))
    world.engine.submit(make_request("doomed", range(20), max_tokens=9))  # all of seven blocks
    world.engine.submit(make_request("small", range(5), max_tokens=2))
    world.step()
    world.damage(world.blocks("running")[0])
    ended = {event.request_id: event for event in world.step().events}
    assert sorted(ended) == ["doomed", "running"]
    assert "no longer fits" in ended["doomed"].error.message
    world.run()
    assert world.tokens("small") == counted_from(5, 2)


def test_a_running_request_that_outgrows_what_is_left_ends_too():
    world = Watched(blocks=9)
    world.engine.submit(make_request("short", range(20, 25), max_tokens=1))
    world.run()
    world.engine.submit(make_request("long", range(5), max_tokens=28))  # all of eight blocks
    world.step()
    world.damage(1)  # what "short" left behind
    world.run()
    assert world.failed() == ["long"]
    assert 0 < len(world.tokens("long")) < 28


def test_a_long_queue_is_gone_through_once_for_each_lost_block():
    world = Watched(max_seqs=1, max_queue=1000)
    world.engine.submit(make_request("running", range(9), max_tokens=60))
    world.step()
    for index in range(1000):
        world.engine.submit(make_request(f"queued {index}", range(5), max_tokens=2))
    asked = []
    room_for = world.scheduler.contexts._room_for
    world.scheduler.contexts._room_for = lambda request: (
        asked.append(request.id) or room_for(request)
    )
    world.damage(world.blocks("running")[0])
    world.step()
    assert len(asked) == 1000 and world.engine.mutated_blocks == 1
    for _ in range(10):
        world.step()
    assert len(asked) == 1000


def test_sampling_comes_to_every_block():
    world = Watched(Audit.SAMPLE, max_seqs=1)
    world.engine.submit(make_request("old", range(41), max_tokens=1))
    world.run()
    world.engine.submit(make_request("new", [45] * 5, max_tokens=40))
    world.step()
    world.damage(7)  # held by nobody
    for _ in range(20):
        world.step()
    assert world.engine.mutated_blocks == 1
    assert world.failed() == []


def test_off_looks_at_nothing():
    world = Watched(Audit.OFF)
    world.engine.submit(make_request("a", range(9), max_tokens=20))
    world.step()
    world.damage(1)
    world.run()
    assert world.failed() == []
    assert world.total("sealed_blocks") == world.total("verified_blocks") == 0


def test_every_full_block_is_sealed_once_and_nothing_is_found():
    world = Watched(Audit.SAMPLE)
    world.engine.submit(make_request("a", range(9), max_tokens=12))  # 20 tokens are stored
    world.engine.submit(make_request("b", range(20, 25), max_tokens=2))
    world.run()
    assert world.total("sealed_blocks") == 6
    assert world.total("verified_blocks") >= 6
    assert world.total("mutated_entries") == 0


def test_what_an_encoder_made_is_sealed_and_ends_its_request():
    world = Watched(sharing=False)
    for name in ("a", "b"):
        world.engine.submit(make_request(name, [1], max_tokens=20, source=tuple(range(9))))
    world.step()
    assert world.stats[0].sealed_blocks == 4
    world.damage(world.blocks("a/encoder")[1])
    world.step()
    assert world.failed() == ["a"]
    world.run()
    assert world.tokens("b") == counted_from(2, 20)


# ------------------------------------------------------------------------------ over HTTP


@contextlib.contextmanager
def serving(world, **options):
    app = engine_app(world.engine, toy(max_context=100), options=options)
    with asking(app) as client:
        yield client, app.state.metrics


def ask(client, prompt, **body):
    settings = {"model": "toy", "prompt": list(prompt), "max_tokens": 5, "temperature": 0}
    return client.post("/v1/completions", json=settings | body)


SABOTAGE = 40  # a prompt with this token has its first block damaged while it is computed


def sabotaged(batch, kv):
    starts = batch.query_starts.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        # The block was sealed in the step before.
        if SABOTAGE in batch.tokens[start:end].tolist() and batch.context_lens[row] == 10:
            damage(kv, int(batch.block_tables[row, 0]))
    return counting(batch, kv)


def test_over_http_a_cache_that_holds_no_whole_context_any_more_is_not_ready():
    world = Watched(forward=sabotaged, blocks=6, max_context=5 * BLOCK + 1)
    with serving(world, max_mutated_blocks=3) as (client, _):
        assert client.get("/health/ready").status_code == 200
        ask(client, [*range(8), SABOTAGE - 1], max_tokens=5)
        answer = client.get("/health/ready")
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert "the remaining blocks of toy cannot hold a request of its full context" in message


def test_over_http_the_right_requests_end_and_ready_turns_false_past_the_threshold():
    world = Watched(forward=sabotaged)
    with serving(world, max_mutated_blocks=1) as (client, metrics):

        def ready():
            return client.get("/health/ready"), client.get("/health")

        guilty = [*range(8), SABOTAGE - 1]  # its first answer is the token that damages it
        answers = {}

        def post(name, prompt):
            answers[name] = ask(client, prompt, max_tokens=20)

        for round_ in range(2):
            assert [answer.status_code for answer in ready()] == [200, 200]
            good = [10 + round_, 12, 13, 14, 15]
            threads = [
                threading.Thread(target=post, args=("bad", guilty)),
                threading.Thread(target=post, args=("good", good)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            error = answers["bad"].json()["error"]
            assert answers["bad"].status_code == 500
            assert error["code"] == "cache_changed"
            assert error["message"].endswith("retry.")
            assert "x-should-retry" not in answers["bad"].headers
            assert answers["good"].json()["choices"][0]["text"] == bytes(range(16, 36)).decode()
        for answer in ready():
            assert answer.status_code == 503
            assert "2 cached blocks changed" in answer.json()["error"]["message"]
        assert client.get("/health/live").status_code == 200
        assert sample(metrics, "kv_blocks", **LABELS, state="quarantined") == 2
        assert sample(metrics, "requests_total", **LABELS, finish_reason="error") == 2
        assert sample(metrics, "kv_mutated_entries_total", **LABELS) == 2 * ENTRIES


def test_a_stream_ends_with_the_error():
    begun = threading.Event()

    def after_the_first_token(batch, kv):
        if batch.context_lens[0] == 10:
            assert begun.wait(10)
        return sabotaged(batch, kv)

    body = {"model": "toy", "prompt": [*range(8), SABOTAGE - 1], "stream": True}
    with (
        serving(Watched(forward=after_the_first_token)) as (client, _),
        client.stream("POST", "/v1/completions", json=body | {"temperature": 0}) as answer,
    ):
        assert answer.status_code == 200  # sent with the first token
        begun.set()
        text = answer.read().decode()
    assert "cache_changed" in text
    assert "[DONE]" not in text
