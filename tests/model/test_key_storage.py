"""RoPE's key storages: what is stored in each, and that logits do not tell them apart."""

import random

import pytest
import torch

from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.kernels.cpu.attention import CpuBackend
from tests.model.paths import BLOCK, PATHS
from tests.model.running import Running, make_batch, new_cache, run_uncached
from tests.model.tiny import ENCODINGS, ROPE, WIDE_ROPE, YARN, Unchanged, on_kernels, tiny, wrapped
from tests.products import combined, pairs

TOKENS = random.Random(2).choices(range(61), k=70)
TURNING = {
    "half": {},
    "interleaved": {"layout": "interleaved", "width": 4},
    "yarn": {"scaling": YARN, "layers": [0, 2]},
}
EXACT = 1e-10
# On average over logits whose deviation is 1.8: at most 2e-6 when this was written. The largest
# difference is 2e-5, as large as between two backends with one storage.
ROUNDED = 1e-5


BACKENDS = ("reference", "sdpa", "cpu")


def with_storage(storage, backend=ReferenceAttention, dtype=torch.float64, **options):
    """The same decoder with any storage. In float64 angles are exact, as two must add up to one."""
    encoding = "rope-block" if dtype is torch.float64 else "rope"
    assert (ENCODINGS[encoding].name == WIDE_ROPE) == (dtype is torch.float64)
    return tiny(encoding, backend, dtype, options={**ROPE, **options, "storage": storage})


def computed(decoder, path):
    """Every row of logits on one path, in one order whatever the decoder."""
    paths = PATHS[path](decoder, random.Random(path))
    return torch.cat([rows for _, _, _, parts in paths for _, rows in parts])


@pytest.mark.parametrize(
    ("storage", "turning", "path", "backend"),
    combined(
        (KeyStorage.RAW, KeyStorage.BLOCK),
        TURNING,
        ("prefill", "decode", "ragged"),
        BACKENDS,
        # Random requests by random chunks: whole prompts and single rows are among them.
        always=lambda _, __, path, ___: path == "ragged",
    ),
)
def test_storages_give_the_same_logits(storage, turning, path, backend, backends):
    def difference(dtype):
        absolute, other = (
            computed(with_storage(each, backends[backend], dtype, **TURNING[turning]), path)
            for each in (KeyStorage.ABSOLUTE, storage)
        )
        return (other - absolute).double()

    assert difference(torch.float64).abs().max() <= EXACT
    assert difference(torch.float32).square().mean().sqrt() <= ROUNDED


@pairs(storage=KeyStorage, turning=TURNING, dtype=[torch.float32, torch.bfloat16])
def test_kernels_keep_the_storage(storage, turning, dtype, kernels):
    decoder = with_storage(storage, CpuBackend(kernels), dtype, **TURNING[turning])
    before = run_uncached(decoder, TOKENS)
    decoder = on_kernels(decoder, kernels)
    assert decoder.encoding.key_storage is storage
    allowed = 1e-4 if dtype is torch.float32 else 0.5  # of logits whose deviation is 1.8
    assert (run_uncached(decoder, TOKENS) - before).abs().max() < allowed


def keys_at(decoder, base):
    """Stored keys [layers, T, kv_heads, head_dim] of TOKENS from position `base` on."""
    blocks = list(range(1, 2 + len(TOKENS) // BLOCK))
    kv = new_cache(decoder, 1 + len(blocks), BLOCK)
    batch = make_batch([(Running(TOKENS, blocks, base=base), len(TOKENS))], BLOCK)
    decoder(batch, kv)
    layers = range(kv.num_layers)
    return torch.stack([kv.layer(layer).keys.flatten(0, 1)[batch.slots] for layer in layers])


def projected(decoder, base):
    """The keys that the layers project, before any encoding."""
    found = []

    class Listening(Unchanged):
        def rotate(self, q, k, positions, offsets):
            found.append(k.clone())
            return super().rotate(q, k, positions, offsets)

    listening = wrapped(decoder, Listening)
    return torch.stack([keys_at(listening, base), torch.stack(found)])


@pytest.mark.parametrize("turning", TURNING)
def test_raw_keys_are_stored_as_projected(turning):
    kept, made = projected(with_storage(KeyStorage.RAW, **TURNING[turning]), 90)
    assert torch.equal(kept, made)
    for storage in (KeyStorage.ABSOLUTE, KeyStorage.BLOCK):
        kept, made = projected(with_storage(storage, **TURNING[turning]), 90)
        assert not torch.equal(kept, made)


@pytest.mark.parametrize("turning", TURNING)
def test_keys_of_a_block_do_not_depend_on_its_base(turning):
    """Of the first layer, bit by bit; deeper ones differ by how attention before them rounds."""
    for storage, free in (
        (KeyStorage.BLOCK, True),
        (KeyStorage.RAW, True),
        (KeyStorage.ABSOLUTE, False),
    ):
        decoder = with_storage(storage, **TURNING[turning])
        here, there = keys_at(decoder, 0), keys_at(decoder, 77)
        assert torch.equal(here[0], there[0]) == free
        assert ((here - there).abs().max() < 1e-10) == free


@pytest.mark.parametrize("storage", [KeyStorage.ABSOLUTE, KeyStorage.BLOCK])
def test_a_stored_key_has_grown_once(storage):
    decoder = with_storage(storage, **TURNING["yarn"])
    kept, made = projected(decoder, 90)
    grown = kept.norm(dim=-1) / made.norm(dim=-1)
    assert decoder.encoding.magnitude > 1.1
    for layer in range(3):
        wanted = decoder.encoding.magnitude if layer in (0, 2) else 1.0
        assert torch.allclose(grown[layer], torch.full_like(grown[layer], wanted))
