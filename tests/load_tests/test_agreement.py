"""The comparison with aiperf, as far as it can be tested without aiperf."""

import asyncio
import json
import sys
from itertools import pairwise

import pytest

from ropewalk.load_tests.client.client import DIALECTS, Server, complete
from ropewalk.load_tests.common.types import Outcome, Point, Request, Result, Run
from ropewalk.load_tests.peers import agreement
from ropewalk.load_tests.peers.agreement import (
    Failed,
    Load,
    Reading,
    our_reading,
    table,
    their_reading,
)
from ropewalk.load_tests.report import result
from ropewalk.load_tests.workload.prompt_file import read_prompts
from tests.load_tests import paced_server

LOAD = Load("http://127.0.0.1:8000", "m", 2, 5, prompt_tokens=7, output_tokens=3)


def test_both_get_the_same_prompts(tmp_path):
    LOAD.write(tmp_path, "s")
    ours = read_prompts(str(tmp_path / "ours.jsonl"))
    theirs = [json.loads(line) for line in (tmp_path / "theirs.jsonl").read_text().splitlines()]
    assert [each.prompt for each in ours] == [each["text"] for each in theirs]
    assert len({each.prompt for each in ours}) == 5
    assert {len(each.prompt.split()) for each in ours} == {7}
    assert {each.max_tokens for each in ours} == {3}


def test_the_two_commands_ask_for_the_same(tmp_path):
    LOAD.write(tmp_path, "s")
    ours = LOAD.our_command(tmp_path)
    assert ours[:3] == [sys.executable, "-m", "ropewalk.load_tests.run.bench"]
    asked = dict(pairwise(ours))
    assert (asked["--profile"], asked["--models"], asked["--runs"]) == ("closed:2", "m", "1")
    assert asked["--workload"] == f"file:{tmp_path / 'ours.jsonl'}"
    theirs = LOAD.their_command(tmp_path / "aiperf", tmp_path)
    after = dict(pairwise(theirs))
    assert after["--url"] == asked["--base-url"] == LOAD.base_url
    assert after["--concurrency"] == "2"
    assert after["--request-count"] == "5"
    assert json.loads(after["--extra-inputs"]) == {
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def outcome(start, error=None):
    chunks = tuple((start + at, count) for at, count in ((0.1, 1), (0.2, 2), (0.3, 3)))
    return Outcome(start, start, start + 0.3, chunks, 7, 3, error=error)


def left_by_us(folder, outcomes):
    (folder / "ours").mkdir()
    point = Point("file", "file")
    run = Run("m", point, LOAD.profile, 0, tuple(outcomes), steady_from=0.0, steady_to=2.0)
    whole = Result("", {}, {}, {"m": {}}, None, (run,), ())
    result.write(folder / "ours" / "result.json", whole)


def test_our_reading_is_of_the_steady_window(tmp_path):
    left_by_us(tmp_path, [outcome(0.3 * index) for index in range(5)])
    assert our_reading(tmp_path, LOAD) == pytest.approx((100.0, 100.0, 7.5))


def test_our_failures_are_no_reading(tmp_path):
    outcomes = [outcome(0.3 * index) for index in range(4)]
    left_by_us(tmp_path, [*outcomes, outcome(1.2, error="status 500")])
    with pytest.raises(Failed, match=r"served 4 of 5: .*status 500"):
        our_reading(tmp_path, LOAD)


def left_by_them(folder, served=5, shortest=3):
    (folder / "theirs").mkdir()
    export = {
        "request_count": {"avg": served},
        "output_sequence_length": {"min": shortest, "max": 3},
        "time_to_first_token": {"avg": 120.0, "p50": 110.0},
        "inter_token_latency": {"avg": 12.0, "p50": 11.0},
        "output_token_throughput": {"avg": 7.0},
    }
    (folder / "theirs" / "profile_export_aiperf.json").write_text(json.dumps(export))


def test_their_reading(tmp_path):
    left_by_them(tmp_path)
    assert their_reading(tmp_path, LOAD) == (110.0, 11.0, 7.0)


def test_their_failures_are_no_reading(tmp_path):
    with pytest.raises(Failed, match=r"left no profile_export_aiperf.json"):
        their_reading(tmp_path, LOAD)
    left_by_them(tmp_path, shortest=2)
    with pytest.raises(Failed, match="5 of 5 requests with 2 to 3 tokens instead of 3"):
        their_reading(tmp_path, LOAD)


def test_they_agree_within_the_limit_in_every_metric():
    ours = [Reading(100.0, 10.0, 50.0), Reading(300.0, 10.4, 51.0), Reading(104.0, 10.2, 49.0)]
    text, agree = table(ours, [Reading(100.0, 10.0, 50.0)])
    assert agree
    assert "104.0 [100.0, 300.0]" in text
    assert "4.0%" in text
    text, agree = table(ours, [Reading(100.0, 9.0, 50.0)])
    assert not agree
    assert "13.3%" in text


def test_a_tool_that_fails_is_quoted(capsys, monkeypatch):
    monkeypatch.setattr(agreement, "flush", lambda server: _nothing())
    status = agreement.main(
        ["--aiperf", "/nowhere/aiperf", "--model", "m", "--base-url", "http://127.0.0.1:1"]
    )
    assert status == 2
    assert "ended with" in capsys.readouterr().err


async def _nothing():
    return None


def test_a_server_of_a_known_pace_is_read_as_that():
    """Only from below, which holds on a busy machine too."""

    async def measured():
        async with await asyncio.start_server(paced_server.handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            to = Server("127.0.0.1", port, DIALECTS["openai"], "m")
            return await complete(to, Request("some words", 2, 3))

    found = asyncio.run(measured())
    assert found.error is None
    assert [count for _, count in found.chunks] == [1, 2, 3]
    after = [at - found.sent for at, _ in found.chunks]
    assert all(at > 0.3 + 0.04 * number - 1e-3 for number, at in enumerate(after))
