"""How an encoding rotates queries and keys, found by experiment: pairs, speeds, scores by distance.

Calls only an encoding's `rotate`, and applies the `rotation` that it leaves to attention, so it
works for any encoding. Only numbers, no pictures.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import PositionalEncoding

SEED = 0


@dataclass(frozen=True, slots=True)
class PairRotation:
    """Pairs of coordinates that rotate by a fixed angle per position, fastest first."""

    pairs: tuple[tuple[int, int], ...]  # the two coordinates of each
    speeds: Tensor  # [pairs] float64, radians per position; the sign gives the direction
    magnitude: float  # factor on rotated coordinates
    still: int  # coordinates of the head that are not rotated


def find_pair_rotation(
    encoding: PositionalEncoding, config: ModelConfig, context: int
) -> PairRotation | None:
    """None when the hooks do anything but rotate pairs at fixed speeds, the same in every head.

    context: how many positions the encoding was built for; one shows no speed.
    """
    if context < 2:
        return None
    once = _unit_vectors_at(encoding, config, 1)[0][:, 0].double()
    across = once - torch.diag(once.diag())
    partner = across.abs().argmax(dim=1)
    moved = across.abs().amax(dim=1) > 0
    pairs = [
        (i, int(j))
        for i, j in enumerate(partner)
        if moved[i] and moved[j] and i < j and partner[j] == i
    ]
    if 2 * len(pairs) != int(moved.sum()) or not pairs:
        return None
    speeds = torch.stack([torch.atan2(once[i, j], once[i, i]) for i, j in pairs])
    order = speeds.abs().argsort(descending=True)
    i, j = pairs[0]
    found = PairRotation(
        tuple(pairs[k] for k in order),
        speeds[order],
        float(torch.hypot(once[i, i], once[i, j])),
        config.head_dim - 2 * len(pairs),
    )
    checked = (2, 7, 60, context - 1)
    if all(_agrees(found, encoding, config, at) for at in checked if at < context):
        return found
    return None


def _agrees(
    found: PairRotation, encoding: PositionalEncoding, config: ModelConfig, at: int
) -> bool:
    """Whether these pairs and speeds reproduce what the hooks do at position `at`."""
    expected = torch.eye(config.head_dim, dtype=torch.float64)
    for (i, j), speed in zip(found.pairs, found.speeds, strict=True):
        cos, sin = torch.cos(at * speed), torch.sin(at * speed)
        expected[i, i] = expected[j, j] = found.magnitude * cos
        expected[i, j], expected[j, i] = found.magnitude * sin, -found.magnitude * sin
    # float32 angles are off by up to at · 2^-24, and so is the estimated speed times `at`.
    allowed = 1e-4 + at * 4e-7
    return all(
        bool((seen - expected[:, None].float()).abs().max() < allowed)
        for seen in _unit_vectors_at(encoding, config, at)
    )


def _unit_vectors_at(
    encoding: PositionalEncoding, config: ModelConfig, at: int
) -> tuple[Tensor, Tensor]:
    """As query and as key, [head_dim, heads, head_dim]: row i is unit vector i as it is scored."""
    rows = torch.eye(config.head_dim)[:, None]
    positions = torch.full((config.head_dim,), at)
    offsets = positions % BLOCK_SIZE
    q, k = rows.repeat(1, config.num_heads, 1), rows.repeat(1, config.num_kv_heads, 1)
    q, k = encoding.rotate(q, k, positions, offsets)
    left = encoding.rotation()
    if left is not None:
        q, k = left.queries(q, positions), left.keys(k, positions, offsets)
    return q, k


def equal_vectors(found: PairRotation, head_dim: int, distances: Tensor) -> Tensor:
    """[distances] float64: q · k / (|q| |k|), averaged over random q = k. The same as for vectors
    of ones: the mean of the cosines of all angles.
    """
    cosines = torch.cos(distances.double()[:, None] * found.speeds).sum(dim=1)
    return (2 * found.magnitude**2 * cosines + found.still) / head_dim


def envelope(values: Tensor) -> Tensor:
    """[distances]: the largest magnitude from each distance on."""
    return values.abs().flip(0).cummax(0).values.flip(0)


def bound(found: PairRotation, distances: Tensor) -> Tensor:
    """[distances] float64: the factor of RoFormer's upper bound that depends on the distance.

    The mean over j of |S_j|, the partial sums of e^(i · distance · speed)
    (arXiv 2104.09864, section 3.4.3).
    """
    angles = distances.double()[:, None] * found.speeds
    real, imaginary = torch.cos(angles).cumsum(1), torch.sin(angles).cumsum(1)
    return torch.hypot(real, imaginary).mean(dim=1)


def random_scores(found: PairRotation, head_dim: int, distances: Tensor, count: int) -> Tensor:
    """[count, distances] float64: q · k / sqrt(head_dim) of independent standard normal q and k."""
    generator = torch.Generator().manual_seed(SEED)
    q, k = torch.randn(2, count, head_dim, generator=generator, dtype=torch.float64)
    first, second = torch.tensor(found.pairs).t()
    # A key `distance` before the query is rotated by that much less.
    angles = -found.speeds[:, None] * distances
    straight = q[:, first] * k[:, first] + q[:, second] * k[:, second]
    crossed = q[:, second] * k[:, first] - q[:, first] * k[:, second]
    scores: Tensor = (
        straight @ torch.cos(angles) + crossed @ torch.sin(angles)
    ) * found.magnitude**2
    still = [i for i in range(head_dim) if i not in set(first.tolist() + second.tolist())]
    scores += (q[:, still] * k[:, still]).sum(dim=1, keepdim=True)
    return scores / math.sqrt(head_dim)
