"""Steps that a device is told of before the tokens of the one before them are on the host.

The device here computes nothing until it is waited for, and then all that it was told, in order:
whatever the host does too early reads numbers that mean nothing.
"""

import random
import time
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ropewalk.cache.types import Audit
from ropewalk.model.kernels.graphs.cuda_graph import CudaGraphs
from ropewalk.model.kernels.graphs.replay import ReplayedDecoder, buckets
from ropewalk.model.kernels.triton.attention import TritonAttention
from ropewalk.model.sampler import Sampler
from ropewalk.model.sampling import History
from ropewalk.server.engine.engine import Runner
from ropewalk.server.scheduling.request import Limits, Overflow
from tests.model.test_replay import Replaying, on, with_weights
from tests.model.tiny import tiny
from tests.products import pairs
from tests.server.fake_engine import make_request
from tests.server.recording import engine

LIMITS = Limits(max_seqs=4, max_step_tokens=16, max_context=40, max_queue=100)
NOTHING = -1  # a token that no embedding has
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


class Late(Runner):
    """What is launched is computed when something is read, or computed as everything else."""

    def __init__(self, forward, kv, manager, sampler):
        self.told = []
        self.ahead = 0  # steps
        self._computing = forward
        super().__init__(self._forward_later, kv, manager, LateSampler(self))
        self._at_once = Runner(forward, kv, manager, sampler)

    def __call__(self, work):
        self.finish()
        return self._at_once(work)

    def launch(self, work, after):
        launched = super().launch(work, after)
        self.ahead += after is not None
        return launched

    def finish(self):
        while self.told:
            self.told.pop(0)()

    def _forward_later(self, batch, kv):
        logits = []
        there = copied(batch)

        def compute():
            coming = None if batch.coming is None else batch.coming.there
            logits.append(self._computing(replace(there, coming=coming), kv).clone())

        self.told.append(compute)
        return logits


def copied(batch):
    """As it is sent to a device; the host goes on to change its own."""
    names = [each.name for each in fields(batch) if isinstance(getattr(batch, each.name), Tensor)]
    return replace(batch, **{name: getattr(batch, name).clone() for name in names})


class LateSampler(Sampler):
    def __init__(self, device):
        self._device = device

    def begin(self, rows, asks, coming=None):
        asks = [replace(ask, tokens=list(ask.tokens), history=History()) for ask in asks]

        def begin():
            before = None if coming is None else coming.there
            return Sampler().begin(rows[0], asks, before)

        return LatePicking(self._device, begin)


class LatePicking:
    def __init__(self, device, begin):
        self.tokens = Coming(device)
        self._device, self._begin = device, begin
        device.told.append(self._compute)

    def _compute(self):
        self._picking = self._begin()
        self.tokens.there = self._picking.tokens

    def read(self):
        self._device.finish()
        return self._picking.read()


class Coming:
    """In the place of a tensor on the device."""

    device = CPU

    def __init__(self, late):
        self._late, self.there = late, torch.tensor([NOTHING])

    def __len__(self):
        raise AssertionError("how many there are is known without it")

    def __getitem__(self, places):
        some = Coming(self._late)

        def take():
            some.there = self.there[places]

        self._late.told.append(take)
        return some


def late(forward, decoder, blocks, **options):
    """An engine over such a device, the device, and a check of what the engine accounts for.

    Nothing audits the cache, as that would have to be told to the device as well.
    """
    made = []

    def runner(*parts):
        made.append(Late(*parts))
        return made[0]

    engine_, manager, scheduler = engine(
        forward, decoder, blocks, LIMITS, ahead=True, runner=runner, audit=Audit.OFF, **options
    )
    device, plan = made[0], scheduler.plan

    def planned():
        device.finish()  # it copies and turns keys in order, too
        return plan()

    scheduler.plan = planned

    def check():
        manager.check()
        scheduler.check()

    return engine_, device, check


WAYS = (
    {"temperature": 0.0},
    {},
    {"top_k": 5, "top_p": 0.9},
    {"logprobs": 2},
    {"logit_bias": {3: 2.0, 4: 2.0}},
    {"top_p": 0.6},
    {"frequency_penalty": 1.5, "temperature": 0.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"min_tokens": 4},
    {"prompt_logprobs": 1},
)
PICKED_THERE = WAYS[:-1]  # by a device, without the host


