"""Tokens that are guessed and checked together: each answer is as if nothing had been guessed."""

import asyncio
import random
from array import array
from dataclasses import replace

import pytest
import torch

from ropewalk.model.sampling import SamplingParams
from ropewalk.server.errors import NumericalError
from ropewalk.server.openai.requests import chat_prompt, choices_for
from ropewalk.server.openai.schemas import ChatBody
from ropewalk.server.scheduling import scheduler
from ropewalk.server.scheduling.request import AHEAD, Drafts, FinishReason, Overflow
from tests.model import encoder_decoders
from tests.model.checkpoints import save
from tests.server.disturbed import load, requests, run
from tests.server.fake_engine import VOCAB, make_engine, make_request
from tests.server.test_preemption import CONTEXT, ENCODINGS, STORED, family
from tests.server.toy import toy

# ------------------------------------------------------------------------------------ guesses


def guessed(tokens, share=0.3, most=AHEAD):
    return Drafts().next(tokens, share, most)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3]),  # repeated, as the two overlap
        ([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3], [6, 7, 1, 2]),  # the last one counts
        ([9, 9, 9, 9], [9, 9, 9, 9]),
        ([9, 9, 9], []),
        ([1, 2, 3, 4, 2, 3], []),  # two are not enough
        # The same bytes, begun within a token.
        ([0xFF, 0, 0, 0xFF00, 5, 0, 0, 0], []),
        ([7, 0, 0, 0, 8, 0xFF, 0, 0, 0xFF00, 5, 0, 0, 0], [8, 0xFF, 0, 0]),
        (
            [200_000, 131_071, 65_536, 255, 200_000, 131_071, 65_536],
            [255, 200_000, 131_071, 65_536],
        ),
    ],
)
def test_a_guess_is_what_followed_the_last_three_tokens(tokens, expected):
    assert list(guessed(tokens, share=0.001, most=4)) == expected


def test_guesses_are_as_many_as_are_worth_a_row():
    """Of those that are half right, the first two are expected to be right more than 0.2 times."""
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert guessed(tokens, share=0.2) == (4, 5)
    assert guessed(tokens, share=0.2, most=1) == (4,)
    assert guessed(tokens, share=0.4) == (4,)
    assert guessed(tokens, share=0.5) == guessed(tokens, share=0.9) == ()


def test_guesses_that_are_seldom_right_are_not_checked_until_they_are_again():
    drafts, rng, tokens = Drafts(), random.Random(0), [1, 2, 3, 9]
    counts = []
    for _ in range(12):  # what follows is never what followed
        tokens += [1, 2, 3]
        counts.append(len(drafts.next(tokens, 0.3, AHEAD)))
        tokens.append(100 + len(tokens))
    assert counts[0] == 1 and counts[-6:] == [0] * 6
    text = [rng.randrange(50) for _ in range(40)]
    tokens += text
    drafts.next(tokens, 0.3, AHEAD)
    counts = []
    for token in text:  # token by token, as where nothing is checked
        tokens.append(token)
        counts.append(len(drafts.next(tokens, 0.3, AHEAD)))
    assert counts[:3] == [0, 0, 0] and counts[-1] > 3


def test_what_is_predicted_follows_the_prompt():
    """And is looked for after what the answer itself has."""
    drafts, tokens = Drafts([9, 9, 1, 2, 3], array("i", [4, 5, 6, 7, 8])), [9, 9, 1, 2, 3, 4]
    assert drafts.next(tokens, 0.01, 4) == (5, 6, 7, 8)
    tokens += [40, 2, 3, 4, 41, 2, 3, 4]
    assert drafts.next(tokens, 0.01, 2) == (41, 2)


def test_a_chat_may_say_what_it_expects():
    """Without the tokens that the model does not have."""
    said = {"role": "user", "content": "hi"}
    content = [{"type": "text", "text": "abc"}, {"type": "text", "text": "dé"}]
    prediction = {"type": "content", "content": content}
    body = ChatBody.model_validate({"messages": [said], "prediction": prediction})
    served = toy(vocab_size=190)
    prompt = asyncio.run(chat_prompt(body, served))
    assert list(prompt.predicted) == list(b"abcd\xa9")  # é is 195 and 169
    (choice,) = choices_for(body, [prompt], served, "")
    drafts, tokens = choice.request.drafts, [*choice.request.tokens, ord("a")]
    assert bytes(drafts.next(tokens, 0.01, 3)) == b"bcd"


