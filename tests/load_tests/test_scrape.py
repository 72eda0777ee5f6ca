import asyncio
from dataclasses import replace

import pytest

from ropewalk.load_tests.client.client import Server, Unreachable, complete, split_base_url
from ropewalk.load_tests.client.scrape import settled, snapshot, view
from ropewalk.load_tests.common.types import Outcome, Request
from tests.load_tests.sse_server import serving, whole
from tests.model import checkpoints
from tests.server.fake_engine import loaded_app
from tests.server.toy import running

PREFIX = tuple(range(40, 72))  # two blocks

ANSWERED = Outcome(0.0, 0.0, 1.0, ((0.5, 1), (1.0, 4)), 10, 4, cached_tokens=0)


def exposed(generated=0, prompts=0, ended=0, hits=0, mutated=0, seconds=0.0, running=0, errors=0):
    """What a server with models `a` and `b` shows; `b` is always busy with something else."""
    return f"""\
# HELP ropewalk_generated_tokens_total Tokens "generated".
# TYPE ropewalk_generated_tokens_total counter
ropewalk_generated_tokens_total{{model_name="a",encoding="rope"}} {generated}.0
ropewalk_generated_tokens_total{{model_name="b",encoding="t5"}} {1000 + generated}.0
# TYPE ropewalk_prompt_tokens_total counter
ropewalk_prompt_tokens_total{{encoding="rope",model_name="a",source="computed"}} {prompts - hits}
ropewalk_prompt_tokens_total{{encoding="rope",model_name="a",source="cached"}} {hits}
# TYPE ropewalk_requests_total counter
ropewalk_requests_total{{model_name="a",finish_reason="length"}} {ended - errors}
ropewalk_requests_total{{model_name="a",finish_reason="error"}} {errors}
# TYPE ropewalk_prefix_cache_hit_tokens_total counter
ropewalk_prefix_cache_hit_tokens_total{{model_name="a"}} {hits}
# TYPE ropewalk_kv_mutated_entries_total counter
ropewalk_kv_mutated_entries_total{{model_name="a"}} {mutated}
# TYPE ropewalk_time_to_first_token_seconds histogram
ropewalk_time_to_first_token_seconds_bucket{{model_name="a",le="+Inf"}} {ended}
ropewalk_time_to_first_token_seconds_count{{model_name="a"}} {ended}
ropewalk_time_to_first_token_seconds_sum{{model_name="a"}} {seconds}
# TYPE ropewalk_requests_running gauge
ropewalk_requests_running{{model_name="a"}} {running}
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 1.5e+00 1700000000
"""


BEFORE = {"generated": 7, "prompts": 3, "ended": 1, "hits": 1, "seconds": 9.0}
AGREED = {"generated": 11, "prompts": 13, "ended": 2, "hits": 1, "seconds": 9.45}


def seen(*outcomes, during=(), **changes):
    after = exposed(**(AGREED | changes))
    return view(exposed(**BEFORE), during, after, "a", outcomes or [ANSWERED])


def test_increases_of_one_model():
    found = seen(during=[exposed(running=3), exposed(running=2)])
    assert found.counters == {
        "ropewalk_generated_tokens_total": 4.0,
        'ropewalk_prompt_tokens_total{source="computed"}': 10.0,
        'ropewalk_requests_total{finish_reason="length"}': 1.0,
        "ropewalk_time_to_first_token_seconds_count": 1.0,
        "ropewalk_time_to_first_token_seconds_sum": pytest.approx(0.45),
    }
    assert found.gauges == {"ropewalk_requests_running": 3.0}
    assert found.disagreements == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"generated": 12}, "The server counted 5 output tokens, the client 4."),
        ({"generated": 10}, "The server counted 3 output tokens, the client 4."),
        ({"prompts": 14}, "The server counted 11 prompt tokens, the client 10."),
        ({"ended": 3, "seconds": 9.9}, "The server counted 2 requests that ended, the client 1."),
        ({"hits": 6}, "The server counted 5 prompt tokens found in the prefix cache, the client 0"),
        ({"errors": 1}, "The server ended 1 requests with 'error'; the client saw all succeed."),
        ({"mutated": 2}, "ropewalk_kv_mutated_entries_total rose by 2 and must stay 0"),
        ({"seconds": 9.9}, "mean time to first token is 900.0 ms, the client's 500.0 ms"),
        ({"seconds": 9.1}, "mean time to first token is 100.0 ms, the client's 500.0 ms"),
        ({"generated": 0}, "it was restarted during the run"),
    ],
)
def test_disagreements_are_said(changes, sentence):
    found = seen(**changes)
    assert len(found.disagreements) == 1
    assert sentence in found.disagreements[0]


