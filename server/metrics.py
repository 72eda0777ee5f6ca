"""Prometheus metrics, in a registry of their own.

Label values come only from closed sets: model names, encodings, and the constants below. Children
are looked up once per model, because `observe_step` runs on the engine thread after every step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from cache.terms import OpReport
from server.http_errors import REJECTION_REASONS
from server.metrics_compat import ALIASES, Alias
from server.request import (
    ContextShift,
    FinishReason,
    PositionTotals,
    RequestSummary,
    StepStats,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNMATCHED = "unmatched"
MODEL_LABELS = ("model_name", "encoding")
INFO_LABELS = (
    "block_size",
    "num_blocks",
    "kv_dtype",
    "layers",
    "kv_heads",
    "head_dim",
    "bytes_per_token",
    "trained_context",
)

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1,
)  # fmt: skip
PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000,
)  # fmt: skip
SHIFT_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
OUTCOMES = ("reindexed", "rerotated", "recomputed")
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


BLOCK_STATES = ("free", "active", "cached", "quarantined")
PHASES = ("prefill", "decode")


class _Registry(CollectorRegistry):
    """Leaves out the `_created` series, which double every counter and tell nothing here.

    A family of `aliases` is exported a second time under that name.
    """

    def __init__(self, aliases: Mapping[str, Alias]) -> None:
        super().__init__()
        self._aliases = aliases

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family
            if family.name in self._aliases:
                yield _renamed(family, self._aliases[family.name])


def _renamed(family: Metric, alias: Alias) -> Metric:
    renamed = Metric(alias.name, family.documentation, family.type)
    for sample in family.samples:
        name = alias.name + sample.name.removeprefix(family.name)
        labels = {alias.labels.get(own, own): value for own, value in sample.labels.items()}
        renamed.add_sample(name, labels, sample.value)
    return renamed


class Metrics:
    """All families, and per model the children that `observe_step` writes to."""

    def __init__(self, aliases: Mapping[str, Alias] = ALIASES["off"]) -> None:
        """`aliases`, by family, are other names to export the same numbers under."""
        self.registry: CollectorRegistry = _Registry(aliases)
        self._families = _Families(self.registry)
        self._models: dict[str, _ModelMetrics] = {}
        self._unmatched = {
            reason: self._families.rejections.labels(UNMATCHED, UNMATCHED, reason)
            for reason in REJECTION_REASONS
        }

    def add_model(
        self,
        model_name: str,
        encoding: str,
        info: Mapping[str, str],
        *,
        bytes_per_token: int,
        blocks: int,
        block_size: int,
        max_context: int,
    ) -> None:
        """Makes every series of a model, at zero. `bytes_per_token` counts K and V of all layers.

        Of `info`, INFO_LABELS are shown; `max_context` stands in for an absent trained_context.
        Raises ValueError for a name added before.
        """
        if model_name in self._models:
            raise ValueError(f"the metrics of {model_name!r} exist already; add each model once")
        shown = {
            "trained_context": str(max_context),
            **info,
            "block_size": str(block_size),
            "num_blocks": str(blocks),
            "bytes_per_token": str(bytes_per_token),
        }
        self._families.info.labels(
            model_name, encoding, *(shown.get(name, "") for name in INFO_LABELS)
        ).set(1)
        half = bytes_per_token * block_size * blocks // 2
        for kind in ("k", "v"):
            self._families.cache_bytes.labels(model_name, encoding, kind).set(half)
        self._models[model_name] = _ModelMetrics(self._families, model_name, encoding, blocks)

    def observe_step(self, model_name: str, stats: StepStats) -> None:
        """Called on the engine thread after each step. Raises KeyError for an unknown model."""
        self._models[model_name].observe_step(stats)

    def reject(self, model_name: str | None, reason: str) -> None:
        """A request refused before the engine had it, for one of REJECTION_REASONS.

        `model_name` is None when the model is not known.
        """
        children = self._unmatched if model_name is None else self._models[model_name].rejections
        children[reason].inc()

    def disconnected(self, model_name: str) -> None:
        """A client went away, or stopped reading, before its answer was complete."""
        self._models[model_name].disconnects.inc()

    def stream_error(self, model_name: str) -> None:
        """A stream that ended with an error after its headers had gone out."""
        self._models[model_name].stream_errors.inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Families:
    """Names, help texts and labels of everything exposed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.info = self._gauge("cache_info", "Shape of the KV cache; always 1.", *INFO_LABELS)
        self.running = self._gauge("requests_running", "Requests holding cache blocks.")
        self.waiting = self._gauge("requests_waiting", "Requests waiting for cache blocks.")
        self.usage = self._gauge(
            "kv_cache_usage_ratio", "Share of the cache blocks that requests hold, 0 to 1."
        )
        self.requests = self._counter(
            "requests", "Requests that reached the engine and ended.", "finish_reason"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", "source"
        )
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one request.", TOKEN_BUCKETS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, once per request.",
            TOKEN_BUCKETS,
        )
        self.phases = {
            "e2e": self._phase("e2e", "Arrival to end."),
            "queue": self._phase("queue", "Arrival to admission."),
            "prefill": self._phase("prefill", "Admission to first token."),
            "decode": self._phase("decode", "First token to end."),
        }
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS
        )
        self.output_length = self._histogram(
            "request_output_tokens", "Generated tokens of a request.", LENGTH_BUCKETS
        )
        self.batch = self._histogram(
            "step_batch_size", "Requests sharing an engine step.", BATCH_BUCKETS
        )
        self.preemptions = self._counter(
            "preemptions", "Requests that gave up their blocks to be recomputed."
        )
        self.disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer was complete."
        )
        self.rejections = self._counter(
            "request_rejections", "Requests refused before the engine had them.", "reason"
        )
        self.stream_errors = self._counter(
            "stream_errors", "Streams ended by an error after their headers."
        )
        self.blocks = self._gauge(
            "kv_blocks", "Cache blocks by state; the sum is the size of the pool.", "state"
        )
        self.cache_bytes = self._gauge(
            "kv_cache_bytes", "Memory reserved for keys (k) and values (v).", "kind"
        )
        self.written_bytes = self._counter(
            "kv_written_bytes", "Bytes of keys and values written to the cache."
        )
        self.written_entries = self._counter(
            "kv_written_entries", "Keys and values written, one per layer, head and token."
        )
        self.sealed = self._counter(
            "kv_blocks_sealed", "Blocks whose checksum was taken, when full or after a rewrite."
        )
        self.verified = self._counter(
            "kv_blocks_verified",
            "Times a block's bytes were compared with its checksum: when it was shared, given up "
            "or operated on, and by sample.",
        )
        self.mutated = self._counter(
            "kv_mutated_entries",
            "Keys and values in the layers and blocks whose checksum no longer matched; 0 unless "
            "memory or this program is at fault. A checksum tells no entry from its neighbours.",
        )
        self.stale = self._counter(
            "kv_stale_entries",
            "Keys and values that an operation left as they were and should not have; always 0 "
            "unless this program is at fault.",
        )
        self.rewritten = self._counter(
            "kv_rewritten_entries",
            "Keys rewritten because their position changed; never by generating tokens.",
            "cause",
        )
        self.moved_bytes = self._counter(
            "kv_moved_bytes", "Bytes that operations on the cache read and wrote, both counted."
        )
        self.shifts = self._counter(
            "context_shifts",
            "Full contexts that were shortened: reindexed when no stored key changed, rerotated "
            "when keys were turned to their new positions, recomputed when none was cached.",
            "outcome",
        )
        self.shift_seconds = self._histogram(
            "context_shift_seconds",
            "Time to shorten one cached context; the whole step waits for it.",
            SHIFT_BUCKETS,
        )
        self.shift_tokens = self._counter(
            "context_shift_tokens", "Tokens of contexts that were shortened.", "fate"
        )
        self.rotations = self._counter(
            "position_rotations",
            "Queries and keys of one head and layer that were turned, by calculation.",
            "phase",
        )
        self.bias_values = self._counter(
            "position_bias_values",
            "Attention scores that a positional bias was added to, by calculation.",
            "phase",
        )
        self.bias_built = self._counter(
            "position_bias_built",
            "Bias values computed anew and stored for one step, by calculation: 0 where a table "
            "made at load is read.",
            "phase",
        )
        self.bias_bytes = self._counter(
            "position_bias_bytes",
            "Bytes of bias tables and stored biases read and written, by calculation; a part of "
            "position_bytes.",
            "phase",
        )
        self.position_flops = self._counter(
            "position_flops",
            "Arithmetic operations because of positions, by calculation from context lengths.",
            "phase",
        )
        self.position_bytes = self._counter(
            "position_bytes",
            "Bytes of positional tables read, and of biases built for a step, by calculation as "
            "if each token were computed alone; batching reads less.",
            "phase",
        )
        self.extrapolated = self._counter(
            "extrapolated_tokens", "Tokens generated at positions past the trained context."
        )
        self.queried = self._counter(
            "prefix_cache_queried_tokens", "Prompt tokens looked up, once per request."
        )
        self.hits = self._counter(
            "prefix_cache_hit_tokens", "Prompt tokens found, once per request."
        )
        self.evicted = self._counter(
            "kv_evicted_blocks", "Cached blocks given up to make room.", "reason"
        )

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"ropewalk_{name}", help_, (*MODEL_LABELS, *labels), registry=self._registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"ropewalk_{name}", help_, (*MODEL_LABELS, *labels), registry=self._registry)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"ropewalk_{name}", help_, MODEL_LABELS, registry=self._registry, buckets=buckets
        )

    def _phase(self, name: str, help_: str) -> Histogram:
        return self._histogram(f"request_{name}_seconds", help_, PHASE_BUCKETS)


