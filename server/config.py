"""ServerConfig: the settings of `ropewalk serve`, checked and frozen.

Opens no file, loads no model, imports no torch.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from server import pull
from server.errors import UsageError

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_NAMED = re.compile(r"([\w.:-]+)=(.+)")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is the model name that requests give.

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
    """The pool of blocks; per model, except for `kv_memory`."""

    kv_memory: int | None  # bytes for all models together
    kv_dtype: str | None  # None: the model's
    kv_spill: (
        int | None
    )  # bytes of host memory for all models together; 0: none; None: by what is free
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
class HttpOptions:
    """Whom the server answers, and its time limits."""

    api_keys: frozenset[str] = field(default=frozenset(), repr=False)  # empty: open; never logged
    allowed_hosts: frozenset[str] = frozenset()  # Host headers served; empty: all
    allowed_origins: frozenset[str] = frozenset()  # of web pages that may read answers
    share_prefixes: bool = False  # between API keys: one can find out what another sent
    max_body_bytes: int | None = None  # None: by the longest context
    request_timeout_s: float = 300.0
    stalled_write_s: float = 30.0
    ping_s: float = 15.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings of `ropewalk serve`."""

    models: tuple[ModelSource, ...]
    loading: ModelOptions
    cache: CacheOptions
    limits: LimitOptions
    http: HttpOptions
    host: str  # to listen on
    port: int  # 0: any free one
    drain_timeout_s: float
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


def host_address(value: str) -> str:
    if not value or "/" in value or any(letter.isspace() for letter in value):
        raise ValueError(f"{value!r} is not a host; write for example 127.0.0.1 or 0.0.0.0")
    return value


def host_name(value: str) -> str:
    """The host as in a Host header, without its port, which is not compared."""
    host = host_address(value)
    if host.count(":") > 1 and not host.startswith("["):
        return f"[{host}]"  # as an IPv6 address is written in the header
    return re.sub(r":[0-9]*\Z", "", host)


def web_origin(value: str) -> str:
    """An origin as browsers write it in the Origin header."""
    if value == "*" or re.fullmatch(r"https?://[^/?#\s@]+", value):
        return value.lower()
    raise ValueError(f"{value!r} is not an origin; write for example https://chat.example, or *")


T = TypeVar("T", ModelOptions, CacheOptions, LimitOptions)


def _of(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass whose fields are named like options."""
    names = (field.name for field in fields(kind))
    return kind(**{name: values[name] for name in names})


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """From the values of SERVE_OPTIONS. Raises UsageError when two contradict each other."""
    config = ServerConfig(
        models=tuple(member for source in values["models"] for member in _members(source)),
        loading=_of(ModelOptions, values),
        cache=_of(CacheOptions, values),
        limits=_of(LimitOptions, values),
        http=HttpOptions(
            api_keys=frozenset(values["api_key"]),
            allowed_hosts=_allowed_hosts(values["host"], values["allowed_host"]),
            allowed_origins=frozenset(values["allowed_origin"]),
            share_prefixes=values["share_prefixes"],
            max_body_bytes=values["max_body"],
            request_timeout_s=values["request_timeout"],
        ),
        host=values["host"],
        port=values["port"],
        drain_timeout_s=values["drain_timeout"],
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
            f"{source.name}=family gives one name to six models; leave the name out or choose one "
            f"of the models, for example {source.name}=ropewalk-rope"
        )
    return [ModelSource(folder.name, str(folder)) for folder in pull.family()]


def _allowed_hosts(host: str, named: Sequence[str]) -> frozenset[str]:
    """A loopback server is for this machine: requests for other names come from web pages."""
    own = LOOPBACK_NAMES | {host_name(host)} if _is_loopback(host) else frozenset()
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
            f"{limits.max_seqs}, but each running sequence needs one token per step; raise the "
            "first or lower the second"
        )
