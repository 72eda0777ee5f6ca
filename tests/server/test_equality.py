"""The whole engine against one uncached pass: chunked, ragged, shared, preempted, at every step.

A real tiny decoder in float64 runs under the real scheduler and cache, with a pool too small for
all requests. Every row of logits it computes is compared with the row that one pass over the
finished sequence gives.
"""

import random

import pytest

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from tests.model.running import run_uncached
from tests.model.tiny import ENCODINGS, tiny
from tests.products import combined
from tests.server.recording import Recording, engine, request

pytestmark = pytest.mark.usefixtures("one_thread")


def family(rng):
    """Prompts of which many begin alike, on and off block bounds."""
    stem = [rng.randrange(61) for _ in range(23)]
    own = [[rng.randrange(61) for _ in range(rng.randint(1, 30))] for _ in range(9)]
    return [stem[: rng.choice([0, 8, 12, 23])] + tail for tail in own] + [stem, stem]


# Every encoding is taken along every path in tests/model/test_contract.py.
USUAL = ("nope", "rope", "rope-block", "t5", "alibi", "forgetting", "cope", "learned")
AHEAD = ("rope", "t5", "learned")  # how keys carry their position: turned, not at all, added


@pytest.mark.parametrize(
    ("encoding", "backend", "ahead"),
    [
        *combined(
            ENCODINGS, [ReferenceAttention], [False], always=lambda encoding, *_: encoding in USUAL
        ),
        ("rope", SdpaAttention, False),
        *combined(
            USUAL, [ReferenceAttention], [True], always=lambda encoding, *_: encoding in AHEAD
        ),
    ],
)
def test_every_step_equals_one_uncached_pass(encoding, backend, ahead, caplog):
    rng = random.Random(encoding)
    spill = 40 if rng.random() < 0.5 else 0
    recording = Recording(tiny(encoding, backend), blocks=24, ahead=ahead, spill=spill)
    requests = [
        request(f"r{i}", prompt, max_tokens=rng.randint(1, 24), seed=i if i % 3 == 0 else None)
        for i, prompt in enumerate(family(rng))
    ]
    waiting = rng.sample(requests, len(requests))
    while waiting or recording.engine.busy:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2]))):
            recording.engine.submit(waiting.pop(0))
        recording.step()
    assert recording.preempted > 0
    assert recording.hits > 0
    assert (recording.manager.spilled().moves.back > 0) == (spill > 0)
    assert recording.chunks > 3
    assert recording.ahead > 10 if ahead else recording.ahead == 0
    assert not caplog.messages
    reference = tiny(encoding)
    oracle = {each.id: run_uncached(reference, each.tokens) for each in requests}
    worst = 0.0
    for owner, first, logits in recording.rows:
        expected = oracle[owner.id][first : first + len(logits)]
        worst = max(worst, float((logits - expected).abs().max()))
    assert worst <= 1e-10
    assert recording.manager.counts().active == 0


@pytest.mark.parametrize("seed", [None, 5])
def test_company_and_preemption_change_no_token(seed):
    """The same request alone, and in a crowd that preempts it."""
    rng = random.Random(1)
    decoder = tiny("rope")
    prompts = family(rng)

    def run(names, blocks):
        running, _, _ = engine(decoder, decoder, blocks)
        requests = [
            request(f"r{i}", prompts[i], max_tokens=20, seed=None if seed is None else seed + i)
            for i in names
        ]
        for each in requests:
            running.submit(each)
        while running.busy:
            running.step()
        return requests

    crowd = run(range(len(prompts)), blocks=24)
    disturbed = [i for i, each in enumerate(crowd) if each.preemptions]
    assert disturbed
    for i in {*disturbed[:3], 0, len(crowd) - 1}:
        together, (alone,) = crowd[i], run([i], blocks=24)
        assert alone.preemptions == 0
        assert together.tokens == alone.tokens
