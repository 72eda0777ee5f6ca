"""The checks of the contract can fail: each planted mistake breaks those named beside it.

A mistake is one change to a decoder that is right, which passes the same check without it. What
some checks cannot see is stated too: it is why there is more than one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.base import DenseBias
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import ContentBias, KeyBias, LinearBias, QueryBias, TableBias
from tests.model import oracle
from tests.model.paths import BLOCK
from tests.model.test_contract import (
    EXACT,
    ROUNDED,
    WINDOWS,
    check_oracle,
    check_path,
    check_rounding,
    exactly,
)
from tests.model.tiny import ENCODINGS, Unchanged, in_torch, program_of, tiny, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")

GROSS = 0.001  # what every mistake exceeds, and no rounding
CACHED = ("decode", "prefix hit", "preempted")  # paths with steps of one row for each request


@dataclass(frozen=True)
class Mistake:
    plant: Callable[[str], Decoder]  # an encoding's name → a broken decoder
    encodings: Sequence[str]
    found_by: Sequence[str] = ("oracle",)
    missed_by: Sequence[str] = ()


# ------------------------------------------------------------------- where a mistake can sit


def right(encoding, backend=ReferenceAttention, dtype=torch.float64, **more):
    return tiny(encoding, backend, dtype, windows=WINDOWS, **more)


def in_options(**options):
    """Built with other options than the config says, which is what the oracle reads."""

    def plant(encoding):
        decoder = right(encoding, options=options)
        told = replace(program_of(decoder), config=right(encoding).config)
        return in_torch(told)

    return plant


class Backend:
    """The reference, told another spec, cache, batch, bias or rotation."""

    name = "changed"

    def __init__(self, *, spec=None, kv=None, batch=None, bias=None, rotation=None):
        self.spec = spec or (lambda spec: spec)
        self.kv = kv or (lambda kv: kv)
        self.batch = batch or (lambda batch: batch)
        self.bias = bias or (lambda bias, batch: bias)
        self.rotation = rotation or (lambda rotation: rotation)

    def __call__(self, spec):
        attend = ReferenceAttention(self.spec(spec))
        return lambda q, kv, batch, bias, rotation: attend(
            q, self.kv(kv), self.batch(batch), self.bias(bias, batch), self.rotation(rotation)
        )


def in_attention(**changes):
    return lambda encoding: right(encoding, Backend(**changes))


def in_batch(change):
    """Before the decoder, so that every hook and kernel sees it."""

    def plant(encoding):
        decoder = right(encoding)
        execute = decoder.executor
        decoder.executor = lambda batch, kv, watch: execute(change(batch), kv, watch)
        return decoder

    return plant


def in_layers(wrapper):
    return lambda encoding: wrapped(right(encoding), wrapper)


# ------------------------------------------------------------------------------- mistakes


class QueriesOneOff(Unchanged):
    """Alone: with the keys off as well, a relative encoding is right again."""

    def rotate(self, q, k, positions, offsets):
        _, k = self.inner.rotate(q, k, positions, offsets)
        return self.inner.rotate(q, k, positions + 1, offsets)[0], k


class CoarseAngles(Unchanged):
    """Positions, frequencies and their products in bfloat16."""

    def rotate(self, q, k, positions, offsets):
        rule = oracle.Rotary(self.config, {}, torch.bfloat16)

        def turned(x):
            heads = [rule.turned(self.layer, head, positions) for head in x.unbind(1)]
            return torch.stack(heads, dim=1)

        return turned(q), turned(k)


def embedded_one_off(encoding):
    decoder = right(encoding)
    embed = decoder.encoding.embed
    decoder.encoding.embed = lambda x, positions: embed(x, positions + 1)
    return decoder


def by_row(batch):
    """Positions counted within the step, and keys from 0: right for whole prompts."""
    counts = batch.query_starts.diff()
    first = batch.query_starts[:-1].repeat_interleave(counts)
    return replace(
        batch,
        positions=torch.arange(len(batch.positions)) - first,
        block_bases=batch.block_bases - batch.block_bases[:, :1],
    )


def late_when_cached(batch):
    """One position short, where each request has one row."""
    return batch if batch.max_query > 1 else replace(batch, positions=batch.positions - 1)


def without_last_key(batch):
    """Past the first block."""
    beyond = (batch.context_lens > BLOCK).long()
    return replace(batch, context_lens=batch.context_lens - beyond)


@dataclass(frozen=True)
class TopLeft:
    """A linear bias whose distances are counted from the row index, without their sign."""

    bias: LinearBias

    def between(self, queries, keys):
        rows, columns = torch.arange(len(queries)), torch.arange(len(keys))
        return self.bias.at((rows[:, None] - columns).abs())


def per_head(change):
    """A bias whose values [heads, ...] are changed."""

    def changed(bias, batch):
        if isinstance(bias, LinearBias):
            return LinearBias(change(bias.slopes))
        if isinstance(bias, KeyBias):
            return KeyBias(change(bias.table))
        if isinstance(bias, DenseBias):
            return DenseBias(change(bias.values))
        if isinstance(bias, QueryBias):
            return QueryBias(change(bias.table))
        return TableBias(change(bias.table), bias.zero)

    return changed


def dropped(bias, batch):
    return None


def dropped_when_cached(bias, batch):
    return None if batch.max_query == 1 else bias


def one_further(bias, batch):
    return TableBias(bias.table, bias.zero + 1)


def rows_one_off(bias, batch):
    return DenseBias(bias.values.roll(1, dims=1))


def other_rows(bias, batch):
    return QueryBias(bias.table.roll(1, dims=1))


def of_content(change):
    """A bias of queries and keys that is given others."""
    return lambda bias, batch: ContentBias(lambda seen: bias.of(change(seen)))


def all_seen(seen):
    return replace(seen, scores=seen.scores.clamp(min=-1))


def queries_of_other_heads(seen):
    return replace(seen, q=seen.q.flip(-3))


def keys_one_later(seen):
    return replace(seen, key_positions=seen.key_positions + 1)


def keys_of_other_tokens(seen):
    return replace(seen, keys=seen.keys.roll(1, dims=-2))


def keys_one_off(bias, batch):
    return DenseBias(bias.values.roll(1, dims=2))


def by_longest_context(bias, batch):
    """Rows that end where the longest request's do: right for a request by itself."""
    lengths = batch.context_lens.repeat_interleave(batch.query_starts.diff())
    late = (batch.max_context - lengths).tolist()
    moved = [row.roll(by, dims=1) for row, by in zip(bias.values.unbind(1), late, strict=True)]
    return DenseBias(torch.stack(moved, dim=1))


