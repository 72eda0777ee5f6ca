"""Groups a result for display: one cell per point and profile, with each variant's figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ropewalk.load_tests.common.statistics import Figures, figures
from ropewalk.load_tests.common.types import Point, Profile, Result, Run
from ropewalk.load_tests.report.differences import Difference, corrected, paired
from ropewalk.report.statistics import Estimate, spread


@dataclass(frozen=True, slots=True)
class Cell:
    """Every run of one point under one profile. Variants are in the order of the result."""

    point: Point
    profile: Profile
    runs: Mapping[str, tuple[Run, ...]]
    figures: Mapping[str, Mapping[int, Figures]]  # of each variant, by round

    def spread(self, variant: str, metric: str) -> Estimate | None:
        """The spread of one of statistics.METRICS; None if no run of this variant has it."""
        found = self.figures.get(variant, {}).values()
        return spread([one.values[metric] for one in found if metric in one.values])

    def against(
        self, base: str | None, variants: Iterable[str], metric: str
    ) -> dict[str, Difference]:
        """Each of `variants` that was measured, compared with `base`, with corrected verdicts."""
        if base is None or base not in self.figures:
            return {}
        others = [variant for variant in variants if variant != base and variant in self.figures]
        baseline = self.figures[base]
        found = corrected([paired(baseline, self.figures[variant], metric) for variant in others])
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
        found.setdefault((run.point, run.profile), {}).setdefault(run.variant, []).append(run)
    built = [_cell(*key, runs, result.variants) for key, runs in found.items()]
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
    point: Point, profile: Profile, runs: Mapping[str, Sequence[Run]], variants: Iterable[str]
) -> Cell:
    ordered = {variant: tuple(runs[variant]) for variant in variants if variant in runs}
    by_round = {
        variant: {run.round: figures(run) for run in own} for variant, own in ordered.items()
    }
    return Cell(point, profile, ordered, by_round)
