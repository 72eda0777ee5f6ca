from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ropewalk.load_tests.run import draft_gain


@pytest.fixture
def asked(monkeypatch):
    """What two models were asked, by whether they guess; and a token that one answers besides."""
    seen = {True: [], False: []}
    other = []

    @contextmanager
    def load(model, *, draft_tokens=None, **options):
        guesses = draft_tokens is None

        def generate(prompt, **fields):
            seen[guesses].append((prompt, fields))
            return SimpleNamespace(tokens=(1, 2, *(other if guesses else ())))

        yield SimpleNamespace(generate=generate)

    monkeypatch.setattr(draft_gain, "load", load)
    return seen, other


def test_both_answer_the_same_chats(asked, capsys):
    seen, _ = asked
    draft_gain.main(["m", "--rounds", "3", "--tokens", "7", "--at-once", "1,2"])
    assert seen[True] == seen[False] and len(seen[True]) == 4 * 2 * 3 * 2 * 8
    assert {fields["max_tokens"] for _, fields in seen[True]} == {1, 7}
    expected = [fields["prediction"]["content"] for _, fields in seen[True] if len(fields) > 3]
    assert any("from a lost dog, and" in text for text in expected)
    table = capsys.readouterr().out.split("\n\n")[-1].strip().splitlines()
    assert [line.split("|")[1:3] for line in table[2:4]] == [["story", "1"], ["story", "2"]]


def test_answers_that_differ_are_a_fault(asked):
    _, other = asked
    other.append(3)
    with pytest.raises(AssertionError, match="depends on guesses"):
        draft_gain.main(["m", "--rounds", "1", "--at-once", "1"])