def no_rotation(rotation):
    return None


def other_storage(rotation):
    """Keys turned by their base for their position, or the other way round."""
    return rotation and replace(
        rotation,
        storage=KeyStorage.RAW if rotation.storage is KeyStorage.BLOCK else KeyStorage.BLOCK,
    )


def not_grown(rotation):
    """Queries by YaRN's factor."""
    return rotation and replace(rotation, magnitude=1.0)


def grown_again(rotation):
    return rotation and replace(rotation, magnitude=rotation.magnitude * 1.1)


def of_far(change):
    """Layers that have none are right."""
    return lambda rotation: (
        replace(rotation, far=change(rotation.far)) if rotation and rotation.far else rotation
    )


def all_near(far):
    return None


def one_later(far):
    return replace(far, start=far.start + 1)


def keys_as_near(far):
    """Their queries are turned as far keys need it."""
    return replace(far, keys=torch.arange(len(far.keys)))


def of_gates(change):
    return lambda kv: replace(kv, gates=change(kv.gates))


def ungated(spec):
    return replace(spec, gated=False)


def of_other_heads(gates):
    return gates.flip(1)


def of_next_tokens(gates):
    """Each token's key is forgotten with its own gate as well, and not with the last one's."""
    in_order = gates.transpose(0, 1).flatten(1).roll(1, dims=1)
    return in_order.view(gates.shape[1], len(gates), -1).transpose(0, 1)


def within_blocks(gates):
    """As if every block began anew."""
    return torch.cat((torch.zeros_like(gates[..., :1]), gates[..., 1:]), dim=-1)


def offsets_from_positions(batch):
    """Right while every base is a multiple of the block size."""
    return replace(batch, offsets=batch.positions % BLOCK)


def aligned_bases(batch):
    """Keys from 0 on, whatever the bases say."""
    aligned = torch.arange(batch.block_bases.shape[1]) * BLOCK
    return replace(batch, block_bases=aligned.expand_as(batch.block_bases))


def negative(values):
    return -values


def other_way(values):
    return values.flip(0)


def steepest_first(values):
    return values.sort(dim=0, descending=True).values


def divided(spec):
    return replace(spec, scale=spec.head_dim**-0.5)


def wider(spec):
    return replace(spec, window=None if spec.window is None else spec.window + 1)


