"""A toy model's HTTP surroundings: a byte tokenizer, a scripted engine, applications, clients."""

import asyncio
import codecs
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import httpx

from ropewalk.model.chat.template import ChatTemplate
from ropewalk.server import listen
from ropewalk.server.app.app import create_app
from ropewalk.server.app.cache import CachePlanner
from ropewalk.server.config import HttpOptions
from ropewalk.server.errors import PromptTooLong, ServeError
from ropewalk.server.http.protocol import Server, uvicorn_config
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.served_models import Models, Served
from ropewalk.server.scheduling.request import (
    FinishReason,
    Outlook,
    Request,
    TokenEvent,
    TokenLogprob,
)

END = 256  # ends a text
BEGIN = 257
VOCABULARY = 300
CONTEXT = 512
LABELS = {"model_name": "toy", "encoding": "rope"}  # of a toy's metrics
UNMATCHED = {"model_name": "unmatched", "encoding": "unmatched"}  # of requests for no model
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ByteTokenizer:
    """Ids 0..255 are bytes; the others have none, and two of them have names."""

    vocab_size = VOCABULARY
    bos = BEGIN
    eos = frozenset({END})
    ends = (END,)

    def encode(self, text: str, *, bos: bool) -> list[int]:
        return [BEGIN] * bos + list(text.encode())

    def token_bytes(self, token: int, *, first: bool) -> bytes:
        return bytes([token]) if token < 256 else b""

    def name(self, token: int) -> str:
        return {END: "<end>", BEGIN: "<begin>"}.get(token, "")


class ScriptedEngine:
    """Generates `script(request)`, one batch of tokens per iteration, ending like a real engine.

    pause: seconds before each iteration; batch: tokens in it; cached: tokens of each prompt.
    refuse: raised instead of an answer; failure_at: (k, what fails a request at its k-th token).
    ahead: the outlook of those who ask for one.
    """

    def __init__(
        self,
        script: Callable[[Request], Sequence[int]] | None = None,
        *,
        pause: float = 0.0,
        batch: int = 1,
        cached: int = 0,
        refuse: ServeError | None = None,
        failure_at: tuple[int, Exception] | None = None,
        ahead: Outlook | None = None,
    ) -> None:
        self.script = script or (lambda request: list(b"Hello, world! " * 200))
        self.alive = True
        self.failure: str | None = None
        self.unsound: str | None = None
        self.started = False
        self.requests: list[Request] = []
        self.models: list[str] = []
        self.aborted: list[Request] = []
        self.ended: list[Request] = []
        self.live = 0
        self.batch = batch
        self.pause = pause
        self.refuse = refuse
        self.failure_at = failure_at
        self.cached = cached
        self.ahead = ahead or Outlook()
        self.context = CONTEXT

    def start(self) -> None:
        self.started = True

    async def stop(self) -> None:
        self.started = False

    def outlook(self, model):
        return self.ahead

    async def ask(self, model, question, *, changes=False):
        raise NotImplementedError("it has no cache")

    async def generate(self, model, requests):
        self.models.append(model)
        if self.refuse is not None:
            raise self.refuse
        if any(len(request.tokens) >= self.context for request in requests):
            raise PromptTooLong("too long for the engine")
        self.requests += requests
        self.live += len(requests)
        going = {index: self._events(request) for index, request in enumerate(requests)}
        try:
            while going:
                await asyncio.sleep(self.pause)
                batch = []
                for index, events in list(going.items()):
                    if requests[index] in self.aborted:
                        del going[index]
                        continue
                    new = [next(events)]
                    while len(new) < self.batch and new[-1].finish is None:
                        new.append(next(events))
                    if new[-1].finish is not None:
                        del going[index]
                        self.live -= 1
                        self.ended.append(requests[index])
                    batch.append((index, new))
                if batch:
                    yield batch
        finally:
            for index in going:
                self.abort(model, requests[index])

    def abort(self, model, request):
        if request not in self.aborted and request not in self.ended:
            self.live -= 1
            self.aborted.append(request)

    def _events(self, request: Request) -> Iterator[TokenEvent]:
        params = request.params
        for count, token in enumerate(self.script(request), start=1):
            if self.failure_at is not None and count == self.failure_at[0]:
                error = self.failure_at[1]
                if not isinstance(error, ServeError):
                    raise error
                yield TokenEvent(request.id, None, FinishReason.ERROR, error=error)
                return
            finish = None
            if token in params.stop_ids and count > params.min_tokens:
                finish = FinishReason.STOP
            elif count == params.max_tokens:
                finish = FinishReason.LENGTH
            first_only = {}
            if count == 1 and params.prompt_logprobs is not None:
                first_only["prompt_logprobs"] = tuple(
                    None if index == 0 else score(token, params.prompt_logprobs)
                    for index, token in enumerate(request.tokens)
                )
            yield TokenEvent(
                request.id,
                token,
                finish,
                logprob=None if params.logprobs is None else score(token, params.logprobs),
                cached_tokens=self.cached,
                **first_only,
            )
            if finish is not None:
                return
        yield TokenEvent(request.id, END, FinishReason.STOP, cached_tokens=self.cached)


