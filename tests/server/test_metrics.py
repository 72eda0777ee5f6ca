"""What is exposed, under which names, and that the numbers are those of the steps."""

import platform
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from ropewalk.cache.keeper import Moves, SpillCounts
from ropewalk.cache.manager import BlockCounts
from ropewalk.cache.types import Capability, Op, OpReport
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.server.errors import REJECTIONS
from ropewalk.server.metrics.exporter import ALIASES, Metrics
from ropewalk.server.scheduling.request import (
    ContextShift,
    FinishReason,
    PassTimes,
    Phase,
    RequestSummary,
    StepStats,
)
from tests.server.toy import LABELS, UNMATCHED, ask, chat, complete, rejected, sample, toy, toy_app

PLAIN = "text/plain; version=0.0.4; charset=utf-8"


FACTS = {"kv_dtype": "bfloat16", "num_layers": "2", "num_kv_heads": "1", "head_dim": "8"}
FACTS["trained_context"] = "512"
SIZE = {"bytes_per_token": 64, "blocks": 10, "block_size": 16}


def metrics_of_toy() -> Metrics:
    metrics = Metrics()
    metrics.add_model("toy", "rope", FACTS, **SIZE, position_apart=True)
    return metrics


def families(metrics: Metrics) -> dict:
    page = b"".join(metrics.render()).decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def value(metrics: Metrics, name: str, **labels) -> float:
    return sample(metrics, name, **LABELS, **labels)


def test_every_family_of_the_reference_is_there():
    names = {
        "requests_running", "requests_waiting", "queue_wait_seconds",
        "kv_cache_usage_ratio", "cache_info", "requests",
        "prompt_tokens", "generated_tokens", "forced_tokens",
        "draft_tokens", "accepted_draft_tokens", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "request_e2e_seconds", "request_queue_seconds", "request_prefill_seconds",
        "request_decode_seconds", "request_prompt_tokens", "request_output_tokens",
        "step_batch_size", "preemptions", "client_disconnects", "request_rejections",
        "stream_errors", "kv_blocks", "kv_spill_blocks", "kv_spilled_blocks",
        "kv_cache_bytes", "kv_written_bytes", "kv_written_entries",
        "prefix_cache_queried_tokens", "prefix_cache_hit_tokens", "kv_evicted_blocks",
        "kv_blocks_sealed", "kv_blocks_verified", "kv_mutated_entries", "kv_stale_entries",
        "kv_rewritten_entries", "kv_moved_bytes", "position_rotations", "position_bias_values",
        "position_bias_built", "position_flops", "position_bytes", "position_bias_bytes",
        "extrapolated_tokens", "context_shifts", "context_shift_seconds", "context_shift_tokens",
        "decode_step_seconds", "timed_steps", "forward_seconds", "attention_seconds",
        "position_seconds", "cache_parity_max_abs_error", "cache_parity_tolerance", "build_info",
        "http_requests", "weights_verified_bytes", "weights_changed",
    }  # fmt: skip
    own = {name for name in families(metrics_of_toy()) if not name.startswith("process_")}
    assert own == {f"ropewalk_{name}" for name in names}


def test_names_types_labels_and_help():
    for name, family in families(metrics_of_toy()).items():
        if name.startswith("process_"):  # named by convention, the same on every server
            continue
        assert re.fullmatch(r"ropewalk_[a-z][a-z0-9_]*[a-z0-9]", name)
        assert re.fullmatch(r"[A-Z].{10,}\.", family.documentation), name
        assert family.samples, f"{name} is not exported from the start"
        if family.type == "gauge":
            assert not name.endswith("_total")
        for one in family.samples:
            assert not one.name.endswith("_created")
            if name not in ("ropewalk_build_info", "ropewalk_http_requests"):
                assert {"model_name", "encoding"} <= set(one.labels)
            if family.type == "counter":
                assert one.name.endswith("_total")
        bounds = {one.labels["le"] for one in family.samples if "le" in one.labels}
        assert len(bounds - {"+Inf"}) <= 16
        assert (family.type == "histogram") is bool(bounds)


