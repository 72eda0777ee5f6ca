"""Makes dashboards/ropewalk.json: `python deploy/grafana/dashboard.py` after a change here.

Every panel shows one line per model and encoding, or one per label of the metric. Knows nothing
of the server; tests/deploy checks the names, and the queries against a running Prometheus.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "dashboards" / "ropewalk.json"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
CHOSEN = 'model_name=~"$model", encoding=~"$encoding"'
BY = "model_name, encoding"
NAMED = "{{encoding}} · {{model_name}}"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # Grafana's grid is 24 wide


@dataclass(frozen=True)
class Panel:
    """`queries` pair PromQL with a legend; `unit` is one of Grafana's."""

    title: str
    says: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def gauge(name: str) -> str:
    return f"sum by ({BY}) (ropewalk_{name}{{{CHOSEN}}})"


def highest(name: str) -> str:
    """The maximum over all servers."""
    return f"max by ({BY}) (ropewalk_{name}{{{CHOSEN}}})"


def rate(name: str, *labels: str, where: str = "") -> str:
    """Per second, summed over all but model, encoding and `labels`."""
    matchers = f"{CHOSEN}, {where}" if where else CHOSEN
    by = ", ".join((BY, *labels))
    return f"sum by ({by}) (rate(ropewalk_{name}{{{matchers}}}[$__rate_interval]))"


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})"


def recorded(name: str) -> str:
    """A rule of prometheus/recording.yaml."""
    return f"ropewalk:{name}{{{CHOSEN}}}"


def lines(title: str, says: str, unit: str, query: str, label: str = "") -> Panel:
    legend = f"{NAMED} · {{{{{label}}}}}" if label else NAMED
    return Panel(title, says, unit, ((query, legend),))


def several(title: str, says: str, unit: str, **queries: str) -> Panel:
    """Lines for each query, with its name."""
    named = tuple((query, f"{NAMED} · {word}") for word, query in queries.items())
    return Panel(title, says, unit, named)


def latency(title: str, says: str, name: str) -> Panel:
    """The median and the slowest hundredth."""
    return several(title, says, "s", p50=quantile(0.5, name), p99=quantile(0.99, name))


