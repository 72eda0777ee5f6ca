"""Groups a result for display: one cell per point and profile, with each arm's figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ropewalk.load_tests.common.statistics import Figures, figures
from ropewalk.load_tests.common.types import Point, Profile, Result, Run
from ropewalk.load_tests.report.differences import Difference, corrected, paired
from ropewalk.report.statistics import Estimate, spread


@dataclass(frozen=True, slots=True)
class Cell:
    """Every run of one point under one profile. Arms are in the order of the result."""

    point: Point
    profile: Profile
    runs: Mapping[str, tuple[Run, ...]]
    figures: Mapping[str, Mapping[int, Figures]]  # of each arm, by block

    def spread(self, arm: str, metric: str) -> Estimate | None:
        """The spread of one of statistics.METRICS; None if no run of this arm has it."""
        found = self.figures.get(arm, {}).values()
        return spread([one.values[metric] for one in found if metric in one.values])

    def against(self, base: str | None, arms: Iterable[str], metric: str) -> dict[str, Difference]:
        """Each of `arms` that was measured, compared with `base`, with corrected verdicts."""
        if base is None or base not in self.figures:
            return {}
        others = [arm for arm in arms if arm != base and arm in self.figures]
        zero = self.figures[base]
        found = corrected([paired(zero, self.figures[arm], metric) for arm in others])
        return dict(zip(others, found, strict=True))

    @property
    def label(self) -> str:
        """The cell's name in a table or beside a chart."""
        if self.point.context is not None and self.profile.kind == "sync":
            return self.point.label
        return f"{self.point.label}, {self.profile.label}"

    @property
    def where(self) -> str:
        """The cell's name as the beginning of a sentence."""
        if self.point.context is None:
            return f"Under {self.label}"
        load = "" if self.profile.kind == "sync" else f" and {self.profile.label}"
        return f"At {self.point.context:,} tokens of context{load}"

    @property
    def load(self) -> float:
        """Requests per second of an open loop, requests in flight of a closed one."""
        return self.profile.rate if self.profile.open_loop else float(self.profile.concurrency)


def cells(result: Result) -> list[Cell]:
    """Cells sorted by workload, context and load."""
    found: dict[tuple[Point, Profile], dict[str, list[Run]]] = {}
    for run in result.runs:
        found.setdefault((run.point, run.profile), {}).setdefault(run.arm, []).append(run)
    built = [_cell(*key, runs, result.arms) for key, runs in found.items()]
    workloads = list(dict.fromkeys(cell.point.workload for cell in built))
    return sorted(
        built,
        key=lambda cell: (
            workloads.index(cell.point.workload),
            cell.point.context or 0,
            cell.profile.open_loop,
            cell.load,
        ),
    )


def _cell(
    point: Point, profile: Profile, runs: Mapping[str, Sequence[Run]], arms: Iterable[str]
) -> Cell:
    ordered = {arm: tuple(runs[arm]) for arm in arms if arm in runs}
    by_block = {arm: {run.block: figures(run) for run in own} for arm, own in ordered.items()}
    return Cell(point, profile, ordered, by_block)