def test_everything_starts_at_zero_and_exists():
    metrics = metrics_of_toy()
    for reason in FinishReason:
        assert value(metrics, "requests_total", finish_reason=reason.value) == 0
    for source in ("computed", "cached"):
        assert value(metrics, "prompt_tokens_total", source=source) == 0
    for reason, code in REJECTIONS:
        labels = {"reason": reason, "code": code}
        assert value(metrics, "request_rejections_total", **labels) == 0
        assert sample(metrics, "request_rejections_total", **labels, **UNMATCHED) == 0
    assert value(metrics, "kv_blocks", state="free") == 10
    assert value(metrics, "kv_cache_bytes", kind="k") == 10 * 16 * 64 / 2
    assert value(metrics, "kv_cache_bytes", kind="v") == 10 * 16 * 64 / 2
    info = FACTS | {"block_size": "16", "num_blocks": "10", "bytes_per_token": "64"}
    assert value(metrics, "cache_info", **info) == 1


def summary(**changes) -> RequestSummary:
    usual = RequestSummary(
        FinishReason.LENGTH,
        prompt_tokens=30,
        cached_tokens=16,
        output_tokens=5,
        arrival=100.0,
        admitted=100.02,
        first_token=100.07,
        end=100.47,
    )
    return replace(usual, **changes)


REWRITTEN = OpReport(Op.EVICT_RENUMBER, Capability.REWRITE, rewritten=13)


def test_a_step_is_counted():
    metrics = metrics_of_toy()
    stats = StepStats(
        seconds=0.1,
        running=3,
        waiting=2,
        batch_requests=3,
        computed_prompt_tokens=14,
        cached_prompt_tokens=16,
        generated_tokens=2,
        forced_tokens=1,
        draft_tokens=5,
        accepted_draft_tokens=4,
        written_entries=64,
        written_bytes=1024,
        preemptions=1,
        prefix_queried_tokens=30,
        evicted_blocks=4,
        flushed_blocks=6,
        blocks=BlockCounts(free=5, active=4, cached=1, quarantined=2),
        sealed_blocks=7,
        verified_blocks=8,
        mutated_entries=9,
        extrapolated_tokens=3,
        spill=SpillCounts(free=7, waiting=2, cached=1, moves=Moves(out=5, back=4, changed=1)),
        prefill_work=PositionalWork(1, 2, 3, 4, 5, 6),
        decode_work=PositionalWork(7, 8, 9, 10, 11, 12),
        forks=(OpReport(Op.FORK, Capability.FREE, copied=5, bytes_moved=50),),
        kept=(replace(REWRITTEN, rewritten=8, should_change=8),),
        shifts=(
            ContextShift(40, 8, 0.002, OpReport(Op.EVICT_RENUMBER, Capability.FREE)),
            ContextShift(30, 10, 0.003, replace(REWRITTEN, should_change=15, bytes_moved=1)),
            ContextShift(20, 12, 0.0, None),
        ),
        inter_token_seconds=(0.01, 0.02),
        ended=(summary(),),
    )
    for _ in range(2):
        metrics.observe_step("toy", stats)
    expected = {
        "requests_running": 3,
        "requests_waiting": 2,
        "kv_cache_usage_ratio": 0.4,
        "generated_tokens_total": 4,
        "forced_tokens_total": 2,
        "draft_tokens_total": 10,
        "accepted_draft_tokens_total": 8,
        "kv_written_entries_total": 128,
        "kv_written_bytes_total": 2048,
        "preemptions_total": 2,
        "prefix_cache_queried_tokens_total": 60,
        "prefix_cache_hit_tokens_total": 32,
        "step_batch_size_sum": 6,
        "kv_blocks_sealed_total": 14,
        "kv_blocks_verified_total": 16,
        "kv_mutated_entries_total": 18,
        "kv_stale_entries_total": 4,
        "kv_moved_bytes_total": 102,
        "extrapolated_tokens_total": 6,
        "step_batch_size_count": 2,
        "inter_token_latency_seconds_count": 4,
        "time_to_first_token_seconds_count": 2,
        "request_prompt_tokens_sum": 60,
        "request_output_tokens_sum": 10,
    }
    for name, number in expected.items():
        assert value(metrics, name) == pytest.approx(number), name
    assert value(metrics, "prompt_tokens_total", source="computed") == 28
    assert value(metrics, "prompt_tokens_total", source="cached") == 32
    assert value(metrics, "kv_evicted_blocks_total", reason="lru") == 8
    states = {"free": 7, "waiting": 2, "cached": 1}
    assert {state: value(metrics, "kv_spill_blocks", state=state) for state in states} == states
    ways = {"out": 10, "back": 8, "changed": 2}
    assert {way: value(metrics, "kv_spilled_blocks_total", way=way) for way in ways} == ways
    assert value(metrics, "kv_evicted_blocks_total", reason="flush") == 12
    assert value(metrics, "requests_total", finish_reason="length") == 2
    states = ("free", "active", "cached", "quarantined")
    assert [value(metrics, "kv_blocks", state=state) for state in states] == [5, 4, 1, 2]
    assert value(metrics, "kv_rewritten_entries_total", cause="context_shift") == 26
    assert value(metrics, "kv_rewritten_entries_total", cause="kept_sequence") == 16
    outcomes = ("reindexed", "rerotated", "recomputed")
    assert [value(metrics, "context_shifts_total", outcome=each) for each in outcomes] == [2, 2, 2]
    assert value(metrics, "context_shift_tokens_total", fate="kept") == 180
    assert value(metrics, "context_shift_tokens_total", fate="dropped") == 60
    assert value(metrics, "context_shift_seconds_count") == 4
    assert value(metrics, "context_shift_seconds_sum") == pytest.approx(0.01)
    names = ("rotations", "bias_values", "bias_built", "flops", "bytes", "bias_bytes")
    for phase, work in (("prefill", range(1, 7)), ("decode", range(7, 13))):
        for name, number in zip(names, work, strict=True):
            assert value(metrics, f"position_{name}_total", phase=phase) == 2 * number
    seconds = {
        "time_to_first_token_seconds": 0.07,
        "request_queue_seconds": 0.02,
        "request_prefill_seconds": 0.05,
        "request_decode_seconds": 0.4,
        "request_e2e_seconds": 0.47,
        "request_time_per_output_token_seconds": 0.1,
        "inter_token_latency_seconds": 0.03,
    }
    for name, number in seconds.items():
        assert value(metrics, f"{name}_sum") == pytest.approx(2 * number), name