def workload(ways, seed, count=14):
    """Requests of all kinds; of every fifth its client leaves after some tokens."""
    rng = random.Random(seed)
    stem = [rng.randrange(61) for _ in range(9)]
    requests = []
    for i in range(count):
        prompt = stem[: rng.choice([0, 4, 9])] + [
            rng.randrange(61) for _ in range(rng.randint(1, 9))
        ]
        params = {"max_tokens": rng.choice([1, 2, 15, 30]), "temperature": 1.0}
        params["stop_ids"] = frozenset(rng.sample(range(61), 3))
        params |= ways[i % len(ways)]
        plain = "prompt_logprobs" not in params
        more = {"arrival": time.monotonic()}
        if plain:
            more["overflow"] = rng.choice([Overflow.REFUSE, Overflow.SHIFT])
        requests.append(make_request(f"r{i}", prompt, rng=random.Random(i), **params, **more))
        if plain and i % 4 == 0:
            more |= {"rng": random.Random(-i), "sibling": f"r{i}"}
            requests.append(make_request(f"s{i}", prompt, **params, **more))
    return requests


def answers(running, requests, check=lambda: None):
    """All events of each, without their clocks; some are added while others run."""
    rng = random.Random(0)
    waiting = list(requests)
    events = {each.id: [] for each in requests}
    while waiting or running.busy:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
            running.submit(waiting.pop(0))
        for event in running.step().events:
            assert event.error is None
            seen = events[event.request_id]
            seen.append(replace(event, cached_tokens=0))  # depends on who came before
            if event.request_id.endswith("1") and len(seen) == 6 and event.finish is None:
                running.abort(event.request_id)
        check()
    return events


def without_numbers(answers):
    """Log-probabilities differ by rounding with the company that a request has."""
    return {
        name: [
            (event.token, event.finish, None if event.logprob is None else event.logprob.token)
            for event in events
        ]
        for name, events in answers.items()
    }


@pairs(
    encoding=["rope", "t5", "learned"],
    ways=[PICKED_THERE, WAYS],
    blocks=[16, 100],  # few enough that requests are preempted, and not
)
def test_answers_are_the_same(encoding, ways, blocks, caplog):
    overflow = {Overflow.REFUSE} if encoding == "learned" else set(Overflow)
    decoder = tiny(encoding, num_layers=1, windows=(None,))

    def requests():
        made = workload(ways, seed=1)
        return [each if each.overflow in overflow else _refusing(each) for each in made]

    plain, _, _ = engine(decoder, decoder, blocks, LIMITS)
    running, device, check = late(decoder, decoder, blocks)
    expected, found = answers(plain, requests()), answers(running, requests(), check)
    assert without_numbers(found) == without_numbers(expected)
    assert device.ahead >= (1 if ways is WAYS else 10)
    assert not caplog.messages


def _refusing(request):
    request.overflow = Overflow.REFUSE
    return request


def test_steps_that_are_replayed(caplog):
    decoder = tiny("rope", num_layers=1, windows=(None,))
    plain, _, _ = engine(decoder, decoder, 60, LIMITS)
    replaying = Replaying(decoder, [(1, 40), (2, 40), (4, 40)])
    running, device, check = late(replaying, decoder, 60)
    expected = answers(plain, workload(PICKED_THERE, seed=1))
    found = answers(running, workload(PICKED_THERE, seed=1), check)
    assert without_numbers(found) == without_numbers(expected)
    assert device.ahead > 10 and len(replaying.replays) > device.ahead // 2
    assert not caplog.messages


class Unwaited(Runner):
    """To launch is not to wait."""

    ahead = 0

    def launch(self, work, after):
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = super().launch(work, after)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        Unwaited.ahead += after is not None
        return launched


class Graphs:
    """The decoder, and its steps as CUDA graphs once a cache is known."""

    def __init__(self, decoder):
        self.forward = decoder

    def record(self, kv):
        device = torch.device("cuda")
        made = buckets(kv, LIMITS.max_seqs, LIMITS.max_context)
        self.forward = ReplayedDecoder(self.forward, kv, self.forward, made, CudaGraphs(device))

    def __call__(self, batch, kv):
        return self.forward(batch, kv)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's, once
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("encoding", ["rope", "t5"])
def test_a_gpu_gives_the_same_answers(encoding, graphs, caplog):
    decoder, _ = on(torch.device("cuda"), encoding, TritonAttention)
    with_weights(decoder, encoding)
    plain, _, _ = engine(decoder, decoder, 60, LIMITS)
    expected = answers(plain, workload(WAYS[:5], seed=2))
    forward = Graphs(decoder)
    running, manager, _ = engine(forward, decoder, 60, LIMITS, ahead=True, runner=Unwaited)
    if graphs:
        forward.record(running._kv)
    Unwaited.ahead = 0
    found = answers(running, workload(WAYS[:5], seed=2), manager.check)
    assert without_numbers(found) == without_numbers(expected)
    assert Unwaited.ahead > 10
    assert not caplog.messages
