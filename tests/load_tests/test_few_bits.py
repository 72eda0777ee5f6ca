"""The measurement of few bits, of a tiny model."""

import pytest

from ropewalk.load_tests.micro import few_bits
from ropewalk.model.loading.random_weights import random_checkpoint


@pytest.fixture
def tiny(monkeypatch, kernels):
    texts = [[seed * 7 % 256 for seed in range(start, start + 21)] for start in range(3)]
    for name, value in (("BATCHES", (2,)), ("CONTEXT", 32), ("ROUNDS", 2), ("LENGTH", 20)):
        monkeypatch.setattr(few_bits, name, value)
    return few_bits.decoders(random_checkpoint("shape:tiny", None, None), kernels), texts


def test_fewer_bits_lose_more_and_each_precision_is_timed(tiny, capsys):
    made, texts = tiny
    exact, *others = (few_bits.losses(each, texts) for each in made.values())
    worst = [max(abs(a - b) for a, b in zip(each, exact, strict=True)) for each in others]
    assert 0 < worst[0] < worst[1] < 0.1  # bfloat16, 8 bits; no such weight is exact in 4
    few_bits.compare_weights(made, texts)
    few_bits.compare_caches(made, texts)
    few_bits.compare_times(made)
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line]
    assert [row[0] for row in rows[2:6]] == list(made)
    assert {len(row) for row in rows[6:10]} == {4} and {len(row) for row in rows[10:]} == {7}


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(few_bits, "stored", lambda *_: None)
    assert few_bits.main([]) == 2
    assert "ropewalk pull smollm2" in capsys.readouterr().err
