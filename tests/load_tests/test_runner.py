import asyncio
import io
import json
from contextlib import contextmanager

import pytest

from ropewalk.load_tests.client.client import Server, Unreachable, Variant
from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.common.types import Profile, Run
from ropewalk.load_tests.run import runner
from ropewalk.load_tests.run.runner import NoSuccess, Runner
from ropewalk.load_tests.workload.loads import Load
from ropewalk.load_tests.workload.prompts import PromptMaker
from ropewalk.load_tests.workload.workloads import Sizes, workload_from
from tests.load_tests.sse_server import event, good, serving, stream, text_event, usage_event, whole

BLOCKS = {"a": 16, "b": 64, "c": None}
SIZES = Sizes(prompt_tokens=40, output_tokens=3, requests_per_worker=2, arrivals=5)
FLUSH = "/v1/cache/flush"


def load(workload: str = "stream", profile: Profile = Profile("sync")) -> Load:  # noqa: B008 - frozen
    each = workload_from(workload)
    return Load(each, each.points(SIZES)[0], profile)


class Asked:
    """A server's answer that notes what was asked, in order; flushing works."""

    def __init__(self, cached: int | None = None, broken: int | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self._cached = cached
        self._broken = broken  # the completion that fails, counted from 1

    def __call__(self, path: str, body: dict):
        if path.startswith(FLUSH):
            self.asked.append(("flush", path.partition("=")[2]))
            return whole("200 OK", {})
        if path != "/v1/completions":
            return good(path, body)
        self.asked.append((body["model"], str(body["prompt"])))
        if sum(kind != "flush" for kind, _ in self.asked) == self._broken:
            return whole("500 No", {"error": "oh"})
        count = body["max_tokens"]
        texts = [text_event("x") for _ in range(count)]
        usage = usage_event(len(body["prompt"]), count, self._cached)
        return stream([*texts, usage, event("[DONE]")])

    def sent(self, model: str) -> list[str]:
        return [prompt for kind, prompt in self.asked if kind == model]


@contextmanager
def runner_at(answer, *labels: str):
    with serving(answer) as running:
        server = Server("127.0.0.1", running.port)
        variants = [Variant(label, Server(server.host, server.port, label), label)
                for label in labels]  # fmt: skip
        runner = Runner(
            lambda seed: PromptMaker(seed, "ids"), SIZES, "seed", Progress(io.StringIO()), BLOCKS
        )
        yield runner, variants


def measure(runner: Runner, variants: list[Variant], loads: list[Load], rounds: int) -> list[Run]:
    async def collect() -> list[Run]:
        return [run async for run in runner.measure(variants, loads, rounds)]

    return asyncio.run(collect())


def test_every_variant_runs_once_in_every_round_with_the_same_prompts():
    asked = Asked()
    loads = [load(), load(profile=Profile("closed", concurrency=2))]
    with runner_at(asked, "a", "b", "c") as (runner, variants):
        runs = measure(runner, variants, loads, 3)
    assert len(runs) == 3 * 2 * 3
    for round in range(3):
        for each in loads:
            cell = [
                run.variant for run in runs if (run.round, run.profile) == (round, each.profile)
            ]
            assert sorted(cell) == ["a", "b", "c"]
    assert asked.sent("a") == asked.sent("b") == asked.sent("c")
    assert len(set(asked.sent("a"))) == len(asked.sent("a")) == 3 * (2 + 4)
    assert all(outcome.error is None for run in runs for outcome in run.outcomes)


def test_the_order_is_random_and_follows_from_the_seed():
    def order() -> list[tuple[int, str]]:
        with runner_at(Asked(), "a", "b", "c") as (runner, variants):
            return [(run.round, run.variant) for run in measure(runner, variants, [load()], 5)]

    first = order()
    assert first == order()
    assert (
        len({tuple(variant for number, variant in first if number == round) for round in range(5)})
        > 1
    )


def test_the_prefix_cache_is_flushed_before_every_run():
    asked = Asked()
    with runner_at(asked, "a", "b") as (runner, variants):
        measure(runner, variants, [load()], 2)
    kinds = [kind if kind != "flush" else f"flush {model}" for kind, model in asked.asked]
    for index, kind in enumerate(kinds):
        if kind.startswith("flush"):
            assert kinds[index + 1 : index + 3] == [kind.removeprefix("flush ")] * 2
    assert len([kind for kind in kinds if kind.startswith("flush")]) == 4
    assert runner.warnings == []


def test_a_server_that_cannot_flush_is_asked_once_and_named():
    paths = []

    def answer(path, body):
        paths.append(path)
        return good(path, body)

    with runner_at(answer, "a") as (runner, variants):
        runs = measure(runner, variants, [load()], 3)
    assert len(runs) == 3
    assert sum(path.startswith(FLUSH) for path in paths) == 1
    (warning,) = runner.warnings
    assert "prefix cache of a was not emptied" in warning
    assert "404" in warning


@pytest.mark.parametrize(("prefix", "found", "warned"), [(32, 32, ["b"]), (70, 64, [])])
def test_hits_are_expected_by_each_variants_own_blocks(prefix, found, warned, tmp_path):
    """Of two prompts that begin alike; a variant whose blocks are unknown is not judged."""
    prompts = [[*range(prefix), 900 + last, 901] for last in range(2)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    each = workload_from(f"file:{path}")
    alike = Load(each, each.points(SIZES)[0], Profile("sync"))
    asked = []

    def answer(path, body):
        if path != "/v1/completions":
            return whole("200 OK", {}) if path.startswith(FLUSH) else good(path, body)
        asked.append(body["model"])
        count = body["max_tokens"]
        hit = found if asked.count(body["model"]) == 2 else 0
        usage = usage_event(len(body["prompt"]), count, hit)
        return stream([*(text_event("x") for _ in range(count)), usage, event("[DONE]")])

    with runner_at(answer, "a", "b", "c") as (runner, variants):
        measure(runner, variants, [alike], 1)
    assert [warning.partition(",")[0] for warning in runner.warnings] == warned


def test_hits_that_theory_does_not_have_are_a_warning():
    with runner_at(Asked(cached=16), "a") as (runner, variants):
        measure(runner, variants, [load()], 1)
    (warning,) = runner.warnings
    assert "a, stream sync: the prefix cache had 32 prompt tokens, but" in warning
    assert "0 were expected" in warning


@pytest.mark.parametrize("asked", [Asked(cached=0), Asked(), Asked(cached=16, broken=1)])
def test_no_warning_where_hits_agree_are_unknown_or_a_request_failed(asked):
    with runner_at(asked, "a") as (runner, variants):
        measure(runner, variants, [load()], 1)
    assert runner.warnings == []


def test_a_run_keeps_its_failures():
    with runner_at(Asked(broken=2), "a") as (runner, variants):
        (run,) = measure(runner, variants, [load()], 1)
    assert [outcome.error is None for outcome in run.outcomes] == [True, False]
    assert str(run.outcomes[1].error).startswith("status 500")


def test_a_server_that_died_is_a_run_of_failures():
    with runner_at(Asked(), "a") as (runner, variants):
        pass
    (run,) = measure(runner, variants, [load()], 1)
    assert all("cannot connect" in str(outcome.error) for outcome in run.outcomes)


def test_a_variant_is_left_out_of_what_it_has_no_room_for():
    loads = [load(), load("prefill")]
    with runner_at(Asked(), "a", "b") as (runner, variants):
        able = asyncio.run(runner.ask(variants, {"a": None, "b": 64}, loads))
        runs = measure(runner, variants, able, 1)
    assert able == loads
    assert sorted((run.point.label, run.variant) for run in runs) == [
        ("prefill", "a"),
        ("stream", "a"),
        ("stream", "b"),
    ]
    (warning,) = runner.warnings
    assert warning.startswith("Left out of prefill: b; its context holds 64 tokens")


def test_what_no_variant_can_run_is_no_load():
    with runner_at(Asked(), "a", "b") as (runner, variants):
        assert asyncio.run(runner.ask(variants, {"a": 2, "b": 2}, [load()])) == []
    (warning,) = runner.warnings
    assert warning.startswith("Left out of stream: a, b; ")


def test_warm_up_asks_every_variant_before_it_is_measured():
    asked = Asked()
    with runner_at(asked, "a", "b") as (runner, variants):
        asyncio.run(runner.warm_up(variants))
    assert [kind for kind, _ in asked.asked] == ["a"] * 4 + ["flush"] + ["b"] * 4 + ["flush"]


def refusing(path, body):
    return whole("401 No", {"error": "key"})


def test_warm_up_tells_who_does_not_work_and_why():
    with (
        runner_at(refusing, "a") as (runner, variants),
        pytest.raises(NoSuccess, match=r"a at http://.*: status 401"),
    ):
        asyncio.run(runner.warm_up(variants))


def test_throughput_counts_served_requests_over_all_the_time():
    with runner_at(Asked(broken=1), "a") as (runner, variants):
        assert 0 < asyncio.run(runner.throughput(variants, load())) < 1e6
    with (
        runner_at(refusing, "a") as (runner, variants),
        pytest.raises(NoSuccess, match="a under stream sync: status 401"),
    ):
        asyncio.run(runner.throughput(variants, load()))


def test_throughput_is_that_of_an_variant_that_can():
    answer = Asked()
    with runner_at(answer, "a", "b") as (made, variants):
        able = asyncio.run(made.ask(variants, {"a": 8, "b": 4096}, [load()]))
        asyncio.run(made.throughput(variants, able[0]))
    assert not answer.sent("a") and answer.sent("b")


@pytest.mark.parametrize("failure", [Unreachable("gone"), ValueError("no metrics")])
def test_metrics_that_cannot_be_read_end_no_run(monkeypatch, failure):
    async def there(server):
        return "ropewalk_requests_running 0"

    async def settled(*_):
        raise failure

    monkeypatch.setattr(runner, "_snapshot", there)
    monkeypatch.setattr(runner.scrape, "settled", settled)

    async def watch():
        async with runner._watching(Server("localhost", 1)) as view:
            return await view([])

    assert asyncio.run(watch()) is None