ROTARY = ("rope", "rope-interleaved", "rope-partial", "rope-scaled", "rope-slowed", "rope-by-layer")
RAW = ("rope-raw", "rope-raw-scaled", "rope-raw-by-layer")
FAR = ("rope-far", "rope-far-alike")
IN_BLOCKS = ("rope-block", "rope-block-partial", "rope-block-scaled")
SLOPES = ("alibi", "alibi-rounded")
TABLES = ("t5", "t5-per-layer", "t5-table")
DENSE = ("t5-materialised", "t5-materialised-per-layer")
BIASED = (*SLOPES, *TABLES, *DENSE)
ADDED = ("learned", "sinusoidal", "sinusoidal-split")
ALL = tuple(name for name in ENCODINGS if name != "table")
MISTAKES = {
    "interleaved-for-half": Mistake(
        in_options(layout="interleaved"),
        ["rope", "rope-partial", "rope-scaled", "rope-raw", "rope-block"],
    ),
    "half-for-interleaved": Mistake(
        in_options(layout="half"), ["rope-interleaved", "rope-raw-scaled", "rope-block-partial"]
    ),
    "split-for-interleaved": Mistake(in_options(layout="split"), ["sinusoidal"]),
    "interleaved-for-split": Mistake(in_options(layout="interleaved"), ["sinusoidal-split"]),
    "too-wide": Mistake(in_options(width=8), ["rope-partial", "rope-block-partial"]),
    "scaling-ignored": Mistake(
        in_options(scaling=None),
        ["rope-scaled", "rope-slowed", "rope-raw-scaled", "rope-block-scaled"],
    ),
    "every-layer-turned": Mistake(in_options(layers=[0, 1, 2]), ["rope-scaled"]),
    "all-layers-turned-alike": Mistake(
        in_options(layers=[0, 1, 2]), ["rope-by-layer", "rope-raw-by-layer"]
    ),
    "others-not-turned": Mistake(
        in_options(elsewhere=None), ["rope-by-layer", "rope-raw-by-layer"]
    ),
    "bias-max-ignored": Mistake(in_options(bias_max=8), ["alibi-rounded"]),
    "queries-one-off": Mistake(in_layers(QueriesOneOff), ROTARY),
    "rotation-dropped": Mistake(in_attention(rotation=no_rotation), [*RAW, *IN_BLOCKS]),
    "other-storage": Mistake(in_attention(rotation=other_storage), [*RAW, *IN_BLOCKS]),
    "queries-not-grown": Mistake(in_attention(rotation=not_grown), ["rope-block-scaled"]),
    "queries-grown-again": Mistake(
        in_attention(rotation=grown_again),
        ["rope-raw-scaled", "rope-raw-by-layer", "rope-block-scaled"],
    ),
    "queries-not-scaled": Mistake(in_options(query_scale=None), ["rope-sharper"]),
    "queries-scaled-too-late": Mistake(
        in_options(query_scale={"beta": 0.4, "original_context": 10}), ["rope-sharper"]
    ),
    "queries-scaled-as-other-heads": Mistake(in_options(by_head=[0.1] * 6), ["sharper"]),
    "far-turned-as-near": Mistake(in_attention(rotation=of_far(all_near)), FAR),
    "far-one-later": Mistake(in_attention(rotation=of_far(one_later)), ["rope-far"]),
    "far-keys-not-grouped": Mistake(in_attention(rotation=of_far(keys_as_near)), FAR),
    "groups-of-another-size": Mistake(in_options(group=4), FAR),
    "queries-of-other-rows": Mistake(in_attention(bias=other_rows), ["shaw"]),
    "queries-of-other-heads": Mistake(in_attention(bias=per_head(other_way)), ["shaw"]),
    "hidden-keys-counted": Mistake(in_attention(bias=of_content(all_seen)), ["cope"]),
    "content-of-other-heads": Mistake(
        in_attention(bias=of_content(queries_of_other_heads)), ["cope", "xpos"]
    ),
    "content-one-later": Mistake(in_attention(bias=of_content(keys_one_later)), ["xpos"]),
    "content-of-other-tokens": Mistake(
        in_attention(bias=of_content(keys_of_other_tokens)), ["xpos"]
    ),
    "gates-ignored": Mistake(in_attention(spec=ungated), ["forgetting"]),
    "gates-of-other-heads": Mistake(in_attention(kv=of_gates(of_other_heads)), ["forgetting"]),
    "gates-one-off": Mistake(in_attention(kv=of_gates(of_next_tokens)), ["forgetting"]),
    "gates-by-block": Mistake(in_attention(kv=of_gates(within_blocks)), ["forgetting"], CACHED),
    "offsets-from-positions": Mistake(
        in_batch(offsets_from_positions),
        IN_BLOCKS,
        ["prefill", "chunked", "decode", "ragged"],
        ["prefix hit", "preempted"],
    ),
    "bases-ignored": Mistake(
        in_attention(batch=aligned_bases),
        [*RAW, *IN_BLOCKS],
        ["prefill", "chunked", "decode", "ragged"],
        ["prefix hit", "preempted"],
    ),
    "coarse-angles": Mistake(in_layers(CoarseAngles), ROTARY),
    "embedded-one-off": Mistake(embedded_one_off, ADDED),
    "one-distance-further": Mistake(in_attention(bias=one_further), TABLES),
    "dense-rows-one-off": Mistake(in_attention(bias=rows_one_off), DENSE),
    "dense-keys-one-off": Mistake(in_attention(bias=keys_one_off), DENSE),
    "dense-by-longest-context": Mistake(
        in_attention(bias=by_longest_context), DENSE, ["decode", "ragged"], ["oracle", "prefix hit"]
    ),
    "heads-in-another-order": Mistake(in_attention(bias=per_head(other_way)), BIASED),
    "slopes-sorted": Mistake(in_attention(bias=per_head(steepest_first)), ["alibi"]),
    "sign-flipped": Mistake(in_attention(bias=per_head(negative)), BIASED),
    "logits-scaled": Mistake(in_attention(spec=divided), [*TABLES, *DENSE]),
    "window-too-wide": Mistake(in_attention(spec=wider), ["nope", "rope", "alibi"]),
    "bias-dropped": Mistake(in_attention(bias=dropped), BIASED),
    "bias-dropped-when-cached": Mistake(
        in_attention(bias=dropped_when_cached), [*BIASED, "table"], CACHED, ["prefill"]
    ),
    "late-when-cached": Mistake(
        # Not ALiBi: what lowers all scores of a query alike changes no softmax.
        in_batch(late_when_cached),
        ["rope", "rope-raw", "rope-block", "t5", "t5-materialised", *ADDED],
        CACHED,
        ["prefill"],
    ),
    "positions-by-row": Mistake(
        in_batch(by_row),
        ["rope", "rope-raw", "t5", "t5-materialised"],
        ["chunked", "ragged", *CACHED],
        ["prefill"],
    ),
    "distances-by-row": Mistake(
        in_attention(bias=lambda bias, batch: TopLeft(bias)),
        ["alibi"],
        ["chunked", "ragged", *CACHED],
        ["prefill"],
    ),
    "last-key-forgotten": Mistake(in_attention(batch=without_last_key), ALL, ["decode"]),
}


