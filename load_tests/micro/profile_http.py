"""Times the server's work on a step's tokens outside the engine: text, chunks, HTTP.

The real application serves streams over a socket, with the real engine around a pass that computes
nothing and takes a given time. The work to be timed runs on one thread, the event loop's. Only its
processor time is read, so neither the engine nor the client counts.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ropewalk.load_tests.client.client import Server as Address
from ropewalk.load_tests.client.client import Unreachable, fetch
from ropewalk.load_tests.micro.engines import idle
from ropewalk.load_tests.micro.in_process import blocks_for
from ropewalk.load_tests.micro.profile_engine import NAME, Stopwatch, metrics_for, watched
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.loading.random_weights import SHAPES
from ropewalk.model.tokenizers.numbers import NumberTokenizer
from ropewalk.server.app.app import create_app
from ropewalk.server.config import HttpOptions
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.errors import CommandError
from ropewalk.server.http.in_thread import HOST, in_thread
from ropewalk.server.http.protocol import Server, uvicorn_config
from ropewalk.server.openai.answers import DONE, Choice, CompletionWire
from ropewalk.server.openai.served_models import Models, Served
from ropewalk.server.scheduling.request import StepStats

DETOKENISING, CHUNKS, HTTP = "detokenising", "chunks as JSON", "HTTP"
PARTS = (DETOKENISING, CHUNKS, HTTP)

_WARM = 4  # steps with all requests before any is timed
_SHAPE = replace(SHAPES["small"], num_layers=1, num_heads=1, num_kv_heads=1, vocab_size=2)
_TOGETHER_S = 20.0  # longest wait for all requests to arrive


def http_times(
    requests: int, step_s: float, steps: int, *, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Seconds per step of PARTS, over `steps` of `step_s` that give each of `requests` a token.

    `clock` is read on the event loop's thread. Raises CommandError if streams fail.
    """
    answer = 1 + _WARM + steps + 1  # the first token may come before the last request
    context = 2 + answer
    came = time.monotonic() + _TOGETHER_S

    def wait(batch: ForwardBatch) -> None:
        while batch.max_query > 1 and engine.active() < requests and time.monotonic() < came:
            time.sleep(0.001)
        time.sleep(step_s)

    made = idle(
        _SHAPE,
        blocks_for(requests, context),
        max_seqs=requests,
        max_context=context,
        max_step_tokens=2 * requests,
        kernels="nothing is computed",
        wait=wait,
    )
    metrics = metrics_for(made.kv)
    steady = Steady(requests, steps, clock)

    def observe(model: str, stats: StepStats) -> None:
        metrics.observe_step(model, stats)
        steady.observe(stats)

    engine = AsyncEngine({NAME: made.engine}, observe)
    app = create_app(Models([_served(context)]), engine, metrics, HttpOptions())
    server = Server(uvicorn_config(app, host=HOST, port=0, log_config=None), app.state.drain, 5.0)
    with (
        watched(Choice, "take", steady.watch, DETOKENISING),
        watched(CompletionWire, "chunk", steady.watch, CHUNKS),
        in_thread(server, steady.begin) as port,
    ):
        asyncio.run(_stream(port, requests, answer))
    return steady.seconds()


class Steady:
    """The event loop's processor time while all requests get a token in every step."""

    def __init__(self, requests: int, steps: int, clock: Callable[[], float]) -> None:
        self.watch = Stopwatch(clock)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._clock = clock
        self._requests = requests
        self._steps = steps
        self._seen = 0
        self._marks: list[tuple[float, Mapping[str, float]]] = []

    def begin(self) -> None:
        """Call in the event loop that is timed."""
        self.loop = asyncio.get_running_loop()

    def observe(self, stats: StepStats) -> None:
        """Called on the engine's thread. The loop runs `_mark` after the earlier steps' events."""
        self._seen += stats.generated_tokens == self._requests
        if self._seen in (_WARM, _WARM + self._steps) and stats.generated_tokens:
            assert self.loop is not None, "it runs the application that was asked"
            self.loop.call_soon_threadsafe(self._mark)

    def seconds(self) -> dict[str, float]:
        """Seconds of each part, per step."""
        if len(self._marks) != 2:
            raise CommandError("the streams did not run side by side; lower --batch")
        (began, _), (ended, parts) = self._marks
        text, chunks = (parts.get(part, 0.0) for part in (DETOKENISING, CHUNKS))
        found = {DETOKENISING: text, CHUNKS: chunks, HTTP: ended - began - text - chunks}
        return {part: found[part] / self._steps for part in PARTS}

    def _mark(self) -> None:
        self._marks.append((self._clock(), self.watch.drain()))


async def _stream(port: int, requests: int, tokens: int) -> None:
    """Raises CommandError."""
    body = {"prompt": [1, 1], "max_tokens": tokens, "temperature": 0.0, "stream": True}
    address = Address(HOST, port)
    asked = (fetch(address, "POST", "/v1/completions", body) for _ in range(requests))
    try:
        streams = await asyncio.gather(*asked)
    except Unreachable as error:
        raise CommandError(f"a stream failed: {error}") from error
    for stream in streams:
        if not stream.endswith(DONE.encode()):
            raise CommandError(f"a stream failed; it ended with {stream[-200:].decode()}")


def _served(context: int) -> Served:
    return Served(
        name=NAME,
        encoding="",
        tokenizer=NumberTokenizer(_SHAPE.vocab_size),
        chat_template=None,
        stop_ids=frozenset(),
        vocab_size=_SHAPE.vocab_size,
        max_context=context,
        created=0,
        details={},
    )
