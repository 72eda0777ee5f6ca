"""Picks tokens with the CPU kernels, which differ from model/sampler.py by rounding only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.kernels.build import SUFFIXES, Kernels
from model.sampler import Ask, Sampler


class KernelSampler(Sampler):
    """For rows of logits on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.largest(rows) if rows.dtype in SUFFIXES else super().largest(rows)

    def draw(self, rows: Tensor, asks: Sequence[Ask], candidates: int) -> tuple[Tensor, Tensor]:
        rows = rows.float()
        tokens = [
            int(row.argmax())
            if ask.params.greedy
            else self._kernels.draw(row, ask.params, ask.uniform)
            for row, ask in zip(rows, asks, strict=True)
        ]
        return torch.tensor(tokens), torch.ones(len(tokens), dtype=torch.bool)
