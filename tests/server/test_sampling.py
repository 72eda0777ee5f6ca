"""Rows of logits to tokens of requests: scores of answer and prompt, whoever shares the batch."""

import random

import pytest
import torch

from ropewalk.cache.manager import Table
from ropewalk.model.sampler import Sampler
from ropewalk.server.engine.batch import PromptRows, build_batch
from ropewalk.server.engine.engine import sample
from ropewalk.server.scheduling.request import Work
from tests.model.running import run_uncached
from tests.model.tiny import tiny
from tests.server.fake_engine import make_request
from tests.server.test_equality import engine


def test_scores_are_of_the_models_own_distribution():
    """Temperature, penalties and biases shape the draw, not the reported log-probabilities."""
    plain = make_request("a", [1, 2], logprobs=2)
    bent = make_request("b", [1, 2], logprobs=2, logit_bias={3: 100.0}, temperature=0.5)
    logits = torch.tensor([[0.0, 3.0, 1.0, -2.0]] * 2)
    result = sample(logits, batch_of(plain, bent), Sampler())
    expected = logits[0].log_softmax(-1)
    assert result["a"].token == 1
    assert result["b"].token == 3
    for each, token in ((result["a"], 1), (result["b"], 3)):
        assert each.logprob.token == token
        assert each.logprob.logprob == pytest.approx(float(expected[token]))
        assert [top for top, _ in each.logprob.top] == [1, 2]


def test_nobody_disturbs_anothers_draws():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))

    def drawn(names):
        requests = [make_request(name, [1], temperature=1.0) for name in names]
        for each in requests:
            each.rng = random.Random(each.id)
        rows = logits[[ord(name) - ord("a") for name in names]]
        return {
            name: each.token for name, each in sample(rows, batch_of(*requests), Sampler()).items()
        }

    together = drawn("abc")
    assert together == drawn("a") | drawn("b") | drawn("c")
    assert drawn("cab") == together


def test_a_seed_decides_and_nothing_else():
    requests = [make_request(f"r{i}", [1], temperature=1.0) for i in range(12)]
    for i, each in enumerate(requests):
        each.rng = random.Random(i % 6)
    found = [
        each.token for each in sample(torch.zeros(12, 40), batch_of(*requests), Sampler()).values()
    ]
    assert found[:6] == found[6:]
    assert len(set(found)) > 3


@pytest.mark.parametrize("blocks", [60, 18])
def test_prompt_scores_survive_chunks_and_preemption(blocks):
    """One entry per prompt token, each the model's own, however often it was computed."""
    decoder = tiny("rope")
    running, _, _ = engine(decoder, decoder, blocks)
    rng = random.Random(2)
    prompts = [[rng.randrange(61) for _ in range(length)] for length in (40, 33, 1)]
    requests = [
        make_request(f"r{i}", prompt, max_tokens=20, prompt_logprobs=3)
        for i, prompt in enumerate(prompts)
    ]
    for each in requests:
        running.submit(each)
    told = {}
    while running.busy:
        for event in running.step().events:
            if event.prompt_logprobs is not None:
                told[event.request_id] = event.prompt_logprobs
    assert (sum(each.preemptions for each in requests) > 0) == (blocks == 18)
    for each, prompt in zip(requests, prompts, strict=True):
        scores = told[each.id]
        assert len(scores) == len(prompt)
        assert scores[0] is None
        exact = run_uncached(decoder, prompt).float().log_softmax(-1)
        for index in range(1, len(prompt)):
            assert scores[index].token == prompt[index]
            assert scores[index].logprob == pytest.approx(
                float(exact[index - 1, prompt[index]]), abs=1e-5
            )
            assert len(scores[index].top) == 3


def test_a_mixed_plan_becomes_exact_tensors():
    """A chunk behind cached tokens, a single row, and a prompt whose scores are wanted."""
    chunk = make_request("chunk", range(10, 20))
    single = make_request("single", [1, 2, 3])
    single.tokens.append(4)
    scored = make_request("scored", [7, 8, 9], prompt_logprobs=0)
    tables = {
        "chunk": ([5, 2, 9], [0, 4, 8]),
        "single": ([3], [100]),  # a base other than its index places the block elsewhere
        "scored": ([8], [0]),
    }
    work = (Work(chunk, 3, 4), Work(single, 3, 1), Work(scored, 0, 3))
    batch = build_batch(work, lambda name: Table(*tables[name]), 4)
    made = batch.forward
    assert made.tokens.tolist() == [13, 14, 15, 16, 4, 7, 8, 9]
    assert made.positions.tolist() == [3, 4, 5, 6, 103, 0, 1, 2]
    assert made.offsets.tolist() == [3, 0, 1, 2, 3, 0, 1, 2]
    assert made.slots.tolist() == [23, 8, 9, 10, 15, 32, 33, 34]
    assert made.query_starts.tolist() == [0, 4, 5, 8]
    assert made.context_lens.tolist() == [7, 4, 3]
    assert made.block_tables.tolist() == [[5, 2, 9], [3, 0, 0], [8, 0, 0]]
    assert made.block_bases.tolist() == [[0, 4, 8], [100, 0, 0], [0, 0, 0]]
    assert made.output_rows.tolist() == [4, 5, 6, 7]
    assert (made.max_query, made.max_context) == (4, 7)
    assert batch.samples == ((single, 0, 1, None), (scored, 3, 0, None))
    assert batch.prompts == (PromptRows(scored, 1, slice(1, 3)),)


def batch_of(*requests):
    """Every request's last token."""
    work = tuple(Work(each, len(each.tokens) - 1, 1) for each in requests)
    return build_batch(work, lambda name: Table([1], [0]), 4)
