"""Training computes what serving computes, and its gradients reach every parameter."""

import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.family.training import dense
from ropewalk.model.family.training.dense import DenseAttention, dense_logits, refreeze
from ropewalk.model.layers.decoder import Decoder
from tests.model.running import run_uncached
from tests.model.tiny import ENCODINGS, tiny

WINDOWS, LENGTH = 3, 40
TOKENS = torch.randint(61, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))
SHAPES = {"plain": {}, "windowed": {"windows": (None, 7, 20)}, "normed": {"qk_norm": True}}


@pytest.fixture(autouse=True)
def pieces(monkeypatch) -> None:
    """A window has several, the last one shorter."""
    monkeypatch.setattr(dense, "QUERIES", 16)


def logits(decoder: Decoder) -> torch.Tensor:
    return dense_logits(decoder, TOKENS, decoder.embed.weight.dtype)


def served(*args, **options) -> torch.Tensor:
    """The same windows through the paged cache and the reference backend, one by one."""
    decoder = tiny(*args, ReferenceAttention, **options)
    return torch.cat([run_uncached(decoder, window.tolist()) for window in TOKENS])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_trained_is_what_is_served(encoding) -> None:
    trained = logits(tiny(encoding, DenseAttention, torch.float32))
    expected = served(encoding, dtype=torch.float32)
    assert expected.std() > 0.1
    assert (trained - expected).abs().max() < 2e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_attention(shape) -> None:
    trained = logits(tiny("t5", DenseAttention, **SHAPES[shape]))
    assert (trained - served("t5", **SHAPES[shape])).abs().max() < 1e-10


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gradients_reach_every_parameter_in_every_step(encoding) -> None:
    """The second step has tables of its own: no step goes back through one before it."""
    decoder = tiny(encoding, DenseAttention).requires_grad_(True)
    for _ in range(2):
        decoder.zero_grad()
        refreeze(decoder)
        logits(decoder).square().sum().backward()
        missing = [
            name
            for name, parameter in decoder.named_parameters()
            if parameter.grad is None or not parameter.grad.any()
        ]
        assert missing == []


def test_a_gradient_is_the_slope() -> None:
    """Of T5's bias, which reaches the scores by the longest way: a table built from it."""
    decoder = tiny("t5", DenseAttention).requires_grad_(True)
    bias = decoder.get_parameter("encoding.weight")

    def loss() -> torch.Tensor:
        refreeze(decoder)
        return logits(decoder)[:, 0].square().sum()

    loss().backward()
    assert bias.grad is not None
    slope, step = bias.grad[5, 2].clone(), 2.0**-10
    with torch.no_grad():
        bias[5, 2] += step
        above = loss()
        bias[5, 2] -= 2 * step
        below = loss()
    assert torch.isclose((above - below) / (2 * step), slope.double(), rtol=1e-4)


def test_serving_keeps_no_gradients() -> None:
    decoder = tiny().requires_grad_(True)
    assert not run_uncached(decoder, [1, 2, 3]).requires_grad
