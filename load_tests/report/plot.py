"""The plots of the report, and what the modules that make them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ropewalk.load_tests.common.types import Result
from ropewalk.load_tests.report.cells import Cell, cells
from ropewalk.load_tests.report.charts import Mark, Row, Series
from ropewalk.load_tests.report.differences import Difference
from ropewalk.load_tests.report.formatting import digits, interval, number, signed, unit
from ropewalk.report.figure import Look, Picture, looks
from ropewalk.report.statistics import Estimate

Table = Sequence[tuple[str, ...]]  # the first line is the header

_ACROSS = {
    "context": "tokens of context",
    "rate": "requests per second",
    "concurrency": "requests in flight",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """Charts with their findings in words, and the same numbers as a table."""

    key: str  # what `--plot` takes
    title: str
    findings: tuple[str, ...]  # sentences, the main one first
    charts: tuple[Picture, ...]
    table: Table
    note: str  # how to read it, and what its metrics mean


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
    def arms(self) -> Sequence[str]:
        return list(self.result.arms)

    @property
    def zero(self) -> str | None:
        return self.result.zero

    @property
    def others(self) -> Sequence[str]:
        """Every arm but the zero."""
        return [arm for arm in self.arms if arm != self.zero]

    def row(self, arm: str, found: Estimate, text: str = "", *, hollow: bool = False) -> Row:
        """A row of a chart, which ends with `text`, or with the number if there is none."""
        ends = found.value, found.low, found.high
        return Row(arm, self.looks[arm], *ends, text or digits(found.value), hollow)

    def series(self, marks: Mapping[str, Sequence[Mark]]) -> list[Series]:
        """A chart's series from each arm's marks; an arm without marks has none."""
        return [
            Series(arm, self.looks[arm], tuple(marks[arm])) for arm in self.arms if marks.get(arm)
        ]


def subject(result: Result) -> Subject:
    return Subject(result, cells(result), looks(list(result.arms), result.zero))


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
    """Axes of all other cells, one for each point and kind of load."""
    taken = [cell for axis in context_axes(subject) for cell in axis.cells]
    found: dict[tuple[str, Literal["rate", "concurrency"]], list[Cell]] = {}
    for cell in subject.cells:
        if cell not in taken:
            by: Literal["rate", "concurrency"] = "rate" if cell.profile.open_loop else "concurrency"
            found.setdefault((cell.point.label, by), []).append(cell)
    return [Axis(name, by, own) for (name, by), own in found.items()]


def shown(metric: str, found: Estimate | None) -> str:
    """12.3 (12.1–12.9): milliseconds, or tokens per second."""
    if found is None:
        return "–"
    middle, low, high = (number(metric, value) for value in (found.value, found.low, found.high))
    return middle if found.low == found.high else f"{middle} ({low}–{high})"


def mark(x: float, found: Estimate, told: str, *, hollow: bool = False) -> Mark:
    """A mark of a chart."""
    return Mark(x, found.value, found.low, found.high, told, hollow)


def measured(subject: Subject, axis: Axis, metric: str) -> list[Series]:
    """Each arm's figure, in milliseconds."""
    return subject.series(
        {
            arm: [
                mark(axis.x(cell), one.times(1e3), f"{cell.label}: {quantity(metric, one)}")
                for cell in axis.cells
                if (one := cell.spread(arm, metric)) is not None
            ]
            for arm in subject.arms
        }
    )


def relative(subject: Subject, axis: Axis, metric: str) -> list[Series]:
    """Each arm's difference from the zero, in percent."""
    marks: dict[str, list[Mark]] = {}
    for cell in axis.cells:
        for arm, one in known(cell.against(subject.zero, subject.others, metric)).items():
            told, hollow = f"{cell.label}: {interval(one)}", one.verdict == "no difference"
            marks.setdefault(arm, []).append(mark(axis.x(cell), percents(one), told, hollow=hollow))
    return subject.series(marks)


def rows(subject: Subject, cell: Cell, metric: str) -> list[Row]:
    """Each arm's figure in milliseconds."""
    found = {arm: cell.spread(arm, metric) for arm in subject.arms}
    return [subject.row(arm, one.times(1e3)) for arm, one in found.items() if one is not None]


def relative_rows(
    subject: Subject, cell: Cell, base: str | None, arms: Sequence[str], metric: str
) -> list[Row]:
    """Each arm's difference from `base`, in percent."""
    return [
        subject.row(
            arm, percents(one), f"{signed(one.value)} %", hollow=one.verdict == "no difference"
        )
        for arm, one in known(cell.against(base, arms, metric)).items()
    ]


def quantity(metric: str, found: Estimate) -> str:
    """12.3 (12.1–12.9) ms"""
    return f"{shown(metric, found)} {unit(metric)}"


def known(found: Mapping[str, Difference]) -> dict[str, Difference]:
    """The differences that have figures."""
    return {arm: one for arm, one in found.items() if one.verdict != "unknown"}


def percents(one: Difference) -> Estimate:
    """In percent: a ratio of 1.1 is 10."""
    return Estimate(*((ratio - 1) * 100 for ratio in (one.value, one.low, one.high)))


def percent_tick(value: float) -> str:
    return f"{value:+,.10g} %".replace("-", "−") if value else "0 %"
