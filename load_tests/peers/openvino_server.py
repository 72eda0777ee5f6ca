"""Serves OpenVINO GenAI's ContinuousBatchingPipeline, which has no server, to the load generator.

With the Python that has openvino:
`python -m ropewalk.load_tests.peers.openvino_server MODEL DTYPE THREADS PORT`.
"""

import itertools
import json
import queue
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stream:
    """One answer in progress: `send` takes its bytes, and `ended` is set after the last."""

    def __init__(self, send: Any, prompt: str, max_tokens: int) -> None:
        self.send, self.prompt, self.max_tokens = send, prompt, max_tokens
        self.prompt_tokens = self.tokens = 0
        self.ended = threading.Event()

    def add(self, text: str, tokens: int) -> None:
        """Send a chunk with the usage so far; after the last token also the end of the stream."""
        self.tokens += tokens
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        chunk = {"choices": [{"index": 0, "text": text}], "usage": usage}
        end = "data: [DONE]\n\n" if self.tokens >= self.max_tokens else ""
        with suppress(OSError):  # the client has left, and the answer goes on without it
            self.send(f"data: {json.dumps(chunk)}\n\n{end}".encode())
        if end:
            self.ended.set()


def step_forever(pipe: Any, tokenizer: Any, config: Any, new: queue.SimpleQueue[Stream]) -> None:
    """Serve the streams of `new`. No other thread touches the pipeline or its tokenizer."""
    running: list[tuple[Stream, Any]] = []
    numbers = itertools.count()
    while True:
        while not running or not new.empty():  # waits only if there is nothing to compute
            stream = new.get()
            prompt = tokenizer.encode(stream.prompt, add_special_tokens=False).input_ids
            stream.prompt_tokens = prompt.shape[-1]
            settings = config(max_new_tokens=stream.max_tokens, ignore_eos=True, do_sample=False)
            running.append((stream, pipe.add_request(next(numbers), prompt, settings)))
        pipe.step()
        came = [(s, h.read().popitem()[1].generated_ids) for s, h in running if h.can_read()]
        texts = tokenizer.decode([list(ids) for _, ids in came]) if came else []
        for (stream, ids), text in zip(came, texts, strict=True):
            stream.add(text, len(ids))
        for stream, handle in running:
            if stream.ended.is_set():
                handle.stop()
        running = [pair for pair in running if not pair[0].ended.is_set()]


def handler(new: queue.SimpleQueue[Stream]) -> type[BaseHTTPRequestHandler]:
    """Makes a Stream of each request and puts it into `new`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                return self.send_error(404)
            self.send_response(200)
            self.end_headers()
            new.put(stream := Stream(self.wfile.write, body["prompt"], body["max_tokens"]))
            stream.ended.wait()

    return Handler


def main(model: str, dtype: str, threads: str, port: str) -> None:
    import openvino as ov  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, 64, 2048
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    # A processor without bfloat16 computes in float32, and then refuses keys in bfloat16.
    capable = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "f32" if dtype == "float32" or not capable else "bf16"
    hints = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), precision)
    hints |= {"INFERENCE_NUM_THREADS": threads}
    folder = f"{model}-{dtype}" if dtype in ("int8", "int4") else model
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", hints)
    new: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), handler(new))
    server.socket.listen(128)  # many connections may arrive at once
    threading.Thread(target=server.serve_forever, daemon=True).start()
    step_forever(pipe, pipe.get_tokenizer(), genai.GenerationConfig, new)


if __name__ == "__main__":
    main(*sys.argv[1:])
