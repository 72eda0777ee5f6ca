"""Decode steps over fixed buffers equal those that are computed as they come."""

import random
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from ropewalk.cache.kv import KVCache
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.batch import Cross
from ropewalk.model.config import Experts
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import create, freeze_all, stored_gates
from ropewalk.model.kernels.graphs.cuda_graph import CudaGraphs
from ropewalk.model.kernels.graphs.replay import (
    CROWDED,
    SHORTEST,
    Bucket,
    ReplayedDecoder,
    buckets,
)
from ropewalk.model.kernels.triton import attention, launches
from ropewalk.model.kernels.triton.attention import TritonAttention
from ropewalk.model.kernels.triton.executor import TritonExecutor
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.recipes import allocate, program
from tests.cache.shape import Shape
from tests.model import encoder_decoders
from tests.model.attention.triton_here import TritonHere
from tests.model.checkpoints import save
from tests.model.paths import BLOCK, VOCABULARY, tokens
from tests.model.running import Running, make_batch, new_cache
from tests.model.test_contract import EXACT, KINDS, ROUNDED, WINDOWS, check_path, even, exactly
from tests.model.tiny import CONFIG, CONTEXT, ENCODINGS, IN_KERNELS, in_torch, parameters_of, tiny
from tests.products import combined

BACKENDS = {"reference": ReferenceAttention, "sdpa": SdpaAttention}
META = torch.device("meta")


pytestmark = pytest.mark.usefixtures("one_thread")


class Replaying:
    """A decoder that replays what it can, over whichever cache it is called with.

    To replay is here to call the decoder on a bucket's buffers.
    """

    def __init__(self, decoder, sizes=((1, 20), (2, 20), (2, CONTEXT), (4, CONTEXT))):
        self.decoder = decoder
        self.config, self.encoding = decoder.config, decoder.encoding
        self.dtype, self.device, self.gates = decoder.dtype, decoder.device, decoder.gates
        self.sizes = sizes
        self.replays, self.others = [], []  # requests of the buckets, and batches
        self.kv = self.over = None

    def __call__(self, batch, kv):
        if self.kv is not kv:
            encoded = self.decoder.encoder_encoding is not None
            made = [Bucket(*size, kv, encoded=encoded) for size in reversed(self.sizes)]
            self.over = ReplayedDecoder(self.decoder, kv, self._other, made, self._record)
            self.kv = kv
        return self.over(batch, kv).clone()

    def _record(self, compute):
        def replay():
            logits = compute()
            self.replays.append(len(logits))
            return logits

        compute()  # as a graph would have it: the first one that is recorded is the largest
        return replay

    def _other(self, batch, kv):
        self.others.append(batch)
        return self.decoder(batch, kv)


# ---------------------------------------------------------------------- on what is right


@pytest.mark.parametrize(
    ("encoding", "backend"),
    combined(
        ENCODINGS,
        BACKENDS,
        always=lambda encoding, backend: (backend == "sdpa") == even(encoding) or encoding in KINDS,
    ),
)
def test_every_row_equals_one_uncached_pass(encoding, backend):
    """While requests end, so that rows and buckets that were in use no longer are."""
    replaying = Replaying(tiny(encoding, BACKENDS[backend], windows=WINDOWS))
    check_path(replaying, exactly(encoding), "decode")
    assert set(replaying.replays) == {2, 4}
    assert len(replaying.others) == 1


def ragged(lengths):
    """Sequences in shuffled blocks, at different bases."""
    rng = random.Random(0)
    needed = [-(-length // BLOCK) for length in lengths]
    ids = rng.sample(range(1, sum(needed) + 1), sum(needed))
    return [
        Running(tokens(rng, length), [ids.pop() for _ in range(count)], base=3 * row)
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True))
    ]


def prefilled(decoder, sequences):
    """A cache that is NaN but for all tokens of the sequences except the last of each."""
    kv = new_cache(decoder, 1 + sum(len(each.blocks) for each in sequences), BLOCK)
    for part in kv.whole:
        part.fill_(torch.nan)
    for each in sequences:
        each.computed = 0
    if work := [(each, len(each.tokens) - 1) for each in sequences if len(each.tokens) > 1]:
        decoder(make_batch(work, BLOCK), kv)
    for each in sequences:
        each.computed = len(each.tokens) - 1
    return kv


def alike(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT, equal_nan=True)


