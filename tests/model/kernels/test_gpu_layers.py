"""Whole decoders with Triton's kernels and by their own modules; interpreted without a GPU."""

from dataclasses import replace

import pytest
import torch

from ropewalk.model.architectures import gemma2
from ropewalk.model.architectures.olmo2 import norm_of_added
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.config import EncodingSpec
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.kernels.graphs.replay import Bucket
from ropewalk.model.kernels.triton.executor import AddNorm, Around, TritonExecutor
from ropewalk.model.kernels.triton.launches import FEW_ROWS
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.program import Linear, quantized
from tests.model import encoder_decoders
from tests.model.attention.triton_here import DEVICE
from tests.model.checkpoints import save
from tests.model.kernels.test_cpu_executor import in_any_order
from tests.model.running import Running, full_of_nan, make_batch, new_cache
from tests.model.tiny import ENCODINGS, in_torch, on_triton, program_of, tiny
from tests.products import combined

pytestmark = pytest.mark.triton

SHAPES = {
    "gated": {},
    "plain": {"gated": False, "activation": "gelu", "mlp_bias": True, "norm": "layer"},
    "biased": {"qkv_bias": True, "out_bias": True, "norm": "layer", "norm_bias": False},
    "norms of queries": {"qk_norm": True},
    "heads as wide as the stream": {"qk_norm": True, "hidden_size": 8},
    "parallel": {"block": "parallel", "logit_scale": 0.3},
    "norms last": {"block": "post_norm"},
    "norms around": {"block": gemma2.block, "qk_norm": True, "score_cap": 0.3, "logit_cap": 0.9},
    "in any order": {"block": in_any_order},
    "in 8 bits": {},
    # All queries are as wide as the residual stream, all keys are not.
    "norms of what is added": {"block": norm_of_added, "hidden_size": 48}
    | {"qk_norm": True, "qk_norm_whole": True},
}


LAYERS = 2  # so that a layer follows another; the interpreter takes its time for each


def decoders(encoding, shape, dtype=torch.float32):
    """The same decoder in torch and in Triton."""
    changes = SHAPES[shape] | {"num_layers": LAYERS, "windows": (None,) * LAYERS}
    changes["options"] = {"layers": [0]} if encoding == "rope-scaled" else {}
    program = program_of(tiny(encoding, dtype=dtype, device=DEVICE, **changes))
    if shape == "in 8 bits":
        program = quantized(program)
    return [in_torch(program), Decoder(program, TritonExecutor(program))]


def kinds(decoder, rows=1):
    """The kinds of ops, fused and not, for so many rows."""
    executor = decoder.executor
    every = (steps(rows) for steps in (executor._all_rows, executor._logits[1]))
    return [type(step.op) for steps in every for step in steps]


def steps():
    """Batches of two requests: with many rows, of which some are wanted, and with few."""
    long, short = Running(list(range(18)), [3, 7]), Running([5, 6, 7], [2])
    many = make_batch([(long, 15), (short, 2)], 16)  # as few as are many
    long.computed, short.computed = 15, 2
    few = make_batch([(long, 3), (short, 1)], 16)
    assert len(few.tokens) <= FEW_ROWS < len(many.tokens)
    return [
        replace(many, output_rows=torch.tensor([14, 16])),
        replace(few, output_rows=torch.tensor([2, 3])),
    ]


KINDS = (
    *("rope", "rope-scaled", "rope-raw", "rope-by-layer", "rope-block"),
    *("alibi", "t5", "learned", "nope"),
)


