"""The same numbers under another server's names, when they are asked for."""

import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ropewalk.cache.manager import BlockCounts
from ropewalk.server.errors import CommandError
from ropewalk.server.launch import build
from ropewalk.server.metrics.exporter import ALIASES, Metrics
from ropewalk.server.scheduling.request import StepStats
from tests.server.fake_engine import configured
from tests.server.test_metrics import SIZE, families, metrics_of_toy, summary

LABELS = {"model_name": "m", "encoding": "t5"}
READ_BY_GATEWAYS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds",
}


def worked(choice: str) -> Metrics:
    metrics = Metrics(ALIASES[choice])
    metrics.add_model("m", "t5", {}, **SIZE)
    counts = {"running": 3, "waiting": 2, "generated_tokens": 7, "cached_prompt_tokens": 16}
    counts |= {"prefix_queried_tokens": 30, "blocks": BlockCounts(free=6, active=4, cached=0)}
    metrics.observe_step("m", StepStats(**counts, ended=(summary(),)))
    return metrics


def value(metrics: Metrics, name: str, **labels) -> float | None:
    return metrics.registry.get_sample_value(name, LABELS | labels)


def test_nobody_gets_other_names_without_asking():
    assert configured("m").metrics_compat == "off"
    assert all(name.startswith(("ropewalk_", "process_")) for name in families(worked("off")))


def test_the_option_reaches_the_metrics(monkeypatch):
    seen = []

    def stop(config, metrics):
        seen.append(metrics)
        raise CommandError("seen enough")

    monkeypatch.setattr(build, "load_models", stop)
    with socket.socket() as listener, pytest.raises(CommandError):
        build.run(configured("m", "--metrics-compat", "vllm"), listener, None)
    assert "vllm:num_requests_running" in families(seen[0])


def test_vllm_names_come_beside_our_own():
    ours, both = families(worked("off")), families(worked("vllm"))
    assert both.keys() - ours.keys() == {alias.name for alias in ALIASES["vllm"].values()}
    assert both.keys() >= ours.keys() | READ_BY_GATEWAYS


def test_every_alias_is_of_a_family_that_exists():
    assert ALIASES["vllm"].keys() <= families(metrics_of_toy()).keys()


def test_the_numbers_are_the_same():
    both = families(worked("vllm"))
    for ours, alias in ALIASES["vllm"].items():
        theirs = both[alias.name]
        assert theirs.type == both[ours].type
        assert [each.value for each in theirs.samples] == [
            each.value for each in both[ours].samples
        ]


def test_names_suffixes_and_labels_are_those_that_are_read():
    metrics = worked("vllm")
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.4
    assert value(metrics, "vllm:prefix_cache_queries_total") == 30
    assert value(metrics, "vllm:prefix_cache_hits_total") == 16
    assert value(metrics, "vllm:generation_tokens_total") == 7
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.08") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    (info,) = families(metrics)["vllm:cache_config_info"].samples
    assert (info.labels["num_gpu_blocks"], info.labels["block_size"]) == ("10", "16")
    assert "num_blocks" not in info.labels


def test_the_page_stays_readable():
    text = b"".join(worked("vllm").render()).decode()
    assert len(list(text_string_to_metric_families(text))) == len(families(worked("vllm")))
    assert '\nvllm:num_requests_running{encoding="t5",model_name="m"} 3.0\n' in text
