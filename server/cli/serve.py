"""`ropewalk serve`: its options, each a flag and a ROPEWALK_* variable, and what it starts.

No torch before a server is to start, so that --help answers at once.
"""

import gc
import os
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.server import listen
from ropewalk.server.cli.config_file import config_option
from ropewalk.server.cli.options import (
    PORT,
    SIZE,
    SIZE_OR_NONE,
    TRUST,
    Command,
    Setting,
    SettingArgument,
    Value,
    Variable,
    auto,
    choice,
    count,
    seconds,
    settings_of,
)
from ropewalk.server.config import (
    DEFAULT_MODEL,
    api_key,
    encoding_option,
    existing_file,
    host_address,
    host_name,
    http_url,
    key_file,
    model_name,
    model_source,
    models_in,
    root_path,
    server_config,
    web_origin,
    zmq_address,
)
from ropewalk.server.errors import UsageError, nearest
from ropewalk.server.terminal import configure_logs

CLIENT_KEY = "ROPEWALK_API_KEY"  # load_tests/run/options.py has it, too

EXAMPLES = """\
Examples:
  ropewalk serve
  ropewalk serve ./Qwen2-0.5B --dtype float32 --max-model-len 4k
  ropewalk serve chat=smollm2 base=./model.gguf --kv-memory 1GiB
  ropewalk serve rope=shape:small t5=shape:small:t5 --max-model-len 16k
                               random weights, only the encoding differs: for costs, not answers
  ROPEWALK_API_KEYS=secret1,secret2 ropewalk serve --host 0.0.0.0
  ropewalk serve --config ropewalk.toml        port = 9000 and the like, one a line
  ropewalk serve --uds /run/ropewalk.sock      then ropewalk chat --url unix:/run/ropewalk.sock
  ropewalk serve --ssl-certfile chain.pem --ssl-keyfile key.pem
"""

_model, _cache, _events, _limits, _http = (
    partial(Setting, section) for section in ("Model", "Cache", "KV events", "Limits", "HTTP")
)


def listening(
    section: str, *, host: str, port: str, uds: str, ssl_certfile: str
) -> tuple[Setting, ...]:
    """The options that a server and its clients share, each with its help."""
    return (
        Setting(section, "--host", host, Value(host_address, "host"), "127.0.0.1"),
        Setting(section, "--port", port, PORT, 8000),
        Setting(section, "--uds", uds, Value(Path, "path")),
        Setting(
            section,
            "--ssl-certfile",
            ssl_certfile,
            Value(existing_file, "file"),
            shown="none, plain http",
        ),
    )


