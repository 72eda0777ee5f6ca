import asyncio

import pytest

from ropewalk.load_tests.common.types import Profile
from ropewalk.load_tests.workload.loads import LEAST_CONTEXT, needed_context, points, under_profiles
from ropewalk.load_tests.workload.workloads import Sizes, workload_from

LONG = workload_from("longctx")
STREAM = workload_from("stream")
SIZES = Sizes(contexts=(512, 8192), context=2048)


async def unasked(load) -> float:
    raise AssertionError(load)


def test_every_size_of_every_workload_is_a_load():
    labels = [load.point.label for load in points([LONG, STREAM], SIZES)]
    assert labels == ["longctx 512", "longctx 8,192", "stream"]


def test_servers_are_started_with_room_for_the_longest_workload():
    small = Sizes(prompt_tokens=4, output_tokens=4)
    assert needed_context([STREAM], small) == LEAST_CONTEXT > STREAM.context(small)
    assert needed_context([STREAM], Sizes(prompt_tokens=999)) == 999 + SIZES.output_tokens
    assert needed_context([STREAM, LONG], SIZES) == 8192


def test_without_a_profile_a_workload_has_its_own():
    loads = points([STREAM, workload_from("chat")], SIZES)
    found = asyncio.run(under_profiles(loads, (), unasked))
    assert [load.label for load in found] == ["stream sync", "chat closed:8"]


@pytest.mark.parametrize("profiles", [(Profile("closed", concurrency=2), Profile("sync"))])
def test_each_load_under_each_profile(profiles):
    found = asyncio.run(under_profiles(points([LONG], SIZES), profiles, unasked))
    assert [load.label for load in found] == [
        "longctx 512 closed:2", "longctx 512 sync",
        "longctx 8,192 closed:2", "longctx 8,192 sync",
    ]  # fmt: skip


def test_a_load_named_twice_is_one():
    async def throughput(load) -> float:
        return 8.0

    loads = points([STREAM], SIZES) + points([LONG], Sizes(contexts=(2048, 2048)))
    found = asyncio.run(under_profiles(loads, (Profile("sync"), "sweep"), throughput))
    labels = [load.label for load in found]
    assert len(labels) == len(set(labels)) == 2 * 6


def test_a_sweep_is_found_for_each_load_by_itself():
    async def throughput(load) -> float:
        return 1.0 if load.point.context == 512 else 8.0

    found = asyncio.run(under_profiles(points([LONG], SIZES), ("sweep",), throughput))
    rates = {load.point.context: [] for load in found}
    for load in found:
        if load.profile.open_loop:
            rates[load.point.context].append(load.profile.rate)
    assert rates == {512: [0.6, 0.7, 0.8, 0.9], 8192: [4.8, 5.6, 6.4, 7.2]}
