"""The sampler against a full softmax and a full sort, which it never does itself."""

import math
import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model import sampler
from ropewalk.model.kernels.triton.launches import TritonSampler
from ropewalk.model.sampler import (
    FIRST_CANDIDATES,
    KernelSampler,
    Sampler,
    adjusted,
    ranked,
    token_scores,
)
from ropewalk.model.sampling import Ask, History, SamplingParams
from tests.products import combined, pairs


@pytest.fixture(scope="module", params=["torch", "kernels"])
def sampling(request):
    """Whatever picks tokens: both must keep to the book."""
    if request.param == "torch":
        return Sampler()
    return KernelSampler(request.getfixturevalue("kernels"))


@pytest.fixture(scope="module")
def draws(sampling):
    return lambda *asked: drawn(sampling, *asked)


def params(**chosen):
    return SamplingParams(max_tokens=8, **chosen)


def drawn(sampling, row, chosen, uniforms):
    """The token of a row [vocab] for each of the uniforms."""
    asks = [Ask(chosen, [], 0, uniform) for uniform in uniforms]
    return [each.token for each in sampling.pick(row.expand(len(asks), -1), asks)]


def kept(row, temperature, top_k, top_p, min_p):
    """Probabilities of the truncated distribution, by the book: top_k, then top_p, then min_p."""
    probabilities = torch.softmax(row.double() / temperature, dim=-1)
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    if top_k:
        ordered, tokens = ordered[:top_k], tokens[:top_k]
        ordered = ordered / ordered.sum()
    before = ordered.cumsum(0) - ordered
    keep = before < top_p
    keep &= ordered >= min_p * ordered[0]
    keep[0] = True
    ordered, tokens = ordered[keep], tokens[keep]
    return dict(zip(tokens.tolist(), (ordered / ordered.sum()).tolist(), strict=True))


TRUNCATIONS = ((0.3, 1.0, 2.0), (0, 1, 5, 5000), (1e-6, 0.4, 0.95, 1.0), (0.0, 0.05, 1.0))
GRID = list(product(*TRUNCATIONS))
# Any two values of different lists are together in each.
THIRDS = [
    [
        case
        for case in GRID
        if sum(of.index(value) for of, value in zip(TRUNCATIONS, case, strict=True)) % 3 == third
    ]
    for third in range(3)
]
ROWS = ((7, 1.0), (900, 3.0), (900, 0.01), (3000, 0.5))  # vocabulary, spread


@pytest.mark.parametrize(
    ("shape", "third"),
    combined(ROWS, range(3), always=lambda shape, third: ROWS.index(shape) == third),
)
def test_draws_follow_the_truncated_distribution(shape, third, draws):
    """`uniform` walks the distribution: equal steps must hit each token as often as is its due.

    A nearly flat row keeps far more tokens than the first candidates hold.
    """
    vocab, spread = shape
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    steps = 40
    for temperature, top_k, top_p, min_p in THIRDS[third]:
        chosen = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = kept(row, temperature, top_k, top_p, min_p)
        counts = dict.fromkeys(expected, 0)
        for token in draws(row, chosen, [(i + 0.5) / steps for i in range(steps)]):
            assert token in expected, (chosen, token)
            counts[token] += 1
        for token, count in counts.items():
            assert abs(count / steps - expected[token]) <= 1 / steps + 1e-9


@st.composite
def truncations(draw):
    return params(
        temperature=draw(st.sampled_from([1e-5, 0.1, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 3, 64, 1000])),
        top_p=draw(st.sampled_from([1e-9, 0.3, 0.9, 1 - 1e-9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 1e-6, 0.1, 1.0])),
    )


UNIFORMS = st.one_of(st.sampled_from([0.0, 0.5, 1 - 2**-53]), st.floats(0, 1, exclude_max=True))
# Few different values: most rows have ties, some have tokens that cannot come.
LOGITS = st.one_of(st.sampled_from([-math.inf, -1.0, 0.0, 0.5]), st.floats(-30, 30, width=32))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    row=st.lists(LOGITS, min_size=1, max_size=90).filter(lambda row: max(row) > -math.inf),
    chosen=truncations(),
    uniform=UNIFORMS,
)
def test_a_draw_is_never_less_likely_than_all_that_is_kept(row, chosen, uniform, draws):
    """Among ties any may be kept, so it is probabilities that are compared."""
    row = torch.tensor(row)
    expected = kept(row, chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p)
    (token,) = draws(row, chosen, [uniform])
    assert row[token] > -torch.inf
    scaled = row.double() / chosen.temperature
    assert scaled[token] >= min(scaled[other] for other in expected) - 1e-6


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 511, 512, 513, 5000])
@pytest.mark.parametrize("top_p", [0.0099, 0.899, 0.9999])
def test_a_flat_row_keeps_as_many_tokens_as_their_mass_asks_for(vocab, top_p):
    """Just not flat: token i is the i-th likely one, and the last one kept is drawn at the end."""
    row = -torch.arange(vocab, dtype=torch.float64) * 1e-9  # the kernels' rows are float32
    first, last = drawn(Sampler(), row, params(top_p=top_p), [0.0, 1 - 2**-53])
    assert first == 0
    assert last == math.ceil(top_p * vocab) - 1