# ---------------------------------------------------------------------------------- tests


def check(decoder, encoding, name, tolerance):
    if name == "oracle":
        check_oracle(decoder, base=3, length=60, tolerance=tolerance)
    else:
        check_path(decoder, exactly(encoding), name, tolerance)


@cache
def unbroken_passes(encoding, name):
    check(right(encoding), encoding, name, EXACT)
    return True


def cases(which):
    """All checks of a mistake under one encoding, and the first of them under the others.

    Under those only in a full run, but for encodings that no mistake before broke.
    """
    made, broken = [], set()
    for name, mistake in MISTAKES.items():
        for encoding in mistake.encodings:
            first = encoding == mistake.encodings[0]
            marks = () if first or encoding not in broken else pytest.mark.full
            for check in which(mistake)[: None if first else 1]:
                case = f"{name}-{encoding}-{check}"
                made.append(pytest.param(mistake.plant, encoding, check, id=case, marks=marks))
                broken.add(encoding)
    return made


@pytest.mark.parametrize(("plant", "encoding", "name"), cases(lambda mistake: mistake.found_by))
def test_mistakes_are_found(plant, encoding, name):
    assert unbroken_passes(encoding, name)
    with pytest.raises(AssertionError, match=rf"assert tensor\(.*\) <= {GROSS}"):
        check(plant(encoding), encoding, name, GROSS)


@pytest.mark.parametrize(("plant", "encoding", "name"), cases(lambda mistake: mistake.missed_by))
def test_mistakes_that_need_another_path(plant, encoding, name):
    check(plant(encoding), encoding, name, GROSS)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("encoding", BIASED)
def test_rounding_hides_no_dropped_bias(encoding, dtype):
    narrow = getattr(torch, dtype)
    decoder = right(encoding, Backend(bias=dropped_when_cached), narrow)
    with pytest.raises(AssertionError):
        check_rounding(decoder, exactly(encoding, narrow), "decode", ROUNDED[dtype])


def test_mistakes_of_every_encoding_are_planted():
    planted = {encoding for mistake in MISTAKES.values() for encoding in mistake.encodings}
    assert planted == set(ENCODINGS)
