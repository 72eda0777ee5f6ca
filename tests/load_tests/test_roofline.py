import pytest
import torch

from ropewalk.load_tests.micro import roofline
from ropewalk.load_tests.micro.roofline import Ceiling, ceiling, kv_bytes, read_rates, weight_bytes
from ropewalk.model.loading.random_weights import SHAPES

SLOW = Ceiling(bytes_per_s=1e9, operations_per_s=1e12)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "parameters", "entries"),
    [("smollm2", 134_515_008, 11_520), ("llama-1b", 1_235_814_400, 16_384)],
)
def test_what_published_models_read(shape, parameters, entries):
    assert weight_bytes(SHAPES[shape], BF16) == 2 * parameters
    assert weight_bytes(SHAPES[shape], torch.float32) == 4 * parameters
    assert kv_bytes(SHAPES[shape], BF16, 3, 100) == 2 * entries * 300


def test_an_embedding_that_is_no_head_is_not_read(monkeypatch):
    from dataclasses import replace

    tied = SHAPES["small"]
    assert weight_bytes(replace(tied, tied_embeddings=False), BF16) == weight_bytes(tied, BF16)


def test_decoding_reads_weights_once_and_every_request_s_keys():
    tiny = SHAPES["tiny"]
    one, four = (SLOW.decode_seconds(tiny, BF16, requests, 64) for requests in (1, 4))
    assert four - one == pytest.approx(kv_bytes(tiny, BF16, 3, 64) / 1e9)
    assert one > weight_bytes(tiny, BF16) / 1e9


def test_a_prompt_multiplies_its_last_row_alone_with_the_head():
    tiny = SHAPES["tiny"]
    head = tiny.vocab_size * tiny.hidden_size
    layers = weight_bytes(tiny, BF16) // 2 - head
    assert SLOW.prefill_seconds(tiny, 10) == pytest.approx(2 * (10 * layers + head) / 1e12)


def test_a_ceiling_is_of_the_fastest_trial(monkeypatch):
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 4000})
    monkeypatch.setattr(roofline, "SIDE", {"cpu": 10})
    trials = [{"copy": 2.0, "product": 0.5}, {"copy": 0.5, "product": 4.0}]
    monkeypatch.setattr(roofline, "rounds", lambda *_: iter(trials))
    assert ceiling(torch.device("cpu"), torch.float32, "wall") == Ceiling(16_000, 4_000)


def test_reading_is_told_by_trial(monkeypatch):
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 4000})
    monkeypatch.setattr(roofline, "rounds", lambda *_: iter([{"read": 2.0}, {"read": 0.5}]))
    assert read_rates() == [2_000, 8_000]


def test_reading_reads(monkeypatch):
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 1 << 24})
    assert all(1e8 < rate < 1e13 for rate in read_rates())
