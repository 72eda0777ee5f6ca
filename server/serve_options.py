"""The options of `ropewalk serve`: each a flag and a ROPEWALK_* variable. No torch."""

from cache.terms import BLOCK_SIZE
from server.config import ModelSource, host_address, host_name, model_source, web_origin
from server.metrics_compat import ALIASES
from server.options import Option, auto, choice, count, seconds, size, switch

DEFAULT_MODEL = "smollm2"


def _key(value: str) -> str:
    if value.split() != [value]:
        raise ValueError("an API key is empty or holds a space; give one word")
    return value


HOST = Option(
    "--host",
    "http",
    "address to listen on; 0.0.0.0: all",
    host_address,
    "127.0.0.1",
    metavar="HOST",
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
        "int8: linear layers' weights in 8 bits, half of what bfloat16 takes in memory and, on a "
        "CPU, has to be read (two thirds where the CPU multiplies bfloat16; a GPU widens them for "
        "every pass); a CPU with AVX2 rounds inputs to 8 bits, too, and prompts and many requests "
        "take less time; answers change a little. int4, on such a CPU: 4 bits for layers whose "
        "weights a file had in 4 bits (GGUF's Q4_0, Q4_1, Q4_K), which lose nothing by it, and "
        "int8 for the others",
        auto(choice("int8", "int4")),
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
        "another positional encoding than the checkpoint's: see ropewalk encodings; not one whose "
        "trained weights the checkpoint lacks, nor for encoder-decoders",
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
        shown="auto, a quarter of what the weights leave free (on a GPU 85 %), at most what "
        "--max-seqs full contexts take",
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
    Option(
        "--block-size", "cache", "tokens per block", count(1, 1024), BLOCK_SIZE, metavar="TOKENS"
    ),
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
        "tokens computed in one step; long prompts are cut into such chunks, or twice as long ones "
        "while a server of one model has no other request",
        count(1, 1 << 20),
        512,
        metavar="TOKENS",
    ),
    Option(
        "--max-queue",
        "limits",
        "sequences that may wait for others to end; more are refused with 429",
        count(1, 1 << 20),
        1024,
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
        host_name,
        (),
        "on a loopback address its own names, else all",
        "HOST",
        env="ROPEWALK_ALLOWED_HOSTS",
        many=True,
    ),
    Option(
        "--allowed-origin",
        "http",
        "origin of web pages that may use the server from a browser, such as "
        "https://chat.example, or * for all; repeatable",
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
        shown="auto, 64K and 256 bytes for each token of the longest context, at most 4M",
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
        "debug (with a line for every request), info, warning or error",
        choice("debug", "info", "warning", "error"),
        "info",
        metavar="LEVEL",
    ),
)
