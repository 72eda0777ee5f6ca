"""ServerConfig: the settings of `ropewalk serve`, checked and frozen.

Opens no file but that of the API keys, loads no model, imports no torch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from ropewalk.server import download
from ropewalk.server.errors import UsageError
from ropewalk.server.listen import is_loopback

DEFAULT_MODEL = "smollm2"
USUAL_MODELS = 4  # at once, of those in a folder; llama.cpp's server has as many
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_NAMED = re.compile(r"([\w.:-]+)=(.+)")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is the model name that requests give.

    `source` is a path, "smollm2" or a hub id (server/download.py), or a shape
    (model/loading/random_weights.py).
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()  # further names that requests may give


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How every model is loaded. None: chosen from the checkpoint and the hardware."""

    dtype: str | None
    quantize: str | None
    device: str | None
    encoding: str | None
    trust_encoding: tuple[str, ...]  # outside this project, whose code checkpoints may name
    encoding_option: tuple[tuple[str, Any], ...]  # on top of the checkpoint's
    attention: str | None
    max_model_len: int | None  # tokens
    threads: int | None
    chat_template: Path | None


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
    max_step_tokens: int | None  # None: by device
    draft_tokens: int | None  # None: by device
    max_queue: int
    max_queue_time: float  # seconds


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Whom the server answers, and its time limits."""

    api_keys: frozenset[str] = field(default=frozenset(), repr=False)  # empty: open; never logged
    allowed_hosts: frozenset[str] = frozenset()  # Host headers served; empty: all
    allowed_origins: frozenset[str] = frozenset()  # of web pages that may read answers
    share_prefixes: bool = False  # between API keys: one can find out what another sent
    operator_routes: bool = True  # whether requests may change what caches keep
    access_log: bool = True  # a line for every request, not only for refused ones
    max_body_bytes: int | None = None  # None: by the longest context
    root_path: str = ""  # below which a proxy publishes the server
    explorer: bool = True  # a page at /
    request_timeout_s: float = 300.0
    stalled_write_s: float = 30.0
    ping_s: float = 15.0
    first_ping_s: float = 30.0  # until then, what goes wrong has a status of its own


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Where KV events are published: ZeroMQ addresses."""

    endpoint: str
    replay: str | None
    topic: str


@dataclass(frozen=True, slots=True)
class ServerConfig:
    models: tuple[ModelSource, ...]  # loaded at the start
    others: tuple[ModelSource, ...]  # which may be loaded later
    max_models: int  # in memory at the same time
    come_and_go: bool  # whether models are loaded and unloaded by requests
    models_autoload: bool  # by the first request for one of them
    loading: ModelOptions
    cache: CacheOptions
    limits: LimitOptions
    http: HttpOptions
    events: EventOptions | None  # None: there are none
    host: str  # to listen on
    port: int  # 0: any free one
    uds: Path | None  # a Unix socket, instead of host and port
    ssl_certfile: Path | None  # None: plain HTTP
    ssl_keyfile: Path | None  # None: in `ssl_certfile`
    drain_timeout_s: float
    metrics_compat: str  # off or vllm
    otlp_endpoint: str | None  # where traces are sent; None: there are none
    log_level: str
    log_format: str  # text or json


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


def models_in(value: str) -> tuple[ModelSource, ...]:
    """What a folder holds: .gguf files, and folders with a config.json."""
    folder = Path(value)
    files = [ModelSource(path.stem, str(path)) for path in folder.glob("*.gguf")]
    folders = [path.parent for path in folder.glob("*/config.json")]
    found = [*files, *(ModelSource(path.name, str(path)) for path in folders)]
    if not folder.is_dir():
        raise ValueError(f"there is no folder {value}")
    if not found:
        raise ValueError(
            f"{value} holds no models; give a folder of .gguf files and of folders with config.json"
        )
    return tuple(sorted(found, key=lambda source: source.name))


def model_name(value: str) -> str:
    if value.split() != [value]:
        raise ValueError(f"{value!r} is not a name; give one word")
    return value


def existing_file(value: str) -> Path:
    if not Path(value).exists() or Path(value).is_dir():  # a pipe is as good as a file
        raise ValueError(f"there is no file {value}; check the path")
    return Path(value)


