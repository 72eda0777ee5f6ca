"""Prometheus metrics, in a registry of their own.

The series of each model are looked up once, because `observe_step` runs on the engine thread after
every step.
"""

import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition

from ropewalk.cache.keeper import Moves
from ropewalk.cache.manager import BlockCounts
from ropewalk.cache.types import OpReport
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.server.errors import REJECTIONS, ServeError
from ropewalk.server.scheduling.request import (
    ContextShift,
    FinishReason,
    PassTimes,
    Phase,
    RequestSummary,
    StepStats,
)
from ropewalk.server.versions import installed

CONTENT_TYPES = {
    False: "text/plain; version=0.0.4; charset=utf-8",
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
UNMATCHED = "unmatched"
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
BUILD = ("ropewalk", "python", "torch")
_END = b"# EOF\n"  # of a page in OpenMetrics

_TOLD = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
MODEL_LABELS = ("model_name", "encoding")


@dataclass(frozen=True, slots=True)
class Alias:
    """A family's second name, without `_total`, and the labels that are named differently there."""

    name: str
    labels: Mapping[str, str]  # ours: theirs


# By our families' names.
ALIASES: Mapping[str, Mapping[str, Alias]] = {
    "off": {},
    "vllm": {
        f"ropewalk_{name}": Alias(f"vllm:{about['vllm']}", about.get("vllm_labels", {}))
        for name, about in _TOLD["metric"].items()
        if "vllm" in about
    },
}


class _Registry(CollectorRegistry):
    """Leaves out the `_created` series, which double every counter and are of no use here.

    A family in `aliases` is exported a second time under its other name.
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


class _Single(CollectorRegistry):
    """One family that has already been collected."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _renamed(family: Metric, alias: Alias) -> Metric:
    renamed = Metric(alias.name, family.documentation, family.type)
    for sample in family.samples:
        name = alias.name + sample.name.removeprefix(family.name)
        labels = {alias.labels.get(own, own): value for own, value in sample.labels.items()}
        renamed.add_sample(name, labels, sample.value)
    return renamed


class Families:
    """Every family that families.toml lists, by its name; registered when it is made."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.labels: dict[str, tuple[str, ...]] = {}  # beside MODEL_LABELS
        self._made: dict[str, Any] = {}
        for name, about in _TOLD["metric"].items():
            self.labels[name] = labels = tuple(about.get("labels", ()))
            if "apart" not in about:
                labels = (*MODEL_LABELS, *labels)
            more = {"buckets": _TOLD["buckets"][about["buckets"]]} if "buckets" in about else {}
            made = KINDS[about["kind"]]
            self._made[name] = made(
                f"ropewalk_{name}", about["help"], labels, registry=registry, **more
            )

    def __getitem__(self, name: str) -> Any:
        return self._made[name]

    def of_model(self, name: str, encoding: str) -> dict[str, Any]:
        """A model's series of all families without further labels, by the family's name."""
        plain = [family for family, labels in self.labels.items() if not labels]
        return {family: self._made[family].labels(name, encoding) for family in plain}

    def forget(self, name: str) -> None:
        """A model's series are exported no more."""
        for family, about in _TOLD["metric"].items():
            if "apart" not in about:
                self._made[family].remove_by_labels({"model_name": name})


class Metrics:
    """All families, and per model the children that `observe_step` writes to."""

    def __init__(self, aliases: Mapping[str, Alias] = ALIASES["off"]) -> None:
        """`aliases`, by family, are other names under which to export the same numbers."""
        self.registry: CollectorRegistry = _Registry(aliases)
        self._families = Families(self.registry)
        ProcessCollector(registry=self.registry)
        self._families["build_info"].labels(*map(installed, BUILD)).set(1)
        self._models: dict[str, ModelMetrics] = {}
        self._unmatched = {
            labels: self._families["request_rejections"].labels(UNMATCHED, UNMATCHED, *labels)
            for labels in REJECTIONS
        }
        self.add_route(UNMATCHED, ["GET"], 404)

    def add_model(
        self,
        model_name: str,
        encoding: str,
        info: Mapping[str, str],
        *,
        bytes_per_token: int,
        gate_bytes: int = 0,
        blocks: int,
        block_size: int,
        position_apart: bool = False,
    ) -> None:
        """Makes every series of a model, at zero. `bytes_per_token` counts all layers.

        gate_bytes: of those, what gates take, which count as part of keys.

        Shows the labels of cache_info among `info`. `position_apart`: positional work is timed
        separately from attention. Raises ValueError for a name added before.
        """
        if model_name in self._models:
            raise ValueError(f"the metrics of {model_name!r} exist already; add each model once")
        shown = {
            **info,
            "block_size": str(block_size),
            "num_blocks": str(blocks),
            "bytes_per_token": str(bytes_per_token),
        }
        info_labels = (shown.get(name, "") for name in self._families.labels["cache_info"])
        self._families["cache_info"].labels(model_name, encoding, *info_labels).set(1)
        values = (bytes_per_token - gate_bytes) // 2
        for kind, each in (("k", bytes_per_token - values), ("v", values)):
            size = each * block_size * blocks
            self._families["kv_cache_bytes"].labels(model_name, encoding, kind).set(size)
        self._models[model_name] = ModelMetrics(
            self._families, model_name, encoding, blocks, position_apart=position_apart
        )

    def remove_model(self, model_name: str) -> None:
        """Removes every series of a model, if there are any."""
        self._models.pop(model_name, None)
        self._families.forget(model_name)

    def observe_step(self, model_name: str, stats: StepStats) -> None:
        """Called on the engine thread after each step. Raises KeyError for an unknown model."""
        self._models[model_name].observe_step(stats)

    def compared(self, model_name: str, error: float, tolerance: float) -> None:
        """Sets the result of the parity check at start: server/launch/self_check.py."""
        self._models[model_name].of["cache_parity_max_abs_error"].set(error)
        self._models[model_name].of["cache_parity_tolerance"].set(tolerance)

    def add_route(self, route: str, methods: Iterable[str], status: int = 200) -> None:
        """Makes series at zero: what appears only with its first request has no rate then."""
        for method in methods:
            self._families["http_requests"].labels(route, method, str(status))

    def answered(self, route: str | None, method: str, status: int | None) -> None:
        """Counts an HTTP request. `route` is a template, `status` None without an answer."""
        self._families["http_requests"].labels(
            route or UNMATCHED,
            method if method in METHODS else "other",
            "none" if status is None else str(status),
        ).inc()

    def reject(self, model_name: str | None, error: ServeError) -> None:
        """Counts a request that is answered only with an error, but not failures of the engine.

        `model_name` is None when the model is not known; one that is not loaded counts as unknown.
        """
        if error.reason is not None:
            model = self._models.get(model_name or "")
            known = self._unmatched if model is None else model.rejections
            known[error.reason, error.code].inc()

    def disconnected(self, model_name: str) -> None:
        """A client went away, or stopped reading, before its answer was complete."""
        self._count(model_name, "client_disconnects")

    def stream_error(self, model_name: str) -> None:
        """A stream that ended with an error after its headers had gone out."""
        self._count(model_name, "stream_errors")

    def _count(self, model_name: str, family: str) -> None:
        if model_name in self._models:  # it may just have been unloaded
            self._models[model_name].of[family].inc()

    def render(self, *, openmetrics: bool = False) -> Iterator[bytes]:
        """The page, one family after another: the text for CONTENT_TYPES[openmetrics]."""
        for family in self.registry.collect():
            if openmetrics:
                # Without escaping, which would also rename series of other servers ("vllm:").
                page = exposition.generate_latest(  # type: ignore[no-untyped-call]
                    _Single(family), exposition.ALLOWUTF8
                )
                yield page.removesuffix(_END)
            else:
                yield generate_latest(_Single(family))
        if openmetrics:
            yield _END


CAUSES = ("context_shift", "kept_sequence")
OUTCOMES = ("reindexed", "rerotated", "recomputed")
BLOCK_STATES = tuple(field.name for field in fields(BlockCounts))
SPILL_STATES = ("free", "waiting", "cached")
SPILL_WAYS = tuple(field.name for field in fields(Moves))
WORK = tuple(field.name for field in fields(PositionalWork))
CONTEXT_BOUNDS = (128, 512, 2048, 8192)
CONTEXTS = (*map(str, CONTEXT_BOUNDS), "+Inf")


class ModelMetrics:
    """The children of one model. Making them also exports them at zero."""

    def __init__(
        self, families: Families, name: str, encoding: str, blocks: int, *, position_apart: bool
    ) -> None:
        def child(family: str, *labels: str) -> Any:
            return families[family].labels(name, encoding, *labels)

        self.of = families.of_model(name, encoding)
        self._num_blocks = blocks
        self._requests = {reason: child("requests", reason.value) for reason in FinishReason}
        self._computed = child("prompt_tokens", "computed")
        self._cached = child("prompt_tokens", "cached")
        self.rejections = {labels: child("request_rejections", *labels) for labels in REJECTIONS}
        self._blocks = {state: child("kv_blocks", state) for state in BLOCK_STATES}
        self._blocks["free"].set(blocks)
        self._shifts = {outcome: child("context_shifts", outcome) for outcome in OUTCOMES}
        self._kept = child("context_shift_tokens", "kept")
        self._dropped = child("context_shift_tokens", "dropped")
        self._rewritten = {cause: child("kv_rewritten_entries", cause) for cause in CAUSES}
        self._position = {
            phase: [child(f"position_{name}", phase) for name in WORK]
            for phase in (Phase.PREFILL, Phase.DECODE)
        }
        self._decode_step = [child("decode_step_seconds", bound) for bound in CONTEXTS]
        self._timed = {phase: child("timed_steps", phase) for phase in Phase}
        self._forward = {phase: child("forward_seconds", phase) for phase in Phase}
        self._attention = {phase: child("attention_seconds", phase) for phase in Phase}
        self._position_seconds = (
            {phase: child("position_seconds", phase) for phase in Phase} if position_apart else {}
        )
        self._evicted = child("kv_evicted_blocks", "lru")
        self._flushed = child("kv_evicted_blocks", "flush")
        self._spill = {state: child("kv_spill_blocks", state) for state in SPILL_STATES}
        self._spilled = {way: child("kv_spilled_blocks", way) for way in SPILL_WAYS}

    def observe_step(self, stats: StepStats) -> None:
        self.of["requests_running"].set(stats.running)
        self.of["requests_waiting"].set(stats.waiting)
        self.of["queue_wait_seconds"].set(stats.outlook.wait(stats.waiting - 1))
        for state, gauge in self._blocks.items():
            gauge.set(getattr(stats.blocks, state))
        self.of["kv_cache_usage_ratio"].set(stats.blocks.active / self._num_blocks)
        for state, gauge in self._spill.items():
            gauge.set(getattr(stats.spill, state))
        for counter, amount in (
            (self._computed, stats.computed_prompt_tokens),
            (self._cached, stats.cached_prompt_tokens),
            (self.of["generated_tokens"], stats.generated_tokens),
            (self.of["forced_tokens"], stats.forced_tokens),
            (self.of["draft_tokens"], stats.draft_tokens),
            (self.of["accepted_draft_tokens"], stats.accepted_draft_tokens),
            (self.of["kv_written_bytes"], stats.written_bytes),
            (self.of["kv_written_entries"], stats.written_entries),
            (self.of["preemptions"], stats.preemptions),
            (self.of["prefix_cache_queried_tokens"], stats.prefix_queried_tokens),
            (self.of["prefix_cache_hit_tokens"], stats.cached_prompt_tokens),
            (self._evicted, stats.evicted_blocks),
            (self._flushed, stats.flushed_blocks),
            (self.of["kv_blocks_sealed"], stats.sealed_blocks),
            (self.of["kv_blocks_verified"], stats.verified_blocks),
            (self.of["kv_mutated_entries"], stats.mutated_entries),
            (self.of["weights_verified_bytes"], stats.verified_weights),
            (self.of["weights_changed"], stats.changed_weights),
            (self.of["extrapolated_tokens"], stats.extrapolated_tokens),
            *((self._spilled[way], getattr(stats.spill.moves, way)) for way in SPILL_WAYS),
        ):
            if amount:
                counter.inc(amount)
        self._observe_position(Phase.PREFILL, stats.prefill_work)
        self._observe_position(Phase.DECODE, stats.decode_work)
        if stats.decode_context is not None:
            index = bisect_left(CONTEXT_BOUNDS, stats.decode_context)
            self._decode_step[index].observe(stats.seconds)
        for times in stats.timed:
            assert stats.phase is not None, "a step that computes nothing has no passes"
            self._observe_times(stats.phase, times)
        for cause, reports in (("context_shift", stats.forks), ("kept_sequence", stats.kept)):
            for report in reports:
                self._observe_operation(report, cause)
        for shift in stats.shifts:
            self._observe_shift(shift)
        if stats.batch_requests:
            self.of["step_batch_size"].observe(stats.batch_requests)
        for seconds in stats.inter_token_seconds:
            self.of["inter_token_latency_seconds"].observe(seconds)
        for summary in stats.ended:
            self._observe_end(summary)

    def _observe_position(self, phase: Phase, work: PositionalWork) -> None:
        for counter, amount in zip(self._position[phase], work.values, strict=True):
            if amount:
                counter.inc(amount)

    def _observe_times(self, phase: Phase, times: PassTimes) -> None:
        self._timed[phase].inc()
        self._forward[phase].inc(times.forward)
        self._attention[phase].inc(times.attention)
        if times.position is not None:
            self._position_seconds[phase].inc(times.position)

    def _observe_shift(self, shift: ContextShift) -> None:
        self._shifts[shift.outcome].inc()
        self._kept.inc(shift.kept)
        self._dropped.inc(shift.dropped)
        if shift.report is not None:
            self.of["context_shift_seconds"].observe(shift.seconds)
            self._observe_operation(shift.report, "context_shift")

    def _observe_operation(self, report: OpReport, cause: str) -> None:
        self._rewritten[cause].inc(report.rewritten)
        self.of["kv_stale_entries"].inc(report.stale)
        self.of["kv_moved_bytes"].inc(report.bytes_moved)

    def _observe_end(self, summary: RequestSummary) -> None:
        self._requests[summary.finish].inc()
        self.of["request_prompt_tokens"].observe(summary.prompt_tokens)
        self.of["request_output_tokens"].observe(summary.output_tokens)
        self.of["request_e2e_seconds"].observe(summary.end - summary.arrival)
        if summary.admitted is None:
            return
        self.of["request_queue_seconds"].observe(summary.admitted - summary.arrival)
        if summary.first_token is None:
            return
        self.of["time_to_first_token_seconds"].observe(summary.first_token - summary.arrival)
        self.of["request_prefill_seconds"].observe(summary.first_token - summary.admitted)
        decode = summary.end - summary.first_token
        self.of["request_decode_seconds"].observe(decode)
        if summary.output_tokens > 1:
            per_token = decode / (summary.output_tokens - 1)
            self.of["request_time_per_output_token_seconds"].observe(per_token)
