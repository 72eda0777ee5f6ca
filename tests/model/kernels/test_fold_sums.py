"""The compiled checksums of stored bytes are those that the ledger defines."""

import pytest
import torch

from ropewalk.cache.kv import KVCache
from ropewalk.cache.ledger import Checksums
from tests.cache.shape import Shape

BLOCKS = 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(
    ("layers", "block_size", "heads", "width"),
    [(1, 1, 1, 1), (2, 1, 1, 3), (3, 3, 1, 1), (2, 1, 5, 9), (4, 16, 4, 64)],
)
def test_they_equal_the_definition(layers, block_size, heads, width, dtype, kernels):
    kv = KVCache(
        Shape(layers, heads, width),
        blocks=BLOCKS,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(2)
    for part in kv.whole:
        part.copy_(torch.randn(part.shape, generator=generator))
    defined, compiled = Checksums(kv), Checksums(kv, kernels.fold_sums)
    for blocks in ([3], [6, 1, 1, 4], list(range(BLOCKS))):
        assert torch.equal(compiled.of(blocks), defined.of(blocks))
    kv.layer(layers - 1).values[5].neg_()
    assert torch.equal(compiled.of([5]), defined.of([5]))
