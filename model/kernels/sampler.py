"""Picks tokens with the CPU kernels, which differ from model/sampler.py by rounding only."""

from torch import Tensor

from model.kernels.build import SUFFIXES, Kernels
from model.sampler import Sampler
from model.sampling import SamplingParams


class KernelSampler(Sampler):
    """For rows of logits on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.largest(rows) if rows.dtype in SUFFIXES else super().largest(rows)

    def draw(self, row: Tensor, params: SamplingParams, uniform: float) -> int:
        return self._kernels.draw(row, params, uniform)
