"""Muon: momentum with all singular values set to about one (Jordan et al. 2024).

torch.optim.Muon works one matrix at a time and only in bfloat16, which is slow where the processor
has no bfloat16 arithmetic; this one takes all matrices of a shape at once, in any precision.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at 0, between 0.7 and 1.2 near 1
STEPS = 5
MOMENTUM = 0.95


def orthogonal(x: Tensor) -> Tensor:
    """[n, rows, columns] with rows <= columns → same singular vectors, singular values near 1."""
    a, b, c = COEFFICIENTS
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


class Muon:
    """Moves every matrix by 0.2 · sqrt(longer side) · rate along its orthogonalised momentum.

    The factor makes steps per entry as large as AdamW's (arXiv 2502.16982, section 2.2).
    """

    def __init__(
        self,
        matrices: dict[str, Sequence[Tensor]],
        *,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """matrices: by parameter, views of its separate matrices, such as queries and keys."""
        self.momenta = {name: [torch.zeros_like(m) for m in ms] for name, ms in matrices.items()}
        self._matrices = matrices
        self._weight_decay = weight_decay
        self._dtype = dtype

    @torch.no_grad()
    def step(self, gradients: dict[str, Sequence[Tensor]], rate: float) -> None:
        """gradients: in the structure of `matrices`."""
        alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, matrices in self._matrices.items():
            parts = zip(matrices, gradients[name], self.momenta[name], strict=True)
            for matrix, gradient, momentum in parts:
                momentum.lerp_(gradient, 1 - MOMENTUM)
                ahead = gradient.lerp(momentum, MOMENTUM)  # Nesterov's
                wide = ahead if ahead.shape[0] <= ahead.shape[1] else ahead.mT
                alike[tuple(wide.shape)].append((matrix, wide))
        for (_, longer), pairs in alike.items():
            updates = orthogonal(torch.stack([wide for _, wide in pairs]).to(self._dtype))
            for (matrix, _), update in zip(pairs, updates, strict=True):
                update = update if update.shape == matrix.shape else update.mT
                matrix.mul_(1 - rate * self._weight_decay)
                matrix.add_(update.to(matrix.dtype), alpha=-0.2 * longer**0.5 * rate)