SETTINGS: tuple[Variable, ...] = (
    SettingArgument(
        "models",
        "a Hugging Face directory, a .gguf file, smollm2, a hub id owner/name, family for all "
        "bundled models or, for example, ropewalk-t5 for one of them, or random weights: "
        "shape:smollm2, or shape:smollm2:t5 for another encoding; NAME=MODEL sets the name that "
        "requests use",
        Value(model_source, "model"),
        shown=f"{DEFAULT_MODEL}, or none with --models-dir",
        default=(),
        nargs=-1,
    ),
    _model(
        "--served-model-name",
        "name that requests use, when one model is served; repeatable: requests may use each, and "
        "answers give the first",
        Value(model_name, "name"),
        shown="after the file, the folder or the hub id",
        multiple=True,
    ),
    _model(
        "--models-dir",
        "folder of further models, .gguf files and folders with config.json: none is loaded at the "
        "start, but each may be later",
        Value(models_in, "folder"),
        (),
        "none",
    ),
    _model(
        "--max-models",
        "models in memory at the same time; the first ones named are loaded at the start, and one "
        "that is loaded later replaces the least recently used one that is not answering. With "
        "this option, --models-dir or --models-autoload, clients may load and unload models: "
        "POST /v1/models/load and /v1/models/unload",
        count(1, 1024),
        shown="all that are named, or 4 with --models-dir if that is more",
    ),
    _model(
        "--models-autoload",
        "load a model that is not in memory when a request names it",
        default=False,
    ),
    _model(
        "--chat-template",
        "chat template to use instead of the checkpoint's: a Jinja file",
        Value(existing_file, "file"),
        shown="the checkpoint's",
    ),
    _model(
        "--dtype",
        "type to compute in; auto: bfloat16 where the hardware supports it, else float32",
        auto(choice("bfloat16", "float16", "float32")),
        shown="auto",
    ),
    _model(
        "--quantize",
        "int8: weights of linear layers in 8 bits, half the size of bfloat16 in memory and, on a "
        "CPU, in memory traffic (two thirds where the CPU multiplies bfloat16; on a GPU only in "
        "steps of up to 16 tokens, and not in float16); a CPU with AVX2 also rounds activations to "
        "8 bits, which speeds up prefill and steps with many requests; answers change a little. "
        "int4, only on such a CPU: 4 bits for layers that the file stores in 4 bits (GGUF's Q4_0, "
        "Q4_1, Q4_K), with no further loss, and int8 for the others",
        auto(choice("int8", "int4")),
        shown="auto, not quantized",
    ),
    _model("--device", "auto: cuda if available", auto(choice("cpu", "cuda")), shown="auto"),
    _model(
        "--encoding",
        "positional encoding to use instead of the checkpoint's: see ropewalk encodings; not "
        "possible for one whose trained weights the checkpoint lacks, nor for encoder-decoders",
        auto(Value(str, "name")),
        shown="auto, the checkpoint's",
    ),
    _model("--trust-encoding", TRUST, Value(str, "name"), multiple=True),
    _model(
        "--encoding-option",
        "option of the positional encoding, its value as JSON or text: see ropewalk encodings; "
        "repeatable. t5's form (window, table or materialised) is how its bias is computed and "
        "changes no answer; rope's storage is how stored keys are rotated: by their position "
        "(absolute), not at all (raw) or by their offset within the block (block); raw and block "
        "keys can be moved for free",
        Value(encoding_option, "name=value"),
        shown="the checkpoint's",
        multiple=True,
    ),
    _model(
        "--attention",
        "what computes attention; auto: the first of these that supports the model",
        auto(choice("triton", "cpu", "sdpa", "reference")),
        shown="auto",
    ),
    _model(
        "--max-model-len",
        "longest context in tokens, 4096 or 4k: prompt and answer together, or each of them for an "
        "encoder-decoder",
        auto(count(1, 1 << 24)),
        shown="auto, the trained context",
    ),
    _model(
        "--threads",
        "CPU threads of the engine",
        auto(count(1, 1024)),
        shown="auto, one per core, or fewer under a container's CPU limit",
    ),
    _cache(
        "--kv-memory",
        "memory for the KV caches of all models together: 1GiB, 512M",
        auto(SIZE),
        shown="auto, a quarter of the memory left free by the weights (on a GPU 85 %), at most "
        "what --max-seqs full contexts need",
    ),
    _cache(
        "--kv-dtype",
        "int8: keys and values in 8 bits, each vector with a scale, so that the same memory holds "
        "about twice as many tokens as in bfloat16; answers change a little",
        auto(choice("int8")),
        shown="auto, the type the model computes in",
    ),
    _cache(
        "--kv-spill",
        "host memory for what preempted requests had computed, and with the rest of it for cached "
        "prefixes that make room: 2GiB; 0: none",
        auto(SIZE_OR_NONE),
        shown="auto, as much as the caches, at most 4 GiB and an eighth of the memory left free",
    ),
    _cache("--block-size", "tokens per cache block", count(1, 1024), BLOCK_SIZE),
    _cache(
        "--prefix-sharing",
        "reuse cached blocks for prompts that begin with the same tokens",
        default=True,
    ),
    _cache(
        "--audit",
        "verify by checksum that cached blocks and weights do not change: off; sample: each block "
        "when it is shared or released, and in every step one more and 1/1024 of the weights; "
        "full: in every step all blocks and 1/16 of the weights, which is slow",
        choice("off", "sample", "full"),
        "sample",
    ),
    _cache(
        "--max-mutated-blocks",
        "changed blocks that are tolerated; with more, /health/ready answers 503",
        count(0, 1 << 20),
        3,
    ),
    _events(
        "--kv-events",
        "ZeroMQ address at which KV events are published, as vLLM does, for routers that send a "
        "prompt to where its beginning is cached: tcp://*:5557, or tcp://127.0.0.1:5557 for this "
        "machine only; an address of another machine is called instead. They contain the token "
        "ids of prompts and answers. One model only; needs the extra events",
        Value(zmq_address, "address"),
        shown="none, no events",
    ),
    _events(
        "--kv-events-replay",
        "ZeroMQ address at which a router asks for events that it missed",
        Value(zmq_address, "address"),
        shown="none",
    ),
    _events(
        "--kv-events-topic",
        "topic of the events: llm-d expects kv@ADDRESS@MODEL",
        Value(str, "topic"),
        "",
        "empty",
    ),
    _limits("--max-seqs", "most sequences computed in one step", count(1, 4096), 64),
    _limits(
        "--max-step-tokens",
        "most tokens computed in one step; longer prompts are split into chunks of this size, or, "
        "on a CPU, of twice this size while a server with one model has no other request",
        auto(count(1, 1 << 20)),
        shown="auto, 512 (on a GPU mostly 2048), or --max-seqs if that is more",
    ),
    _limits(
        "--draft-tokens",
        "most tokens of an answer that are guessed and checked in one step; a guess is what "
        "followed the answer's last tokens before, and changes no answer, with the CPU's kernels "
        "not even its rounding; 0: none",
        auto(count(0, 7)),
        shown="auto, 7 with the CPU's kernels, else 0: on a GPU a guess keeps steps from being "
        "launched ahead",
    ),
    _limits(
        "--max-queue",
        "sequences that may wait in the queue; further ones are refused with 429",
        count(1, 1 << 20),
        1024,
    ),
    _limits(
        "--max-queue-time",
        "longest time that a request may wait before the first of its prompts is computed; one "
        "that would wait longer is refused with 429 and told when to come back",
        seconds(0.1, 86400),
        30,
    ),
    *listening(
        "HTTP",
        host="address to listen on; 0.0.0.0: all interfaces",
        port="port to listen on; 0: any free one",
        uds="path of a Unix socket to listen on, instead of host and port; the umask decides who "
        "may connect",
        ssl_certfile="certificate, followed by those of its issuers, for serving https: a PEM file",
    ),
    _http(
        "--ssl-keyfile",
        "private key of the certificate, not encrypted: a PEM file",
        Value(existing_file, "file"),
        shown="in the file of the certificate",
    ),
    _http(
        "--root-path",
        "path below which a proxy publishes the server, such as /llm: requests are answered with "
        "and without it",
        Value(root_path, "path"),
        "",
        "none",
    ),
    _http(
        "--explorer",
        "serve a page at / that shows what each encoding does to a live cache",
        default=True,
    ),
    _http(
        "--api-key",
        "key that clients must send; repeatable. Setting the variable instead keeps it out of the "
        "process list",
        Value(api_key, "key"),
        shown="none, open to all",
        multiple=True,
    ),
    _http(
        "--api-key-file",
        "file of further keys, one a line, read once at the start; lines that begin with # are "
        "comments; repeatable",
        Value(key_file, "file"),
        multiple=True,
    ),
    _http(
        "--allowed-host",
        "Host header to accept; repeatable. A server on a loopback address also accepts those "
        "names",
        Value(host_name, "host"),
        shown="all, but on a loopback address only localhost, 127.0.0.1 and [::1]",
        multiple=True,
    ),
    _http(
        "--allowed-origin",
        "origin whose web pages may use the server from a browser, such as https://chat.example, "
        "or * for all; repeatable",
        Value(web_origin, "origin"),
        multiple=True,
    ),
    _http(
        "--share-prefixes",
        "share cached prefixes between clients with different keys, which lets one find out what "
        "another sent",
        default=False,
    ),
    _http(
        "--operator-routes",
        "whether requests may keep sequences in the cache and operate on them; auto: on a loopback "
        "address without API keys and without --allowed-host",
        choice("auto", "on", "off"),
        "auto",
    ),
    _http(
        "--max-body",
        "largest request body: 512K, 4M",
        auto(SIZE),
        shown="auto, 64K plus 256 bytes per token of the longest context, at most 4M",
    ),
    _http("--request-timeout", "longest time one request may take", seconds(1, 86400), 300),
    _http(
        "--drain-timeout",
        "time that running requests have to finish after SIGTERM",
        seconds(0, 3600),
        30,
    ),
    _http(
        "--metrics-compat",
        "vllm: also export metrics under vLLM's names, for gateways and dashboards that expect "
        "them",
        choice("off", "vllm"),
        "off",
    ),
    _http(
        "--otlp-endpoint",
        "OpenTelemetry collector that gets a span for each request over OTLP/HTTP, such as "
        "http://localhost:4318; needs the extra otel",
        Value(http_url, "url"),
        shown="none, no traces",
    ),
    _http(
        "--log-level",
        "least severe messages to log",
        choice("debug", "info", "warning", "error"),
        "info",
    ),
    _http(
        "--log-format",
        "json: one JSON object per line, and no banner",
        choice("text", "json"),
        "text",
    ),
    _http(
        "--access-log",
        "log a line for every request, except for health checks and /metrics, which get one only "
        "at --log-level debug; refused requests get one in any case",
        default=True,
    ),
)

