"""Training computes what serving computes, and its gradients reach every parameter."""

import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.family.training import dense
from ropewalk.model.family.training.dense import DenseAttention, dense_logits, refreeze
from ropewalk.model.layers.executor import TorchExecutor
from tests.model.running import run_uncached
from tests.model.tiny import ENCODINGS, in_torch, program_of, tiny

WINDOWS, LENGTH = 3, 40
TOKENS = torch.randint(61, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))
SHAPES = {
    "plain": {},
    "windowed": {"windows": (None, 7, 20)},
    "normed": {"qk_norm": True},
    "capped": {"score_cap": 0.3, "logit_cap": 0.9},
}


@pytest.fixture(autouse=True)
def pieces(monkeypatch) -> None:
    """A window has several, the last one shorter."""
    monkeypatch.setattr(dense, "QUERIES", 16)


def training(*args, **options) -> TorchExecutor:
    """A tiny program as training computes it, with gradients."""
    program = program_of(tiny(*args, **options))
    for _, parameter in program.named_parameters():
        parameter.requires_grad_(True)
    return TorchExecutor(program, DenseAttention)


def logits(executor: TorchExecutor) -> torch.Tensor:
    return dense_logits(executor, TOKENS, executor.program.dtype)


def served(*args, **options) -> torch.Tensor:
    """The same windows through the paged cache and the reference backend, one by one."""
    decoder = tiny(*args, ReferenceAttention, **options)
    return torch.cat([run_uncached(decoder, window.tolist()) for window in TOKENS])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_trained_is_what_is_served(encoding) -> None:
    trained = logits(training(encoding, dtype=torch.float32))
    expected = served(encoding, dtype=torch.float32)
    assert expected.std() > 0.1
    assert (trained - expected).abs().max() < 2e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_attention(shape) -> None:
    trained = logits(training("t5", **SHAPES[shape]))
    assert (trained - served("t5", **SHAPES[shape])).abs().max() < 1e-10


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gradients_reach_every_parameter_in_every_step(encoding) -> None:
    """The second step has tables of its own: no step goes back through one before it."""
    decoder = training(encoding)
    for _ in range(2):
        for _, parameter in decoder.program.named_parameters():
            parameter.grad = None
        refreeze(decoder)
        logits(decoder).square().sum().backward()
        missing = [
            name
            for name, parameter in decoder.program.named_parameters()
            if parameter.grad is None or not parameter.grad.any()
        ]
        assert missing == []


def test_a_gradient_is_the_slope() -> None:
    """Of T5's bias, which reaches the scores by the longest way: a table built from it."""
    decoder = training("t5")
    bias = dict(decoder.program.named_parameters())["encoding.weight"]

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
    program = training().program
    assert not run_uncached(in_torch(program), [1, 2, 3]).requires_grad


# One of each kind of hook. torch looks for a gradient of T5's table, which is made of its weights.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5", "forgetting", "shaw", "cope", "fire"])
def test_a_compiled_pass_is_one_graph_and_the_same(encoding) -> None:
    """Or `--compile` would gain little, or train another encoding than is served."""
    one_layer = {"num_layers": 1, "windows": (None,)}
    executor = training(encoding, dtype=torch.float32, **one_layer)
    compiled = torch.compile(lambda: logits(executor), backend="eager", fullgraph=True)
    passes = []
    for compute in (lambda: logits(executor), compiled):
        refreeze(executor)
        found = compute()
        found.square().sum().backward()
        passes.append([found.detach(), *gradients(executor)])
    for one, other in zip(*passes, strict=True):
        assert torch.equal(one, other)


def gradients(executor: TorchExecutor) -> list[torch.Tensor]:
    """Of all parameters, which have none afterwards."""
    found = []
    for _, parameter in executor.program.named_parameters():
        found.append(parameter.grad)
        parameter.grad = None
    return found
