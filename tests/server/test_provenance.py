"""The stateful search, and two large fixed runs: preemption identity and poison isolation.

STATEFUL_EXAMPLES asks for a longer search, at random.
"""

import random

from ropewalk.model.sampling import SamplingParams
from ropewalk.server.scheduling.request import FinishReason, Limits
from tests.server.machine import ProvenanceMachine, search
from tests.server.provenance import STOP, World, next_token, solo

TestProvenance = ProvenanceMachine.TestCase
TestProvenance.settings = search(100)


def run_all(world: World) -> None:
    while world.live:
        world.step()
    world.check_empty()


def test_the_model_depends_on_all_of_its_context():
    context = [0, 1, 1, 0, 1, 0, 0, 1]
    flipped = [[*context[:i], 1 - context[i], *context[i + 1 :]] for i in range(8)]
    assert all(next_token(each, 251) != next_token(context, 251) for each in flipped)


def test_two_hundred_requests_under_pressure_equal_their_solo_runs():
    # 8 requests of up to 40 tokens want 80 blocks of 4; there are 20.
    pick = random.Random(7)
    world = World(21, 4, Limits(8, 24, 64, 500))
    beginnings = [[pick.randrange(2) for _ in range(12)] for _ in range(4)]
    prompts = [
        pick.choice(beginnings)[: pick.randrange(13)]
        + [pick.randrange(2) for _ in range(pick.randrange(1, 9))]
        for _ in range(240)
    ]
    requests = []
    for prompt in prompts:
        params = SamplingParams(max_tokens=pick.randrange(1, 21))
        requests.append(world.add(prompt, params, salt=pick.choice(["", "a"])))
    run_all(world)

    assert world.preemptions >= 100
    assert sum(request.preemptions for request in requests) == world.preemptions
    assert len(world.finished) == 240
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == solo(prompt, request.params, 64)
    assert sum(request.cached for request in requests) > 0
    assert world.cache.evicted_blocks > 0


def test_one_poisoned_request_of_sixteen_leaves_the_others_as_they_were():
    world = World(200, 4, Limits(16, 64, 64, 100))
    shared = [0, 1, 1, 0, 1, 0, 0, 1]
    params = SamplingParams(max_tokens=12)
    prompts = {f"r{i}": [*shared, i % 2, i // 2 % 2] for i in range(16)}
    for name, prompt in prompts.items():
        world.add(prompt, params, name=name)
    events = [*world.step(), *world.step(), *world.step()]
    events += world.step(poisoned=frozenset({"r5"}))
    world.check()
    while world.live:
        events += world.step()
    ends = {event.request_id: event for event in events if event.finish}
    failed = ends.pop("r5")

    assert failed.finish is FinishReason.ERROR and failed.error is not None
    assert len(ends) == 15
    assert all(end.finish is FinishReason.LENGTH for end in ends.values())
    for name in ends:
        assert world.finished[name].tokens == solo(prompts[name], params, 64)
    world.check_empty()


def test_one_free_block_and_many_requests_all_finish():
    world = World(2, 4, Limits(8, 8, 8, 64))
    for i in range(64):
        stop_ids = frozenset({STOP}) if i % 3 else frozenset()
        world.add([i % 2, i // 2 % 2], SamplingParams(max_tokens=3, stop_ids=stop_ids))
    world.drain()
    assert len(world.finished) == 64