@pytest.mark.parametrize("content", ["a" * 10**6, "\N{ROCKET}" * 10**5])
def test_a_prediction_is_cut_to_what_an_answer_can_be(content):
    said, prediction = {"role": "user", "content": "hi"}, {"type": "content", "content": content}
    body = ChatBody.model_validate({"messages": [said], "prediction": prediction})
    served = toy()
    assert len(asyncio.run(chat_prompt(body, served)).predicted) == served.max_context


# ------------------------------------------------------------------------------ whole answers


@pytest.fixture
def always(monkeypatch):
    """Every guess is worth a row."""
    monkeypatch.setattr(scheduler, "ROWS_PER_STEP", 10**6)
    monkeypatch.setattr(scheduler, "MOST_ROWS", 10**6)
    monkeypatch.setattr(scheduler, "BESIDE_OTHERS", 10**6)
    monkeypatch.setattr(Drafts, "_follow", never_discouraged(Drafts._follow))


def never_discouraged(follow):
    def followed(self, tokens):
        follow(self, tokens)
        self._rate = 0.9

    return followed


def repeating(count, **ways):
    """Requests whose prompts, and so whose answers, repeat themselves."""
    made = requests(count, **ways)
    for each in made:
        side = each.tokens if not each.source else list(each.source)
        side[:] = (side[:7] * len(side))[: len(side)]
        each.source = tuple(side) if each.source else ()
        each.params = replace(each.params, temperature=each.params.temperature / 4)
    return made


def assert_the_same(source, flags, count, **ways):
    """With guesses, in a cache that is too small, and without, in one with room for all."""
    flags = (*flags, "--max-model-len", str(CONTEXT))
    plain = load(source, *flags, "--draft-tokens", "0", "--kv-spill", "0")
    block = 16 * plain.facts.kv_bytes_per_token
    small = ("--kv-memory", str(25 * block), "--kv-spill", str(200 * block))
    ways |= {"context": CONTEXT, "vocab": plain.served.vocab_size}
    expected = run(plain.engine, repeating(count, **ways), check=False)
    guessing = load(source, *flags, *small)
    counts = []
    guessing.engine.step = counted(guessing.engine.step, counts)
    found = run(guessing.engine, repeating(count, **ways), together=12, check=True)
    assert found.answers == expected.answers
    drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted > accepted > count and found.preempted > 0
    return accepted


def counted(step, counts):
    def stepped():
        done = step()
        counts.append((done.stats.draft_tokens, done.stats.accepted_draft_tokens))
        return done

    return stepped


@pytest.mark.usefixtures("always", "one_thread")
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    ("encoding", "stored"), list(zip(ENCODINGS, 2 * list(STORED), strict=True)), ids=str
)
def test_every_encoding(encoding, stored, seeded, kernels):
    assert_the_same(family(encoding), STORED[stored], 20, seeded=seeded)


@pytest.mark.usefixtures("always", "one_thread")
@pytest.mark.parametrize(
    ("flags", "overflow"),
    [
        (("--quantize", "int8"), Overflow.SHIFT),
        (("--encoding-option", "storage=block", "--quantize", "int4"), Overflow.SLIDE),
        (("--audit", "full", "--no-prefix-sharing"), Overflow.SHIFT),
    ],
)
def test_contexts_that_are_shortened_and_other_forms(flags, overflow, kernels):
    flags = ("--dtype", "bfloat16", *flags)
    assert_the_same(family("rope"), flags, 12, seeded=True, overflow=overflow)


@pytest.mark.usefixtures("always", "one_thread")
def test_an_encoder_decoder(tmp_path, kernels):
    folder = save(encoder_decoders.random_model(encoder_decoders.t5_v11()), tmp_path)
    assert_the_same(folder, STORED["float32"], 20, seeded=False, encoder=True)


# -------------------------------------------------------------------------- the engine's steps


def circling(batch, kv):
    """The next token is the last one plus one, of four."""
    following = (batch.tokens[batch.output_rows] + 1) % 4
    return torch.nn.functional.one_hot(following, VOCAB).float()


def stepped(engine):
    """Numbers of tokens by step, and all events."""
    counts, events = [], []
    while engine.busy:
        step = engine.step()
        events += step.events
        counts.append(sum(event.token is not None for event in step.events))
    return counts, events


