"""The theory of prefix hits, by hand and against a real server over a tiny checkpoint."""

import asyncio
import time
from dataclasses import replace

import pytest

from ropewalk.load_tests.client.client import Server, complete, split_base_url
from ropewalk.load_tests.common.types import Profile, Request
from ropewalk.load_tests.workload.arrivals import drive
from ropewalk.load_tests.workload.hits import cached_tokens
from ropewalk.load_tests.workload.prompts import PromptMaker
from ropewalk.load_tests.workload.workloads import WORKLOADS, Sizes
from tests.model.checkpoints import llama, random_model, save
from tests.server.fake_engine import loaded_app
from tests.server.toy import running, sample

BLOCK = 16
VOCABULARY = 258
SYNC = Profile("sync")
SIZES = Sizes(
    prompt_tokens=40,
    output_tokens=12,
    prefill_tokens=70,
    prefix_tokens=40,
    prefixes=5,
    requests_per_prefix=3,
    requests_per_worker=2,
    context=256,
)


def closed(workers):
    return Profile("closed", concurrency=workers)


def theory(*prompts, profile=SYNC):
    requests = [Request(prompt, len(prompt), 1) for prompt in prompts]
    return cached_tokens(requests, profile, BLOCK)


def theory_of(plan, profile):
    return cached_tokens(plan, profile, BLOCK)


def ids(count, start=0):
    return tuple(range(start, start + count))


def test_whole_blocks_but_never_the_last_token():
    for length, hit in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (47, 32)):
        assert theory(ids(length), ids(length)) == (hit, hit)


def test_only_what_begins_alike_is_shared():
    assert theory(ids(40), ids(40, start=1)) == (0, 0)
    assert theory(ids(40), ids(20) + ids(20, start=500)) == (16, 16)
    assert theory(ids(40), ids(16, start=500) + ids(40)[16:]) == (0, 0)


def test_the_share_of_k_requests_for_each_prefix():
    sizes = replace(SIZES, prefixes=7, requests_per_prefix=5)
    plan = plan_of("shared-prefix", SYNC, sizes)
    whole = sizes.prefix_tokens // BLOCK * BLOCK
    found = theory_of(plan, SYNC)
    assert found == (7 * 4 * whole,) * 2
    prompts = sum(request.prompt_tokens for request in plan)
    length = plan[0].prompt_tokens
    assert found[0] / prompts == pytest.approx(whole / length * (1 - 1 / 5))


def test_what_may_still_be_computed_is_only_a_bound():
    same = [ids(40)] * 6
    assert theory(*same, profile=closed(1)) == (5 * 32, 5 * 32)
    assert theory(*same, profile=closed(4)) == (2 * 32, 5 * 32)
    assert theory(*same, profile=closed(6)) == (0, 5 * 32)
    assert theory(*same, profile=Profile("poisson", rate=1.0)) == (0, 5 * 32)
    assert theory(*same, profile=Profile("gamma", rate=1.0, burstiness=0.5)) == (0, 5 * 32)


def test_text_has_no_theory():
    assert cached_tokens([Request("some words", 2, 1)], SYNC, BLOCK) is None


@pytest.fixture(scope="module")
def app(one_thread, tmp_path_factory):
    config = llama(max_position_embeddings=256)
    folder = save(random_model(config), tmp_path_factory.mktemp("model"))
    flags = ("--dtype", "float32", "--kv-memory", "64M", "--max-seqs", "8")
    return loaded_app(f"m={folder}", *flags)


@pytest.fixture(scope="module")
def url(app):
    with running(app) as (url, _):
        yield url


@pytest.fixture(scope="module")
def metrics(app):
    return app.state.metrics


def plan_of(workload, profile, sizes=SIZES):
    """With prompts that no other test sends."""
    prompts = PromptMaker(f"{workload} {profile.label} {sizes}", "ids", VOCABULARY)
    chosen = WORKLOADS[workload]
    return chosen.plan(chosen.points(sizes)[0], profile, prompts, sizes)


def seen(metrics):
    labels = {"model_name": "m", "encoding": "rope"}
    return [
        sample(metrics, f"prefix_cache_{what}_tokens_total", **labels)
        for what in ("queried", "hit")
    ]


def sent(url, plan, profile):
    """Prompt tokens that each request was told were cached."""

    server = Server(*split_base_url(url), "m")

    async def send(request, intended):
        return await complete(server, request, intended)

    outcomes = asyncio.run(drive(plan, profile, "seed", send)).outcomes
    assert [outcome.error for outcome in outcomes if outcome.error is not None] == []
    return [outcome.cached_tokens for outcome in outcomes]


@pytest.mark.parametrize(
    ("workload", "profile"),
    [
        *(
            (shared, profile)
            for shared in ("chat", "shared-prefix")
            for profile in (SYNC, closed(4))
        ),
        *((alone, closed(4)) for alone in ("stream", "prefill", "shift")),
    ],
    ids=lambda value: getattr(value, "label", value),
)
def test_a_server_finds_exactly_what_theory_says(workload, profile, url, metrics):
    plan = plan_of(workload, profile)
    low, high = theory_of(plan, profile)
    assert low == high
    assert (low > 0) == (workload in ("chat", "shared-prefix"))
    asked = sum(request.prompt_tokens for request in plan)
    queried_before, hit_before = seen(metrics)
    cached = sent(url, plan, profile)
    # A step is counted after its tokens have left.
    deadline = time.monotonic() + 10
    while seen(metrics)[0] < queried_before + asked and time.monotonic() < deadline:
        time.sleep(0.01)
    queried, hit = seen(metrics)
    assert queried - queried_before == asked
    assert hit - hit_before == sum(cached) == low


def test_a_server_stays_within_the_bounds_where_they_are_all_there_is(url):
    sizes = replace(SIZES, prefixes=1, requests_per_prefix=12)
    low, high = theory_of(plan_of("shared-prefix", closed(4), sizes), closed(4))
    assert 0 < low < high
    assert low <= sum(sent(url, plan_of("shared-prefix", closed(4), sizes), closed(4))) <= high
