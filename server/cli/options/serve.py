"""The options of `ropewalk serve`: each a flag and a ROPEWALK_* variable. No torch."""

from pathlib import Path

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.server.cli.options.base import (
    Option,
    auto,
    choice,
    count,
    seconds,
    size,
    size_or_none,
    switch,
)
from ropewalk.server.config import (
    ModelSource,
    api_key,
    existing_file,
    host_address,
    host_name,
    key_file,
    model_name,
    model_source,
    root_path,
    web_origin,
)
from ropewalk.server.metrics.compat import ALIASES

DEFAULT_MODEL = "smollm2"


HOST = Option(
    "--host",
    "http",
    "address to listen on; 0.0.0.0: all interfaces",
    host_address,
    "127.0.0.1",
    metavar="HOST",
)
PORT = Option(
    "--port", "http", "port to listen on; 0: any free one", count(0, 65535), 8000, metavar="PORT"
)
UDS = Option(
    "--uds",
    "http",
    "path of a Unix socket to listen on, instead of host and port; the umask decides who may "
    "connect",
    Path,
    shown="none",
    metavar="PATH",
)
SSL_CERTFILE = Option(
    "--ssl-certfile",
    "http",
    "certificate, followed by those of its issuers, for serving https: a PEM file",
    existing_file,
    shown="none, plain http",
    metavar="FILE",
)
CONFIG = Option(
    "--config",
    "model",
    "file of settings: TOML whose keys are the names of these flags, such as port or "
    "max-model-len; flags and variables beat it",
    existing_file,
    shown="none",
    metavar="FILE",
)