CONFIG = config_option(
    "Model",
    "file of settings: TOML whose keys are the names of these flags, such as port or "
    "max-model-len; flags and variables beat it",
    SETTINGS,
)


@click.command(cls=Command, params=[CONFIG, *SETTINGS], epilog=EXAMPLES)
@click.pass_context
def serve(ctx: click.Context, /, **_: Any) -> int:
    """Load models and serve them."""
    config = server_config(as_told(ctx))
    if os.environ.get(CLIENT_KEY) and not config.http.api_keys:
        raise UsageError(
            f"{CLIENT_KEY} is the key that a client sends and does not protect the server; set "
            f"ROPEWALK_API_KEYS to require a key, or unset {CLIENT_KEY}"
        )
    # Before torch and the weights are loaded: a taken port should be reported at once.
    with listen.bound(config.host, config.port, config.uds) as listener:
        tls = None
        if config.ssl_certfile is not None:
            tls = listen.tls_context(config.ssl_certfile, config.ssl_keyfile)
        configure_logs(config.log_level, config.log_format)
        traces = None if config.otlp_endpoint is None else _traces(config.otlp_endpoint)
        wait_briefly(os.environ)
        # Until all is loaded: it stays, and looking for garbage in it would take a third of a
        # second.
        gc.disable()
        # Late: it loads torch, which takes seconds.
        from ropewalk.server.launch import build

        return build.run(config, listener, tls, traces)


