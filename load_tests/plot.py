"""What a plot of the report is, and what the modules that make plots share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from load_tests.cells import Cell, Spread, cells
from load_tests.charts import Mark, Row, Series
from load_tests.differences import Difference
from load_tests.svg import Look, looks
from load_tests.terms import Result
from load_tests.words import digits, interval, milliseconds, signed

Table = Sequence[tuple[str, ...]]  # the first line is the header


@dataclass(frozen=True, slots=True)
class Plot:
    """Charts with what they show in words, and the same numbers as a table."""

    key: str  # what `--plot` takes
    title: str
    findings: tuple[str, ...]  # sentences, the main one first
    charts: tuple[str, ...]  # <svg> elements
    table: Table
    note: str  # how to read it, and what its metrics mean


@dataclass(frozen=True, slots=True)
class Subject:
    """A result with what every plot of it needs."""

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


def subject(result: Result) -> Subject:
    return Subject(result, cells(result), looks(list(result.arms), result.zero))


def shown(metric: str, found: Spread | None) -> str:
    """12.3 (12.1–12.9): milliseconds, or tokens per second."""
    if found is None:
        return "–"
    number = digits if metric.endswith("per_s") else milliseconds
    if found.low == found.high:
        return number(found.median)
    return f"{number(found.median)} ({number(found.low)}–{number(found.high)})"


def measured(subject: Subject, along: Sequence[tuple[float, Cell]], metric: str) -> list[Series]:
    """Each arm's figure in milliseconds, over the x that goes with each cell."""
    found: list[Series] = []
    for arm in subject.arms:
        marks = [
            Mark(x, one.median * 1e3, one.low * 1e3, one.high * 1e3, _told(cell, metric, one))
            for x, cell in along
            if (one := cell.spread(arm, metric)) is not None
        ]
        if marks:
            found.append(Series(arm, subject.looks[arm], tuple(marks)))
    return found


def relative(subject: Subject, along: Sequence[tuple[float, Cell]], metric: str) -> list[Series]:
    """Each arm's difference to the zero in percent, over the x that goes with each cell."""
    marks: dict[str, list[Mark]] = {}
    for x, cell in along:
        for arm, one in known(cell.against(subject.zero, subject.others, metric)).items():
            told = f"{cell.label}: {interval(one)}"
            mark = Mark(x, *_percents(one), told, hollow=one.verdict == "no difference")
            marks.setdefault(arm, []).append(mark)
    return [
        Series(arm, subject.looks[arm], tuple(marks[arm])) for arm in subject.others if arm in marks
    ]


def rows(subject: Subject, cell: Cell, metric: str) -> list[Row]:
    """Each arm's figure in milliseconds."""
    found = {arm: cell.spread(arm, metric) for arm in subject.arms}
    return [
        Row(arm, subject.looks[arm], one.median * 1e3, one.low * 1e3, one.high * 1e3,
            milliseconds(one.median))
        for arm, one in found.items()
        if one is not None
    ]  # fmt: skip


def relative_rows(
    subject: Subject, cell: Cell, base: str | None, arms: Sequence[str], metric: str
) -> list[Row]:
    """Each arm's difference to `base` in percent."""
    return [
        Row(
            arm,
            subject.looks[arm],
            *_percents(one),
            f"{signed(one.estimate)} %",
            hollow=one.verdict == "no difference",
        )
        for arm, one in known(cell.against(base, arms, metric)).items()
    ]


def known(found: Mapping[str, Difference]) -> dict[str, Difference]:
    """Those that have figures."""
    return {arm: one for arm, one in found.items() if one.verdict != "unknown"}


def percent_tick(value: float) -> str:
    return f"{value:+,.10g} %".replace("-", "−") if value else "0 %"


def plain_tick(value: float) -> str:
    return f"{value:,.10g}"


def _told(cell: Cell, metric: str, found: Spread) -> str:
    return f"{cell.label}: {shown(metric, found)} ms"


def _percents(one: Difference) -> tuple[float, float, float]:
    """Estimate, low and high: 1.1 → 10."""
    estimate, low, high = ((ratio - 1) * 100 for ratio in (one.estimate, one.low, one.high))
    return estimate, low, high
