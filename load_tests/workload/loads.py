"""The loads of a load test: each workload at each of its sizes, under each profile."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ropewalk.load_tests.common.types import Point, Profile, Request
from ropewalk.load_tests.workload.profiles import find_sweep
from ropewalk.load_tests.workload.prompts import PromptMaker
from ropewalk.load_tests.workload.workloads import Sizes, Workload

LEAST_CONTEXT = 256  # tokens of a started server, whatever is measured: the warm-up needs some


@dataclass(frozen=True, slots=True)
class Load:
    """What every variant gets in a block: a workload at one of its sizes, under a profile."""

    workload: Workload
    point: Point
    profile: Profile

    @property
    def label(self) -> str:
        return f"{self.point.label} {self.profile.label}"

    def plan(self, prompts: PromptMaker, sizes: Sizes) -> list[Request]:
        """New requests for one run. Raises ValueError when sizes leave no room for them."""
        return self.workload.plan(self.point, self.profile, prompts, sizes)


def points(workloads: Sequence[Workload], sizes: Sizes) -> list[Load]:
    """Every size of the workloads, one request at a time."""
    return [
        Load(workload, point, Profile("sync"))
        for workload in workloads
        for point in workload.points(sizes)
    ]


def needed_context(workloads: Sequence[Workload], sizes: Sizes) -> int:
    """Tokens that servers started for these workloads should have room for."""
    return max(LEAST_CONTEXT, *(workload.context(sizes) for workload in workloads))


async def under_profiles(
    loads: Sequence[Load],
    profiles: Sequence[Profile | Literal["sweep"]],
    throughput: Callable[[Load], Awaitable[float]],
) -> list[Load]:
    """Each of `loads` under each profile, or its workload's own; a sweep's are found by measuring.

    `throughput` measures requests per second. A load named twice (2k and 2048, or sync and a
    sweep, which includes it) is kept once: each variant has one run of a load in a round.
    """
    found: list[Load] = []
    for load in loads:
        for profile in profiles or (load.workload.profile,):
            if profile == "sweep":

                async def measured(each: Profile, load: Load = load) -> float:
                    return await throughput(replace(load, profile=each))

                found += [replace(load, profile=each) for each in await find_sweep(measured)]
            else:
                found.append(replace(load, profile=profile))
    return list(dict.fromkeys(found))
