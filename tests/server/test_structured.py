"""Answers that must satisfy a grammar, in a real engine: alone, in company, preempted, ahead."""

import random
import re
from collections import Counter

import pytest

from ropewalk.server.errors import FormFailed
from ropewalk.server.scheduling.request import FinishReason, Limits, Overflow
from ropewalk.server.structured.grammar import Grammar, Kind
from ropewalk.server.structured.matcher import Matcher
from tests.model.tiny import tiny
from tests.server.fake_engine import make_request
from tests.server.grammars import Letters, compiled, grammars_of
from tests.server.recording import engine
from tests.server.test_ahead import LIMITS, answers, late, without_numbers, workload

LETTERS = Letters()
END = 60
REGEXES = (
    r"[a-z]{3,9}",
    r"\{\"name\": \"[a-f]+\", \"born\": [0-9]{4}\}",
    r"(rope|walk)( (rope|walk)){1,4}",
    r"[0-9]+(\.[0-9]{2})?",
    r"A{40}",
)
WAYS = (
    {},
    {"temperature": 0.0},
    {"top_k": 40, "top_p": 0.9},
    {"logprobs": 2},
    {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"min_tokens": 6, "temperature": 0.0},
    {"logit_bias": {3: 90.0, END: 50.0}},
    {"min_p": 0.1},
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def grammars():
    made = grammars_of(LETTERS)
    return [compiled(made, Grammar(Kind.REGEX, regex)) for regex in REGEXES]


def requests(grammars, count=24, *, ways=WAYS, max_tokens=60, overflow=Overflow.REFUSE):
    """By turns one with each grammar, and a free one."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        prompt = [rng.randrange(60) for _ in range(rng.randint(1, 9))]
        which = i % (len(grammars) + 1)
        matcher = grammars[which].begin() if which < len(grammars) else None
        more = {"rng": random.Random(i), "matcher": matcher, "overflow": overflow}
        params = {"max_tokens": max_tokens, "temperature": 1.0, "stop_ids": frozenset({END})}
        made.append(make_request(f"r{i}", prompt, **params | ways[i % len(ways)], **more))
    return made


def texts(events):
    return {
        name: "".join(LETTERS.text[event.token] for event in own if event.token != END)
        for name, own in events.items()
    }


def finished(events):
    return {name for name, own in events.items() if own[-1].finish is FinishReason.STOP}


def check(events, grammars=REGEXES):
    """Every finished answer with a grammar satisfies it; returns how many there are."""
    done = 0
    for name in finished(events):
        which = int(name[1:]) % (len(grammars) + 1)
        if which < len(grammars):
            assert re.fullmatch(grammars[which], texts(events)[name])
            done += 1
    return done


LONG = Limits(max_seqs=6, max_step_tokens=16, max_context=80, max_queue=100)


@pytest.fixture(scope="module")
def expected(grammars):
    decoder = tiny("rope")
    running, _, _ = engine(decoder, decoder, 200, LONG)
    return answers(running, requests(grammars))


def test_answers_satisfy_their_grammars(expected):
    assert check(expected) >= 15


def test_an_answer_ends_with_what_nothing_can_follow(expected):
    """Without a token that says so, and whatever the least number of tokens."""
    for name in ("r7", "r13"):  # an object in braces; r13 has min_tokens
        *_, last = expected[name]
        assert LETTERS.text[last.token] == "}" and last.finish is FinishReason.STOP


def test_min_tokens_holds_where_the_grammar_has_more():
    made = grammars_of(LETTERS)
    start = compiled(made, Grammar(Kind.REGEX, "a+"))
    decoder = tiny("rope")
    for more in ({"min_tokens": 20}, {"stop_ids": frozenset()}):  # the latter is ignore_eos
        params = {"max_tokens": 30, "stop_ids": frozenset({END}), "logit_bias": {END: 99.0}} | more
        running, _, _ = engine(decoder, decoder, 200, LONG)
        one = make_request("r0", [1, 2], matcher=start.begin(), **params)
        (events,) = answers(running, [one]).values()
        assert [event.token for event in events[:20]] == [0] * 20
        assert len(events) == (21 if "min_tokens" in more else 30)


def test_free_requests_are_answered_as_without_such_company(grammars, expected):
    decoder = tiny("rope")
    running, _, _ = engine(decoder, decoder, 200, LONG)
    free = [each for each in requests(grammars) if each.matcher is None]
    found = answers(running, free)
    assert without_numbers(found) == without_numbers({name: expected[name] for name in found})


def test_preemption_changes_no_answer(grammars, expected):
    decoder = tiny("rope")
    running, manager, scheduler = engine(decoder, decoder, 24, LONG)
    made = requests(grammars)

    def checked():
        manager.check()
        scheduler.check()

    found = answers(running, made, checked)
    assert sum(each.preemptions for each in made) > 5
    assert without_numbers(found) == without_numbers(expected)


def test_forced_tokens_are_those_that_would_have_been_drawn_one_by_one(grammars):
    decoder, steps, forced = tiny("rope"), [], []
    answered = []
    for scored in (False, True):  # with scores, every token is drawn
        running, _, _ = engine(decoder, decoder, 200, LONG)
        made = requests(grammars, ways=({"logprobs": 0},) if scored else ({},))
        for each in made:
            running.submit(each)
        events = {each.id: [] for each in made}
        steps.append(0)
        forced.append(0)
        while running.busy:
            step = running.step()
            steps[-1] += 1
            forced[-1] += step.stats.forced_tokens
            assert step.stats.generated_tokens == len(step.events)
            for event in step.events:
                events[event.request_id].append((event.token, event.finish))
        answered.append(events)
    assert answered[0] == answered[1]
    assert forced[0] > 100 and forced[1] == 0 and steps[0] < 0.75 * steps[1]


@pytest.mark.parametrize("encoding", ["rope", "t5"])
def test_a_full_context_is_shortened_under_a_grammar(grammars, encoding):
    decoder = tiny(encoding)
    small = Limits(max_seqs=6, max_step_tokens=16, max_context=24, max_queue=100)
    made = grammars_of(LETTERS)
    regexes = (r"(rope walk ){4}end", r"[a-f]{15}(xyz){10}")
    starts = [compiled(made, Grammar(Kind.REGEX, regex)) for regex in regexes]
    for overflow in (Overflow.SHIFT, Overflow.SLIDE) if encoding == "t5" else (Overflow.SHIFT,):
        running, manager, scheduler = engine(decoder, decoder, 30, small)
        asked = requests(starts, 6, max_tokens=200, overflow=overflow)
        found = answers(running, asked, lambda m=manager, s=scheduler: (m.check(), s.check()))
        assert check(found, regexes) == 3  # the client of one has left
        assert any(each.dropped for each in asked)


def test_max_tokens_and_stops_end_an_answer_among_forced_tokens(grammars):
    decoder = tiny("rope")
    for params, finish in (
        ({"max_tokens": 5}, FinishReason.LENGTH),
        ({"max_tokens": 50, "stop_ids": frozenset({LETTERS.text.index("m")})}, FinishReason.STOP),
    ):
        running, _, _ = engine(decoder, decoder, 200, LONG)
        one = make_request("r1", [1, 2], temperature=1.0, matcher=grammars[1].begin(), **params)
        events = answers(running, [one])
        assert texts(events)["r1"] == '{"name'[: len(events["r1"])] and len(events["r1"]) == 5
        assert events["r1"][-1].finish is finish


class Stuck(Matcher):
    """Fails at its third token: when it takes it, or when it looks for it."""

    def __init__(self, matcher, where):
        super().__init__(matcher._state, matcher._mask, matcher._ends)
        self.where, self.taken = where, 0

    def mask(self):
        if self.taken == 2 and self.where == "mask":
            raise FormFailed("no token continues it")
        return super().mask()

    def takes(self, token):
        return self.mask() and super().takes(token)

    def advance(self, token, most):
        self.taken += 1
        if self.taken == 3:
            raise FormFailed("no token continues it")
        return super().advance(token, 0)


def all_events(running, made):
    """Events by request, and how many requests ended in which way."""
    events, ends = {each.id: [] for each in made}, Counter()
    for each in made:
        running.submit(each)
    while running.busy:
        step = running.step()
        ends.update(summary.finish for summary in step.stats.ended)
        for event in step.events:
            events[event.request_id].append(event)
    return events, ends


@pytest.mark.parametrize("where", ["mask", "advance"])
def test_a_grammar_that_leads_nowhere_fails_its_request_alone(grammars, expected, where):
    decoder = tiny("rope")
    running, manager, scheduler = engine(decoder, decoder, 200, LONG)
    made = requests(grammars)
    made[2].matcher = Stuck(made[2].matcher, where)
    events, ends = all_events(running, made)
    scheduler.check()
    assert ends[FinishReason.ABORT] == 1 and not ends[FinishReason.ERROR]  # the client's fault
    assert [event.error is not None for event in events.pop("r2")] == [False, False, True]
    found, wanted = without_numbers(events), without_numbers(expected)
    for name, own in found.items():  # clients of some have left in the other run
        assert name.endswith("1") or own == wanted[name]
    assert manager.counts().active == 0


def test_steps_are_launched_ahead_with_grammars(grammars, caplog):
    """The mask is made of tokens that were read while the device computed the next logits."""
    decoder = tiny("rope")
    plain, _, _ = engine(decoder, decoder, 100, LIMITS)
    running, device, checked = late(decoder, decoder, 100)

    def mixed():
        own = requests(grammars[1:3], 8, ways=WAYS[:2], max_tokens=20)
        return own + workload(({"temperature": 0.0}, {}), seed=3, count=0)

    want, found = answers(plain, mixed()), answers(running, mixed(), checked)
    assert without_numbers(found) == without_numbers(want)
    assert device.ahead > 5
    assert not caplog.messages


def test_one_that_leads_nowhere_fails_alone_in_a_step_launched_ahead(grammars):
    decoder = tiny("rope")
    running, device, _ = late(decoder, decoder, 100)
    made = requests(grammars[1:2], 8, ways=WAYS[:2], max_tokens=20)
    want, _ = all_events(running, requests(grammars[1:2], 8, ways=WAYS[:2], max_tokens=20))
    stuck = next(each for each in made if each.matcher is not None)
    stuck.matcher = Stuck(stuck.matcher, "mask")
    found, _ = all_events(running, made)
    assert [event.error is not None for event in found.pop(stuck.id)] == [False, False, True]
    assert without_numbers(found) == without_numbers({name: want[name] for name in found})
    assert device.ahead > 5
