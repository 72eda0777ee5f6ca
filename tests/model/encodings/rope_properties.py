"""Properties of every rotary embedding. Each check raises AssertionError if it does not hold.

`rotate` maps rows [T, width] in float64 and their positions [T] to the rotated rows.
"""

import torch

WIDTH = 64
SPAN = 40  # positions 0 .. SPAN - 1 can be turned


def rows(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def keeps_norms(rotate, magnitude=1.0):
    x = rows(SPAN)
    grown = rotate(x.clone(), torch.arange(SPAN)).norm(dim=-1) / x.norm(dim=-1)
    assert (grown - magnitude).abs().max() < 1e-6, f"norms grow by {grown.max():.3g}"


def keeps_angles(rotate, magnitude=1.0):
    """Orthogonal up to the magnitude: at one position all inner products stay."""
    x = rows(20)
    turned = rotate(x.clone(), torch.full((20,), 7))
    before, after = x @ x.T, turned @ turned.T
    assert (after - before * magnitude**2).abs().max() < 1e-4


def depends_on_distance_alone(rotate):
    q, k = rows(1), rows(1, seed=2)

    def score(query, key):
        return (rotate(q.clone(), at(query)) * rotate(k.clone(), at(key))).sum()

    for far in (13, 21, SPAN - 1):
        assert (score(3, 1) - score(far, far - 2)).abs() < 1e-3, f"2 apart at 1 and at {far - 2}"
    assert (score(3, 1) - score(4, 1)).abs() > 1e-3, "a further key scores the same"


def leaves_position_zero(rotate):
    x = rows(1)
    assert torch.allclose(rotate(x.clone(), at(0)), x, atol=1e-12), "position 0 is turned"


def leaves_its_input(rotate):
    x = rows(SPAN)
    before = x.clone()
    rotate(x, torch.arange(SPAN))
    assert torch.equal(x, before), "the input was changed in place"


def decodes_one_at_a_time(rotate):
    """A token is rotated the same alone, at its position, as together with all others."""
    x = rows(SPAN)
    together = rotate(x.clone(), torch.arange(SPAN))
    for position in (0, 1, 17, SPAN - 1):
        alone = rotate(x[position : position + 1].clone(), at(position))
        assert torch.allclose(alone[0], together[position], atol=1e-12)


def at(position):
    return torch.tensor([position])
