"""8-bit weights: near the given ones, and nothing else rounded."""

import torch

from model.attention.reference import ReferenceAttention
from model.linear import ROUNDED_AT_ONCE, Int8Linear, Linear, quantize, rounded_rows
from tests.model.running import run_uncached
from tests.model.tiny import CPU, tiny


def test_rows_are_within_half_a_step() -> None:
    matrix = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-6], [1.0], [30.0], [0.0], [1.0], [1e4], [1.0]]
    )
    packed, scale = rounded_rows(matrix)
    assert packed.dtype == torch.int8
    error = (packed.float() * scale[:, None] - matrix).abs()
    assert (error <= scale[:, None] * 0.5001).all()
    assert torch.equal(scale[:3] * 127, matrix[:3].abs().amax(dim=1))


def test_large_matrices_are_rounded_row_by_row_and_left_as_they_are() -> None:
    rows = 2 * ROUNDED_AT_ONCE // 700 + 3
    matrix = torch.randn(rows, 700, generator=torch.Generator().manual_seed(2))
    before = matrix.clone()
    packed, scale = rounded_rows(matrix)
    for row in (0, 1, ROUNDED_AT_ONCE // 700 - 1, ROUNDED_AT_ONCE // 700, rows - 1):
        alone, of_row = rounded_rows(matrix[row : row + 1])
        assert torch.equal(packed[row], alone[0])
        assert scale[row] == of_row
    assert torch.equal(matrix, before)


def test_the_rounded_weights_are_multiplied_exactly() -> None:
    drawn = torch.Generator().manual_seed(1)
    layer = Linear(40, 9, bias=True, dtype=torch.float64, device=CPU)
    layer.weight.copy_(torch.randn(9, 40, generator=drawn))
    layer.bias.copy_(torch.randn(9, generator=drawn))
    rounded, scale = rounded_rows(layer.weight)
    x = torch.randn(5, 40, generator=drawn, dtype=torch.float64)
    expected = x @ (rounded.double() * scale.double()[:, None]).T + layer.bias
    assert (Int8Linear(layer)(x) - expected).abs().max() < 1e-5  # scales are float32


def test_sums_fit_where_the_answer_fits() -> None:
    """127 · 200 · 64 is more than float16 holds."""
    layer = Linear(64, 3, dtype=torch.float16, device=CPU)
    layer.weight.copy_(torch.tensor([[0.05], [-3.0], [1e-4]]).expand(3, 64))
    x = torch.full((2, 64), 200.0, dtype=torch.float16)
    exact = x.double() @ layer.weight.double().T
    assert ((Int8Linear(layer)(x) - exact).abs() <= 2e-3 * exact.abs()).all()


def test_every_linear_layer_is_rounded_and_the_model_computes_nearly_the_same() -> None:
    decoder = tiny("rope", ReferenceAttention, torch.float32)
    tokens = list(range(30))
    before = run_uncached(decoder, tokens)
    quantize(decoder)
    assert not [m for m in decoder.modules() if isinstance(m, Linear)]
    after = run_uncached(decoder, tokens)
    assert 0 < (after - before).square().mean().sqrt() < 0.1 * before.std()