class _ModelMetrics:
    """The children of one model. Making them also exports them at zero."""

    def __init__(self, families: _Families, name: str, encoding: str, blocks: int) -> None:
        def child(family: Any, *labels: str) -> Any:
            return family.labels(name, encoding, *labels)

        self._num_blocks = blocks
        self._running = child(families.running)
        self._waiting = child(families.waiting)
        self._usage = child(families.usage)
        self._requests = {reason: child(families.requests, reason.value) for reason in FinishReason}
        self._computed = child(families.prompt_tokens, "computed")
        self._cached = child(families.prompt_tokens, "cached")
        self._generated = child(families.generated_tokens)
        self._first_token = child(families.first_token)
        self._inter_token = child(families.inter_token)
        self._per_token = child(families.per_token)
        self._phases = {phase: child(family) for phase, family in families.phases.items()}
        self._prompt_length = child(families.prompt_length)
        self._output_length = child(families.output_length)
        self._batch = child(families.batch)
        self._preemptions = child(families.preemptions)
        self.disconnects = child(families.disconnects)
        self.rejections = {
            reason: child(families.rejections, reason) for reason in REJECTION_REASONS
        }
        self.stream_errors = child(families.stream_errors)
        self._blocks = {state: child(families.blocks, state) for state in BLOCK_STATES}
        self._blocks["free"].set(blocks)
        self._written_bytes = child(families.written_bytes)
        self._written_entries = child(families.written_entries)
        self._sealed = child(families.sealed)
        self._verified = child(families.verified)
        self._mutated = child(families.mutated)
        self._stale = child(families.stale)
        self._shifts = {outcome: child(families.shifts, outcome) for outcome in OUTCOMES}
        self._shift_seconds = child(families.shift_seconds)
        self._kept = child(families.shift_tokens, "kept")
        self._dropped = child(families.shift_tokens, "dropped")
        # Forks copy and never rewrite, so a shift is the one cause there is.
        self._rewritten = child(families.rewritten, "context_shift")
        self._moved_bytes = child(families.moved_bytes)
        self._position = {  # in the order of PositionTotals' fields
            phase: (
                child(families.rotations, phase),
                child(families.bias_values, phase),
                child(families.bias_built, phase),
                child(families.position_flops, phase),
                child(families.position_bytes, phase),
                child(families.bias_bytes, phase),
            )
            for phase in PHASES
        }
        self._extrapolated = child(families.extrapolated)
        self._queried = child(families.queried)
        self._hits = child(families.hits)
        self._evicted = child(families.evicted, "lru")

    def observe_step(self, stats: StepStats) -> None:
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._blocks["free"].set(stats.blocks_free)
        self._blocks["active"].set(stats.blocks_active)
        self._blocks["cached"].set(stats.blocks_cached)
        self._blocks["quarantined"].set(stats.blocks_quarantined)
        self._usage.set(stats.blocks_active / self._num_blocks)
        for counter, amount in (
            (self._computed, stats.computed_prompt_tokens),
            (self._cached, stats.cached_prompt_tokens),
            (self._generated, stats.generated_tokens),
            (self._written_bytes, stats.written_bytes),
            (self._written_entries, stats.written_entries),
            (self._preemptions, stats.preemptions),
            (self._queried, stats.prefix_queried_tokens),
            (self._hits, stats.prefix_hit_tokens),
            (self._evicted, stats.evicted_blocks),
            (self._sealed, stats.sealed_blocks),
            (self._verified, stats.verified_blocks),
            (self._mutated, stats.mutated_entries),
            (self._extrapolated, stats.extrapolated_tokens),
        ):
            if amount:
                counter.inc(amount)
        self._observe_position("prefill", stats.prefill_work)
        self._observe_position("decode", stats.decode_work)
        for report in stats.forks:
            self._observe_operation(report)
        for shift in stats.shifts:
            self._observe_shift(shift)
        if stats.batch_requests:
            self._batch.observe(stats.batch_requests)
        for seconds in stats.inter_token_seconds:
            self._inter_token.observe(seconds)
        for summary in stats.ended:
            self._observe_end(summary)

    def _observe_position(self, phase: str, work: PositionTotals) -> None:
        amounts = astuple(work)
        for counter, amount in zip(self._position[phase], amounts, strict=True):
            if amount:
                counter.inc(amount)

    def _observe_shift(self, shift: ContextShift) -> None:
        self._shifts[shift.outcome].inc()
        self._kept.inc(shift.kept)
        self._dropped.inc(shift.dropped)
        if shift.report is not None:
            self._shift_seconds.observe(shift.seconds)
            self._observe_operation(shift.report)

    def _observe_operation(self, report: OpReport) -> None:
        self._rewritten.inc(report.rewritten)
        self._stale.inc(report.stale)
        self._moved_bytes.inc(report.bytes_moved)

    def _observe_end(self, summary: RequestSummary) -> None:
        self._requests[summary.finish].inc()
        self._prompt_length.observe(summary.prompt_tokens)
        self._output_length.observe(summary.output_tokens)
        self._phases["e2e"].observe(summary.end - summary.arrival)
        if summary.admitted is None:
            return
        self._phases["queue"].observe(summary.admitted - summary.arrival)
        if summary.first_token is None:
            return
        self._first_token.observe(summary.first_token - summary.arrival)
        self._phases["prefill"].observe(summary.first_token - summary.admitted)
        decode = summary.end - summary.first_token
        self._phases["decode"].observe(decode)
        if summary.output_tokens > 1:
            self._per_token.observe(decode / (summary.output_tokens - 1))
