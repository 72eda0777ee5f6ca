"""A model in this process, asked from Python instead of over HTTP: `import ropewalk` shows it.

Prompts, fields, limits and answers are those of the HTTP API; engine and cache are the server's.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock, Thread
from typing import Any, TypeVar

import torch

from ropewalk.server import hardware
from ropewalk.server.app.cache import described
from ropewalk.server.cli.serve import from_program
from ropewalk.server.config import ServerConfig, server_config
from ropewalk.server.engine.async_engine import AsyncEngine, Batch
from ropewalk.server.engine.engine import Engine
from ropewalk.server.errors import (
    CommandError,
    InvalidField,
    ServeError,
    UnsupportedField,
    UsageError,
)
from ropewalk.server.launch.build import Loaded, engine_of, load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.answers import Choice, Piece
from ropewalk.server.openai.body import read_body
from ropewalk.server.openai.requests import (
    chat_prompt,
    choices_for,
    combined_salt,
    compiled_grammar,
    completion_prompts,
)
from ropewalk.server.openai.schemas import ChatBody, CompletionBody
from ropewalk.server.scheduling.request import TokenEvent

__all__ = ["Answer", "CommandError", "Model", "ServeError", "load"]

# A text, its token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
T = TypeVar("T")

# Fields of the HTTP API that ask for more than the text of one answer, or for what a server keeps.
_ELSEWHERE = (
    *("model", "n", "stream", "stream_options", "echo", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "return_token_ids", "return_tokens_as_token_ids"),
    *("keep", "sequence"),
)
_CLOSED = "the model is closed; load it again"


@dataclass(frozen=True, slots=True)
class Answer:
    """What `Model.generate` returns. Printing it prints the text."""

    text: str
    tokens: tuple[int, ...]  # generated, with the one that ended the text
    finish_reason: str  # stop or length
    prompt_tokens: int
    cached_tokens: int  # of the prompt's, computed for an earlier request

    def __str__(self) -> str:
        return self.text


def load(model: str | Path, **options: object) -> "Model":
    """Load a model: a path, a bundled model's name, smollm2, or a hub id `owner/name`.

    options: those of `ropewalk serve` by their names, for example dtype="float32",
    max_model_len="4k", kv_memory="1GiB", prefix_sharing=False; their variables do not count.
    Raises CommandError, with one sentence.
    """
    config = _config(str(model), options)
    if len(config.models) != 1:
        raise UsageError(f"{model} is {len(config.models)} models; load one of them at a time")
    torch.set_num_threads(hardware.pick_threads(config.loading.threads))
    metrics = Metrics()
    (loaded,) = load_models(config, metrics)
    if loaded.defect is not None:
        raise CommandError(loaded.defect)
    return Model(loaded, engine_of(config, [loaded], metrics, lambda: None))


class Model:
    """A loaded model, which any number of threads may ask: what they ask shares steps and cache.

    It holds weights and cache until it is closed, best by `with`. Every method raises ServeError,
    with one sentence, for what the HTTP API refuses, and RuntimeError once the model is closed.
    """

    def __init__(self, loaded: Loaded, engine: AsyncEngine) -> None:
        """Takes over an engine that was not started. `load` makes both."""
        self._open: _Open | None = _Open(loaded, engine)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, prompt: Prompt, **fields: object) -> Answer:
        """The whole answer to a text, to token ids, or to the messages of a chat.

        fields: those of /v1/completions or /v1/chat/completions, with their defaults, such as
        max_tokens, temperature, top_p, stop and seed.
        """
        choice = self._choice(prompt, fields)
        pieces = list(self._pieces(choice))
        return Answer(
            text="".join(piece.text for piece in pieces),
            tokens=tuple(token for piece in pieces for token in piece.tokens),
            finish_reason=pieces[-1].finish or "",
            prompt_tokens=len(choice.prompt),
            cached_tokens=choice.cached,
        )

    def stream(self, prompt: Prompt, **fields: object) -> Iterator[str]:
        """The text of the same answer in pieces, as they are generated.

        Refuses at once, generates from the first `next` on, and stops generating when closed.
        """
        choice = self._choice(prompt, fields)
        return (piece.text for piece in self._pieces(choice) if piece.text)

    def cache(self) -> dict[str, object]:
        """The cache as GET /v1/cache shows it: blocks, who holds them, what the ledger counted."""
        opened = self._opened()
        served = opened.loaded.served
        view = opened.wait(opened.engine.ask(served.name, Engine.view))
        return described(served, opened.loaded.planner, view)

    def close(self) -> None:
        """Stop generating, and let go of weights and cache. Harmless when repeated."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _opened(self) -> "_Open":
        if self._open is None:
            raise RuntimeError(_CLOSED)
        return self._open

    def _choice(self, prompt: Prompt, fields: Mapping[str, object]) -> Choice:
        opened, served = self._opened(), self._opened().loaded.served
        for name in _ELSEWHERE:
            if name in fields:
                raise UnsupportedField(
                    f"{name} is for requests over HTTP; leave it out, or ask a server", name
                )
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise InvalidField("prompt should be a text, token ids or a list of messages", "prompt")
        chat = not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)
        source = prompt if isinstance(prompt, str) else list(prompt)
        # As JSON, so that what is accepted and refused is what a server accepts and refuses.
        try:
            sent = json.dumps({"messages" if chat else "prompt": source, **fields})
        except (TypeError, ValueError) as error:
            raise InvalidField(f"prompt and fields must be what JSON can hold: {error}") from None
        given = json.loads(sent)
        body: ChatBody | CompletionBody
        if chat:
            body = read_body(ChatBody, given)
            prompts = [opened.wait(chat_prompt(body, served))]
        else:
            body = read_body(CompletionBody, given)
            if len(body.prompts) != 1:
                raise UnsupportedField(
                    "prompt is a list of prompts; ask for one at a time", "prompt"
                )
            prompts = opened.wait(completion_prompts(body, served))
        grammar = opened.wait(compiled_grammar(body, prompts[0], served))
        salt = combined_salt("", body.cache_salt)
        return choices_for(body, prompts, served, salt, grammar=grammar)[0]

    def _pieces(self, choice: Choice) -> Iterator[Piece]:
        opened = self._opened()
        batches = opened.engine.generate(opened.loaded.served.name, [choice.request])
        try:
            while not choice.finished:
                piece = choice.take(self._opened().wait(_next(batches)))
                if choice.cut:  # at a stop string: to the engine the request is aborted
                    choice.request.stop_after(choice.tokens)
                yield piece
        finally:
            opened.end(batches)


