"""What streams cost outside the engine counts as the part that it was spent on."""

import itertools

import pytest

from ropewalk.load_tests.micro import profile_http
from ropewalk.load_tests.micro.profile_http import (
    CHUNKS,
    DETOKENISING,
    HTTP,
    PARTS,
    Steady,
    http_times,
)
from ropewalk.server.errors import CommandError
from ropewalk.server.http.streaming import EventStream
from ropewalk.server.openai.answers import Choice, CompletionWire

REQUESTS, STEPS = 3, 5


def test_every_part_takes_time_and_nothing_stays_behind():
    before = Choice.take, CompletionWire.chunk
    found = http_times(REQUESTS, 0.002, STEPS)
    assert list(found) == list(PARTS)
    assert all(seconds > 0 for seconds in found.values())
    assert (Choice.take, CompletionWire.chunk) == before


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (Choice, "take", DETOKENISING),
        (CompletionWire, "chunk", CHUNKS),
        (EventStream, "write", HTTP),
    ],
)
def test_a_slow_part_is_that_part(owner, name, part, monkeypatch):
    now, act = [0.0], getattr(owner, name)

    def late(self, *arguments):
        now[0] += 1
        return act(self, *arguments)

    monkeypatch.setattr(owner, name, late)
    found = http_times(REQUESTS, 0.01, STEPS, clock=lambda: now[0])
    # Once for each token, unless a stream was woken too late and took two at once.
    assert 0 < found.pop(part) <= REQUESTS + REQUESTS / STEPS
    assert set(found.values()) == {0}


@pytest.mark.parametrize("good", [0, 6])
def test_streams_that_fail_are_told_of(good, monkeypatch):
    act, calls = CompletionWire.chunk, itertools.count()

    def broken(self, *arguments):
        if next(calls) >= good:
            raise RuntimeError("it broke")
        return act(self, *arguments)

    monkeypatch.setattr(CompletionWire, "chunk", broken)
    monkeypatch.setattr(profile_http, "_TOGETHER_S", 1.0)  # those that failed early never come
    with pytest.raises(CommandError, match="a stream failed"):
        http_times(REQUESTS, 0.002, STEPS)


def test_streams_that_were_never_all_there_are_told_of():
    with pytest.raises(CommandError, match="did not run side by side; lower --batch"):
        Steady(REQUESTS, STEPS, lambda: 0.0).seconds()
