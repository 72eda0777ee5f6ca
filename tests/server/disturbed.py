"""Many requests on an engine whose cache is too small for them, and on one with room for all."""

import random
import time
from dataclasses import dataclass

from ropewalk.server.scheduling.request import Overflow
from tests.server.fake_engine import load_one, make_request

CONTEXT = 160


@dataclass
class Run:
    """What each request got, token by token, how often any was preempted, and blocks returned."""

    answers: dict[str, list]
    preempted: int
    back: int


def load(source, *flags):
    """A loaded model; requests arrive when they are made, all at once."""
    return load_one(source, "--max-model-len", CONTEXT, "--max-queue-time", "3600", *flags)


def requests(
    count, *, seeded, vocab, seed=0, encoder=False, overflow=Overflow.REFUSE, context=CONTEXT
):
    """With common beginnings, choices of one prompt, and log-probabilities of prompts.

    overflow: of some of them, whose answers are longer than the context.
    context: tokens, with which the engine was loaded.
    """
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab) for _ in range(50)] for _ in range(3)]
    made = []
    for index in range(count):
        own = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 5, 17, 30, 60]))]
        prompt = rng.choice(stems)[: rng.choice([0, 0, 16, 31, 33])] + own
        going_on = overflow is not Overflow.REFUSE and index % 3 == 0
        longest = context - (1 if encoder else len(prompt))
        alike = {
            "max_tokens": 2 * context if going_on else rng.randint(1, longest),
            "temperature": 1.0 if seeded else 0.0,
            "logprobs": 2,
            "prompt_logprobs": 1 if index % 7 == 3 and not (encoder or going_on) else None,
            "arrival": time.monotonic(),
            "source": tuple(prompt) if encoder else (),
            "overflow": overflow if going_on else Overflow.REFUSE,
        }
        for choice in range(3 if index % 10 == 5 and not encoder else 1):
            own = {"rng": random.Random(f"{index}.{choice}")}
            own["sibling"] = f"r{index}.0" if choice else None
            name = f"r{index}.{choice}"
            made.append(make_request(name, [0] if encoder else prompt, **alike, **own))
    return made


def run(engine, asked, together=20, *, check):
    """Keep `together` requests in the engine until all are answered."""
    got = {request.id: [] for request in asked}
    left, live, preempted = asked[::-1], 0, 0
    while left or live:
        while left and live < together:
            engine.submit(left.pop())
            live += 1
        step = engine.step()
        if check:
            engine._manager.check()
            engine._scheduler.check()
        preempted += step.stats.preemptions
        live -= len(step.stats.ended)
        for event in step.events:
            assert event.error is None
            got[event.request_id].append((event.token, event.logprob, event.prompt_logprobs))
    return Run(got, preempted, engine.view().spill.moves.back)