def encoding_option(value: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON or text."""
    name, equals, text = value.partition("=")
    if not name or not equals:
        raise ValueError(f"{value!r} is not NAME=VALUE; write for example base=500000")
    try:
        return name, json.loads(text)
    except ValueError:  # not JSON, so it is text: half, interleaved
        return name, text


def root_path(value: str) -> str:
    """Begins with a slash and does not end with one; empty for the root itself."""
    path = unquote(value).strip("/")
    if not re.fullmatch(r"[^?#\s]*", path):
        raise ValueError(f"{value!r} is not a path; write for example /llm")
    return path and f"/{path}"


def api_key(value: str) -> str:
    if value.split() != [value]:
        raise ValueError("an API key must not be empty or contain spaces; give one word")
    return value


def key_file(value: str) -> tuple[str, ...]:
    """The keys in a file, one a line."""
    try:
        lines = Path(value).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(f"{value} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{value} is not UTF-8 text; write one key a line") from error
    words = (line.strip() for line in lines)
    keys = tuple(api_key(word) for word in words if word and not word.startswith("#"))
    if not keys:  # which must not mean open to all
        raise ValueError(f"{value} holds no key; write one a line, or leave the option out")
    return keys


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


def zmq_address(value: str) -> str:
    if re.fullmatch(r"tcp://[^/?#\s]+:[0-9]{1,5}|(ipc|inproc)://\S+", value):
        return value
    raise ValueError(f"{value!r} is not a ZeroMQ address; write for example tcp://*:5557")


def http_url(value: str) -> str:
    if re.fullmatch(r"https?://[^?#\s]+", value):
        return value
    raise ValueError(f"{value!r} is not an address; write for example http://localhost:4318")


T = TypeVar("T", ModelOptions, CacheOptions, LimitOptions, HttpOptions, ServerConfig)


def _of(kind: type[T], values: Mapping[str, Any], **others: Any) -> T:
    """A dataclass whose fields are named like options, but for `others`."""
    named = {field.name: values[field.name] for field in fields(kind) if field.name in values}
    return kind(**{**named, **others})


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """From the values of `ropewalk serve`. Raises UsageError when two contradict each other."""
    found, most = values["models_dir"], values["max_models"]
    sources = values["models"] or ([] if found else [ModelSource(DEFAULT_MODEL, DEFAULT_MODEL)])
    members = [member for source in sources for member in _members(source)]
    named = _named(members, values["served_model_name"])
    at_once = most or max(len(named), USUAL_MODELS if found else 1)
    config = _of(
        ServerConfig,
        values,
        models=named[:at_once],
        others=(*named[at_once:], *found),
        max_models=at_once,
        come_and_go=bool(most or found or values["models_autoload"]),
        loading=_of(ModelOptions, values),
        cache=_of(CacheOptions, values),
        limits=_of(LimitOptions, values),
        http=_of(
            HttpOptions,
            values,
            api_keys=frozenset(chain(values["api_key"], *values["api_key_file"])),
            allowed_hosts=_allowed_hosts(
                None if values["uds"] else values["host"], values["allowed_host"]
            ),
            allowed_origins=frozenset(values["allowed_origin"]),
            operator_routes=_operator_routes(values),
            max_body_bytes=values["max_body"],
            request_timeout_s=values["request_timeout"],
            # Who has waited for too long is found a moment later, and told so by a status.
            first_ping_s=max(values["max_queue_time"] + 5.0, 15.0),
        ),
        events=_events(values),
        drain_timeout_s=values["drain_timeout"],
    )
    _check(config)
    return config


def _operator_routes(values: Mapping[str, Any]) -> bool:
    """auto: where those who reach the server are on its machine, and no proxy lets others in."""
    own = not values["uds"] and is_loopback(values["host"]) and not values["allowed_host"]
    open_to_all = not (values["api_key"] or values["api_key_file"])
    return {"on": True, "off": False, "auto": own and open_to_all}[values["operator_routes"]]


def _events(values: Mapping[str, Any]) -> EventOptions | None:
    endpoint, replay = values["kv_events"], values["kv_events_replay"]
    topic = values["kv_events_topic"]
    if endpoint is not None:
        return EventOptions(endpoint, replay, topic)
    if replay is not None or topic:
        raise UsageError(
            "--kv-events-replay and --kv-events-topic belong to KV events; publish them with "
            "--kv-events"
        )
    return None


def _members(source: ModelSource) -> list[ModelSource]:
    """`family` stands for all bundled models."""
    if source.source != "family":
        return [source]
    if source.name != "family":
        raise UsageError(
            f"{source.name}=family gives one name to six models; leave the name out or choose one "
            f"of the models, for example {source.name}=ropewalk-rope"
        )
    return [ModelSource(folder.name, str(folder)) for folder in download.family()]


def _named(models: Sequence[ModelSource], names: Sequence[str]) -> tuple[ModelSource, ...]:
    """The models, under --served-model-name's `names` if there are any."""
    if not names:
        return tuple(models)
    if len(models) > 1:
        raise UsageError(
            f"--served-model-name names one model, but {len(models)} are served; name each of them "
            f"with NAME=MODEL, for example {names[0]}={models[0].source}"
        )
    first, *others = dict.fromkeys(names)
    return (ModelSource(first, models[0].source, tuple(others)),)


def _allowed_hosts(host: str | None, named: Sequence[str]) -> frozenset[str]:
    """A loopback server is for this machine: requests for other names come from web pages.

    No web page reaches a Unix socket, whose `host` is None.
    """
    own = LOOPBACK_NAMES | {host_name(host)} if host and is_loopback(host) else frozenset()
    return own.union(named)


def _check(config: ServerConfig) -> None:
    models = (*config.models, *config.others)
    names = [model.name for model in models]
    for name, model in zip(names, models, strict=True):
        if names.count(name) > 1:
            raise UsageError(
                f"two models are called {name!r}; name one of them with NAME=MODEL, "
                f"for example other={model.source}"
            )
    if config.ssl_keyfile is not None and config.ssl_certfile is None:
        raise UsageError(
            "--ssl-keyfile is the key of a certificate; name the certificate with --ssl-certfile"
        )
    if config.events is not None and (len(names) > 1 or config.come_and_go):
        raise UsageError(
            "--kv-events are those of one model, but others are served, too; start a server for "
            "each"
        )
    if config.events is not None and not config.cache.prefix_sharing:
        raise UsageError(
            "--kv-events tell of shared prefixes, of which there are none with "
            "--no-prefix-sharing; leave one of the two out"
        )
    limits = config.limits
    if limits.max_step_tokens is not None and limits.max_step_tokens < limits.max_seqs:
        raise UsageError(
            f"--max-step-tokens {limits.max_step_tokens} is less than --max-seqs "
            f"{limits.max_seqs}, but each running sequence needs one token per step; raise the "
            "first or lower the second"
        )