# An encoding is embedded, rotated or added in ops of its own, whatever the others are: each of them
# with one of the shapes, and by turns with hidden states of many rows or of few.
@pytest.mark.parametrize(
    ("encoding", "shape", "hidden"),
    combined(
        KINDS,
        SHAPES,
        [(True, False), (False, True)],
        always=lambda encoding, shape, hidden: (
            KINDS.index(encoding) == list(SHAPES).index(shape) % len(KINDS)
            and hidden[KINDS.index(encoding) % 2]
        ),
    ),
)
def test_a_decoder_computes_what_its_modules_do(encoding, shape, hidden):
    plain, fast = decoders(encoding, shape)
    few, many = kinds(fast), kinds(fast, FEW_ROWS + 1)
    assert few.count(Around) == 1 + 4 * LAYERS and Linear not in few
    assert Around not in many or SHAPES[shape].get("gated", True)
    assert AddNorm in many
    kept, used = (full_of_nan(new_cache(decoder, 8, 16)) for decoder in (plain, fast))
    for batch in map(lambda each, hidden: replace(each, hidden=hidden), steps(), hidden):
        exact, found = plain(batch, kept), fast(batch, used)
        assert found.shape == exact.shape
        assert (found - exact).abs().max() <= 1e-4 * exact.abs().max()
    for part, given in zip(used.whole, kept.whole, strict=True):
        assert torch.equal(part.isnan(), given.isnan())
        assert (part - given).nan_to_num().abs().max() < 1e-4


class InColumns(PositionalEncoding):
    """What it returns lies column by column in memory."""

    def embed(self, x, positions):
        return (x.T.contiguous() + positions / 256).T


@pytest.mark.parametrize("shape", ["gated", "norms last"])
def test_the_embedded_tokens_may_lie_anyhow(shape, monkeypatch):
    monkeypatch.setitem(ENCODINGS, "in columns", EncodingSpec(f"{__name__}:InColumns", {}))
    plain, fast = decoders("in columns", shape)
    kept, used = (new_cache(decoder, 8, 16) for decoder in (plain, fast))
    for batch in steps():
        exact, found = plain(batch, kept), fast(batch, used)
        assert (found - exact).abs().max() <= 1e-4 * exact.abs().max()


def test_float16_leaves_linear_layers_to_torch():
    _, fast = decoders("rope", "gated", torch.float16)
    assert Linear in kinds(fast)
    kv = new_cache(fast, 8, 16)
    assert all(fast(batch, kv).isfinite().all() for batch in steps())


def test_unused_rows_of_a_bucket_leave_the_others_alone():
    """They store what they compute in block 0."""
    plain, fast = decoders("rope", "gated")
    kept, used = (full_of_nan(new_cache(fast, 8, 16)) for _ in range(2))
    for part in (*kept.whole, *used.whole):
        part[:, 0] = 0
    sequence = Running(list(range(18)), [3, 7])
    for kv in (kept, used):
        plain(make_batch([(sequence, 17)], 16), kv)
    sequence.computed = 17
    few = make_batch([(sequence, 1)], 16)
    bucket = Bucket(4, 64, used)
    bucket.fill(few)
    found, exact = fast(bucket.batch, used)[:1], fast(few, kept)
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()
    for part, given in zip(used.whole, kept.whole, strict=True):
        torch.testing.assert_close(part[:, 1:], given[:, 1:], equal_nan=True)


def test_encoder_decoders(tmp_path):
    """Gated and not; many rows of a prompt and of an answer, and few of an answer."""
    for layers, kind in ((1, encoder_decoders.t5), (LAYERS, encoder_decoders.t5_v11)):
        model = encoder_decoders.random_model(kind(num_layers=1, num_decoder_layers=layers))
        checkpoint = open_checkpoint(save(model, tmp_path / str(layers)))
        logits = []
        plain = encoder_decoders.loaded(checkpoint, backend=ReferenceAttention, device=DEVICE)
        for decoder in (plain, on_triton(plain)):
            take = encoder_decoders.allocator(torch.Generator().manual_seed(0))
            request = encoder_decoders.Answering([5, 6, 7] * 6, range(20), take)
            kv = encoder_decoders.new_cache(decoder)
            for count in (FEW_ROWS + 1, 2, 1):
                logits += encoder_decoders.step(decoder, [(request, count)], kv)
        for exact, found in zip(logits[:3], logits[3:], strict=True):
            assert (found - exact).abs().max() <= 1e-4 * exact.abs().max()
