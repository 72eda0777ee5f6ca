"""The arithmetic of an overload, and one small real one."""

import os
import signal

import pytest

from ropewalk.load_tests.common.types import Outcome
from ropewalk.load_tests.run import overload
from ropewalk.load_tests.run.overload import Phase, Processor, Round, main, phase_of, sound, summary
from ropewalk.load_tests.workload.arrivals import Driven


@pytest.fixture(autouse=True)
def cores():
    """The load keeps this process to one core, which the tests after it need not do."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def phase(served=100, refused=0, seconds=10.0, client=0.0, server=5.0, loop=1.0, **more):
    cpu = Processor(client, server, loop)
    first, lag = more.get("first", [0.5]), more.get("lag", 0.0)
    return Phase(served, refused, more.get("failures", []), seconds, cpu, first, lag)


def outcome(began, ended, error=None, late=0.0):
    chunks = () if error else ((ended - 0.1, 1),)
    return Outcome(began, began + late, ended, chunks, error=error)


def test_a_phase_counts_what_ended_in_its_window():
    outcomes = (
        outcome(-1.0, -0.5),  # of the first wave, as the next
        outcome(-1.0, 1.5),
        outcome(0.0, 1.0),
        outcome(1.0, 4.0, late=0.2),
        outcome(3.0, 9.0),  # after the window
        outcome(2.0, 2.1, "status 429: full"),
        outcome(2.0, 2.1, "status 503: gone"),
    )
    found = phase_of(Driven(outcomes, 0.0, 5.0), Processor(2.0, 4.0, 1.0), 10.0)
    assert (found.served, found.refused, found.failures) == (3, 1, ["status 503: gone"])
    assert 0.15 < found.lag <= 0.2
    assert found.cpu == Processor(1.0, 2.0, 0.5)  # the window is half of the time
    assert found.first_tokens == pytest.approx([0.9, 2.9, 5.9])


def test_the_client_s_time_is_taken_off(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    one = Round(phase(), phase(served=90, client=2.0))
    assert one.goodput == pytest.approx(90 / 9 / 10)
    assert one.efficiency == pytest.approx(0.9)


def test_the_cost_of_a_refusal_is_what_served_requests_do_not_explain():
    one = Round(phase(loop=1.0), phase(served=90, refused=300, loop=1.0))
    assert one.refusal_s == pytest.approx(0.1 / 300)


def test_the_summary_has_medians_and_failures():
    calm = phase()
    rounds = [Round(calm, phase(served=each, lag=each / 1e4)) for each in (80, 95, 90)]
    text = "\n".join(summary(rounds, 2.0))
    assert "the client sent late by 9.5 ms (p99)" in text
    assert "goodput 0.90 of the capacity (0.80, 0.95, 0.90)" in text
    assert "first token after 0.50 s (p99); the limit in the queue is 2 s" in text
    assert "failed otherwise: 0" in text and all(map(sound, rounds))
    bad = Round(calm, phase(failures=["status 500: x"]))
    assert "failed otherwise: 1\n    status 500: x" in "\n".join(summary([bad], 2.0))
    assert not sound(bad)


def test_a_server_that_ends_under_load_has_the_last_word(fake, monkeypatch, capsys):
    async def kill(server, pid, *_):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return phase()

    monkeypatch.setattr(overload, "_phase", kill)
    assert main(["--model", "a=a"]) == 2
    assert "ended under load" in capsys.readouterr().err


def test_a_small_overload_is_served_or_refused(monkeypatch, capsys):
    """In two rounds, each with arrivals of its own."""
    seeds = set()
    real = overload.drive

    async def drive(plan, profile, seed, send):
        seeds.add(seed)
        return await real(plan, profile, seed, send)

    monkeypatch.setattr(overload, "drive", drive)
    words = ["--seconds", "0.4", "--rounds", "2", "--max-seqs", "2", "--max-queue-time", "0.3"]
    assert main([*words, "--prompt-tokens", "16", "--output-tokens", "4", "--factor", "3"]) == 0
    assert "failed otherwise: 0" in capsys.readouterr().out
    assert len(seeds) == 2