def score(token: int, top: int) -> TokenLogprob:
    """The log-probability of a token that is the most likely one."""
    ranked = [(token, -0.5), *(((token + step) % 256, -1.0 - step) for step in range(1, top))]
    return TokenLogprob(token, -0.5, tuple(ranked[:top]))


def spelled_apart(tokenizer, tokens) -> list[str]:
    """An answer's tokens as its scores show them: what each adds to the text, or its name."""
    pieces, data = [], b""
    for token in tokens:
        own = tokenizer.token_bytes(token, first=False)
        before, data = data, data + own
        last = len(pieces) == len(tokens) - 1
        pieces.append(
            _decoded(data, last)[len(_decoded(before)) :] if own else tokenizer.name(token)
        )
    return pieces


def _decoded(data: bytes, final: bool = False) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


@cache
def chat_template() -> ChatTemplate:
    """One for all toys: each has a process."""
    return ChatTemplate(TEMPLATE, {})


def toy(name: str = "toy", **changes) -> Served:
    values = {
        "name": name,
        "encoding": "rope",
        "tokenizer": ByteTokenizer(),
        "chat_template": chat_template(),
        "stop_ids": frozenset({END}),
        "vocab_size": VOCABULARY,
        "max_context": CONTEXT,
        "created": 1_700_000_000,
        "details": {"parameters": 7},
    }
    return Served(**(values | changes))


def toy_app(
    engine=None,
    served: Sequence[Served] | None = None,
    metrics=None,
    *,
    planners: Mapping[str, CachePlanner] | None = None,
    place=None,
    traces=None,
    **options,
):
    """An application over a scripted engine, of a toy for each planner unless `served` says more.

    options: of HttpOptions. The metrics are in its state.
    """
    served = list(served or [toy(name) for name in planners or ["toy"]])
    metrics = metrics or Metrics()
    for one in served:
        metrics.add_model(
            one.name, one.encoding, {"layers": "2"}, bytes_per_token=64, blocks=8, block_size=16
        )
    engine, options = engine or ScriptedEngine(), HttpOptions(**options)
    app = create_app(Models(served), engine, metrics, options, place, planners, traces)
    app.state.metrics = metrics
    return app


def ask(app, method: str, path: str, **more) -> httpx.Response:
    """One request straight into the application."""

    async def run():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            return await client.request(method, path, **more)

    return asyncio.run(run())


def complete(app, headers=None, **body) -> httpx.Response:
    body = {"model": "toy", "prompt": "abc"} | body
    return ask(app, "POST", "/v1/completions", json=body, headers=headers)


def chat(app, **body) -> httpx.Response:
    messages = [{"role": "user", "content": "abc"}]
    path = "/v1/chat/completions"
    return ask(app, "POST", path, json={"model": "toy", "messages": messages} | body)


def events(text: str) -> list:
    """The JSON of every event of a stream; [DONE] must be last, and is left out."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict:
    """The error of an answer that must be one JSON refusal with that status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) <= 1024
    return body["error"]


@contextlib.contextmanager
def running(
    app, *, drain_seconds: float = 5.0, http=None, tls=None, path=None
) -> Iterator[tuple[str, Server]]:
    """The application behind a real socket, in a thread: (base URL, server)."""
    config = uvicorn_config(
        app, host="127.0.0.1", port=0, tls=tls, log_config=None, access_log=False
    )
    if http is not None:
        config.http = http
    server = Server(config, app.state.drain, drain_seconds)
    with listen.bound("127.0.0.1", 0, path) as listener:
        listener.listen(256)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            if path is not None:
                yield f"unix:{path}", server
            else:
                port = listener.getsockname()[1]
                yield listen.local_url("127.0.0.1", port, tls=tls is not None), server
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()


@contextlib.contextmanager
def asking(app, **options) -> Iterator[httpx.Client]:
    """A client of the application behind a real socket. options: of `running`."""
    with (
        running(app, **options) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until it holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def sample(metrics: Metrics, name: str, **labels) -> float:
    """The value of one series; only the family that has it is made, not the whole page."""
    name = f"ropewalk_{name}"
    families = metrics.registry.restricted_registry([name]).collect()
    samples = [each for family in families for each in family.samples]
    (value,) = [each.value for each in samples if (each.name, each.labels) == (name, labels)]
    return value


def rejected(app, reason: str, code: str, labels: Mapping[str, str] = LABELS) -> float:
    """How many requests were refused for that reason."""
    metrics = app.state.metrics
    return sample(metrics, "request_rejections_total", reason=reason, code=code, **labels)
