"""Counting everything is counting tokens; what is not seen is not counted, nor is what is NaN."""

from dataclasses import replace

import pytest
import torch

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import EncodingError, Scored, create
from tests.model.tiny import CONFIG, CPU

HEADS, DIM = CONFIG.num_heads, CONFIG.head_dim


def of_layer(positions=7):
    whole = create(EncodingSpec("cope", {"positions": positions}), CONFIG, 64, CPU)
    made = whole.for_layer(1)
    made.vector.copy_(torch.randn(positions, DIM, generator=torch.Generator().manual_seed(0)))
    return made


def scored(gates, count=12):
    """Queries and keys whose scores' sigmoids are all `gates`, where they are seen."""
    q = torch.randn(HEADS, count, DIM, generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(count, count).triu(1).bool()
    scores = torch.full((HEADS, count, count), gates).logit().masked_fill(hidden, -torch.inf)
    at = torch.arange(count)
    return Scored(scores, q, torch.zeros(CONFIG.num_kv_heads, count, DIM), at, at)


def test_where_every_token_counts_distances_are_relative_keys():
    """As in arXiv 1803.02155, from 1 for the query's own token and clipped at the last."""
    encoding, seen = of_layer(), scored(1.0)
    found = encoding.content_bias(seen)
    for i in range(12):
        for j in range(i + 1):
            wanted = seen.q[:, i] @ encoding.vector[min(i - j + 1, 6)]
            torch.testing.assert_close(found[:, i, j], wanted)


def test_where_none_counts_all_keys_are_at_0():
    encoding, seen = of_layer(), scored(0.0)
    wanted = (seen.q @ encoding.vector[0])[..., None].expand(-1, -1, 12)
    torch.testing.assert_close(encoding.content_bias(seen), wanted)


def test_half_a_token_is_between_two_vectors():
    encoding, seen = of_layer(), scored(0.5)
    found = encoding.content_bias(seen)[:, 4, 2]  # three halves
    middle = (encoding.vector[1] + encoding.vector[2]) / 2
    torch.testing.assert_close(found, seen.q[:, 4] @ middle)


def test_nan_is_no_index():
    encoding, seen = of_layer(), scored(0.5)
    broken = seen.scores.index_fill(1, torch.tensor([3]), torch.nan)
    found = encoding.content_bias(replace(seen, scores=broken))
    whole = encoding.content_bias(seen)
    assert found[:, 3].isnan().all()
    assert torch.equal(found[:, [*range(3), *range(4, 12)]], whole[:, [*range(3), *range(4, 12)]])


def test_training_moves_queries_keys_and_vectors():
    encoding, seen = of_layer(), scored(0.3)
    encoding.vector.requires_grad_()
    leaves = [seen.q.requires_grad_(), seen.scores.clone().requires_grad_(), encoding.vector]
    found = encoding.content_bias(replace(seen, q=leaves[0], scores=leaves[1]))
    found.masked_fill(seen.scores == -torch.inf, 0).square().sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all() and leaf.grad.any()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"position": 3}, r"cope takes positions, but got \['position'\]"),
        ({"positions": 1}, "cope's positions must be an integer from 2"),
        ({"positions": 64.0}, "cope's positions must be an integer"),
        ({"positions": 2}, None),
        ({"positions": (1 << 22) + 1}, "cope's positions must be an integer from 2 to 4194304"),
    ],
)
def test_options(options, why):
    def make():
        return create(EncodingSpec("cope", options), replace(CONFIG, num_layers=1), 64, CPU)

    if why is None:
        make()
    else:
        with pytest.raises(EncodingError, match=why):
            make()
