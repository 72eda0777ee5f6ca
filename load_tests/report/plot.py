"""The plots of the report, and what the modules that make them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ropewalk.load_tests.common.types import Profile, Result, Run
from ropewalk.load_tests.report.cells import Cell, cells
from ropewalk.load_tests.report.charts import Mark, Series, dots, lines, plain
from ropewalk.load_tests.report.formatting import digits, interval, number, signed, unit
from ropewalk.report.figure import Look, Picture, looks
from ropewalk.report.statistics import Estimate

_ACROSS = {
    "context": "tokens of context",
    "rate": "requests per second",
    "concurrency": "requests in flight",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """Cells that differ in one quantity, a chart's x axis. It may have a single cell."""

    name: str  # what they have in common
    by: Literal["context", "rate", "concurrency"]
    cells: Sequence[Cell]

    @property
    def title(self) -> str:
        return _ACROSS[self.by]

    def x(self, cell: Cell) -> float:
        return float(cell.point.context or 0) if self.by == "context" else cell.load


@dataclass(frozen=True, slots=True)
class Subject:
    """A result with what all its plots need."""

    result: Result
    cells: Sequence[Cell]
    looks: Mapping[str, Look]

    @property
    def variants(self) -> Sequence[str]:
        return list(self.result.variants)

    @property
    def baseline(self) -> str | None:
        return self.result.baseline

    @property
    def others(self) -> Sequence[str]:
        """Every variant but the baseline."""
        return [variant for variant in self.variants if variant != self.baseline]

    def runs(self, variant: str) -> list[Run]:
        return [run for run in self.result.runs if run.variant == variant]

    def series(self, marks: Mapping[str, Sequence[Mark]]) -> list[Series]:
        """A chart's series from each variant's marks; a variant without marks has none."""
        return [
            Series(variant, self.looks[variant], marks[variant])
            for variant in self.variants
            if marks.get(variant)
        ]

    def rows(self, found: Mapping[str, Estimate]) -> list[Series]:
        """Rows of a chart, each with its number at the end."""
        return self.series(
            {variant: [Mark(one, "", digits(one.value))] for variant, one in found.items()}
        )


def subject(result: Result) -> Subject:
    return Subject(result, cells(result), looks(list(result.variants), result.baseline))


def context_axes(subject: Subject) -> list[Axis]:
    """An axis for each workload with several contexts (and each of its profiles)."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in subject.cells:
        if cell.point.context is not None:
            found.setdefault((cell.point.workload, cell.profile.label), []).append(cell)
    several = {key: own for key, own in found.items() if len(own) > 1}
    names = [workload for workload, _ in several]
    return [
        Axis(workload if names.count(workload) == 1 else f"{workload} {profile}", "context", own)
        for (workload, profile), own in several.items()
    ]


def load_axes(subject: Subject) -> list[Axis]:
    """Axes of all other cells, one for each point and kind of load.

    Arrivals of another burstiness are another kind: at one rate they are another load.
    """
    taken = [cell for axis in context_axes(subject) for cell in axis.cells]
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in subject.cells:
        if cell not in taken:
            found.setdefault((cell.point.label, _arrivals(cell.profile)), []).append(cell)
    open_loops = [label for label, arrivals in found if arrivals]
    return [
        Axis(
            f"{label} {arrivals}" if open_loops.count(label) > 1 and arrivals else label,
            "rate" if arrivals else "concurrency",
            own,
        )
        for (label, arrivals), own in found.items()
    ]


def _arrivals(profile: Profile) -> str:
    """Of an open loop, all of its label but the rate; "" of a closed one."""
    if profile.kind == "gamma":
        return f"gamma of burstiness {profile.burstiness:g}"
    return profile.kind if profile.open_loop else ""


def shown(metric: str, found: Estimate | None) -> str:
    """12.3 (12.1–12.9): milliseconds, or tokens per second."""
    if found is None:
        return "–"
    middle, low, high = (number(metric, value) for value in (found.value, found.low, found.high))
    return middle if found.low == found.high else f"{middle} ({low}–{high})"


def measured(subject: Subject, axis: Axis, metric: str) -> list[Series]:
    """Each variant's figure, in milliseconds."""
    marks: dict[str, list[Mark]] = {}
    for cell in axis.cells:
        for variant in subject.variants:
            if (one := cell.spread(variant, metric)) is not None:
                told, text = f"{cell.label}: {quantity(metric, one)}", digits(one.value * 1e3)
                marks.setdefault(variant, []).append(Mark(one.times(1e3), told, text, axis.x(cell)))
    return subject.series(marks)


def relative(
    subject: Subject, axis: Axis, metric: str, base: str | None, variants: Sequence[str]
) -> list[Series]:
    """The difference of each of `variants` from `base`, in percent."""
    marks: dict[str, list[Mark]] = {}
    for cell in axis.cells:
        for variant, one in cell.against(base, variants, metric).items():
            if one.verdict != "unknown":
                ends = ((ratio - 1) * 100 for ratio in (one.value, one.low, one.high))
                told, text = f"{cell.label}: {interval(one)}", f"{signed(one.value)} %"
                same = one.verdict == "no difference"
                marks.setdefault(variant, []).append(
                    Mark(Estimate(*ends), told, text, axis.x(cell), same)
                )
    return subject.series(marks)


def chart(title: str, series: Sequence[Series], axis: Axis) -> Picture:
    """Lines over the axis; dots for a single cell."""
    if len(axis.cells) > 1:
        return lines(title, series, axis.title, plain)
    return dots(title, {"": series}, axis.cells[0].label, plain)


def quantity(metric: str, found: Estimate) -> str:
    """12.3 (12.1–12.9) ms"""
    return f"{shown(metric, found)} {unit(metric)}"


def percent_tick(value: float) -> str:
    return f"{value:+,.10g} %".replace("-", "−") if value else "0 %"
