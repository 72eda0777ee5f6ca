"""The decoders that costs are measured on differ in nothing but their encoding."""

import pytest
import torch

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.load_tests.micro import in_process
from ropewalk.load_tests.micro.in_process import blocks_for, decoders, new_cache, passes, step
from ropewalk.load_tests.micro.step_cost import VARIANTS
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.alibi import ALiBi
from ropewalk.model.encodings.base import EncodingError, MaterialisedBias, TableBias
from tests.model.tiny import program_of

CPU = torch.device("cpu")


def made(kernels, variants=VARIANTS) -> dict[str, Decoder]:
    return decoders("small", variants, context=64, dtype=torch.float32, device=CPU, kernels=kernels)


@pytest.fixture(scope="module")
def every(kernels):
    return made(kernels)


@pytest.fixture(scope="module")
def plain():
    return made("not asked for")


def test_one_decoder_for_each_variant(every):
    assert list(every) == list(VARIANTS)
    assert isinstance(every["alibi"].encoding, ALiBi)
    assert type(every["t5"].encoding.score_bias()) is TableBias
    assert type(every["t5:materialised"].encoding.score_bias()) is MaterialisedBias
    assert every["rope"].encoding.rotation() is None
    storages = [
        every[variant].encoding.rotation().storage for variant in ("rope:raw", "rope:block")
    ]
    assert storages == ["raw", "block"]


def test_variants_may_have_options():
    (slow,) = made("not asked for", ["alibi:bias_max=4"]).values()
    (far,) = made("not asked for", ["rope:near=8+group=2"]).values()
    assert slow.encoding.slopes[-1] == 2**-4
    assert (far.encoding.rotation().far.start, int(far.encoding.rotation().far.keys[9])) == (8, 4)


def test_weights_are_the_same_tensors(plain):
    first = program_of(plain["nope"]).weights
    for variant, decoder in plain.items():
        for name, weight in program_of(decoder).weights.items():
            assert weight is first[name], (variant, name)
    assert first["embed.weight"] is first["head.weight"]


def test_panels_are_the_same_tensors(every):
    def panels(decoder):
        held = decoder.executor.fixed_tensors()
        return [each.data_ptr() for name, each in held.items() if name.endswith(".panels")]

    assert len(set(panels(every["nope"]))) == 4 * 4 + 1  # of four layers, and the head
    for variant in VARIANTS:
        assert panels(every[variant]) == panels(every["nope"])


def test_logits_are_those_of_a_decoder_by_itself(every, kernels):
    """Sharing changes nothing: alone, with the same weights drawn anew, it computes the same."""
    kv = new_cache(every["nope"], blocks_for(2, 40))
    batch = step(2, 40, 3, CPU)
    seen = []
    for variant in ("t5", "rope:block", "learned"):
        (alone,) = made(kernels, (variant,)).values()
        logits = every[variant](batch, kv)
        assert torch.equal(logits, alone(batch, kv))
        assert logits.isfinite().all()
        seen.append(logits)
    assert not torch.equal(seen[0], seen[1])


def test_forms_compute_the_same(every):
    kv = new_cache(every["nope"], blocks_for(2, 40))
    batch = step(2, 40, 1, CPU)
    window, table, dense = (
        every[variant](batch, kv) for variant in ("t5", "t5:table", "t5:materialised")
    )
    torch.testing.assert_close(window, table)
    torch.testing.assert_close(window, dense)


def test_decode_steps_are_replayed_where_there_is_a_recorder(plain, monkeypatch):
    """As on a GPU, but that replaying is here to compute once more."""
    recorded = []

    def record(compute):
        recorded.append(compute)
        return compute

    kv = new_cache(plain["rope"], blocks_for(2, 40))
    variants = {variant: plain[variant] for variant in ("nope", "rope")}
    asked = [call() for call in passes(variants, kv, 2, 40, rows=1).values()]
    assert recorded == []
    monkeypatch.setattr(in_process, "recorder", lambda decoder: record)
    found = [call() for call in passes(variants, kv, 2, 40, rows=1).values()]
    assert len(recorded) == 2
    torch.testing.assert_close(found, asked)
    passes(variants, kv, 1, 40, rows=8)
    assert len(recorded) == 2  # a prompt's pass is computed as it comes


def test_what_cannot_be_recorded_is_computed_as_it_comes(plain, monkeypatch, caplog):
    def record(compute):
        raise RuntimeError("no memory")

    monkeypatch.setattr(in_process, "recorder", lambda decoder: record)
    kv = new_cache(plain["rope"], blocks_for(1, 40))
    (call,) = passes({"rope": plain["rope"]}, kv, 1, 40, rows=1).values()
    assert call().isfinite().all()
    assert "batch 1, context 40 without CUDA graphs: no memory" in caplog.text


def test_unknown_variants_are_refused():
    with pytest.raises(
        EncodingError, match="form must be one of window, table, materialised, but is 'no'"
    ):
        made("none", ("t5:no",))
    with pytest.raises(EncodingError, match="alibi has no forms or storages; leave out 'no'"):
        made("none", ("alibi:no",))


def test_step_is_the_end_of_each_context():
    batch = step(3, 100, 5, CPU)
    assert batch.positions.tolist() == list(range(95, 100)) * 3
    assert batch.context_lens.tolist() == [100] * 3
    assert batch.output_rows.tolist() == [4, 9, 14]
    assert len(set(batch.slots.tolist())) == 15
    assert batch.slots.max() < blocks_for(3, 100) * BLOCK_SIZE
    assert batch.slots.min() >= BLOCK_SIZE  # block 0 is nobody's