def test_what_clients_did_not_stay_for_may_have_been_counted():
    gone, failed = replace(ANSWERED, left=True), replace(ANSWERED, error="status 500")
    for other in (gone, failed):
        assert seen(ANSWERED, other, generated=14, prompts=20, errors=1).disagreements == ()
        assert len(seen(ANSWERED, other, generated=9).disagreements) == 1


def test_a_server_that_does_not_tell_hits():
    silent = replace(ANSWERED, cached_tokens=None)
    assert seen(silent, hits=6).disagreements == ()


def test_a_foreign_server_gives_what_it_has():
    def text(generated):
        return (
            "# TYPE vllm:generation_tokens_total counter\n"
            f'vllm:generation_tokens_total{{engine="0",model_name="a \\"b\\""}} {generated}\n'
            "# TYPE vllm:num_requests_running gauge\n"
            'vllm:num_requests_running{model_name="a \\"b\\""} 2\n'
        )

    found = view(text(0), [], text(5), 'a "b"', [ANSWERED])
    assert found.counters == {"vllm:generation_tokens_total": 5.0}
    assert found.gauges == {"vllm:num_requests_running": 2.0}
    assert found.disagreements == ("The server counted 5 output tokens, the client 4.",)
    assert view("", [], "", "a", [ANSWERED]).disagreements == ()


@pytest.fixture(scope="module")
def server(one_thread, tmp_path_factory):
    """A tiny model behind a real socket."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.save(checkpoints.random_model(checkpoints.llama()), folder)
    flags = ("--dtype", "float32", "--kv-memory", "8M", "--max-model-len", "100")
    app = loaded_app(f"tiny={folder}", *flags)
    with running(app) as (url, _):
        yield Server(*split_base_url(url), "tiny")


def test_client_and_ropewalk_agree(server):
    prompts = [(*PREFIX, 5 + number) for number in range(3)]

    async def measured():
        before = await snapshot(server)
        outcomes = [await complete(server, Request(prompt, 33, 6)) for prompt in prompts]
        return before, outcomes, await settled(server, before, outcomes)

    before, outcomes, after = asyncio.run(measured())
    assert [outcome.error for outcome in outcomes] == [None] * 3
    found = view(before, [], after, "tiny", outcomes)
    assert found.disagreements == ()
    assert found.counters['ropewalk_requests_total{finish_reason="length"}'] == 3
    assert found.counters["ropewalk_generated_tokens_total"] == 18
    assert found.counters["ropewalk_prefix_cache_hit_tokens_total"] == 64
    assert "ropewalk_kv_blocks" in {name.partition("{")[0] for name in found.gauges}
    lost = [replace(outcomes[0], output_tokens=5), *outcomes[1:]]
    assert view(before, [], after, "tiny", lost).disagreements == (
        "The server counted 18 output tokens, the client 17.",
    )


def test_a_server_that_never_agrees_is_not_waited_for(server):
    async def measured():
        before = await snapshot(server)
        return before, await settled(server, before, [ANSWERED])

    before, after = asyncio.run(measured())
    assert len(view(before, [], after, "tiny", [ANSWERED]).disagreements) == 3


def test_no_metrics_is_unreachable():
    page = whole("200 OK", {"hello": "there"})
    with serving(lambda path, body: page) as running:
        there = Server("127.0.0.1", running.port)
        with pytest.raises(Unreachable, match="no Prometheus metrics"):
            asyncio.run(snapshot(there))