class _Open:
    """An engine that runs, with the event loop that speaks to it in a thread of its own."""

    def __init__(self, loaded: Loaded, engine: AsyncEngine) -> None:
        self.loaded = loaded
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._posting = RLock()  # while `_closed` and the loop agree
        self._thread = Thread(target=self._loop.run_forever, name="ropewalk", daemon=True)
        self._thread.start()
        self.wait(_started(engine))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns. Interrupting the wait cancels it. Raises RuntimeError once closed."""
        future = self._post(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(_CLOSED) from None
        finally:
            future.cancel()

    def end(self, batches: AsyncGenerator[Batch, None]) -> None:
        """Ends an answer without a wait: an iterator that was dropped is closed by the garbage
        collector, on any thread, that of the loop included."""
        with suppress(RuntimeError):
            self._post(batches.aclose())

    def close(self) -> None:
        self.wait(self.engine.stop())
        with self._posting:
            last = self._post(_end_others())
            self._closed = True
        last.result()
        self.loaded.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _post(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._posting:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError(_CLOSED)


async def _started(engine: AsyncEngine) -> None:
    engine.start()


async def _end_others() -> None:
    """Cancels what other threads still wait for on this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


async def _next(batches: AsyncGenerator[Batch, None]) -> list[TokenEvent]:
    """Of the only request."""
    ((_, events),) = await anext(batches)
    return events


def _config(model: str, options: Mapping[str, object]) -> ServerConfig:
    """The configuration of `ropewalk serve` with these options and no variables."""
    if "models" in options:
        raise UsageError("models is not an option of ropewalk.load, which takes one model")
    return server_config(from_program({**options, "models": [model]}))
