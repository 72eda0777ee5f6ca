import asyncio

import pytest

from ropewalk.load_tests.common.types import Profile
from ropewalk.load_tests.workload.profiles import SWEEP_RATES, find_sweep, parse_profile


@pytest.mark.parametrize("text", ["sync", "closed:8", "poisson:0.5", "gamma:4:0.25"])
def test_a_profile_is_what_its_label_says(text):
    profile = parse_profile(text)
    assert isinstance(profile, Profile)
    assert profile.label == text
    assert profile.kind == text.split(":")[0]


def test_the_numbers_of_a_profile():
    assert parse_profile("closed:12") == Profile("closed", concurrency=12)
    assert parse_profile("poisson:2.5") == Profile("poisson", rate=2.5)
    assert parse_profile("gamma:3:0.5") == Profile("gamma", rate=3.0, burstiness=0.5)
    assert parse_profile("sweep") == "sweep"


@pytest.mark.parametrize(
    "text",
    [
        "nap",
        "sync:2",
        "closed",
        "closed:0",
        "closed:1.5",
        "poisson:",
        "poisson:0",
        "poisson:-1",
        "poisson:inf",
        "gamma:4",
        "gamma:4:0",
        "gamma:0:1",
        "sweep:3",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"no profile|above 0"):
        parse_profile(text)


def sweep_of(rates: dict[str, float]):
    asked = []

    async def throughput(profile: Profile) -> float:
        asked.append(profile.label)
        return rates[profile.label]

    return asyncio.run(find_sweep(throughput)), asked


def test_a_sweep_stops_doubling_where_the_throughput_does():
    found, asked = sweep_of({"sync": 2.0, "closed:2": 3.8, "closed:4": 6.8, "closed:8": 7.0})
    assert asked == ["sync", "closed:2", "closed:4", "closed:8"]
    assert [profile.label for profile in found] == [
        "sync", "poisson:3", "poisson:4", "poisson:5", "poisson:6", "closed:8",
    ]  # fmt: skip


def test_a_sweep_of_a_server_that_does_not_batch_has_rates_too():
    found, _ = sweep_of({"sync": 4.0, "closed:2": 3.0})
    rates = [profile.rate for profile in found if profile.open_loop]
    assert rates == [2.4, 2.8, 3.2, 3.6]


def test_a_sweep_gives_up_at_a_server_without_limits():
    rates = {"sync": 1.0} | {f"closed:{2**power}": 2.0**power for power in range(1, 7)}
    found, asked = sweep_of(rates)
    assert asked[-1] == "closed:64"
    assert len(found) == SWEEP_RATES + 2