def test_requests_that_never_got_a_token_have_no_latencies():
    metrics = metrics_of_toy()
    never = summary(finish=FinishReason.ABORT, admitted=None, first_token=None, output_tokens=0)
    started = summary(finish=FinishReason.ABORT, first_token=None, output_tokens=0)
    single = summary(output_tokens=1)
    metrics.observe_step("toy", StepStats(ended=(never, started, single)))
    assert value(metrics, "requests_total", finish_reason="abort") == 2
    assert value(metrics, "request_e2e_seconds_count") == 3
    assert value(metrics, "request_queue_seconds_count") == 2
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0


def test_gates_are_stored_beside_keys():
    metrics = metrics_of_toy()
    size = {"bytes_per_token": 80, "gate_bytes": 16, "blocks": 10, "block_size": 16}
    metrics.add_model("b", "forgetting", {}, **size)
    for kind, each in (("k", 48), ("v", 32)):
        labels = {"kind": kind, "model_name": "b", "encoding": "forgetting"}
        assert sample(metrics, "kv_cache_bytes", **labels) == 10 * 16 * each


def test_models_are_kept_apart_and_unknown_ones_are_errors():
    metrics = metrics_of_toy()
    metrics.add_model("b", "nope", {}, **SIZE)
    metrics.observe_step("b", StepStats(generated_tokens=7))
    assert value(metrics, "generated_tokens_total") == 0
    assert sample(metrics, "generated_tokens_total", model_name="b", encoding="nope") == 7
    with pytest.raises(ValueError, match="exist already"):
        metrics.add_model("b", "nope", {}, **SIZE)
    with pytest.raises(KeyError):
        metrics.observe_step("c", StepStats())


def test_reasons_group_codes():
    """Rules and dashboards that were made before there were codes read the reasons."""
    by_reason = {}
    for reason, code in REJECTIONS:
        by_reason.setdefault(reason, set()).add(code)
    assert sorted(by_reason) == [
        *("body_too_large", "context_length", "deadline", "failed", "invalid_request"),
        *("model_not_found", "other", "queue_full", "shutting_down", "unauthorized"),
    ]
    assert by_reason["queue_full"] == {"queue_full", "queue_time"}
    assert {"invalid_value", "unknown_parameter", "wrong_host"} <= by_reason["invalid_request"]
    assert len({code for _, code in REJECTIONS}) == len(REJECTIONS) - 1  # internal_error has two


