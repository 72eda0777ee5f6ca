"""A small list of prompts, and small requests beside it."""

from ropewalk.load_tests.run import fairness
from ropewalk.load_tests.run.fairness import main, summary


def test_the_summary_has_the_median_and_the_worst():
    assert summary([0.2, 0.9, 0.3]) == ("a small request takes 0.30 s, at most 0.90 s (3 requests)")


def test_a_list_that_is_answered_at_once_compares_nothing(monkeypatch, capsys):
    async def fetch(*_):
        return b""

    monkeypatch.setattr(fairness, "fetch", fetch)
    monkeypatch.setattr(fairness, "_PAUSE_S", 0.01)
    assert main(["--model", "ropewalk-rope"]) == 2
    assert "answered before a small request; ask for more --prompts" in capsys.readouterr().err


def test_small_requests_beside_a_small_list(capsys):
    words = ["--model", "ropewalk-rope", "--prompts", "512", "--prompt-tokens", "32"]
    assert main(words) == 0
    alone, beside = capsys.readouterr().out.splitlines()
    assert alone.startswith("alone: a small request takes ")
    assert beside.startswith("beside 512 prompts: a small request takes ")