SERVE_OPTIONS = (
    Option(
        "models",
        "model",
        "a Hugging Face directory, a .gguf file, smollm2, a hub id owner/name, family for all "
        "bundled models or, for example, ropewalk-t5 for one of them, or random weights: "
        "shape:smollm2, or shape:smollm2:t5 for another encoding; NAME=MODEL sets the name that "
        "requests use",
        model_source,
        (ModelSource(DEFAULT_MODEL, DEFAULT_MODEL),),
        DEFAULT_MODEL,
        "MODEL",
        many=True,
    ),
    CONFIG,
    Option(
        "--served-model-name",
        "model",
        "name that requests use, when one model is served; repeatable: requests may use each, and "
        "answers give the first",
        model_name,
        (),
        "after the file, the folder or the hub id",
        "NAME",
        env="ROPEWALK_SERVED_MODEL_NAMES",
        many=True,
    ),
    Option(
        "--chat-template",
        "model",
        "chat template to use instead of the checkpoint's: a Jinja file",
        existing_file,
        shown="the checkpoint's",
        metavar="FILE",
    ),
    Option(
        "--dtype",
        "model",
        "bfloat16, float16 or float32; auto: bfloat16 where the hardware supports it, else float32",
        auto(choice("bfloat16", "float16", "float32")),
        shown="auto",
        metavar="TYPE",
    ),
    Option(
        "--quantize",
        "model",
        "int8: weights of linear layers in 8 bits, half the size of bfloat16 in memory and, on a "
        "CPU, in memory traffic (two thirds where the CPU multiplies bfloat16; on a GPU only in "
        "steps of up to 8 tokens, and not in float16); a CPU with AVX2 also rounds activations to "
        "8 bits, which speeds up prefill and steps with many requests; answers change a little. "
        "int4, only on such a CPU: 4 bits for layers that the file stores in 4 bits (GGUF's Q4_0, "
        "Q4_1, Q4_K), with no further loss, and int8 for the others",
        auto(choice("int8", "int4")),
        shown="auto, not quantized",
        metavar="TYPE",
    ),
    Option(
        "--device",
        "model",
        "cpu or cuda; auto: cuda if available",
        auto(choice("cpu", "cuda")),
        shown="auto",
        metavar="DEVICE",
    ),
    Option(
        "--encoding",
        "model",
        "positional encoding to use instead of the checkpoint's: see ropewalk encodings; not "
        "possible for one whose trained weights the checkpoint lacks, nor for encoder-decoders",
        auto(str),
        shown="auto, the checkpoint's",
        metavar="NAME",
    ),
    Option(
        "--trust-encoding",
        "model",
        "encoding outside Ropewalk, as package.module:Class, whose code may run where a checkpoint "
        "names it; repeatable",
        str,
        (),
        "none",
        "NAME",
        env="ROPEWALK_TRUST_ENCODINGS",
        many=True,
    ),
    Option(
        "--bias-form",
        "model",
        "how the decoder's T5 bias is computed: window, table or materialised; answers stay the "
        "same",
        auto(choice("window", "table", "materialised")),
        shown="auto, the checkpoint's",
        metavar="FORM",
    ),
    Option(
        "--rope-frame",
        "model",
        "how RoPE's stored keys are rotated: by their position (absolute), not at all (raw) or by "
        "their offset within the block (block); raw and block keys can be moved for free",
        auto(choice("absolute", "raw", "block")),
        shown="auto, the checkpoint's or absolute",
        metavar="FRAME",
    ),
    Option(
        "--attention",
        "model",
        "triton, cpu, sdpa or reference; auto: the first of these that supports the model",
        auto(choice("triton", "cpu", "sdpa", "reference")),
        shown="auto",
        metavar="BACKEND",
    ),
    Option(
        "--max-model-len",
        "model",
        "longest context in tokens, 4096 or 4k: prompt and answer together, or each of them for an "
        "encoder-decoder",
        auto(count(1, 1 << 24)),
        shown="auto, the trained context",
        metavar="TOKENS",
    ),
    Option(
        "--threads",
        "model",
        "CPU threads of the engine",
        auto(count(1, 1024)),
        shown="auto, one per core, or fewer under a container's CPU limit",
        metavar="COUNT",
    ),
    Option(
        "--kv-memory",
        "cache",
        "memory for the KV caches of all models together: 1GiB, 512M",
        auto(size),
        shown="auto, a quarter of the memory left free by the weights (on a GPU 85 %), at most "
        "what --max-seqs full contexts need",
        metavar="BYTES",
    ),
    Option(
        "--kv-dtype",
        "cache",
        "int8: keys and values in 8 bits, each vector with a scale, so that the same memory holds "
        "about twice as many tokens as in bfloat16; answers change a little",
        auto(choice("int8")),
        shown="auto, the type the model computes in",
        metavar="TYPE",
    ),
    Option(
        "--kv-spill",
        "cache",
        "host memory for what preempted requests had computed, and with the rest of it for cached "
        "prefixes that make room: 2GiB; 0: none",
        auto(size_or_none),
        shown="auto, as much as the caches, at most 4 GiB and an eighth of the memory left free",
        metavar="BYTES",
    ),
    Option(
        "--block-size",
        "cache",
        "tokens per cache block",
        count(1, 1024),
        BLOCK_SIZE,
        metavar="TOKENS",
    ),
    Option(
        "--prefix-sharing",
        "cache",
        "reuse cached blocks for prompts that begin with the same tokens",
        switch,
        True,
    ),
    Option(
        "--audit",
        "cache",
        "verify by checksum that cached blocks and weights do not change: off; sample: each block "
        "when it is shared or released, and in every step one more and 1/1024 of the weights; "
        "full: in every step all blocks and 1/16 of the weights, which is slow",
        choice("off", "sample", "full"),
        "sample",
        metavar="HOW",
    ),
    Option(
        "--max-mutated-blocks",
        "cache",
        "changed blocks that are tolerated; with more, /health/ready answers 503",
        count(0, 1 << 20),
        3,
        metavar="COUNT",
    ),
    Option(
        "--max-seqs",
        "limits",
        "most sequences computed in one step",
        count(1, 4096),
        64,
        metavar="COUNT",
    ),
    Option(
        "--max-step-tokens",
        "limits",
        "most tokens computed in one step; longer prompts are split into chunks of this size, or "
        "of twice this size while a server with one model has no other request",
        count(1, 1 << 20),
        512,
        metavar="TOKENS",
    ),
    Option(
        "--max-queue",
        "limits",
        "sequences that may wait in the queue; further ones are refused with 429",
        count(1, 1 << 20),
        1024,
        metavar="COUNT",
    ),
    Option(
        "--max-queue-time",
        "limits",
        "longest time that a request may wait before the first of its prompts is computed; one "
        "that would wait longer is refused with 429 and told when to come back",
        seconds(0.1, 86400),
        30.0,
        "30",
        "SECONDS",
    ),
    HOST,
    PORT,
    UDS,
    SSL_CERTFILE,
    Option(
        "--ssl-keyfile",
        "http",
        "private key of the certificate, not encrypted: a PEM file",
        existing_file,
        shown="in the file of the certificate",
        metavar="FILE",
    ),
    Option(
        "--root-path",
        "http",
        "path below which a proxy publishes the server, such as /llm: requests are answered with "
        "and without it",
        root_path,
        "",
        "none",
        "PATH",
    ),
    Option(
        "--api-key",
        "http",
        "key that clients must send; repeatable. Setting the variable instead keeps it out of the "
        "process list",
        api_key,
        (),
        "none, open to all",
        "KEY",
        env="ROPEWALK_API_KEYS",
        many=True,
    ),
    Option(
        "--api-key-file",
        "http",
        "file of further keys, one a line, read once at the start; lines that begin with # are "
        "comments; repeatable",
        key_file,
        (),
        "none",
        "FILE",
        env="ROPEWALK_API_KEY_FILES",
        many=True,
    ),
    Option(
        "--allowed-host",
        "http",
        "Host header to accept; repeatable. A server on a loopback address also accepts its own "
        "names",
        host_name,
        (),
        "all, but on a loopback address only its own names",
        "HOST",
        env="ROPEWALK_ALLOWED_HOSTS",
        many=True,
    ),
    Option(
        "--allowed-origin",
        "http",
        "origin whose web pages may use the server from a browser, such as https://chat.example, "
        "or * for all; repeatable",
        web_origin,
        (),
        "none",
        "ORIGIN",
        env="ROPEWALK_ALLOWED_ORIGINS",
        many=True,
    ),
    Option(
        "--share-prefixes",
        "http",
        "share cached prefixes between clients with different keys, which lets one find out what "
        "another sent",
        switch,
        False,
        "off",
    ),
    Option(
        "--max-body",
        "http",
        "largest request body: 512K, 4M",
        auto(size),
        shown="auto, 64K plus 256 bytes per token of the longest context, at most 4M",
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
        "time that running requests have to finish after SIGTERM",
        seconds(0, 3600),
        30.0,
        "30",
        "SECONDS",
    ),
    Option(
        "--metrics-compat",
        "http",
        "vllm: also export metrics under vLLM's names, for gateways and dashboards that expect "
        "them",
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
    Option(
        "--log-format",
        "http",
        "text, or json: one JSON object per line, and no banner",
        choice("text", "json"),
        "text",
        metavar="FORMAT",
    ),
    Option(
        "--access-log",
        "http",
        "log a line for every request, except for health checks and /metrics, which get one only "
        "at --log-level debug; refused requests get one in any case",
        switch,
        True,
    ),
)