def test_every_refusal_has_its_series():
    """Also those that the middleware and the connection send, and future ones."""
    app = toy_app(
        api_keys=frozenset({"k"}),
        allowed_hosts=frozenset({"toy"}),
        allowed_origins=frozenset({"https://a"}),
        max_body_bytes=2000,
    )
    key = {"authorization": "Bearer k"}
    preflight = {"origin": "https://b", "access-control-request-method": "GET"}

    def assert_counted(request, reason, code, labels=UNMATCHED):
        before = rejected(app, reason, code, labels)
        request()
        assert (before, rejected(app, reason, code, labels)) == (0, 1), code

    for method, path, headers, code in (
        ("GET", "/version", {}, "invalid_api_key"),
        ("GET", "/version", key | {"host": "b"}, "wrong_host"),
        ("OPTIONS", "/version", preflight, "wrong_origin"),
        ("POST", "/tokenize", key, "unsupported_media_type"),
        ("GET", "/nothing", key, "not_found"),
        ("POST", "/version", key | {"content-type": "application/json"}, "method_not_allowed"),
    ):
        reason = "unauthorized" if code == "invalid_api_key" else "invalid_request"
        assert_counted(partial(ask, app, method, path, headers=headers), reason, code)
    for body, reason, code, labels in (
        ({"temperature": 9}, "invalid_request", "invalid_value", UNMATCHED),
        ({"prompt": [300]}, "invalid_request", "invalid_value", LABELS),
        ({"prompt": [1] * 600}, "context_length", "context_length_exceeded", LABELS),
        ({"model": "other"}, "model_not_found", "model_not_found", UNMATCHED),
        ({"user": "x" * 2000}, "body_too_large", "body_too_large", UNMATCHED),
    ):
        assert_counted(partial(complete, app, key, **body), reason, code, labels)


def test_no_request_adds_a_series():
    app = toy_app(served=[toy("a"), toy("b")])
    metrics = app.state.metrics

    def count() -> int:
        return sum(len(family.samples) for family in families(metrics).values())

    # One of each kind below: a status of a path has its series once it has been answered.
    complete(app, model="a", max_tokens=1)
    complete(app, model="no")
    chat(app, model="no")
    ask(app, "METHOD", "/v1/completions")
    before = count()
    for index in range(100):
        assert ask(app, "GET", f"/v1/{index}/{'x' * (index % 7)}").status_code == 404
    for index in range(100):
        assert ask(app, f"METHOD{index}", "/v1/completions").status_code in (404, 405)
    for index in range(50):
        assert complete(app, model=f"m{index}").status_code == 404
        assert chat(app, model=f"m{index}").status_code == 404
    assert count() == before


@pytest.mark.parametrize(
    ("context", "bound"), [(1, "128"), (128, "128"), (129, "512"), (8192, "8192"), (8193, "+Inf")]
)
def test_a_step_of_decoding_counts_by_the_longest_context(context, bound):
    metrics = metrics_of_toy()
    metrics.observe_step("toy", StepStats(seconds=0.25, phase=Phase.DECODE, decode_context=context))
    metrics.observe_step("toy", StepStats(seconds=9.0, phase=Phase.PREFILL))
    for each in ("128", "512", "2048", "8192", "+Inf"):
        expected = 0.25 if each == bound else 0
        assert value(metrics, "decode_step_seconds_sum", context_le=each) == expected


def test_times_of_passes_add_up_by_phase():
    metrics = metrics_of_toy()
    for times in ((PassTimes(4.0, 2.0, 1.0),), (), (PassTimes(8.0, 3.0, 0.5),)):
        metrics.observe_step("toy", StepStats(phase=Phase.DECODE, timed=times))
    metrics.observe_step("toy", StepStats(phase=Phase.MIXED, timed=(PassTimes(1.0, 0.5, 0.25),)))
    names = ("timed_steps", "forward_seconds", "attention_seconds", "position_seconds")
    found = {
        phase: [value(metrics, f"{name}_total", phase=phase) for name in names] for phase in Phase
    }
    assert found == {"prefill": [0] * 4, "decode": [2, 12, 5, 1.5], "mixed": [1, 1, 0.5, 0.25]}


def test_positions_that_are_not_timed_apart_have_no_series():
    app = toy_app()
    page = ask(app, "GET", "/metrics").text
    assert "ropewalk_attention_seconds_total{" in page
    assert "ropewalk_position_seconds_total{" not in page


def requests(app) -> dict[tuple[str, str, str], float]:
    """HTTP requests by route, method and status, without those that there were none of."""
    (family,) = (each for each in app.state.metrics.registry.collect() if "_http_" in each.name)
    labels = ("route", "method", "status")
    return {
        tuple(one.labels[name] for name in labels): one.value for one in family.samples if one.value
    }


