"""Explained scores are those that attention computes, for every encoding and family.

The oracle is another implementation of attention: what it finds is what the explained weights make
of the values.
"""

import pytest
import torch

from ropewalk.cache.kv import KVCache
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.batch import in_order, of_one
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import (
    LinearBias,
    PositionVectors,
    asks_keys,
    asks_query,
    by_content,
    embeds,
    forgets,
    rotates,
    stored_gates,
)
from ropewalk.model.encodings.common.rotary import rotate_pairs
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.inspect.scores import Looked, explain, layers_of, program_of
from ropewalk.model.layers.executor import Pass, TorchExecutor
from ropewalk.model.loading.checkpoints import InUse, open_checkpoint
from ropewalk.model.program import Attend, quantized
from tests.model import checkpoints, encoder_decoders
from tests.model.families import FAMILIES
from tests.model.test_parity import drawn
from tests.model.tiny import ENCODINGS, ROPE, tiny
from tests.model.tiny import program_of as program_in

CPU = torch.device("cpu")
TOKENS = [1 + n * 7 % 29 for n in range(37)]
SIZE = 16

pytestmark = pytest.mark.usefixtures("one_thread")


def attended(program, layer, tokens, kv_dtype, backend=SdpaAttention):
    """What attention over each token finds in a layer [T, heads, head_dim], and the values."""
    ops = program.prompt_ops or program.ops
    at = [i for i, op in enumerate(ops) if isinstance(op, Attend) and not op.crosses][layer]
    table = in_order(-(-len(tokens) // SIZE), SIZE)
    batch = of_one(tokens, 0, table, SIZE, wanted=1, device=CPU)
    gates = stored_gates(program.encoding, program.config)
    kv = KVCache(program.config, blocks=8, block_size=SIZE, dtype=kv_dtype, device=CPU, gates=gates)
    op, now = ops[at], Pass(batch, kv)
    found = TorchExecutor(program, backend).run(ops, range(at + 1), now, {})["y"]
    index = torch.arange(len(tokens))
    _, values = now.layer(op.layer).read(index // SIZE, index % SIZE, dtype=torch.float32)
    repeated = values.repeat_interleave(op.num_heads // op.num_kv_heads, dim=1)
    return found.view(len(tokens), op.num_heads, op.head_dim), repeated


def assert_explained(seen, query, key, found, values, tolerance, turned=2e-4):
    """A score is what was said of its parts; returns the explanation.

    turned: how far off a key may be that is rounded after it is turned.
    """
    made = torch.einsum("hk,khd->hd", seen.weights, values)
    torch.testing.assert_close(made, found[query].float(), atol=tolerance, rtol=tolerance)
    if seen.content is None:
        assert seen.why_not and seen.kind in ("embedding", "several")
    else:
        assert seen.why_not is None
        largest = float(seen.scores.abs().max())
        torch.testing.assert_close(
            seen.content + seen.position, seen.scores, atol=1e-6 * (1 + largest), rtol=1e-5
        )
    if seen.kind == "none":
        assert not seen.position.any()
    if seen.pairs:
        distance = query - key
        at = seen.still + sum(
            each.magnitudes * torch.cos(distance * each.frequency + each.phases)
            for each in seen.pairs
        )
        there = seen.scores[:, key]
        if seen.curve is None and seen.content is not None:  # nothing is added
            atol = turned * (1 + float(there.abs().max()))
            torch.testing.assert_close(at, there, atol=atol, rtol=0)
    return seen


@pytest.mark.parametrize("name", ENCODINGS)
def test_scores_of_every_encoding(name):
    program = program_in(tiny(name))
    use = InUse(None, 256, torch.float64, torch.float64, None, SIZE)
    for layer in (0, 1):
        found, values = attended(program, layer, TOKENS, torch.float64)
        looked = Looked(program, program.ops, layer, TOKENS, use)
        encoding = program.encoding.for_layer(layer)
        for query, key in ((36, 3), (20, 20), (0, 0)):
            seen = looked.explanation(query, key)
            assert_explained(seen, query, key, found, values, 1e-5)
            turns = rotates(encoding) or encoding.rotation() is not None
            bias = encoding.score_bias() is not None
            if (
                turns
                and not bias
                and seen.position is not None
                and "near" not in (program.config.encoding.options)
            ):
                at = seen.position[:, query].abs().max()  # its own key, at the same position
                assert at <= 2e-4 * (1 + float(seen.scores.abs().max()))
            biased = bias or by_content(encoding)
            acts = {
                "rotation": turns,
                "query_scale": encoding.query_scales() is not None,
                "bias": bias,
                "query_bias": asks_query(encoding),
                "content_bias": asks_keys(encoding),
                "gates": forgets(encoding),
                "embedding": embeds(program.encoding),
            }
            kinds = [kind for kind, does in acts.items() if does]
            assert seen.kind == ("several" if len(kinds) > 1 else [*kinds, "none"][0])
            assert (seen.content is None) == (layer > 0 and embeds(program.encoding))
            far = "near" in program.config.encoding.options and encoding is program.encoding
            assert bool(seen.pairs) == (turns and not far) and (seen.curve is not None) == biased
            if biased and not turns:
                by = dict(zip(seen.distances.tolist(), seen.curve.t(), strict=True))
                assert torch.equal(by[query - key], seen.position[:, key])


class Biased(RoPE):
    def score_bias(self):
        return LinearBias(2.0 ** -torch.arange(6.0))


class Placed(RoPE):
    def vectors(self):
        return PositionVectors(torch.ones(256, 24))


class Faster(RoPE):
    def tables(self, context):
        cos, sin = super().tables(2 * context)
        return cos[::2].contiguous(), sin[::2].contiguous()


class Back(RoPE):
    def rotate(self, q, k, positions, offsets):
        return super().rotate(q, k, self.max_positions - 1 - positions, offsets)


class Twice(RoPE):
    """Tables of the whole width, as other libraries have them, and a rotation that reads them."""

    def tables(self, context):
        return tuple(torch.cat((table, table), dim=1) for table in super().tables(context))

    def rotate(self, q, k, positions, offsets):
        cos, sin = (table[positions, : self.width // 2] for table in (self.cos, self.sin))
        return rotate_pairs(q, cos, sin, self.layout), rotate_pairs(k, cos, sin, self.layout)


def explained(kind, monkeypatch):
    """What is said of a class of one's own."""
    monkeypatch.setitem(ENCODINGS, "own", EncodingSpec(f"{__name__}:{kind.__name__}", ROPE))
    program = program_in(tiny("own"))
    use = InUse(None, 256, torch.float64, torch.float64, None, SIZE)
    found, values = attended(program, 0, TOKENS, torch.float64)
    seen = Looked(program, program.ops, 0, TOKENS, use).explanation(36, 3)
    return assert_explained(seen, 36, 3, found, values, 1e-5)


@pytest.mark.parametrize(("kind", "told"), [(Faster, True), (Back, False), (Twice, True)])
def test_a_class_of_ones_own_that_turns_otherwise(kind, told, monkeypatch):
    """The speeds are those at which it turns, not those that it inherits."""
    seen = explained(kind, monkeypatch)
    assert (seen.kind, bool(seen.pairs)) == ("rotation", told)


@pytest.mark.parametrize("kind", [Biased, Placed])
def test_an_encoding_that_does_several_things(kind, monkeypatch):
    """A turn and a bias add up; what a turn makes of positions in embeddings has no parts."""
    seen = explained(kind, monkeypatch)
    assert seen.kind == "several" and seen.pairs
    assert (seen.content is None) == (kind is Placed) == bool(seen.why_not)


def test_what_a_position_adds_where_it_is_added_to_the_embedding():
    """In layer 0, by whose position it is; here with an RMSNorm alone before the scores."""
    program = program_in(tiny("learned"))
    use = InUse(None, 256, torch.float64, torch.float64, None, SIZE)
    seen = Looked(program, program.ops, 0, TOKENS, use).explanation(36, None)
    weights, config = program.weights, program.config
    embedded = weights["embed.weight"][TOKENS]
    vectors = program.encoding.vectors().table[: len(TOKENS)].double()
    size = ((embedded + vectors).square().mean(dim=1, keepdim=True) + config.norm_eps).sqrt()
    terms = {}
    for of, x in (("content", embedded), ("position", vectors)):
        made = x / size * weights["layers.0.attention_norm.weight"]
        made = made @ weights["layers.0.attention.qkv.weight"].t()
        q, k, _ = made.view(len(TOKENS), -1, config.head_dim).split((6, 2, 2), dim=1)
        terms[of] = q[36], k.repeat_interleave(3, dim=1)
    for name, (of_q, of_k) in {
        "query": ("position", "content"),
        "key": ("content", "position"),
        "both": ("position", "position"),
    }.items():
        found = torch.einsum("hd,khd->hk", terms[of_q][0], terms[of_k][1]) * config.head_dim**-0.5
        torch.testing.assert_close(seen.terms[name], found.float(), atol=1e-4, rtol=1e-4)
    assert seen.position.abs().max() > 0.1
    for limit, possible in (
        ({"qkv_clip": 0.1}, False),
        ({"qkv_clip": 1e3}, True),
        ({"score_cap": 1e3}, False),
    ):  # what is clamped is no sum
        program = program_in(tiny("learned", **limit))
        seen = Looked(program, program.ops, 0, TOKENS, use).explanation(36, None)
        assert (seen.terms is not None) == (seen.why_not is None) == possible


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_of_every_family(name, tmp_path):
    """From a checkpoint, whose weights are read when they are needed."""
    row = FAMILIES[name]
    folder = checkpoints.save(drawn(row.config), tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    context = row.context or checkpoint.config.trained_context
    use = InUse(checkpoint, context, torch.float32, torch.float32, None, SIZE)
    program = checkpoints.loaded(checkpoint, context=context).executor.program
    for layer in {0, checkpoint.config.num_layers - 1}:
        found, values = attended(program, layer, TOKENS, torch.float32)
        seen = assert_explained(explain(use, TOKENS, layer, 36, 5), 36, 5, found, values, 1e-4)
        assert (seen.content is None) == (layer > 0 and seen.kind == "embedding")


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_scores_of_an_encoder(name, tmp_path):
    config = getattr(encoder_decoders, name)()
    folder = checkpoints.save(encoder_decoders.random_model(config), tmp_path / "model")
    use = InUse(open_checkpoint(folder), 64, torch.float32, torch.float32, None, SIZE)
    program = program_of(use)
    layer = layers_of(program.config) - 1
    found, values = attended(program, layer, TOKENS, torch.float32)
    seen = assert_explained(explain(use, TOKENS, layer, 9, 30), 9, 30, found, values, 1e-4)
    assert not seen.causal and seen.weights[:, 10:].all() and seen.kind == "bias"
    assert seen.distances.tolist() == list(range(-63, 64))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_those_of_weights_and_caches_as_they_are_served(dtype, bits, kv_dtype, tmp_path):
    folder = checkpoints.save(drawn(FAMILIES["llama-tied"].config), tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    kv_dtype = dtype if kv_dtype is torch.float32 else kv_dtype
    use = InUse(checkpoint, 64, dtype, kv_dtype, bits, SIZE)
    program = checkpoints.loaded(checkpoint, dtype, context=64).executor.program
    program = program if bits is None else quantized(program, bits)
    # The other implementation rounds more where there are fewer bits.
    exact = dtype is torch.float32
    backend, loose = (SdpaAttention, 1e-4) if exact else (ReferenceAttention, 0.02)
    found, values = attended(program, 1, TOKENS, kv_dtype, backend)
    turned = 2e-4 if kv_dtype is torch.float32 else 0.02
    assert_explained(explain(use, TOKENS, 1, 36, 5), 36, 5, found, values, loose, turned)
