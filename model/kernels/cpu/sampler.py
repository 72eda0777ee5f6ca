"""Picks tokens with the CPU kernels; results differ from model/sampler.py only by rounding."""

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from ropewalk.model.kernels.cpu.bindings import SUFFIXES, Kernels
from ropewalk.model.sampler import (
    FIRST_CANDIDATES,
    Ask,
    Picked,
    Sampler,
    adjusted,
    masks_of,
    note,
    taken,
)
from ropewalk.model.sampling import allows


class KernelSampler(Sampler):
    """For rows of logits on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pick(
        self, rows: Tensor, asks: Sequence[Ask], candidates: int = FIRST_CANDIDATES
    ) -> list[Picked]:
        """Like Sampler.pick, but moves to Python numbers as early as possible.

        Once a step's weights have passed through the processor's caches, a torch operation on a few
        numbers takes longer than a kernel on a whole row. Candidates always suffice.
        """
        if rows.dtype not in SUFFIXES:
            return super().pick(rows, asks, candidates)
        largest, tokens = self._kernels.largest(rows)
        drawing = [i for i, ask in enumerate(asks) if not takes(ask, tokens[i])]
        if drawing:
            asked = [asks[i] for i in drawing]
            wide = adjusted(taken(rows, drawing), asked)
            held = [at for at, ask in enumerate(asked) if ask.allowed is not None]
            for at, token in zip(held, self._allowed(wide, asked, held), strict=True):
                tokens[drawing[at]] = token
            for at, ask in enumerate(asked):
                if ask.allowed is None:
                    tokens[drawing[at]] = self._drawn(wide[at], ask)
        picked = [
            Picked(token, isfinite(value)) for token, value in zip(tokens, largest, strict=True)
        ]
        if any(ask.params.logprobs is not None for ask in asks):
            for members, scores in self.scores_of(rows, torch.tensor(tokens), asks):
                note(picked, members, scores.tolist())
        return picked

    def scores(self, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
        if rows.dtype not in SUFFIXES:
            return super().scores(rows, tokens, count)
        return self._kernels.scores(rows, tokens, count)

    def _allowed(self, wide: Tensor, asks: Sequence[Ask], held: Sequence[int]) -> list[int]:
        """Tokens for those of the rows that `allowed` restricts."""
        some = [asks[at] for at in held]
        masks = masks_of(some, wide.shape[-1])
        if masks is None:
            return []
        return self._kernels.pick_allowed(wide, held, masks, [_rule(ask) for ask in some])

    def _drawn(self, row: Tensor, ask: Ask) -> int:
        if ask.params.greedy:
            return int(row.argmax())
        return self._kernels.draw(row, ask.params, ask.uniform)


def takes(ask: Ask, largest: int) -> bool:
    """Whether the row's largest logit is what is picked: what a grammar allows is most often."""
    if ask.changes_logits or not ask.params.greedy:
        return False
    return ask.allowed is None or allows(ask.allowed, largest)


def _rule(ask: Ask) -> tuple[float, ...]:
    params = ask.params
    temperature = 0.0 if params.greedy else params.temperature
    return temperature, params.top_k, params.top_p, params.min_p, ask.uniform