def _traces(endpoint: str) -> Any:
    # Late: nobody else needs it.
    from ropewalk.server.tracing import Tracing

    return Tracing(endpoint)


def as_told(ctx: click.Context) -> dict[str, Any]:
    """The command's values, without the addresses in variables and files where flags name one."""
    given = {name for name in ("url", "uds", "host", "port") if is_flag(ctx, name)}
    return ctx.params | dict.fromkeys({"url", "uds"} - given if given else ())


def from_program(options: Mapping[str, object]) -> dict[str, Any]:
    """The command's values where a program names options, and no variable or file is read."""
    known = {each.name: each for each in settings_of(serve)}
    for name in options.keys() - known.keys():
        meant = nearest(name, known)
        hint = f"did you mean {meant}?" if meant else "see its --help"
        raise UsageError(f"{name} is not an option of ropewalk serve; {hint}")
    ctx = click.Context(serve)
    defaults = {name: each.default for name, each in known.items()}
    for name, value in {**defaults, **options}.items():
        # As on the command line: text, or a switch.
        plain = value is None or isinstance(value, bool | tuple | list)
        try:
            ctx.params[name] = known[name].type_cast_value(ctx, value if plain else str(value))
        except click.BadParameter as error:
            raise UsageError(f"{name}: {error.message}") from error
    return ctx.params


def is_flag(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def wait_briefly(environ: MutableMapping[str, str]) -> None:
    """Make threads that wait for the next step give up their cores within 1 ms.

    GNU OpenMP reads the variable when torch loads. By default it spins ten times as long, and next
    to another busy program keeps a core from the thread that prepares the step: docs/speed.md.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = "30000"
