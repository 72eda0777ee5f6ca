"""Refuses requests that would wait too long, from counters alone: before their bodies are read.

A refusal at the door costs so little that a server with far too many clients still spends its time
on those that it admitted. The engine has limits of its own for what the door cannot know, such as
how many prompts a body holds. For one event loop.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from ropewalk.server.errors import QueueFull
from ropewalk.server.scheduling.pace import Appointments, no_place, no_time
from ropewalk.server.scheduling.request import Outlook

# Estimates err. Who is admitted and then waits too long has cost more than a refusal at the door.
SURE = 0.6


class Visit:
    """One HTTP request for answers, which waits until `begin`."""

    def __init__(self, door: "Door", client: str, model: str | None) -> None:
        self.client = client
        self.model = model
        self._door = door
        self._waits = True
        door.count(self, 1)

    def choose(self, model: str) -> None:
        """The body names the model. Raises QueueFull."""
        if self.model is None:
            self._door.check(self.client, [model])
            self._door.count(self, -1)
            self.model = model
            self._door.count(self, 1)

    def begin(self) -> None:
        """It waits no longer: it has its first token, or has ended. Repeating this is harmless."""
        if self._waits:
            self._waits = False
            self._door.count(self, -1)


class Door:
    """Counts the HTTP requests that wait, by model and client."""

    def __init__(
        self,
        models: Iterable[str],
        outlook: Callable[[str], Outlook],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`outlook` is each model's, of the engine."""
        self._models = tuple(models)
        self._outlook = outlook
        self._clock = clock
        self._waiting: dict[str | None, Counter[str]] = {
            model: Counter() for model in (None, *self._models)
        }
        self._appointments = {model: Appointments(outlook(model).places) for model in self._models}

    def enter(self, client: str) -> Visit:
        """Raises QueueFull when no model would admit another request of this client in time."""
        self.check(client, self._models)
        return Visit(self, client, self._models[0] if len(self._models) == 1 else None)

    def check(self, client: str, models: Iterable[str]) -> None:
        refusals = []
        for model in models:
            refusal = self._refusal(client, model)
            if refusal is None:
                return
            refusals.append(refusal)
        raise min(refusals, key=lambda refusal: refusal.retry_after or 0)

    def count(self, visit: Visit, change: int) -> None:
        waiting = self._waiting[visit.model]
        waiting[visit.client] += change
        if not waiting[visit.client]:
            del waiting[visit.client]

    def _refusal(self, client: str, model: str) -> QueueFull | None:
        outlook, waiting = self._outlook(model), self._waiting[model]
        if outlook.idle and not waiting:
            self._appointments[model].forget()
        if max(outlook.waiting, waiting.total()) >= outlook.places + outlook.seats:
            after = self._appointments[model].give(self._clock(), outlook.apart_s)
            return no_place(outlook.places, after)
        wait = outlook.wait(_ahead(client, waiting))
        if wait > outlook.most_s * SURE:
            after = self._appointments[model].give(
                self._clock(), outlook.apart_s, wait - outlook.most_s * SURE
            )
            return no_time(wait, outlook.most_s, after)
        return None


def _ahead(client: str, waiting: Counter[str]) -> int:
    """How many requests have their turn before another one of `client`."""
    own = waiting[client]
    return own + sum(min(count, own + 1) for each, count in waiting.items() if each != client)
