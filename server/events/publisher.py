"""Publishes KV events over ZeroMQ, on a thread of its own, with vLLM's frames.

A batch is [topic, number, events]; numbers count up from 0, in 8 bytes. Whoever misses one asks the
replay socket for all from a number on. Whoever subscribes is told everything at once, and so is
whoever asks for batches that are no longer kept; so a router may come, go and come back at any
time. A subscriber that is too slow loses batches and sees it by their numbers; it delays nobody.
"""

import time
from collections import deque
from ipaddress import ip_address
from itertools import count
from logging import getLogger
from os import close, eventfd_read, eventfd_write
from threading import Thread
from urllib.parse import urlsplit

import msgspec
import zmq

from ropewalk.server.errors import CommandError
from ropewalk.server.events.changes import Changes
from ropewalk.server.events.wire import Event, Told

log = getLogger(__name__)

KEPT_BATCHES, KEPT_BYTES = 10_000, 64 << 20  # for replay
MOST_EVENTS = 500  # of a batch: routers bound what they take
PAUSE_S = 0.05  # between batches, so that the changes of some steps are one of them
CLOSING_SECONDS = 1.0


class Publisher:
    """Publishes what changes in one cache until it is closed.

    endpoint, replay: ZeroMQ addresses such as tcp://*:5557. One with a wildcard, of this machine's
    loopback, or ipc is bound; to any other, whose owner is bound, it connects. Raises CommandError.
    """

    def __init__(
        self, endpoint: str, block_size: int, *, replay: str | None = None, topic: str = ""
    ) -> None:
        self.changes = Changes()
        self._told = Told(block_size)
        self._topic = topic.encode()
        self._numbers = count()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self.changes.signal, zmq.POLLIN)
        try:
            # XPUB is a PUB that also says who subscribes, and repeats it for the next one.
            self._socket = self._opened(zmq.XPUB, endpoint)
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._replay = None if replay is None else self._opened(zmq.ROUTER, replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CommandError(
                f"KV events cannot be published at {endpoint}"
                f"{'' if replay is None else f' and replayed at {replay}'} ({error.strerror}); "
                "choose other addresses"
            ) from error
        self._closing = False
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish no more, once nothing changes any more; what is on its way may be lost."""
        self._closing = True
        eventfd_write(self.changes.signal, 1)
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            close(self.changes.signal)

    def _opened(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.SNDHWM, KEPT_BATCHES)
        opened.setsockopt(zmq.LINGER, 0)
        (opened.bind if _is_own(endpoint) else opened.connect)(endpoint)
        self._poller.register(opened, zmq.POLLIN)
        return opened

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:  # the thread's last resort: the server answers without events, too
            log.exception("KV events are no longer published")
        finally:
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        ready = dict(self._poller.poll())
        if self.changes.signal in ready:
            eventfd_read(self.changes.signal)
            self._publish(self._told.update(*self.changes.take()))
        if self._socket in ready and self._subscribed():
            self._publish(self._told.everything())
        if self._replay is not None and self._replay in ready:
            self._answer(self._replay)
        time.sleep(PAUSE_S)

    def _subscribed(self) -> bool:
        """Whether one of those who subscribed or left since the last turn gets this topic."""
        found = False
        while self._socket.poll(0):
            message = self._socket.recv()
            found |= message[:1] == b"\1" and self._topic.startswith(message[1:])
        return found

    def _publish(self, events: list[Event]) -> None:
        for payload in self._batches(events, MOST_EVENTS):
            number = next(self._numbers)
            self._socket.send_multipart([self._topic, _frame(number), payload])
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
        while len(self._kept) > 1 and (
            len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES
        ):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _batches(self, events: list[Event], most: int) -> list[bytes]:
        parts = (events[start : start + most] for start in range(0, len(events), most))
        return [self._encoder.encode([time.time(), part, 0]) for part in parts]  # 0: the only rank

    def _answer(self, socket: "zmq.Socket[bytes]") -> None:
        """Send a client what it asks for: the batches from a number on."""
        client, *asked = socket.recv_multipart()
        if len(asked) != 2:
            return
        first = int.from_bytes(asked[1], "big")
        batches = [each for each in self._kept if each[0] >= first]
        if self._kept and first < self._kept[0][0]:
            # Everything, under numbers that were asked for.
            last, events = self._kept[-1][0], self._told.everything()
            most = max(MOST_EVENTS, -(-len(events) // (last + 1 - first)))
            parts = self._batches(events, most)
            batches = list(enumerate(parts, last + 1 - len(parts)))
        for number, payload in batches:
            socket.send_multipart([client, b"", self._topic, _frame(number), payload])
        socket.send_multipart([client, b"", b"", _frame(-1), b""])


def _frame(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


def _is_own(endpoint: str) -> bool:
    """Whether to wait for others at this address, instead of calling there."""
    address = urlsplit(endpoint)
    if address.scheme != "tcp" or address.hostname == "*":
        return True
    try:
        host = ip_address(address.hostname or "")
    except ValueError:  # a name
        return False
    return host.is_unspecified or host.is_loopback
