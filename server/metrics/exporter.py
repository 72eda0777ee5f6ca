"""Prometheus metrics, in a registry of their own."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition

from ropewalk.server.errors import REJECTIONS, ServeError
from ropewalk.server.metrics.compat import ALIASES, Alias
from ropewalk.server.metrics.families import INFO_LABELS, Families
from ropewalk.server.metrics.per_model import ModelMetrics
from ropewalk.server.scheduling.request import StepStats
from ropewalk.server.versions import installed

CONTENT_TYPES = {
    False: "text/plain; version=0.0.4; charset=utf-8",
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
UNMATCHED = "unmatched"
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
BUILD = ("ropewalk", "python", "torch")
_END = b"# EOF\n"  # of a page in OpenMetrics


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


class Metrics:
    """All families, and per model the children that `observe_step` writes to."""

    def __init__(self, aliases: Mapping[str, Alias] = ALIASES["off"]) -> None:
        """`aliases`, by family, are other names under which to export the same numbers."""
        self.registry: CollectorRegistry = _Registry(aliases)
        self._families = Families(self.registry)
        ProcessCollector(registry=self.registry)
        self._families.build.labels(*map(installed, BUILD)).set(1)
        self._models: dict[str, ModelMetrics] = {}
        self._unmatched = {
            labels: self._families.rejections.labels(UNMATCHED, UNMATCHED, *labels)
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
        blocks: int,
        block_size: int,
        position_apart: bool = False,
    ) -> None:
        """Makes every series of a model, at zero. `bytes_per_token` counts K and V of all layers.

        Shows INFO_LABELS of `info`. `position_apart`: positional work is timed separately from
        attention.
        Raises ValueError for a name added before.
        """
        if model_name in self._models:
            raise ValueError(f"the metrics of {model_name!r} exist already; add each model once")
        shown = {
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
        self._models[model_name] = ModelMetrics(
            self._families, model_name, encoding, blocks, position_apart=position_apart
        )

    def observe_step(self, model_name: str, stats: StepStats) -> None:
        """Called on the engine thread after each step. Raises KeyError for an unknown model."""
        self._models[model_name].observe_step(stats)

    def compared(self, model_name: str, error: float, tolerance: float) -> None:
        """Sets the result of the parity check at start: server/launch/self_check.py."""
        self._models[model_name].parity_error.set(error)
        self._models[model_name].parity_tolerance.set(tolerance)

    def add_route(self, route: str, methods: Iterable[str], status: int = 200) -> None:
        """Makes series at zero: what appears only with its first request has no rate then."""
        for method in methods:
            self._families.http.labels(route, method, str(status))

    def answered(self, route: str | None, method: str, status: int | None) -> None:
        """Counts an HTTP request. `route` is a template, `status` None without an answer."""
        self._families.http.labels(
            route or UNMATCHED,
            method if method in METHODS else "other",
            "none" if status is None else str(status),
        ).inc()

    def reject(self, model_name: str | None, error: ServeError) -> None:
        """Counts a request that is answered only with an error, but not failures of the engine.

        `model_name` is None when the model is not known.
        """
        if error.reason is not None:
            known = self._unmatched if model_name is None else self._models[model_name].rejections
            known[error.reason, error.code].inc()

    def disconnected(self, model_name: str) -> None:
        """A client went away, or stopped reading, before its answer was complete."""
        self._models[model_name].disconnects.inc()

    def stream_error(self, model_name: str) -> None:
        """A stream that ended with an error after its headers had gone out."""
        self._models[model_name].stream_errors.inc()

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
