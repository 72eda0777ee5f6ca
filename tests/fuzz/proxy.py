"""Byte streams to nginx in front of the server, and to the server itself: do they count alike?

The server here has an application that only writes down what it was asked. Each stream is sent
twice. Behind nginx, every request must be one that nginx says it sent, once. And what nginx made
of the stream must be what the server makes of it by itself, up to where the first of the two
refuses to go on: then there is no stream in which one of them sees a request and the other a part
of a body.
"""

import asyncio
import hashlib
import logging
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from ropewalk.server.http.in_thread import in_thread
from ropewalk.server.http.protocol import Server, uvicorn_config
from ropewalk.server.http.streaming import Drain
from tests.fuzz import raw
from tests.fuzz.streams import Ending, Stream, exchange
from tests.fuzz.target import Hasty
from tests.server.sockets import free_port
from tests.server.toy import wait_for

CONFIGURATION = Path(__file__).with_name("nginx.conf").read_text()  # to be formatted
_FIRST = IPv4Address("127.1.0.0")  # of the 16 million addresses of the loopback interface


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the server saw it. `client` is the address that the stream was sent from."""

    client: str
    nginx: str | None  # nginx's id of the request
    what: tuple[str, str, str]  # method, target, digest of the body
    whole: bool


class Recorder:
    """An application that answers everything and writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            return await send({"type": "lifespan.shutdown.complete"})
        self.running += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.running -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        digest = hashlib.sha256()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            digest.update(message["body"])
            more = message["more_body"]
        target = (scope["raw_path"] + b"?" + scope["query_string"]).decode("latin-1")
        nginx = headers.get(b"x-nginx")
        self.asked.append(
            Asked(
                client=headers[b"x-client"].decode() if nginx else scope["client"][0],
                nginx=None if nginx is None else nginx.decode("latin-1"),
                what=(scope["method"], target, digest.hexdigest()),
                whole=not more,
            )
        )
        body = b"{}"
        length = (b"content-length", b"%d" % len(body))
        # A 2xx to CONNECT would end HTTP on this connection.
        status = 404 if scope["method"] == "CONNECT" else 200
        await send({"type": "http.response.start", "status": status, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


class Pair:
    """nginx and the server behind it. `name` says how nginx sends bodies on."""

    def __init__(self, name: str, recorder: Recorder, behind: int, port: int, folder: Path) -> None:
        self.name = name
        self._recorder = recorder
        self._direct = ("127.0.0.1", behind)
        self._proxied = ("127.0.0.1", port)
        self._folder = folder
        self._read = 0  # bytes of nginx's log
        # Every stream comes from an address of its own, as ports are soon used again.
        self._sources = (str(_FIRST + number) for number in count(1))
        self._clients: set[str] = set()  # those that nginx was not asked by

    def draw(self, draw: Random) -> Stream:
        requests = draw.choice((1, 1, 2, 3))
        data = b"".join(raw.draw_request(draw, odd=0.06) for _ in range(requests))
        for _ in range(draw.choice((0, 0, 1))):
            data = raw.spoilt(draw, data)
        return Stream(raw.parts(draw, data), draw.choice((Ending.WAIT, Ending.HALF)))

    async def attempt(self, stream: Stream) -> tuple[str | None, bytes, float]:
        # A half-closed client is gone for nginx, and only its next stream would be compared.
        waiting = Stream(stream.parts)
        near, far = next(self._sources), next(self._sources)
        self._clients.add(near)
        direct, proxied = await asyncio.gather(
            exchange(self._direct, stream, near), exchange(self._proxied, waiting, far)
        )
        for _ in range(100):  # what nginx sent on may still be under way
            if not self._recorder.running:
                break
            await asyncio.sleep(0.005)
        hung = proxied.hung or direct.hung
        what = "hang" if hung else self._compared(near, far)
        shown = b"by nginx:\n" + proxied.raw + b"\ndirectly:\n" + direct.raw
        return what, shown, max(proxied.seconds, direct.seconds)

    def _compared(self, near: str, far: str) -> str | None:
        seen: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        for asked in self._recorder.asked:
            if asked.whole:
                seen[asked.client].append(asked.what)
        ours, theirs = seen[near], seen[far]
        both = min(len(ours), len(theirs))
        if ours[:both] != theirs[:both]:
            return f"read differently: directly {ours}, behind nginx {theirs}"
        return None

    def settle(self) -> Sequence[str]:
        wait_for(lambda: not self._recorder.running, 20)
        asked = [each for each in self._recorder.asked if each.nginx is not None]
        found = [
            f"smuggled: {each} has no id of nginx"
            for each in self._recorder.asked
            if each.nginx is None and each.client not in self._clients
        ]
        self._recorder.asked.clear()
        self._clients.clear()
        sent = self._sent(asked)
        for each in asked:
            method, target, _ = each.what
            known = sent.get(each.nginx or "")
            if known is None or known[1:] != (method, target.removesuffix("?")):
                found.append(f"smuggled: {each} is not what nginx sent: {known}")
        seen = Counter(each.nginx for each in asked)
        found += [f"smuggled: {one} came {n} times" for one, n in seen.items() if n > 1]
        found += [
            f"lost: {line} of nginx never came"
            for one, line in sent.items()
            if line[0] == "200" and one not in seen
        ]
        return found

    def _sent(self, asked: Sequence[Asked]) -> dict[str, tuple[str, str, str]]:
        """Status, method and target by id, of what nginx says it sent to the server."""
        log = self._folder / "access.log"

        def lines() -> list[list[str]]:
            text = log.read_bytes()[self._read :].decode("latin-1")
            return [line.split(" ", 4) for line in text.splitlines()]

        with suppress(AssertionError):  # what never comes is a finding
            wait_for(lambda: {each.nginx for each in asked} <= {line[0] for line in lines()}, 20)
        found = {
            line[0]: (line[2], line[3], line[4].removesuffix("?"))
            for line in lines()
            if len(line) == 5 and line[1] != "-"
        }
        self._read = log.stat().st_size
        return found


@contextmanager
def pair(folder: Path, *, buffering: bool) -> Iterator[Pair]:
    """nginx and a server until the end of the block. Needs nginx on the PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "access.log").unlink(missing_ok=True)
    recorder = Recorder()
    config = uvicorn_config(recorder, host="127.0.0.1", port=0, log_config=None)
    config.http = Hasty
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # of refused requests
    port = free_port()
    with in_thread(Server(config, Drain(), 1.0)) as behind:
        text = CONFIGURATION.format(
            folder=folder, behind=behind, port=port, buffering="on" if buffering else "off"
        )
        path = folder / "nginx.conf"
        path.write_text(text)
        command = ["nginx", "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(path)]
        process = subprocess.Popen(command)
        try:
            wait_for(lambda: process.poll() is not None or (folder / "pid").exists())
            assert process.poll() is None, f"nginx did not start: {folder}/error.log"
            yield Pair("proxy" if buffering else "proxy-unbuffered", recorder, behind, port, folder)
        finally:
            process.terminate()
            process.wait()


def missing() -> str | None:
    """Why there can be no pair."""
    if shutil.which("nginx") is None:
        return "nginx is not on the PATH; install it, for example with apt install nginx-light"
    return None