def looked_at(monkeypatch):
    """How many rows are asked for how many of their most likely tokens, from now on."""
    seen = []
    among_best = sampler.among_best

    def noted(rows, rule, count, whole):
        seen.append((len(rows), count))
        return among_best(rows, rule, count, whole)

    monkeypatch.setattr(sampler, "among_best", noted)
    return seen


def test_a_peaked_row_looks_at_the_first_candidates_alone(monkeypatch):
    """The reason there are candidates: no step may sort a whole vocabulary."""
    seen = looked_at(monkeypatch)
    row = -torch.arange(5000.0)
    for chosen in (params(top_p=0.99), params(min_p=0.01), params(top_p=0.9, min_p=0.1)):
        drawn(Sampler(), row, chosen, [0.5])
    drawn(Sampler(), row, params(top_k=7, top_p=0.9), [0.5])
    drawn(Sampler(), row, params(), [0.5])
    assert seen == [(1, FIRST_CANDIDATES)] * 3 + [(1, 7)]


def test_only_rows_that_need_more_candidates_get_them(monkeypatch):
    seen = looked_at(monkeypatch)
    rows = torch.stack((-torch.arange(700.0), torch.zeros(700), torch.full((700,), torch.nan)))
    asks = [Ask(params(top_p=0.99), [], 0, 0.999)] * 3
    picked = Sampler().pick(rows, asks)
    assert seen == [(3, 64), (1, 512), (1, 700)]
    assert [each.finite for each in picked] == [True, True, False]
    assert picked[0].token < 5


def test_a_temperature_just_above_greedy_draws_the_most_likely(draws):
    row = torch.tensor([80.0, 80.5, -80.0])
    for chosen in (params(temperature=1e-5), params(temperature=1e-5, top_p=0.5)):
        assert not chosen.greedy
        assert set(draws(row, chosen, [i / 10 for i in range(10)])) == {1}
    assert params(temperature=9e-6).greedy


