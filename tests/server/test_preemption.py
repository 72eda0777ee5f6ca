"""A preempted request's answer is that of a server that never preempts, to the last bit."""

from pathlib import Path

import pytest

from ropewalk.cache.manager import Table
from ropewalk.model import family as bundled
from ropewalk.server.engine.batch import build_batch
from ropewalk.server.scheduling.request import Overflow, Work
from tests.model import encoder_decoders
from tests.model.checkpoints import save
from tests.products import combined
from tests.server.disturbed import load, requests, run
from tests.server.fake_engine import make_request

pytestmark = pytest.mark.usefixtures("one_thread")

ENCODINGS = ("rope", "alibi", "t5", "learned", "sinusoidal", "nope")
STORED = {
    "bfloat16": ("--dtype", "bfloat16"),
    "float32": ("--dtype", "float32"),
    "int8": ("--dtype", "float32", "--kv-dtype", "int8"),
}
# Tokens of a context, and blocks of the small cache: a dozen contexts do not fit at once.
CONTEXT, BLOCKS = 112, 28
PLACES = (0, 7, 200)  # blocks of the second place: none, too few for a request, more than needed


def family(encoding):
    return Path(bundled.__file__).parent / "weights" / f"ropewalk-{encoding}"


def assert_undisturbed(source, flags, count, places, **ways):
    """No token and no log-probability depends on whether the cache is large.

    places: sizes in blocks of the second place.
    """
    # Guesses, which save steps, leave less to preempt; test_drafts.py has them.
    flags = (*flags, "--max-model-len", str(CONTEXT), "--draft-tokens", "0")
    ways["context"] = CONTEXT
    ample = load(source, *flags, "--kv-spill", "0")
    block = 16 * ample.facts.kv_bytes_per_token
    small = ("--kv-memory", str((BLOCKS + 1) * block), "--max-step-tokens", "64")
    ways["vocab"] = ample.served.vocab_size
    undisturbed = run(ample.engine, requests(count, **ways), check=False)
    assert undisturbed.preempted == 0
    for place in places:
        loaded = load(source, *flags, *small, "--kv-spill", str(place * block))
        check = count < 100  # which takes longer than the steps
        disturbed = run(loaded.engine, requests(count, **ways), check=check)
        assert disturbed.preempted > count / 5
        assert (disturbed.back > 0) == (place > 0)
        differing = [
            name
            for name, answer in disturbed.answers.items()
            if undisturbed.answers[name] != answer
        ]
        assert not differing, place


# Usually each encoding in one of the three, so that all places are met as often.
@pytest.mark.parametrize(
    ("encoding", "stored"),
    combined(
        ENCODINGS,
        STORED,
        always=lambda encoding, stored: (
            (ENCODINGS.index(encoding) - list(STORED).index(stored)) % 3 == 0
        ),
    ),
)
def test_every_encoding(encoding, stored, kernels):
    case = ENCODINGS.index(encoding) + list(STORED).index(stored)
    place = PLACES[case % len(PLACES)]
    assert_undisturbed(family(encoding), STORED[stored], 20, [place], seeded=case % 2 == 0)


@pytest.mark.full
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.timeout(900)
def test_a_thousand_requests(encoding, stored, seeded, kernels):
    assert_undisturbed(family(encoding), STORED[stored], 1000, PLACES, seeded=seeded)


@pytest.mark.parametrize(
    ("encoding", "flags"),
    [
        ("rope", ("--encoding-option", "storage=block", "--dtype", "bfloat16")),
        ("rope", ("--encoding-option", "storage=raw", "--dtype", "bfloat16")),
        ("t5", ("--encoding-option", "form=materialised", "--dtype", "bfloat16")),
        ("rope", ("--quantize", "int8", "--dtype", "bfloat16")),
        ("alibi", ("--block-size", "4", "--no-prefix-sharing", "--dtype", "float32")),
        ("nope", ("--audit", "full", "--dtype", "bfloat16")),
    ],
)
def test_other_forms(encoding, flags, kernels):
    assert_undisturbed(family(encoding), flags, 20, [7], seeded=True)


@pytest.mark.parametrize("stored", STORED)
def test_an_encoder_decoder(stored, tmp_path, kernels):
    folder = save(encoder_decoders.random_model(encoder_decoders.t5_v11()), tmp_path)
    places = [PLACES[list(STORED).index(stored)]]
    assert_undisturbed(folder, STORED[stored], 30, places, seeded=True, encoder=True)


@pytest.mark.parametrize(
    ("encoding", "overflow", "flags"),
    [
        ("rope", Overflow.SHIFT, ()),
        ("rope", Overflow.SLIDE, ("--encoding-option", "storage=block", "--kv-dtype", "int8")),
        pytest.param("t5", Overflow.SHIFT, (), marks=pytest.mark.full),
        pytest.param("alibi", Overflow.SLIDE, (), marks=pytest.mark.full),
        pytest.param("nope", Overflow.SHIFT, ("--kv-dtype", "int8"), marks=pytest.mark.full),
    ],
)
def test_contexts_that_were_shortened(encoding, overflow, flags, kernels):
    """While nothing is lost: what depends on dropped tokens cannot be computed again."""
    flags = ("--dtype", "bfloat16", *flags)
    ways = {"seeded": True, "overflow": overflow}
    assert_undisturbed(family(encoding), flags, 12, [400], **ways)


def test_shortened_answers_of_an_encoder_decoder(tmp_path, kernels):
    folder = save(encoder_decoders.random_model(encoder_decoders.t5_v11()), tmp_path)
    ways = {"seeded": True, "encoder": True, "overflow": Overflow.SHIFT}
    assert_undisturbed(folder, ("--dtype", "float32"), 20, [400], **ways)


def test_tokens_of_an_answer_are_computed_as_if_alone():
    """Also those that are computed again, which are many at once."""
    known = make_request("known", [1, 2, 3])
    known.tokens += [4, 5, 6]
    work = (Work(known, 1, 5), Work(make_request("new", [7, 8]), 0, 2))
    tables = {"known": Table([5, 2], [0, 4]), "new": Table([3], [0])}
    made = build_batch(work, tables.__getitem__, 4)
    assert made.forward.query_starts.tolist() == [0, 2, 3, 4, 5, 7]
    assert made.forward.context_lens.tolist() == [3, 4, 5, 6, 2]
    assert made.forward.prompts.tolist() == [1, 0, 0, 0, 1]
    assert made.forward.slots.tolist() == [21, 22, 23, 8, 9, 12, 13]
    assert [(each.request.id, each.row) for each in made.samples] == [("known", 0), ("new", 1)]
    assert made.forward.output_rows.tolist() == [4, 6]


@pytest.mark.parametrize(
    ("prompt", "front", "dropped", "seen"),
    [(100, 16, 48, 52), (10, 16, 48, 10), (40, 16, 48, 16), (40, 0, 0, 40)],
)
def test_how_much_of_a_shortened_context_is_its_prompt(prompt, front, dropped, seen):
    shortened = make_request("a", range(prompt))
    shortened.tokens += range(100)
    shortened.front, shortened.dropped = front, dropped
    assert shortened.context_prompt == seen
    assert shortened.context(0, seen) == [
        each
        for index, each in enumerate(shortened.tokens[:prompt])
        if not front <= index < front + dropped
    ]