def alike_but_for_rounding(found, expected):
    """On average, as the contract measures it: a bucket's products have another number of rows."""
    assert torch.equal(found.isnan(), expected.isnan())
    assert (found - expected).nan_to_num().square().mean().sqrt() <= ROUNDED["float32"]


def check_one_step(decoder, lengths, size, close, prefill=None):
    """Computed as it comes and replayed, logits agree, and all of the cache but block 0."""
    sequences = ragged(lengths)
    kept, used = (prefilled(prefill or decoder, sequences) for _ in range(2))
    batch = make_batch([(each, 1) for each in sequences], BLOCK)
    replaying = Replaying(decoder, [size])
    plain, replayed = decoder(batch, kept), replaying(batch, used)
    assert len(replaying.replays) == 1 and not replaying.others
    assert replayed.shape == plain.shape
    close(replayed, plain)
    for part, given in zip(used.whole, kept.whole, strict=True):
        close(part[:, 1:], given[:, 1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requests", range(1, 9))
def test_every_number_of_requests_in_a_bucket(requests, backend):
    decoder = tiny("t5-materialised-per-layer", BACKENDS[backend], windows=WINDOWS)
    lengths = [17, 1, 40, 4, 5, 9, 8, 30][:requests]
    check_one_step(decoder, lengths, (8, 64), alike)


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_an_encoder_decoder(backend, tmp_path):
    """Prompts are encoded as they come; requests end, so that rows in use no longer are."""
    save(encoder_decoders.random_model(encoder_decoders.t5()), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    decoder = encoder_decoders.loaded(checkpoint, torch.float64, BACKENDS[backend])
    replaying = Replaying(decoder, [(1, 20), (2, 60), (4, 60)])
    logits = {decoder: [], replaying: []}
    for forward, found in logits.items():
        take = encoder_decoders.allocator(torch.Generator().manual_seed(0))
        rng = random.Random(0)
        requests = [
            encoder_decoders.Answering(tokens(rng, length), [0, *tokens(rng, 8)], take)
            for length in (41, 3, 17)
        ]
        kv = encoder_decoders.new_cache(decoder)
        for count in (3, 3, 2, 1, 3):
            found += encoder_decoders.step(forward, [(each, 1) for each in requests[:count]], kv)
        found += encoder_decoders.step(forward, [(each, 2) for each in requests], kv)
        found += encoder_decoders.step(forward, [(requests[1], 1)], kv)
    assert replaying.replays == [4, 2, 2, 4, 1] and len(replaying.others) == 2
    for plain, replayed in zip(*logits.values(), strict=True):
        alike(replayed, plain)


# Triton's interpreter needs milliseconds for a program.
@pytest.mark.triton
@pytest.mark.parametrize(
    "encoding", combined(KINDS, always=lambda encoding: encoding in ("table", "rope-raw-scaled"))
)
def test_programs_for_splits_that_nobody_has_end(encoding, monkeypatch):
    """A grid is its bucket's: here for four splits of keys, of which requests have up to three."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    shape = {"num_layers": 2, "windows": WINDOWS[:2], "num_heads": 3, "num_kv_heads": 1}
    if "layers" in ENCODINGS[encoding].options:
        shape["options"] = {"layers": [0]}
    decoder, prefill = (
        tiny(encoding, backend, torch.float32, **shape) for backend in (TritonHere, SdpaAttention)
    )
    check_one_step(decoder, [70, 1, 33], (4, 128), alike_but_for_rounding, prefill)


# ---------------------------------------------------------------------- which steps, and where


def step(counts, computed=5):
    """Each request's next tokens, so many."""
    sequences = [
        Running([1] * (computed + count), list(range(1, 8)), computed=computed) for count in counts
    ]
    return make_batch(list(zip(sequences, counts, strict=True)), BLOCK)


OTHERS = {
    "a chunk": replace(step([1, 2]), output_rows=torch.tensor([0, 2])),
    "chunks": step([3, 3]),
    "too many requests": step([1] * 5),
    "too long a context": step([1, 1], computed=10),
    "a row that is not wanted": replace(step([1, 1]), output_rows=torch.tensor([1])),
    "an encoded prompt": replace(step([1, 1]), cross=Cross(None, step([1, 1]))),
}


@pytest.mark.parametrize("batch", OTHERS.values(), ids=OTHERS)
def test_other_steps_are_computed_as_they_come(batch):
    replaying = Replaying(tiny("nope"), [(4, 10)])
    logits = replaying(batch, new_cache(replaying, 8, BLOCK))
    assert logits.shape == (len(batch.output_rows), VOCABULARY)
    assert replaying.others == [batch] and not replaying.replays


def encoded(counts, keys=5, new=None):
    """A step whose requests see encoded prompts of so many keys."""
    return replace(step(counts), cross=Cross(new, step([1] * len(counts), keys - 1)))


def test_which_steps_of_an_encoder_decoder_are_held():
    """Those that only decode, and whose answers and prompts are not too long."""
    bucket = Bucket(4, 10, new_cache(tiny("nope"), 8, BLOCK), encoded=True)
    assert bucket.holds(encoded([1, 1], keys=10))
    assert not bucket.holds(encoded([1, 1], keys=11))
    assert not bucket.holds(encoded([1, 2]))
    assert not bucket.holds(encoded([1, 1], new=step([3])))
    assert not bucket.holds(step([1, 1]))


def test_the_smallest_bucket_that_holds_a_step_is_replayed():
    replaying = Replaying(tiny("nope"), [(1, 8), (1, 28), (2, 8), (4, 8), (4, 28)])
    kv = new_cache(replaying, 8, BLOCK)
    for requests, computed in ((1, 7), (1, 8), (2, 7), (2, 8), (3, 7), (4, 8)):
        replaying(step([1] * requests, computed), kv)
    assert replaying.replays == [1, 1, 2, 4, 4, 4]
    assert not replaying.others


def test_only_over_the_cache_it_was_recorded_with():
    decoder = tiny("nope")
    kv, another = (new_cache(decoder, 8, BLOCK) for _ in range(2))
    over = ReplayedDecoder(decoder, kv, decoder, [Bucket(2, 20, kv)], lambda compute: compute)
    with pytest.raises(AssertionError, match="one cache"):
        over(step([1]), another)


def tensors(batch):
    made = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return {name: each for name, each in made.items() if isinstance(each, torch.Tensor)}


def test_buffers_stay_where_they_are():
    """What a graph has recorded are addresses. Nothing of the step before is left in them."""
    bucket = Bucket(4, 28, new_cache(tiny("nope"), 8, BLOCK))
    batch = bucket.batch
    before = {name: each.data_ptr() for name, each in tensors(batch).items()}
    whole = Running([7] * 20, list(range(1, 8)), computed=19, base=5)
    bucket.fill(make_batch([(whole, 1)] * 4, BLOCK))
    assert batch.block_tables.tolist() == [[1, 2, 3, 4, 5, 0, 0]] * 4
    assert batch.positions.tolist() == [24] * 4
    bucket.fill(step([1, 1]))
    assert batch.tokens.tolist() == [1, 1, 0, 0]
    assert batch.positions.tolist() == [5, 5, 0, 0]
    assert batch.offsets.tolist() == [1, 1, 0, 0]
    assert batch.slots.tolist() == [9, 9, 0, 0]
    assert batch.context_lens.tolist() == [6, 6, 0, 0]
    assert batch.block_tables.tolist() == [[1, 2, 0, 0, 0, 0, 0]] * 2 + [[0] * 7] * 2
    assert batch.block_bases.tolist() == [[0, 4, 0, 0, 0, 0, 0]] * 2 + [[0] * 7] * 2
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.output_rows.tolist() == [0, 1, 2, 3]
    assert (batch.max_query, batch.max_context) == (1, 28)
    assert {name: each.data_ptr() for name, each in tensors(batch).items()} == before


def sizes(*, blocks, max_seqs, max_context):
    kv = KVCache(Shape(1, 1, 1), blocks=blocks, block_size=16, dtype=torch.uint8, device=META)
    return [(each.requests, each.context) for each in buckets(kv, max_seqs, max_context)]


def test_sizes_of_buckets():
    """The largest first, and as large as a step may be."""
    found = sizes(blocks=100_000, max_seqs=6, max_context=5000)
    assert found == [(r, c) for r in (6, 4, 2, 1) for c in (5000, 4096, SHORTEST)]
    assert sizes(blocks=100, max_seqs=1, max_context=70) == [(1, 70)]


def test_no_bucket_of_long_contexts_is_much_larger_than_the_cache():
    assert sizes(blocks=1024 // CROWDED, max_seqs=16, max_context=8193) == [
        *[(16, 1024), (8, 1024), (4, 4096), (4, 1024), (2, 4096), (2, 1024)],
        *[(1, 8193), (1, 4096), (1, 1024)],
    ]
    assert sizes(blocks=64, max_seqs=2, max_context=1024) == [(2, 1024), (1, 1024)]


# ----------------------------------------------------------------- what cannot be recorded


class NoKernel:
    """In the place of a Triton kernel, which takes no tensors without values."""

    def __getitem__(self, grid):
        assert all(type(each) is int for each in grid)
        return lambda *given, **named: None


@pytest.fixture
def no_kernels(monkeypatch):
    names = ("attend", "merge", "store", "add_norm", "gate", "linear", "expert", "forget")
    none = SimpleNamespace(**dict.fromkeys(names, NoKernel()), float32=None)
    for using in (attention, launches):
        monkeypatch.setattr(using, "import_module", lambda name: none)


def on(device, encoding, backend, stored=torch.float32, **changes):
    """A decoder with uninitialised weights and a cache for it, of what is `stored`."""
    config = replace(CONFIG, encoding=ENCODINGS[encoding], windows=WINDOWS, **changes)
    made = create(config.encoding, config, CONTEXT, device)
    gates = stored_gates(made, config)
    kv = KVCache(config, blocks=40, block_size=BLOCK, dtype=stored, device=device, gates=gates)
    weights = allocate(config, made, dtype=torch.float32, device=device)
    told = program(config, weights, made)
    if backend is TritonAttention:
        return Decoder(told, TritonExecutor(told)), kv
    return in_torch(told, backend), kv


def with_weights(decoder, encoding):
    """Those of a tiny decoder, copied."""
    own = parameters_of(decoder)
    for name, values in parameters_of(tiny(encoding, dtype=torch.float32, windows=WINDOWS)).items():
        own[name].copy_(values)
    freeze_all(decoder.encoding)
    return decoder


def replayed_without_values(encoding, backend, stored=torch.float32, **changes):
    """On a device that has none, whatever asks for a value raises."""
    decoder, kv = on(META, encoding, backend, stored, **changes)
    over = ReplayedDecoder(decoder, kv, decoder, [Bucket(4, 28, kv)], lambda compute: compute)
    return over(step([1, 1]), kv)


# "table" has its tensors on the CPU, wherever the model is.
@pytest.mark.parametrize(
    ("encoding", "backend", "stored"),
    combined(
        [name for name in ENCODINGS if name != "table"],
        (SdpaAttention, TritonAttention),
        (torch.float32, torch.int8),
        # Each encoding with each backend and with each of what is stored.
        always=lambda encoding, backend, stored: (
            even(encoding) == ((backend is SdpaAttention) == (stored is torch.int8))
        ),
        possible=lambda encoding, backend, stored: (
            backend is SdpaAttention or encoding in IN_KERNELS
        ),
    ),
)
def test_a_replayed_step_asks_the_device_for_nothing(encoding, backend, stored, no_kernels):
    assert replayed_without_values(encoding, backend, stored).shape == (2, VOCABULARY)


def test_the_host_need_not_know_which_experts_are_picked(no_kernels):
    experts = Experts(5, 2, normalized=True)
    found = replayed_without_values("rope", TritonAttention, experts=experts)
    assert found.shape == (2, VOCABULARY)


def test_what_asks_the_device_shows():
    with pytest.raises(NotImplementedError, match="meta"):
        replayed_without_values("rope", ReferenceAttention)


# ------------------------------------------------------------------------ on a GPU only


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's, once
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(
    "encoding", ["alibi", "t5", "t5-materialised", "rope", "rope-block-scaled"]
)
def test_cuda_graphs_compute_what_the_decoder_does(encoding):
    """In any order, though all work in the same memory; and nobody waits for the device."""
    device = torch.device("cuda")
    decoder, kv = on(device, encoding, TritonAttention)
    with_weights(decoder, encoding)
    _, other = on(device, encoding, TritonAttention)
    replaying = ReplayedDecoder(decoder, kv, None, buckets(kv, 4, 200), CudaGraphs(device))
    sequences = ragged([60, 9, 33, 20])
    decoder(whole := make_batch([(each, len(each.tokens) - 6) for each in sequences], BLOCK), kv)
    decoder(whole, other)
    for each in sequences:
        each.computed = len(each.tokens) - 6
    for count in (4, 1, 3, 2, 4):
        batch = make_batch([(each, 1) for each in sequences[:count]], BLOCK)
        torch.cuda.set_sync_debug_mode("error")
        try:
            replayed = replaying(batch, kv)
        finally:  # or every test after this one would fail too
            torch.cuda.set_sync_debug_mode("default")
        assert (replayed - decoder(batch, other)).abs().max() < 1e-4
        for each in sequences[:count]:
            each.computed += 1
