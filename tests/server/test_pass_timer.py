"""Timed passes: what counts as what, and that nothing of it is left in the decoder."""

import itertools

import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.server.engine.statistics import TimedDecoder
from ropewalk.server.scheduling.request import PassTimes
from tests.model import encoder_decoders
from tests.model.attention.triton_here import DEVICE
from tests.model.checkpoints import save
from tests.model.running import Running, make_batch, new_cache
from tests.model.tiny import CONFIG, on_triton, program_of, tiny

LAYERS = CONFIG.num_layers
TOKENS = [3, 1, 4, 1, 5]


def ticking():
    """A clock that goes on by one whenever it is looked at, so a span without others is 1."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def one_pass(forward, decoder):
    return forward(make_batch([(Running(TOKENS, [1]), len(TOKENS))], 16), new_cache(decoder, 2))


def looks(decoder):
    """At the clock: when a pass begins, after each op, and when it ends."""
    return 1 + len(program_of(decoder).ops)


@pytest.mark.parametrize("encoding", ["rope", "learned", "sinusoidal", "nope"])
def test_work_that_is_apart_from_attention(encoding):
    decoder = tiny(encoding)
    timed = TimedDecoder(decoder, every=1, clock=ticking())
    assert decoder.position_apart
    assert torch.equal(one_pass(timed, decoder), one_pass(decoder, decoder))
    assert timed.drain() == (PassTimes(looks(decoder), LAYERS, LAYERS + 1),)
    assert timed.drain() == ()


@pytest.mark.parametrize(
    "encoding", ["alibi", "alibi-rounded", "t5", "t5-per-layer", "t5-materialised", "rope-raw",
                 "rope-block", "rope-raw-scaled"],
)  # fmt: skip
def test_work_that_attention_does_is_not_told_from_it(encoding):
    decoder = tiny(encoding)
    timed = TimedDecoder(decoder, every=1, clock=ticking())
    assert not decoder.position_apart
    one_pass(timed, decoder)
    assert timed.drain() == (PassTimes(looks(decoder), LAYERS, None),)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("encoding", "position"), [("rope", None), ("rope-scaled", None), ("learned", 1), ("nope", 1)]
)
def test_a_rotation_in_the_kernel_that_stores_is_not_told_from_it(encoding, position):
    pytest.importorskip("triton", reason="Triton is not installed")
    decoder = on_triton(tiny(encoding, dtype=torch.float32, device=DEVICE))
    assert decoder.position_apart == (position is not None)


def test_an_encoder_and_what_looks_at_it_count_as_attention(tmp_path):
    model = encoder_decoders.random_model(encoder_decoders.t5())
    checkpoint = open_checkpoint(save(model, tmp_path))
    decoder = encoder_decoders.loaded(checkpoint)
    timed = TimedDecoder(decoder, every=1, clock=ticking())
    ids = itertools.count(1)
    request = encoder_decoders.Answering(
        [5, 6, 7], [0, 8], lambda count: list(itertools.islice(ids, count))
    )
    encoder_decoders.step(timed, [(request, 2)], encoder_decoders.new_cache(decoder))
    (times,) = timed.drain()
    assert times.attention == 2 + 3 * 2  # two layers encode, three look at both sides
    assert times.position is None


def test_a_pass_that_fails_leaves_nothing_behind():
    calls = itertools.count()

    class Failing(ReferenceAttention):
        def __call__(self, *arguments):
            if next(calls) == 1:
                raise RuntimeError("the second layer gave up")
            return super().__call__(*arguments)

    decoder = tiny("rope", Failing)
    timed = TimedDecoder(decoder, every=1, clock=ticking())
    with pytest.raises(RuntimeError, match="gave up"):
        one_pass(timed, decoder)
    assert timed.drain() == ()
    one_pass(timed, decoder)
    assert [times.attention for times in timed.drain()] == [LAYERS]


def test_one_of_so_many_is_timed_and_the_others_look_at_no_clock():
    looks = []
    decoder = tiny("nope")
    timed = TimedDecoder(decoder, every=4, clock=lambda: looks.append(0) or 0.0)
    decoder.executor = lambda batch, kv, watch: batch
    for _ in range(400):
        timed(None, None)
    count = len(timed.drain())
    assert 70 < count < 130
    assert len(looks) == 2 * count
