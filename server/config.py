"""ServerConfig: what `ropewalk serve` was asked for, checked and frozen, and the table of options.

From flags and ROPEWALK_* variables. Opens no file, loads no model, imports no torch.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from server import pull
from server.errors import UsageError
from server.metrics_compat import ALIASES
from server.options import Option, auto, choice, count, seconds, size, switch

DEFAULT_MODEL = "smollm2"
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_NAMED = re.compile(r"([\w.:-]+)=(.+)")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is what requests say.

    `source` is a path, "smollm2" or a hub id (server/pull.py), or a shape (model/shapes.py).
    """

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How every model is loaded. None: chosen from the checkpoint and the hardware."""

    dtype: str | None
    quantize: str | None
    device: str | None
    encoding: str | None
    bias_form: str | None
    rope_frame: str | None
    attention: str | None
    max_model_len: int | None  # tokens
    threads: int | None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The pool of blocks, per model but for `kv_memory`."""

    kv_memory: int | None  # bytes for all models together
    kv_dtype: str | None  # None: the model's
    block_size: int  # tokens
    prefix_sharing: bool
    audit: str  # off, sample or full
    max_mutated_blocks: int  # over all models


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Per model."""

    max_seqs: int
    max_step_tokens: int
    max_queue: int


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Where the server listens, to whom it answers, and how long."""

    host: str
    port: int  # 0: any free one
    api_keys: frozenset[str] = field(repr=False)  # empty: open; never in a log line
    allowed_hosts: frozenset[str]  # Host headers served; empty: all
    share_prefixes: bool  # between API keys
    max_body_bytes: int | None  # None: by the longest context
    request_timeout_s: float
    drain_timeout_s: float


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything `ropewalk serve` was asked for."""

    models: tuple[ModelSource, ...]
    loading: ModelOptions
    cache: CacheOptions
    limits: LimitOptions
    http: HttpConfig
    metrics_compat: str  # a key of server.metrics_compat.ALIASES
    log_level: str


def model_source(value: str) -> ModelSource:
    """NAME=SOURCE, or SOURCE named after its file, its folder or its hub id."""
    named = _NAMED.fullmatch(value)
    if named and not Path(value).exists():
        return ModelSource(named[1], named[2])
    path = Path(value)
    if path.suffix == ".gguf":
        return ModelSource(path.stem, value)
    if path.is_dir():
        return ModelSource(path.resolve().name, value)
    return ModelSource(value, value)


def _key(value: str) -> str:
    if value.split() != [value]:
        raise ValueError("an API key is empty or holds a space; give one word")
    return value


def _host(value: str) -> str:
    if not value or "/" in value or any(letter.isspace() for letter in value):
        raise ValueError(f"{value!r} is not a host; write for example 127.0.0.1 or 0.0.0.0")
    return value


def _host_name(value: str) -> str:
    """Of a Host header, without the port: that is not compared."""
    host = _host(value)
    if host.count(":") > 1 and not host.startswith("["):
        return f"[{host}]"  # as the header has an IPv6 address
    return re.sub(r":[0-9]*\Z", "", host)


HOST = Option(
    "--host", "http", "address to listen on; 0.0.0.0: all", _host, "127.0.0.1", metavar="HOST"
)
PORT = Option("--port", "http", "0: any free one", count(0, 65535), 8000, metavar="PORT")

SERVE_OPTIONS = (
    Option(
        "models",
        "model",
        "a Hugging Face directory, a .gguf file, smollm2 or a hub id owner/name, family for all "
        "bundled models or ropewalk-t5 for one, or random weights: shape:smollm2, or "
        "shape:smollm2:t5 for another encoding; NAME=MODEL names it",
        model_source,
        (ModelSource(DEFAULT_MODEL, DEFAULT_MODEL),),
        DEFAULT_MODEL,
        "MODEL",
        many=True,
    ),
    Option(
        "--dtype",
        "model",
        "bfloat16, float16 or float32; auto: bfloat16 where the hardware has it",
        auto(choice("bfloat16", "float16", "float32")),
        shown="auto",
        metavar="TYPE",
    ),
    Option(
        "--quantize",
        "model",
        "int8: linear layers' weights in 8 bits, which take half as much memory as bfloat16, and "
        "on a CPU half as much to read (a GPU widens them for every pass); answers change a little",
        auto(choice("int8")),
        shown="auto, as they are",
        metavar="TYPE",
    ),
    Option(
        "--device",
        "model",
        "cpu or cuda; auto: cuda where there is one",
        auto(choice("cpu", "cuda")),
        shown="auto",
        metavar="DEVICE",
    ),
    Option(
        "--encoding",
        "model",
        "another positional encoding than the checkpoint's: see ropewalk encodings",
        auto(str),
        shown="auto, the checkpoint's",
        metavar="NAME",
    ),
    Option(
        "--bias-form",
        "model",
        "window, table or materialised: how the decoder's T5 bias is added; answers stay the same",
        auto(choice("window", "table", "materialised")),
        shown="auto, the checkpoint's",
        metavar="FORM",
    ),
    Option(
        "--rope-frame",
        "model",
        "absolute, raw or block: by what RoPE's stored keys are turned, their position, nothing or "
        "their place in the block; in the last two they move for free",
        auto(choice("absolute", "raw", "block")),
        shown="auto, the checkpoint's or absolute",
        metavar="FRAME",
    ),
    Option(
        "--attention",
        "model",
        "triton, cpu, sdpa or reference; auto: the first that can",
        auto(choice("triton", "cpu", "sdpa", "reference")),
        shown="auto",
        metavar="BACKEND",
    ),
    Option(
        "--max-model-len",
        "model",
        "longest prompt and answer together, of encoder-decoders each, in tokens: 4096 or 4k",
        auto(count(1, 1 << 24)),
        shown="auto, the trained context",
        metavar="TOKENS",
    ),
    Option(
        "--threads",
        "model",
        "CPU threads of the engine",
        auto(count(1, 1024)),
        shown="auto, one per core, fewer where a container's CPU limit is lower",
        metavar="COUNT",
    ),
    Option(
        "--kv-memory",
        "cache",
        "memory for keys and values of all models: 1GiB, 512M",
        auto(size),
        shown="auto",
        metavar="BYTES",
    ),
    Option(
        "--kv-dtype",
        "cache",
        "int8: keys and values in 8 bits with a scale for each, so that the same memory holds "
        "about twice the tokens of bfloat16; answers change a little",
        auto(choice("int8")),
        shown="auto, as the model computes",
        metavar="TYPE",
    ),
    Option("--block-size", "cache", "tokens per block", count(1, 1024), 16, metavar="TOKENS"),
    Option("--prefix-sharing", "cache", "compute equal beginnings of prompts once", switch, True),
    Option(
        "--audit",
        "cache",
        "check that cached blocks do not change: off; sample: when shared or given up, and one "
        "for each step; full: all each step, slowly",
        choice("off", "sample", "full"),
        "sample",
        metavar="HOW",
    ),
    Option(
        "--max-mutated-blocks",
        "cache",
        "changed blocks after which /health/ready turns false, so many still allowed",
        count(0, 1 << 20),
        3,
        metavar="COUNT",
    ),
    Option(
        "--max-seqs", "limits", "sequences computed together", count(1, 4096), 64, metavar="COUNT"
    ),
    Option(
        "--max-step-tokens",
        "limits",
        "tokens computed in one step; long prompts are cut into such chunks",
        count(1, 1 << 20),
        512,
        metavar="TOKENS",
    ),
    Option(
        "--max-queue",
        "limits",
        "sequences that may wait for others to end; more are refused with 429",
        count(1, 1 << 20),
        128,
        metavar="COUNT",
    ),
    HOST,
    PORT,
    Option(
        "--api-key",
        "http",
        "clients must send this key; repeatable. The variable keeps it out of the process list",
        _key,
        (),
        "none, open to all",
        "KEY",
        env="ROPEWALK_API_KEYS",
        many=True,
    ),
    Option(
        "--allowed-host",
        "http",
        "Host header to serve; repeatable. Beside it, a server on a loopback address serves its "
        "own names",
        _host_name,
        (),
        "on a loopback address its own names, else all",
        "HOST",
        env="ROPEWALK_ALLOWED_HOSTS",
        many=True,
    ),
    Option(
        "--share-prefixes",
        "http",
        "let clients with different keys share cached prefixes, by which one can find out what "
        "another sent",
        switch,
        False,
        "off",
    ),
    Option(
        "--max-body",
        "http",
        "largest body of a request: 512K, 4M",
        auto(size),
        shown="auto, 64K and 16 bytes for each token of the longest context, at most 1M",
        metavar="BYTES",
    ),
    Option(
        "--request-timeout",
        "http",
        "longest time one request may take",
        seconds(1, 86400),
        300.0,
        "300",
        "SECONDS",
    ),
    Option(
        "--drain-timeout",
        "http",
        "after SIGTERM, time for running requests to finish",
        seconds(0, 3600),
        30.0,
        "30",
        "SECONDS",
    ),
    Option(
        "--metrics-compat",
        "http",
        "vllm: export metrics under vLLM's names, too, for gateways and dashboards that read those",
        choice(*ALIASES),
        "off",
        metavar="NAMES",
    ),
    Option(
        "--log-level",
        "http",
        "debug, info, warning or error",
        choice("debug", "info", "warning", "error"),
        "info",
        metavar="LEVEL",
    ),
)


T = TypeVar("T", ModelOptions, CacheOptions, LimitOptions)


def _of(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass whose fields are called as options are."""
    names = (field.name for field in fields(kind))
    return kind(**{name: values[name] for name in names})


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """From the values of SERVE_OPTIONS. UsageError when two of them contradict each other."""
    config = ServerConfig(
        models=tuple(member for source in values["models"] for member in _members(source)),
        loading=_of(ModelOptions, values),
        cache=_of(CacheOptions, values),
        limits=_of(LimitOptions, values),
        http=HttpConfig(
            host=values["host"],
            port=values["port"],
            api_keys=frozenset(values["api_key"]),
            allowed_hosts=_allowed_hosts(values["host"], values["allowed_host"]),
            share_prefixes=values["share_prefixes"],
            max_body_bytes=values["max_body"],
            request_timeout_s=values["request_timeout"],
            drain_timeout_s=values["drain_timeout"],
        ),
        metrics_compat=values["metrics_compat"],
        log_level=values["log_level"],
    )
    _check(config)
    return config


def _members(source: ModelSource) -> list[ModelSource]:
    """`family` stands for all bundled models."""
    if source.source != "family":
        return [source]
    if source.name != "family":
        raise UsageError(
            f"{source.name}=family names one model, and family is six; leave the name out or give "
            f"one of them, for example {source.name}=ropewalk-rope"
        )
    return [ModelSource(folder.name, str(folder)) for folder in pull.family()]


def _allowed_hosts(host: str, named: Sequence[str]) -> frozenset[str]:
    """A loopback server is meant for this machine: other names are a web page's attempt."""
    own = LOOPBACK_NAMES | {_host_name(host)} if _is_loopback(host) else frozenset()
    return own.union(named)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host.lower() == "localhost"


def _check(config: ServerConfig) -> None:
    names = [model.name for model in config.models]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two models are called {name!r}; name one of them with NAME=MODEL, "
                f"for example other={name}"
            )
    limits = config.limits
    if limits.max_step_tokens < limits.max_seqs:
        raise UsageError(
            f"--max-step-tokens {limits.max_step_tokens} is less than --max-seqs "
            f"{limits.max_seqs}, and each running sequence needs one token a step; "
            "raise the first or lower the second"
        )