def test_several_tokens_come_from_one_step():
    engine, manager = make_engine(circling, draft_tokens=3)
    engine.submit(make_request("a", [0, 1, 2, 3, 0, 1, 2], max_tokens=20))
    counts, events = stepped(engine)
    assert [event.token for event in events] == [(3 + n) % 4 for n in range(20)]
    assert sum(counts) == 20 and max(counts) == 4 and len(counts) < 12
    assert events[-1].finish is FinishReason.LENGTH
    assert manager.counts().active == 0


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 20},
    ],
)
def test_nothing_is_guessed_where_a_pick_depends_on_all_tokens_before_it(more):
    engine, _ = make_engine(circling, draft_tokens=3)
    engine.submit(make_request("a", [0, 1, 2, 3, 0, 1, 2], max_tokens=20, **more))
    counts, _ = stepped(engine)
    assert max(counts) == 1


def test_a_stop_among_guesses_ends_the_answer_there():
    engine, manager = make_engine(circling, draft_tokens=7)
    engine.submit(make_request("a", [0, 1, 2, 3, 0, 1, 2], max_tokens=90, stop_ids={9}))
    for _ in range(6):
        engine.step()  # by then many are guessed
    (request,) = engine._scheduler.running
    request.params = SamplingParams(max_tokens=90, temperature=0, stop_ids=frozenset({1}))
    _, events = stepped(engine)
    assert events[-1].token == 1 and events[-1].finish is FinishReason.STOP
    assert 1 not in [event.token for event in events[:-1]]
    assert manager.counts().active == 0


def test_a_full_context_ends_an_answer_among_guesses():
    engine, _ = make_engine(circling, draft_tokens=7, max_context=30)
    engine.submit(make_request("a", [0, 1, 2, 3, 0, 1, 2], max_tokens=90))
    _, events = stepped(engine)
    assert len(events) == 23 and events[-1].finish is FinishReason.CONTEXT


@pytest.mark.parametrize("reached", [False, True])
def test_a_broken_row_of_a_guess_fails_its_request_only_if_it_is_reached(reached):
    """The token 3 is never right after 2 here, but was once in the prompt."""

    def broken(batch, kv):
        logits = circling(batch, kv)
        wanted = batch.tokens[batch.output_rows]
        positions = batch.positions[batch.output_rows]
        last = logits.new_zeros(VOCAB)
        last[0] = 1
        logits[wanted == 2] = last  # 0 1 2 0 1 2 …
        logits[(wanted == (1 if reached else 3)) & (positions > 20)] = float("nan")
        return logits

    engine, _ = make_engine(broken, draft_tokens=7)
    engine.submit(make_request("a", [0, 1, 2, 3, 0, 1, 2], max_tokens=30))
    engine.submit(make_request("b", [5, 6], max_tokens=3))
    _, events = stepped(engine)
    ends = {event.request_id: event for event in events if event.finish is not None}
    assert ends["b"].finish is FinishReason.LENGTH
    if reached:
        assert isinstance(ends["a"].error, NumericalError)
    else:
        assert ends["a"].finish is FinishReason.LENGTH


def test_guesses_take_no_block_from_others():
    """A cache that is full: without guesses nobody is preempted, so nor with them."""
    engine, _ = make_engine(circling, draft_tokens=7, blocks=13, max_context=24)
    for name in "ab":
        engine.submit(make_request(name, [0, 1, 2, 3, 0, 1, 2], max_tokens=17))
    preempted = 0
    while engine.busy:
        preempted += engine.step().stats.preemptions
    assert preempted == 0


def test_beside_others_a_request_has_one_guess():
    engine, _ = make_engine(circling, draft_tokens=7)
    for name in ("a", "b"):
        engine.submit(make_request(name, [0, 1, 2, 3, 0, 1, 2], max_tokens=60))
    drafted = []
    while len(engine._scheduler.running) != 1 or len(drafted) < 9:
        drafted.append(engine.step().stats.draft_tokens)
        if len(drafted) == 20:
            engine.abort("b")
    assert max(drafted[:20]) == 2
    while engine.busy:
        drafted.append(engine.step().stats.draft_tokens)
    assert max(drafted) == 7


def test_no_guess_is_worth_a_row_beside_many():
    engine, _ = make_engine(circling, draft_tokens=7, max_seqs=64, max_step_tokens=500, blocks=400)
    for index in range(8):
        engine.submit(make_request(f"r{index}", [0, 1, 2, 3, 0, 1, 2], max_tokens=9))
    drafted = 0
    while engine.busy:
        drafted += engine.step().stats.draft_tokens
    assert drafted == 0