def test_the_kernels_draw_what_the_definition_draws(kernels):
    """But where rounding moves an edge across `uniform`, which these do not meet."""
    row = torch.randn(5000, generator=torch.Generator().manual_seed(8)) * 4
    rng = random.Random(3)
    for temperature, top_k, top_p, min_p in GRID:
        chosen = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        uniforms = [rng.random() for _ in range(5)]
        both = [drawn(each, row, chosen, uniforms) for each in (KernelSampler(kernels), Sampler())]
        assert both[0] == both[1], chosen


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_row_of_no_numbers_does_no_harm_in_the_kernels(value, kernels):
    row = torch.full((300,), value)
    for chosen in (params(), params(top_p=0.9), params(top_k=5), params(min_p=0.1)):
        (token,) = drawn(KernelSampler(kernels), row, chosen, [0.5])
        assert 0 <= token < 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_of_each_row(dtype, sampling):
    rows = torch.randn(6, 1000, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows[1, 999] = 9.0
    rows[2, 0] = torch.inf
    rows[3] = -torch.inf
    rows[4, 500] = torch.nan
    values, tokens = sampling.largest(rows)
    assert values.isfinite().tolist() == [True, True, False, False, False, True]
    assert values[4].isnan() and tokens[1] == 999 and tokens[2] == 0
    for row in (0, 1, 5):
        assert values[row] == rows[row].max() == rows[row, tokens[row]]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_in_the_kernels(dtype, rows, kernels):
    """Parts of a row are looked through one by one."""
    generator = torch.Generator().manual_seed(5)
    given = torch.randn(rows, 2, 2000, generator=generator).to(dtype)[:, 0]  # not side by side
    assert rows == 1 or not given.is_contiguous()

    def found():
        values, tokens = kernels.largest(given)
        return values[-1], tokens[-1]

    assert found() == (given[-1].max(), given[-1].argmax())
    given[-1, 1999] = given[-1, 700] = 9.0  # the first of them
    assert found() == (9.0, 700)
    given[-1, 1500] = torch.inf
    assert found() == (torch.inf, 1500)
    given[-1] = -torch.inf
    assert found() == (-torch.inf, 0)
    given[-1, 1800] = torch.nan
    assert math.isnan(found()[0]) and 0 <= found()[1] < 2000


def adjusted_row(row, chosen, prompt, answer):
    (found,) = adjusted(row[None], [Ask(chosen, [*prompt, *answer], len(prompt), 0.0)])
    return found


def changes_logits(chosen, generated):
    return Ask(chosen, [0] * generated, 0, 0.0).changes_logits


def test_adjustments_one_by_one():
    row = torch.tensor([2.0, -2.0, 1.0, 0.5])
    prompt, answer = [0, 1], [2, 2]
    cases = [
        ({"logit_bias": {3: 4.0, 0: -100.0}}, [-98.0, -2.0, 1.0, 4.5]),
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 0.5, 0.5]),
        ({"presence_penalty": 0.5}, [2.0, -2.0, 0.5, 0.5]),
        ({"frequency_penalty": 0.25}, [2.0, -2.0, 0.5, 0.5]),
        ({"presence_penalty": 1.0, "frequency_penalty": -1.0}, [2.0, -2.0, 2.0, 0.5]),
        ({"min_tokens": 3, "stop_ids": frozenset({0})}, [-torch.inf, -2.0, 1.0, 0.5]),
        ({"min_tokens": 2, "stop_ids": frozenset({0})}, [2.0, -2.0, 1.0, 0.5]),
    ]
    for chosen, expected in cases:
        assert adjusted_row(row, params(**chosen), prompt, answer).tolist() == expected
        assert changes_logits(params(**chosen), len(answer)) == (row.tolist() != expected)
    assert row.tolist() == [2.0, -2.0, 1.0, 0.5]
    assert not changes_logits(params(), 0)


def test_all_adjustments_together_come_in_order():
    """Bias, then the repetition penalty on the biased value, then what is subtracted."""
    row = torch.tensor([2.0, -2.0, 1.0, 0.5])
    chosen = params(
        logit_bias={0: -3.0, 2: 1.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=4,
        stop_ids=frozenset({3}),
    )
    assert adjusted_row(row, chosen, [0], [2, 1, 2]).tolist() == [-2.0, -4.75, 0.0, -torch.inf]


def test_the_repetition_penalty_counts_no_token_twice():
    row, chosen = torch.tensor([4.0, -1.0]), params(repetition_penalty=2.0)
    assert adjusted_row(row, chosen, [0, 0, 1], [0, 1]).tolist() == [2.0, -2.0]


PENALTIES = (
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.5, "frequency_penalty": -0.25},
    {"repetition_penalty": 0.6, "presence_penalty": -0.5, "logit_bias": {3: 2.0, 900: 1.0}},
    {"min_tokens": 4, "stop_ids": frozenset({2, 900})},
    {},
)


def test_an_answer_that_grows_is_penalised_as_one_that_is_there():
    """Its history is read on, not anew; tokens may have no logit."""
    rng = random.Random(0)
    rows = torch.randn(len(PENALTIES), 30, generator=torch.Generator().manual_seed(0))
    tokens = [[rng.randrange(40) for _ in range(5)] for _ in PENALTIES]
    growing = [
        Ask(params(**own), known, 3, 0.0) for own, known in zip(PENALTIES, tokens, strict=True)
    ]
    for _ in range(40):
        fresh = [replace(ask, history=History()) for ask in growing]
        assert torch.equal(adjusted(rows, growing), adjusted(rows, fresh))
        for known in tokens:
            known.append(rng.randrange(40))


@pytest.mark.parametrize("last", range(6))
def test_a_token_that_only_the_device_knows_is_penalised_as_others(last):
    """In prompt and answer, in the prompt alone, in the answer alone, and new."""
    rows = torch.randn(len(PENALTIES), 30, generator=torch.Generator().manual_seed(last))
    known = [0, 1, 2, 3, 29, 0, 3, 4]
    asks = [Ask(params(**own), known, 5, 0.0, coming=True) for own in PENALTIES]
    whole = [replace(ask, tokens=[*known, last], coming=False) for ask in asks]
    coming = torch.full((len(asks),), last)
    assert torch.equal(adjusted(rows, asks, coming), adjusted(rows, whole))


