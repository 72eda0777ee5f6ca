import asyncio

import pytest

from load_tests.client import DIALECTS, Server
from load_tests.measure import NoSuccess, figures, percentile, run, warm_up
from load_tests.prompts import PromptMaker
from load_tests.scenarios import Scenario, Sizes
from load_tests.terms import Outcome, Request
from tests.load_tests.sse_server import good, serving, whole

SIZES = Sizes(prompt_tokens=4, output_tokens=3, prefill_tokens=9, prefix_tokens=5, arrivals=5)


def outcome(start: float, first: float, end: float, tokens: int = 11, error=None) -> Outcome:
    return Outcome(start, start, end, ((first, 1),), 100, tokens, error=error)


def sent(count: int) -> list[Request]:
    return [Request((index,), 100, 11) for index in range(count)]


def test_percentiles_interpolate():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0, 0.5, 1)] == [1.0, 2.5, 4.0]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile(list(map(float, range(101))), 0.99) == pytest.approx(99.0)


def test_the_figures_of_a_run():
    result = figures(sent(2), [outcome(10.0, 10.5, 12.5), outcome(10.0, 11.5, 14.0)])
    assert result.total_s == 4.0
    assert result.output_tokens_per_s == 22 / 4
    assert result.ttft_p50_ms == pytest.approx(1000)
    assert result.ttft_p99_ms == pytest.approx(1490)
    assert result.tpot_p50_ms == pytest.approx(225)  # of 200 and 250
    assert result.prompt_tokens_per_s == pytest.approx((200 + 100 / 1.5) / 2)
    assert (result.requests, result.failed, result.prompt_tokens_off) == (2, 0, 0)


def test_failures_are_counted_and_keep_out_of_the_latencies():
    broken = outcome(10.0, 10.001, 14.0, tokens=1, error="cut")
    result = figures(sent(3), [outcome(10.0, 10.5, 12.5), broken, broken])
    assert (result.requests, result.failed, result.errors) == (3, 2, {"cut": 2})
    assert result.ttft_p50_ms == pytest.approx(500)
    assert result.output_tokens == 11
    assert result.total_s == 4.0


def test_nothing_but_failures_is_no_figure():
    with pytest.raises(NoSuccess, match="cut"):
        figures(sent(1), [outcome(0.0, 0.0, 1.0, error="cut")])


def test_prompt_lengths_the_server_counts_differently():
    asked = [Request((index,), tokens, 11) for index, tokens in enumerate([99, 100, 100])]
    unknown = Outcome(0.0, 0.0, 1.0, error="cut")
    result = figures(asked, [outcome(0.0, 0.5, 1.0), outcome(0.0, 0.5, 1.0), unknown])
    assert result.prompt_tokens_off == 1


def measure(scenario: Scenario, answer=good, ticks: list | None = None):
    tick = None if ticks is None else lambda *counts: ticks.append(counts)
    with serving(answer) as running:
        server = Server("127.0.0.1", running.port, DIALECTS["openai"], "tiny")
        prompts = PromptMaker("s", "ids")
        result = asyncio.run(run(server, scenario, SIZES, prompts, seed="s", tick=tick))
    return result, running


@pytest.mark.parametrize(
    ("scenario", "count", "tokens"),
    [
        (Scenario("stream", 1), 1, 3),
        (Scenario("prefill", 1), 1, 1),
        (Scenario("closed", 4), 8, 24),
        (Scenario("shared-prefix", 8), 16, 512),
        (Scenario("poisson", 0, 500.0), 5, 15),
    ],
)
def test_every_workload_runs(scenario, count, tokens):
    ticks: list[tuple[int, int]] = []
    result, running = measure(scenario, ticks=ticks)
    assert (result.requests, result.failed, result.output_tokens) == (count, 0, tokens)
    assert len({str(body["prompt"]) for body in running.bodies}) == count
    assert ticks == [(number, count) for number in range(1, count + 1)]


def test_one_bad_answer_in_a_run_is_one_failure():
    answers = 0

    def sometimes(path, body):
        nonlocal answers
        answers += 1
        return whole("500 No", {}) if answers == 3 else good(path, body)

    result, _ = measure(Scenario("closed", 2), sometimes)
    assert (result.requests, result.failed) == (4, 1)
    assert next(iter(result.errors)).startswith("status 500")


def test_warm_up_sends_short_requests_at_once():
    with serving(pause_s=0.01) as running:
        server = Server("127.0.0.1", running.port, DIALECTS["openai"])
        asyncio.run(warm_up(server, 6, PromptMaker("s", "ids")))
    assert [body["max_tokens"] for body in running.bodies] == [4] * 6
    assert running.most_in_flight == 6


def test_warm_up_tells_why_nothing_works():
    with serving(lambda path, body: whole("401 No", {"error": "key"})) as running:
        server = Server("127.0.0.1", running.port, DIALECTS["openai"])
        with pytest.raises(NoSuccess, match="status 401"):
            asyncio.run(warm_up(server, 2, PromptMaker("s", "ids")))
