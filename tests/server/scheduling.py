"""A scheduler over a cache without tensors, step by step."""

from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Capability
from ropewalk.server.scheduling.request import Limits, Plan, Request, Sampled
from ropewalk.server.scheduling.scheduler import Scheduler
from tests.cache.bookkeeping import Bookkeeping
from tests.server.fake_engine import make_request


class Clock:
    """Counts how often it is asked, from 100."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_scheduler(
    blocks=50,
    size=4,
    *,
    seqs=4,
    tokens=64,
    context=64,
    waiting=100,
    clock=None,
    prefix_sharing=True,
    capability=Capability.FREE,
    **limits,
) -> Scheduler:
    manager = CacheManager(blocks, size, prefix_sharing=prefix_sharing)
    operations = Bookkeeping(manager, capability=capability)
    limits = Limits(seqs, tokens, context, waiting, **limits)
    return Scheduler(manager, limits, operations, clock=clock or Clock())


def add(scheduler: Scheduler, name: str, prompt=(1, 2, 3), **more) -> Request:
    chosen = {"max_tokens": 4, "temperature": 1.0, "arrival": 5.0} | more
    made = make_request(name, prompt, **chosen)
    scheduler.add(made)
    return made


def step(scheduler: Scheduler, token: int = 7, **errors):
    """The plan and its events; a request whose name is in `errors` fails with that."""
    plan = scheduler.plan()
    scheduler.check()
    events = scheduler.record(
        plan,
        {
            work.request.id: Sampled(token, error=errors.get(work.request.id))
            for work in plan.work
            if work.samples
        },
    )
    scheduler.check()
    return plan, events


def finish(scheduler: Scheduler):
    """Steps until nothing is left to do: their plans, and all events."""
    plans, events = [], []
    while scheduler.running or scheduler.waiting:
        plan, new = step(scheduler)
        plans.append(plan)
        events += new
    return plans, events


def shape(plan: Plan) -> list[tuple[str, int, int]]:
    return [(work.request.id, work.start, work.count) for work in plan.work]


def names(requests) -> list[str]:
    return [each.id for each in requests]