@pytest.mark.parametrize("penalty", [1e-38, 1e-40, 1e-46])
def test_a_tiny_repetition_penalty_makes_no_logit_infinite(penalty):
    row = torch.tensor([4.0, 0.0, -1.0, 2.0])
    chosen = params(repetition_penalty=penalty, min_tokens=2, stop_ids=frozenset({0}))
    found = adjusted_row(row, chosen, [0, 1, 2, 3], [])
    assert found[0] == -torch.inf
    assert found[1:].isfinite().all() and found.argmax() == 3


def test_a_stop_token_without_a_logit_forbids_nothing():
    row, chosen = torch.tensor([1.0, 2.0]), params(min_tokens=1, stop_ids=frozenset({1, 2}))
    assert adjusted_row(row, chosen, [], []).tolist() == [1.0, -torch.inf]


def test_top_logprobs_are_ordered():
    row = torch.tensor([0.1, 0.5, 0.4]).log()
    ((largest, own, *top),) = token_scores(row[None], torch.tensor([0]), 2).tolist()
    assert largest == row.max()
    (first, second) = ranked(top)
    assert (first[0], second[0]) == (1, 2)
    assert first[1] == pytest.approx(torch.tensor(0.5).log().item())
    assert own == pytest.approx(torch.tensor(0.1).log().item())
    assert token_scores(row[None], torch.tensor([0]), 0).tolist() == [[largest, own]]
    assert ranked([]) == ()


@pairs(vocab=[20, 511, 513, 5000], count=[0, 1, 5, 20], dtype=[torch.float32, torch.bfloat16])
def test_kernels_score_as_torch_does(vocab, count, dtype, kernels):
    generator = torch.Generator().manual_seed(vocab)
    rows = (4 * torch.randn(7, vocab, generator=generator)).to(dtype)
    rows[1] = rows[1].sort().values  # the likeliest come last
    rows[2] = rows[2].sort(descending=True).values
    rows[3, ::2] = -torch.inf
    tokens = torch.randint(vocab, (7,), generator=generator)
    found = kernels.scores(rows, tokens, count)
    exact = rows.double().log_softmax(dim=-1)
    assert torch.equal(found[:, 0], rows.double().amax(dim=-1))
    near = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)  # it adds up in float32
    near(found[:, 1], exact.gather(1, tokens[:, None])[:, 0])
    best, values = found[:, 2 : 2 + count].long(), found[:, 2 + count :]
    near(values, exact.topk(count).values)
    near(values, exact.gather(1, best))
    assert all(len(set(row)) == count for row in best.tolist())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_seen_in_its_scores(bad, kernels):
    rows = torch.zeros(3, 700)
    rows[1, 600] = bad
    found = kernels.scores(rows, torch.tensor([5, 5, 5]), 2)
    assert found[:, 0].isfinite().tolist() == [True, False, True]
    assert found[[0, 2]].isfinite().all()


# ---------------------------------------------------------------------- many rows at once


def everything(vocab, count):
    """Rows and what is asked after each, as different as they come."""
    rng = random.Random(count)
    rows = torch.randn(count, vocab, generator=torch.Generator().manual_seed(count)) * 3
    asks = []
    for _ in range(count):
        tokens = [rng.randrange(vocab) for _ in range(9)]
        chosen = params(
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 3, 100]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
            presence_penalty=rng.choice([0.0, 0.5]),
            logit_bias=rng.choice([{}, {rng.randrange(vocab): 9.0}]),
            logprobs=rng.choice([None, None, 0, 4]),
        )
        asks.append(Ask(chosen, tokens, 4, rng.random()))
    return rows, asks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_what_it_gets_alone(dtype, sampling):
    """Ties included: rounded to 8 bits, many tokens are as likely as others."""
    rows, asks = everything(2000, 60)
    rows = rows.to(dtype)
    together = sampling.pick(rows, asks)
    alone = [sampling.pick(row[None], [ask])[0] for row, ask in zip(rows, asks, strict=True)]
    assert together == alone
    assert len({each.token for each in together}) > 20
    order = random.Random(1).sample(range(60), 45)
    assert sampling.pick(rows[order], [asks[i] for i in order]) == [alone[i] for i in order]


