"""Many requests on an engine whose cache is too small for them, and on one with room for all."""

import random
from dataclasses import dataclass

from model.sampling import SamplingParams
from server.build import load_models
from server.metrics import Metrics
from server.request import Request
from tests.server.fake_engine import configured

CONTEXT = 160


@dataclass
class Run:
    """What each request got, token by token, and how often any was preempted."""

    answers: dict[str, list]
    preempted: int


def load(source, *flags):
    """A loaded model."""
    (loaded,) = load_models(
        configured(str(source), "--max-model-len", str(CONTEXT), *flags), Metrics()
    )
    return loaded


def requests(count, *, seeded, vocab, seed=0, encoder=False):
    """With common beginnings, choices of one prompt, and log-probabilities of prompts."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab) for _ in range(50)] for _ in range(3)]
    made = []
    for index in range(count):
        own = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 5, 17, 30, 60]))]
        prompt = rng.choice(stems)[: rng.choice([0, 0, 16, 31, 33])] + own
        params = SamplingParams(
            max_tokens=rng.randint(1, CONTEXT - len(prompt)),
            temperature=1.0 if seeded else 0.0,
            logprobs=2,
            prompt_logprobs=1 if index % 7 == 3 and not encoder else None,
        )
        for choice in range(3 if index % 10 == 5 and not encoder else 1):
            made.append(
                Request(
                    id=f"r{index}.{choice}",
                    tokens=[0] if encoder else list(prompt),
                    num_prompt=1 if encoder else len(prompt),
                    params=params,
                    arrival=0.0,
                    rng=random.Random(f"{index}.{choice}"),
                    source=tuple(prompt) if encoder else (),
                    sibling=f"r{index}.0" if choice else None,
                )
            )
    return made


def run(engine, asked, together=20):
    """Keep `together` requests in the engine until all are answered."""
    got = {request.id: [] for request in asked}
    left, preempted = asked[::-1], 0
    while left or engine.busy:
        while left and len(engine.view().running) + engine.view().waiting < together:
            engine.submit(left.pop())
        step = engine.step()
        preempted += step.stats.preemptions
        for event in step.events:
            assert event.error is None
            got[event.request_id].append((event.token, event.logprob, event.prompt_logprobs))
    return Run(got, preempted)