def test_requests_are_counted_by_route_method_and_status():
    app = toy_app(api_keys=frozenset({"k"}))
    key = {"authorization": "Bearer k"}
    body = {"prompt": "a", "max_tokens": 1}
    for path in ("/v1/completions", "/v1/completions/"):
        ask(app, "POST", path, json=body, headers=key)
    ask(app, "POST", "/v1/completions", json={"temperature": 9}, headers=key)
    ask(app, "POST", "/v1/completions", json=body)
    ask(app, "GET", "/v1/models/toy", headers=key)
    ask(app, "GET", "/v1/models/a/b/c", headers=key)
    ask(app, "HEAD", "/health/")
    ask(app, "GET", "/a/path/that/is/long", headers=key)
    ask(app, "BREW", "/v1/models", headers=key)
    assert requests(app) == {
        ("/v1/completions", "POST", "200"): 2,
        ("/v1/completions", "POST", "400"): 1,
        ("/v1/completions", "POST", "401"): 1,
        ("/v1/models/{name}", "GET", "200"): 1,
        ("/v1/models/{name}", "GET", "404"): 1,
        ("/health", "HEAD", "200"): 1,
        ("unmatched", "GET", "404"): 1,
        ("/v1/models", "other", "405"): 1,
    }


def test_every_route_is_there_before_its_first_request():
    page = ask(toy_app(), "GET", "/metrics").text
    for route, method in (("/v1/completions", "POST"), ("/v1/models/{name}", "GET")):
        labels = f'method="{method}",route="{route}",status="200"'
        assert f"ropewalk_http_requests_total{{{labels}}} 0.0" in page


def test_what_runs_and_what_it_uses_of_the_machine():
    found = families(metrics_of_toy())
    (build,) = found["ropewalk_build_info"].samples
    assert build.value == 1
    assert build.labels["version"] == ask(toy_app(), "GET", "/version").json()["version"]
    assert build.labels["python"] == platform.python_version()
    assert build.labels["torch"] == torch.__version__
    if Path("/proc/self/stat").exists():
        (memory,) = found["process_resident_memory_bytes"].samples
        assert memory.value > 1 << 20
        assert {"process_cpu_seconds", "process_open_fds", "process_start_time_seconds"} <= set(
            found
        )


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        # As Prometheus 2 and 3 ask.
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", True),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,"
            "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2",
            True,
        ),
        ("Application/OpenMetrics-Text", True),
        ("text/plain", False),
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text;q=0, text/plain;q=0.1", False),
        ("text/plain, application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text; version=a; q=nan, ;;,=", False),
    ],
)
def test_the_format_that_is_asked_for(accept, openmetrics):
    response = ask(toy_app(), "GET", "/metrics", headers={"accept": accept})
    kind = "application/openmetrics-text; version=1.0.0" if openmetrics else PLAIN
    assert response.headers["content-type"].startswith(kind)
    assert response.text.count("# EOF") == openmetrics
    assert response.text.endswith("# EOF\n") is openmetrics


@pytest.mark.parametrize("names", ["off", "vllm"])
def test_openmetrics_says_the_same(names):
    metrics = Metrics(ALIASES[names])
    metrics.add_model("toy", "rope", {}, **SIZE)
    metrics.observe_step("toy", StepStats(generated_tokens=7, ended=(summary(),)))
    page = b"".join(metrics.render(openmetrics=True)).decode()
    read = {family.name: family for family in openmetrics_families(page)}
    plain = families(metrics)
    assert read.keys() == plain.keys()
    for name, family in plain.items():
        if name.startswith("process_"):  # the process has lived on meanwhile
            continue
        assert [(each.name, each.labels, each.value) for each in read[name].samples] == [
            (each.name, each.labels, each.value) for each in family.samples
        ]


@pytest.mark.parametrize(
    ("accepted", "zipped"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip;q=0.000, identity", False),
        ("x-gzipped", False),
        ("", False),
    ],
)
def test_a_page_is_compressed_for_those_who_can_read_it(accepted, zipped):
    response = ask(toy_app(), "GET", "/metrics", headers={"accept-encoding": accepted})
    assert ("content-encoding" in response.headers) is zipped
    assert "ropewalk_requests_running{" in response.text
    assert "accept-encoding" in response.headers["vary"]
    length = int(response.headers["content-length"])
    assert length < len(response.content) / 3 if zipped else length == len(response.content)