def test_greedy_takes_the_largest_after_what_changes_it(sampling):
    """And nothing else of what is asked for matters to it."""
    row = torch.tensor([1.0, 4.0, 3.0, -1.0])
    for changes, token in (
        ({}, 1),
        ({"logit_bias": {3: 6.0}}, 3),
        ({"repetition_penalty": 2.0}, 2),
        ({"presence_penalty": 1.5}, 2),
    ):
        chosen = params(temperature=0.0, top_k=2, **changes)
        for uniform in (0.0, 0.999):
            (picked,) = sampling.pick(row[None], [Ask(chosen, [0, 1], 1, uniform)])
            assert picked.token == token


def test_scores_are_of_the_token_and_its_row(sampling):
    rows, asks = everything(300, 40)
    for row, ask, found in zip(rows, asks, sampling.pick(rows, asks), strict=True):
        count = ask.params.logprobs
        if count is None:
            assert found.logprob is None and found.top == ()
            continue
        exact = row.double().log_softmax(-1)
        assert found.logprob == pytest.approx(float(exact[found.token]), abs=1e-5)
        assert [token for token, _ in found.top] == exact.topk(count).indices.tolist()
        assert [score for _, score in found.top] == pytest.approx(
            exact.topk(count).values.tolist(), abs=1e-5
        )


def test_a_device_is_asked_once(monkeypatch):
    """On one that has no values, whatever else asks for one raises."""
    rows, asks = everything(300, 40)
    asked = []

    def answer(numbers, arrived):
        asked.append(numbers)
        return [1.0] * len(numbers)

    monkeypatch.setattr(sampler, "_back", answer)
    assert len(Sampler().pick(rows.to("meta"), asks)) == 40
    assert len(asked) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kernels", [False, True])
def test_a_gpu_picks_what_a_cpu_picks(kernels):
    """Nothing is waited for before all is under way: the host's list is the first to wait."""
    rows, asks = everything(50_000, 60)
    expected, there = Sampler().pick(rows, asks), TritonSampler() if kernels else Sampler()
    for found, wanted in zip(there.pick(rows.cuda(), asks), expected, strict=True):
        assert found.token == wanted.token
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]


class Only:
    """These tokens may be picked, of so many."""

    def __init__(self, tokens, size):
        self.includes = set(tokens).__contains__
        bits = sum(1 << token for token in tokens)
        self.bits = partial(bits.to_bytes, -(-size // 32) * 4, "little")


@pytest.mark.parametrize("vocab", [7, 900, 3001])
@pytest.mark.parametrize("some", [1, 3, 600])
@pytest.mark.parametrize(
    "chosen", [{"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.9, "temperature": 0.7}]
)
def test_only_allowed_tokens_are_picked(sampling, vocab, some, chosen):
    """As from a row that has no other tokens, beside rows that are free; scores are the model's."""
    rng = random.Random(vocab + some)
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(5, vocab, generator=generator) * 3
    plain = [Ask(params(**chosen, logprobs=0), [], 0, rng.random()) for _ in rows]
    tokens = sorted(rng.sample(range(vocab), min(some, vocab)))
    # A mask may be shorter than the row: of an embedding with rows that no token has.
    allowed = Only(tokens, tokens[-1] + 1)
    held = [
        Ask(*(getattr(a, n) for n in ("params", "tokens", "num_prompt", "uniform")), allowed)
        if i % 2
        else a
        for i, a in enumerate(plain)
    ]
    found, free = sampling.pick(rows, held), sampling.pick(rows, plain)
    narrow = sampling.pick(rows[:, tokens], plain)
    for i, each in enumerate(found):
        assert each.token == (tokens[narrow[i].token] if i % 2 else free[i].token)
        assert each.logprob == pytest.approx(rows[i].log_softmax(0)[each.token].item(), abs=1e-4)


def test_stops_and_biases_beside_a_grammar(sampling):
    """A token that the mask bars stays barred whatever its bias, and penalties still count."""
    row = torch.zeros(1, 40)
    row[0, 7] = 1.0
    for chosen, token in (
        ({"logit_bias": {3: 100.0, 5: 2.0}}, 5),
        ({}, 7),
        ({"presence_penalty": 2.0}, 5),
        ({"min_tokens": 4, "stop_ids": frozenset({7})}, 7),  # what made the mask has seen to it
    ):
        asked = Ask(params(**chosen, temperature=0.0), [1, 7], 1, 0.0, Only([5, 7], 40))
        assert sampling.pick(row, [asked])[0].token == token