CACHE = (
    lines(
        "Bytes written per token",
        "Size of one token's keys and values. The same for all encodings without gates.",
        "bytes",
        recorded("kv_written_bytes_per_token"),
    ),
    lines(
        "Entries rewritten per token",
        "Keys rotated to a new position. 0 except for context shifts of RoPE in the absolute "
        "storage.",
        "short",
        recorded("kv_rewritten_entries_per_token"),
    ),
    lines(
        "Prefix cache hit rate",
        "Share of prompt tokens that were found in the cache.",
        "percentunit",
        recorded("prefix_cache_hit_ratio"),
    ),
    lines(
        "Positional operations per token",
        "Arithmetic operations for positional encoding, by calculation. They grow with the context "
        "for ALiBi, for T5's bias except in window form and for RoPE except with absolute key "
        "storage.",
        "short",
        recorded("position_flops_per_token"),
    ),
    lines(
        "Positional bytes per token",
        "Positional tables read and biases built, by calculation.",
        "bytes",
        recorded("position_bytes_per_token"),
    ),
    several(
        "Rotations and bias additions per token",
        "What the positional work consists of: queries and keys rotated, scores to which a bias "
        "was added, bias values computed for a step.",
        "short",
        rotated=recorded("position_rotations_per_token"),
        added=recorded("position_bias_values_per_token"),
        built=recorded("position_bias_built_per_token"),
    ),
    lines(
        "Time of a decoding step by context",
        "Mean time of steps that decode one token per request, by upper bound on the longest "
        "context.",
        "s",
        recorded("decode_step_seconds:mean5m"),
        "context_le",
    ),
    lines(
        "Time of a forward pass",
        "Mean time in the model for prompts, for answers and for steps with both, on a sample of "
        "the passes.",
        "s",
        recorded("forward_seconds:mean5m"),
        "phase",
    ),
    several(
        "Attention and positions in a forward pass",
        "Shares of the time in the model. Positions have a line only where no positional work "
        "happens in attention.",
        "percentunit",
        attention=recorded("attention_time_ratio"),
        positions=recorded("position_time_ratio"),
    ),
    lines(
        "Context shifts",
        "Full contexts that were shortened, by what happened to the entries that were kept.",
        "ops",
        rate("context_shifts_total", "outcome"),
        "outcome",
    ),
    several(
        "Time of a context shift",
        "How long a shift delays the whole step.",
        "s",
        mean=recorded("context_shift_seconds:mean5m"),
        p99=quantile(0.99, "context_shift_seconds"),
    ),
    lines(
        "Entries rewritten per shift",
        "Keys rotated by one shift. 0 where shifts are free.",
        "short",
        recorded("kv_rewritten_entries_per_shift"),
    ),
    several(
        "Blocks sealed and verified",
        "Checksums taken, and blocks compared with their checksum.",
        "ops",
        sealed=rate("kv_blocks_sealed_total"),
        verified=rate("kv_blocks_verified_total"),
    ),
    several(
        "Entries mutated and stale",
        "Entries that changed without a cause, and entries that should have changed but did not. "
        "Anything but 0 is a fault.",
        "short",
        mutated=gauge("kv_mutated_entries_total"),
        stale=gauge("kv_stale_entries_total"),
    ),
    several(
        "Decoding compared with one whole pass",
        "The largest difference between logits, measured at start, and how much of it rounding can "
        "explain.",
        "short",
        differs=highest("cache_parity_max_abs_error"),
        rounding=highest("cache_parity_tolerance"),
    ),
    lines(
        "Tokens past the trained context",
        "Tokens generated where the encoding extrapolates. 0 for learned positions.",
        "ops",
        rate("extrapolated_tokens_total"),
    ),
)
SERVING = (
    several(
        "Requests",
        "Requests that hold cache blocks, and requests that wait.",
        "short",
        running=gauge("requests_running"),
        waiting=gauge("requests_waiting"),
    ),
    lines(
        "Requests ended",
        "Requests per second, by finish reason.",
        "reqps",
        rate("requests_total", "finish_reason"),
        "finish_reason",
    ),
    several(
        "Throughput",
        "Tokens per second: generated tokens, and prompt tokens computed.",
        "short",
        generated=rate("generated_tokens_total"),
        prompt=rate("prompt_tokens_total", where='source="computed"'),
    ),
    latency(
        "Time to first token",
        "From arrival, time in the queue included.",
        "time_to_first_token_seconds",
    ),
    latency(
        "Inter-token latency",
        "Time between two tokens of a request.",
        "inter_token_latency_seconds",
    ),
    latency("Time per request", "From arrival to the end.", "request_e2e_seconds"),
    latency("Time in the queue", "From arrival to admission.", "request_queue_seconds"),
    lines(
        "Cache held by requests",
        "Share of the blocks. Near 1, new requests wait and running ones may be preempted.",
        "percentunit",
        highest("kv_cache_usage_ratio"),
    ),
    lines(
        "Cache blocks",
        "By state; they add up to the size of the pool.",
        "short",
        f"sum by ({BY}, state) (ropewalk_kv_blocks{{{CHOSEN}}})",
        "state",
    ),
    several(
        "Preemptions and evictions",
        "Preempted requests, which go on later, and cached blocks that were evicted.",
        "ops",
        preempted=rate("preemptions_total"),
        evicted=rate("kv_evicted_blocks_total"),
    ),
    several(
        "Errors",
        "Share of requests that ended with an error, and streams broken off by one, per second.",
        "short",
        share=recorded("error_ratio"),
        streams=rate("stream_errors_total"),
    ),
    Panel(
        "Rejected and disconnected",
        "Requests answered only with an error, by reason, and clients that disconnected.",
        "reqps",
        (
            # Unfiltered: requests for unknown models have labels that no variable matches.
            (
                "sum by (reason) (rate(ropewalk_request_rejections_total[$__rate_interval]))",
                "{{reason}}",
            ),
            (rate("client_disconnects_total"), f"{NAMED} · disconnected"),
        ),
    ),
    Panel(
        "HTTP requests",
        "By path of the API and status, health checks and scrapes left out.",
        "reqps",
        (
            # Unfiltered: a path belongs to no model.
            (
                "sum by (route, status) (rate(ropewalk_http_requests_total"
                '{route!~"/health.*|/metrics"}[$__rate_interval]))',
                "{{route}} · {{status}}",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "uid": "ropewalk",
        "title": "Ropewalk: encodings side by side",
        "tags": ["ropewalk"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-30m", "to": "now"},
        "editable": False,
        "templating": {"list": [variable("model", "model_name"), variable("encoding", "encoding")]},
        "panels": list(panels()),
    }


def variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(ropewalk_cache_info, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for title, group in (("Cache behaviour", CACHE), ("Serving", SERVING)):
        number += 1
        place = {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        top += 1
        for index, panel in enumerate(group):
            number += 1
            row, column = divmod(index, COLUMNS)
            yield drawn(panel, number, column * WIDTH, top + row * HEIGHT)
        top += -(-len(group) // COLUMNS) * HEIGHT


def drawn(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": as_,
            }
            for i, (query, as_) in enumerate(panel.queries)
        ],
    }


def as_json() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(as_json())
