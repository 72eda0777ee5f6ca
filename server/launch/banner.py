"""The text printed once the server answers: what is served, how, where, and a line to paste.

Builds strings from plain facts; loads and prints nothing.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ropewalk.server.listen import is_loopback
from ropewalk.server.terminal import counted


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the banner shows of one model."""

    name: str
    architecture: str  # "llama"
    encoding: str  # resolved, as in the metrics
    trained_context: int  # tokens
    max_context: int  # tokens; longest prompt and answer together, or each of an encoder-decoder
    device: str  # "cpu", "cuda (NVIDIA ...)"
    dtype: str
    attention: str
    kv_dtype: str  # of keys and values
    kv_bytes_per_token: int
    blocks: int
    block_size: int  # tokens
    chat: bool  # has a chat template
    key_storage: str | None = None  # of stored keys, if attention still rotates them
    sides: int = 1  # an encoder-decoder keeps prompt and answer apart: 2
    quantize: str | None = None  # type that the weights of linear layers are rounded to
    max_step_tokens: int = 512


def banner(
    models: Sequence[ModelFacts],
    *,
    url: str,
    open_to_all: bool,
    version: str,
    uds: Path | None = None,
    certificate: Path | None = None,
    others: Sequence[str] = (),
    explorer: bool = False,
) -> str:
    """Boxed facts and, outside the box so that it can be copied, a curl line. No final newline.

    `others` are names of models that may be loaded later. `uds` is the Unix socket that the server
    listens on instead of at `url`. `explorer`: whether it shows browsers a page.
    """
    flags = ""
    if uds is not None:
        url = f"{url.partition(':')[0]}://localhost"
        flags = f" --unix-socket {shlex.quote(str(uds))}"
    if certificate is not None and (uds is not None or is_loopback(urlsplit(url).hostname or "")):
        flags += " --insecure"  # it need not bear the name of an address on this machine
    elif certificate is not None:
        flags += f" --cacert {shlex.quote(str(certificate))}"
    rows: list[tuple[str, str] | None] = []
    for model in models:
        rows += [*_model_rows(model), None]
    rows += [("not loaded", name) for name in others]
    rows += [("socket", str(uds))] if uds is not None else []
    rows += [("explorer", f"{url}/")] if explorer and uds is None else []
    rows += [
        ("completions", f"{url}/v1/completions"),
        ("chat", f"{url}/v1/chat/completions"),
        ("metrics", f"{url}/metrics"),
        ("access", "no API key required" if open_to_all else "API key required"),
    ]
    keyed = "" if open_to_all else ' -H "Authorization: Bearer $KEY"'
    command = (
        _curl(models[0], url, flags + keyed) if models else f"curl {url}/v1/models{flags + keyed}"
    )
    return f"{_box(f'ropewalk {version}', rows)}\n\nTry it:\n\n{command}"


def readable_bytes(amount: int) -> str:
    """1536 as "1.5 KiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if amount >= 1024**power:
            return f"{amount / 1024**power:.1f} {unit}"
    return f"{amount} bytes"


def _model_rows(model: ModelFacts) -> list[tuple[str, str]]:
    tokens = model.blocks * model.block_size
    pool = readable_bytes(tokens * model.kv_bytes_per_token)
    beyond = " (beyond training)" if model.max_context > model.trained_context else ""
    rounded = "" if model.quantize is None else f" with {model.quantize} weights"
    each = " each for prompt and answer" if model.sides == 2 else ""
    trained = f"{model.trained_context:,}"
    storage = f", {model.key_storage} key storage" if model.key_storage else ""
    return [
        ("model", f"{model.name} ({model.architecture})"),
        ("encoding", model.encoding + storage),
        ("context", f"{model.max_context:,} tokens{each}{beyond}, trained on {trained}"),
        ("device", f"{model.device}, {model.dtype}{rounded}, {model.attention} attention"),
        ("keys and values", f"{model.kv_dtype}, {model.kv_bytes_per_token:,} bytes per token"),
        ("cache", f"{counted(model.blocks, 'block')} of {model.block_size} tokens, {pool}"),
        ("at full length", f"{tokens / (model.sides * model.max_context):.1f} concurrent requests"),
    ]


def _box(title: str, rows: Sequence[tuple[str, str] | None]) -> str:
    left = max(len(row[0]) for row in rows if row)
    lines = [f"{row[0]:<{left}}  {row[1]}" if row else None for row in rows]
    width = max(len(title) + 1, *(len(line) for line in lines if line))
    top = f"╭─ {title} {'─' * (width - len(title) - 1)}╮"
    body = [f"│ {line:<{width}} │" if line else f"├{'─' * (width + 2)}┤" for line in lines]
    return "\n".join([top, *body, f"╰{'─' * (width + 2)}╯"])


def _curl(model: ModelFacts, url: str, flags: str) -> str:
    body: dict[str, object] = {"model": model.name}
    if model.chat:
        route = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    else:
        route = "/v1/completions"
        body["prompt"] = "The sky is blue because"
    body |= {"max_tokens": 64, "temperature": 0.2, "stream": True}
    data = json.dumps(body).replace("'", "'\\''")  # a quote inside a single-quoted shell word
    header = '-H "Content-Type: application/json"'
    return f"curl -N {url}{route}{flags} {header} -d '{data}'"
