"""Simulated replicas against closed forms and steps counted by hand, and what is measured."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ropewalk.load_tests.client.client import Server
from ropewalk.load_tests.common.types import Outcome, Profile
from ropewalk.load_tests.plan import dispatch, plan, service
from ropewalk.load_tests.plan.figures import Figures, Row, comparison, figures, off
from ropewalk.load_tests.plan.prefix_cache import PrefixCache
from ropewalk.load_tests.plan.routing import consistent_hash, least_loaded, round_robin, weighed
from ropewalk.load_tests.plan.service import Service
from ropewalk.load_tests.plan.simulate import Answered, simulate
from ropewalk.load_tests.plan.traffic import Call, Traffic, requests_of
from ropewalk.load_tests.workload.arrivals import Driven
from ropewalk.load_tests.workload.prompts import PromptMaker

# One request at a time, a microsecond for each token of its prompt, and nothing else.
QUEUE = Service(((1, 0.0),), 1e-6, 0.0, 0.0, 0.0, 10**9, 16, max_seqs=1, max_step_tokens=10**9)
STEPS = Service(((1, 0.01), (2, 0.02)), 1e-3, 0.0, 0.0, 0.0, 100, 10, max_step_tokens=100)
COUNT, RATE = 20_000, 60.0


def waits(lengths, rate=RATE):
    """Seconds from arrival to the end of the service, of requests with prompts of `lengths`."""
    trace = [Call(number, 0, tokens, 1) for number, tokens in enumerate(lengths)]
    answered = simulate(QUEUE, 1, round_robin(1), trace, Profile("poisson", rate=rate), "seed")
    return np.array([each.first - each.sent for each in answered])


def test_one_server_at_random_moments_is_an_m_m_1_queue():
    source = random.Random(1)
    found = waits([1 + round(source.expovariate(1) * 1e4) for _ in range(COUNT)])
    assert found.mean() == pytest.approx(1 / (100 - RATE), rel=0.07)
    assert np.percentile(found, 99) == pytest.approx(math.log(100) / (100 - RATE), rel=0.1)


def test_equal_requests_make_it_an_m_d_1_queue():
    load = RATE / 100
    wanted = (1 + load / (2 * (1 - load))) / 100
    assert waits([10_000] * COUNT).mean() == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("skew", [0.0, 0.8])
def test_a_cache_hits_as_ches_approximation_says(skew):
    kinds, blocks, source = 400, 100, random.Random(2)
    shares = np.array([(rank + 1) ** -skew for rank in range(kinds)])
    shares /= shares.sum()
    low, high = 0.0, 1e6
    while high - low > 1e-6 * high:  # the time after which one that is not asked for is gone
        middle = (low + high) / 2
        inside = (1 - np.exp(-shares * middle)).sum()
        low, high = (middle, high) if inside < blocks else (low, middle)
    wanted = (shares * (1 - np.exp(-shares * low))).sum()
    cache, hits = PrefixCache(blocks), 0
    for prefix in source.choices(range(kinds), shares, k=30_000):
        known = cache.known(prefix)
        hits += known
        assert cache.take(prefix, 1 - known)
        assert cache.publish(prefix, 1) == 1 - known
        cache.give_back(prefix, 0)
    assert hits / 30_000 == pytest.approx(wanted, abs=0.01)


def test_a_cache_has_room_until_what_is_held_fills_it():
    cache = PrefixCache(10)
    assert cache.take(1, 6)
    assert cache.publish(1, 4) == 4
    assert not cache.take(2, 5)
    cache.give_back(1, 2)  # its two other blocks are garbage, and go first
    assert cache.take(2, 6)
    assert cache.known(1) == 4
    assert not cache.take(1, 1)
    cache.give_back(2, 6)
    assert cache.take(3, 3)
    assert cache.known(1) == 1  # cut at its end
    cache.give_back(3, 3)
    assert cache.take(1, 9)
    assert not cache.take(4, 1)


def test_steps_are_those_of_the_engine():
    """The first prompt takes two steps whole. The third has room for the second prompt too, which
    knows by then what the two have in common."""
    trace = [Call(0, 250, 0, 3), Call(0, 100, 50, 2)]
    first, second = simulate(STEPS, 1, round_robin(1), trace, Profile("closed", concurrency=2), "")
    assert first.first == pytest.approx(0.1 + 0.1 + (0.05 + 0.05 + 0.02))
    assert (first.cached_tokens, second.cached_tokens) == (0, 100)
    assert second.first == pytest.approx(first.first)
    assert second.ended == pytest.approx(second.first + 0.02)
    assert first.ended == pytest.approx(second.ended + 0.01)


def test_who_comes_while_others_decode_waits_for_the_end_of_a_step():
    trace = [Call(0, 0, 10, 100), Call(1, 0, 10, 1)]
    profile = Profile("poisson", rate=3.0)
    first, second = simulate(STEPS, 1, round_robin(1), trace, profile, "seed")
    begins = first.sent + 0.02
    assert begins < second.sent < first.ended
    steps = math.ceil((second.sent - begins) / 0.01)
    assert second.first == pytest.approx(begins + steps * 0.01 + 0.03)
    assert first.ended == pytest.approx(begins + 98 * 0.01 + 0.03)


def test_a_request_larger_than_the_cache_is_an_error():
    with pytest.raises(ValueError, match="does not hold one request"):
        simulate(STEPS, 1, round_robin(1), [Call(0, 0, 1000, 1)], Profile("closed", 1), "")


@pytest.mark.parametrize("rate", [0.0, 5.0])
def test_every_call_is_answered_and_the_same_again(rate):
    traffic = Traffic(prefixes=3, skew=1.0, prefix_tokens=60, rate=rate)
    case = plan.Case(3, traffic, 200, "seed", 2)
    assert plan.predict(STEPS, case) == plan.predict(STEPS, case)
    trace = traffic.trace(3, 200, "seed")
    answered = simulate(STEPS, 3, least_loaded(), trace, traffic.profile(3), "seed")
    assert [each.call for each in answered] == trace
    for each in answered:
        assert each.sent < each.first <= each.ended
        assert 0 <= each.cached_tokens <= 60


def test_policies():
    loads, call = np.array([2, 1, 1, 5]), Call(7, 10, 1, 1)
    robin = round_robin(4)
    assert [robin(call, loads) for _ in range(5)] == [0, 1, 2, 3, 0]
    least = least_loaded()
    assert {least(call, loads) for _ in range(50)} == {1, 2}
    knows = weighed(4, slack=2, kept=1)
    home = knows(call, loads)
    loads[home] += 2
    assert knows(call, loads) == home
    loads[home] += 1
    away = knows(call, loads)
    assert away != home
    loads[away] += 9
    loads[home] = 0
    assert knows(call, loads) == home  # both know it
    knows(replace(call, prefix=8), np.array([9 * (place != home) for place in range(4)]))
    loads[away] = 0
    loads[home] = 1
    assert knows(call, loads) == away  # the other keeps one prefix


def test_a_ring_moves_few_prefixes_to_a_new_replica():
    calls = [Call(prefix, 10, 1, 1) for prefix in range(2000)]
    before, after = (
        [ring(call, np.zeros(0)) for call in calls]
        for ring in (consistent_hash(9), consistent_hash(10))
    )
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {9}
    assert 100 < len(moved) < 300
    assert min(Counter(before).values()) > 2000 / 9 / 2


def test_traffic_is_as_popular_and_as_long_as_said():
    trace = Traffic(prefixes=5, skew=1.0, tail_tokens=10).trace(2, 5000, "seed")
    asked = Counter(call.prefix for call in trace)
    assert len(asked) == 10
    assert asked[0] / asked[9] == pytest.approx(10, rel=0.3)
    assert {call.tail_tokens for call in trace} == set(range(5, 16))
    requests = requests_of(trace[:50], "seed", 1000)
    assert [len(each.prompt) for each in requests] == [c.prompt_tokens for c in trace[:50]]
    starts = {call.prefix: set() for call in trace[:50]}
    for call, request in zip(trace, requests, strict=False):
        starts[call.prefix].add(request.prompt[:200])
    assert all(len(found) == 1 for found in starts.values())


def test_figures_leave_out_the_warm_up():
    call = Call(0, 60, 40, 1)
    slow = [Answered(call, 0, 0.0, 9.0, 9.0, 0)] * 2
    fast = [Answered(call, 0, 1.0 + n, 1.1 + n, 1.5 + n, 50) for n in range(6)]
    found = figures(slow + fast)
    assert found == Figures(1.0, 0.5, pytest.approx(0.1), pytest.approx(0.1))


def test_a_comparison_says_how_far_off_a_prediction_is():
    assert (off(1.1, 1.0), off(0.5, 1.0), off(1.0, 0.0)) == ("+10 %", "−50 %", "–")
    said = Row(2, "round robin", Figures(110, 0.5, 0.1, 0.2), Figures(70, 0.6, 0.1, 0.3))
    found = Row(2, "round robin", Figures(100, 0.5, 0.1, 0.2), Figures(70, 0.5, 0.1, 0.2))
    assert "110.0 → 100.0 (+10 %)|60.0 % → 50.0 % (+20 %)" in comparison([said], [found])
    assert "300 ms → 200 ms (+50 %)" in comparison([said], [found])


class Served:
    """Stands in for servers: answers as the simulated service would a request alone."""

    def __init__(self, monkeypatch, timed: Service) -> None:
        self.asked: list[tuple[Server, int]] = []
        self._timed = timed
        self._seen: set[tuple[int, ...]] = set()
        for module in (dispatch, service):
            monkeypatch.setattr(module, "complete", self.complete)
        monkeypatch.setattr(service, "get_json", self.cache)
        monkeypatch.setattr(dispatch, "flush", self.flush)

    async def complete(self, server, request, intended=0.0) -> Outcome:
        await asyncio.sleep(0)
        timed, prompt = self._timed, request.prompt
        self.asked.append((server, len(prompt)))
        cached = 100 if prompt[:100] in self._seen else 0
        self._seen.add(prompt[:100])
        first = timed.way_s + timed.step_s(1) + timed.prompt_s(len(prompt) - cached, cached)
        chunks = [(intended + first + n * 0.01, n + 1) for n in range(request.output_tokens)]
        return Outcome(
            intended=intended,
            sent=intended,
            ended=chunks[-1][0],
            chunks=tuple(chunks),
            prompt_tokens=len(prompt),
            output_tokens=request.output_tokens,
            cached_tokens=cached,
        )

    async def flush(self, server) -> None:
        self._seen.clear()

    async def cache(self, server, path) -> dict:
        blocks = {"free": 5, "active": 1, "cached": 4, "quarantined": 0}
        limits = {"max_seqs": 7, "max_step_tokens": 2048, "lone_factor": 1}
        return {"data": [{"model": "m", "block_size": 16, "blocks": blocks, "limits": limits}]}


def test_times_are_found_again(tmp_path):
    traffic = Traffic(prefix_tokens=300, tail_tokens=20, output_tokens=8, concurrency=2)
    steps = ((1, 0.01), (2, 0.012), (4, 0.02))
    timed = Service(steps, 2e-3, 1e-5, 0.004, 0.5, 0, 0)
    alone = [
        (n, timed.way_s + timed.request_s + timed.step_s(1) + timed.prompt_s(n, 0))
        for n in (20, 80, 160, 320)
    ]
    known, unknown = (
        (n, timed.request_s + timed.prompt_s(n, 320 - n) + 8 * timed.step_s(2) / 2)
        for n in (32, 320)
    )
    found = service.deduce(traffic, alone, steps, known, unknown)
    for name in ("token_s", "pair_s", "request_s", "way_s"):
        assert getattr(found, name) == pytest.approx(getattr(timed, name)), name
    bent = [(n, 0.1 + 0.001 * n - 1e-7 * n * n) for n in (20, 80, 160, 320)]
    assert service.deduce(traffic, bent, steps, known, unknown).pair_s == 0
    with pytest.raises(ValueError, match="finds no prefix again"):
        service.deduce(traffic, alone, steps, unknown, unknown)
    found.write(tmp_path / "times.json")
    assert service.read(tmp_path / "times.json") == found
    (tmp_path / "times.json").write_text('{"steps": [[1]]}')
    with pytest.raises(ValueError, match=r"times\.json does not hold service times"):
        service.read(tmp_path / "times.json")


def test_a_server_is_measured(monkeypatch):
    served = Served(monkeypatch, STEPS)
    server = Server("127.0.0.1", 1, "m")
    traffic = Traffic(prefix_tokens=300, tail_tokens=20, concurrency=2)
    found = asyncio.run(service.measure(server, traffic, 1000, "seed"))
    assert [batch for batch, _ in found.steps] == list(service.BATCHES)
    assert [seconds for _, seconds in found.steps] == pytest.approx([0.01] * len(found.steps))
    assert (found.blocks, found.block_size) == (10, 16)
    assert (found.max_seqs, found.max_step_tokens, found.lone_factor) == (7, 2048, 1)
    assert {length for _, length in served.asked} == {20, 80, 160, 320}


@pytest.mark.parametrize("workers", [1, 3])
def test_the_requests_of_the_window_share_its_time(workers, monkeypatch):
    """Each takes a second of its worker's."""

    async def drive(plan, profile, seed, send):
        begun = [at // workers for at in range(len(plan))]
        outcomes = tuple(Outcome(each, each, each + 1.0, cached_tokens=0) for each in begun)
        return Driven(outcomes, 1.0 if workers > 1 else 0.0, len(plan) / workers)

    Served(monkeypatch, STEPS)
    monkeypatch.setattr(service, "drive", drive)
    server = Server("127.0.0.1", 1, "m")
    traffic, maker = Traffic(concurrency=workers), PromptMaker("s", "ids")
    _, seconds = asyncio.run(service._busy(server, maker, traffic, alike=False))
    assert seconds == pytest.approx(1 / workers)


def test_a_trace_is_sent_where_the_policy_says(monkeypatch):
    served = Served(monkeypatch, STEPS)
    servers = [Server("127.0.0.1", port) for port in (1, 2)]
    traffic = Traffic(prefixes=1, prefix_tokens=100, concurrency=1)
    trace = traffic.trace(2, 20, "seed")
    answered = asyncio.run(
        dispatch.dispatch(servers, round_robin(2), trace, traffic.profile(2), "seed", 1000)
    )
    assert [each.replica for each in answered] == [0, 1] * 10
    assert Counter(server.port for server, _ in served.asked) == {1: 10, 2: 10}
    assert [each.call for each in answered] == trace
    assert sorted(each.cached_tokens for each in answered) == [0, 0] + [100] * 18
    assert all(each.sent < each.first for each in answered)


def test_the_command_plans_from_a_file(tmp_path, capsys):
    STEPS.write(tmp_path / "times.json")
    words = ["--service", str(tmp_path / "times.json"), "--replicas", "1,3", "--requests", "30"]
    words += ["--prefix-tokens", "50", "--prefixes", "2", "--out", str(tmp_path / "plan")]
    assert plan.main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("|prefix and load|") == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"plan.json", "plan.svg"}
    assert service.read(tmp_path / "plan.service.json") == STEPS
    assert plan.main(["--service", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
