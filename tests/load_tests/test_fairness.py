"""A small list of prompts, and small requests beside it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import Server
from ropewalk.load_tests.run import fairness
from ropewalk.load_tests.run.fairness import main, summary
from tests.load_tests import sse_server


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(fairness, "_PAUSE_S", 0.01)


def test_the_summary_has_the_median_and_the_worst():
    assert summary([0.2, 0.9, 0.3]) == ("a small request takes 0.30 s, at most 0.90 s (3 requests)")


def test_a_list_that_is_answered_at_once_compares_nothing(monkeypatch, capsys):
    def answer(path, body):
        if path == "/v1/models":
            return sse_server.whole("200 OK", {"data": [{"id": "tiny", "vocab_size": 1000}]})
        return sse_server.good(path, body)

    async def at_once(*_):
        return b""

    @contextmanager
    def serve_alone(*_):
        with sse_server.serving(answer) as running:
            server = Server(process.HOST, running.port)
            yield server, SimpleNamespace(answers=at_once)

    monkeypatch.setattr(fairness, "serve_alone", serve_alone)
    monkeypatch.setattr(fairness, "fetch", at_once)
    assert main([]) == 2
    assert "answered before a small request; ask for more --prompts" in capsys.readouterr().err


def test_small_requests_beside_a_small_list(capsys):
    words = ["--model", "ropewalk-rope", "--prompts", "64", "--prompt-tokens", "32"]
    assert main(words) == 0
    alone, beside = capsys.readouterr().out.splitlines()
    assert alone.startswith("alone: a small request takes ")
    assert beside.startswith("beside 64 prompts: a small request takes ")
