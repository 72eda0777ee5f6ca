import asyncio
import threading
from http.server import ThreadingHTTPServer
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from ropewalk.load_tests.client.client import Server, complete, get_json
from ropewalk.load_tests.common.types import Request
from ropewalk.load_tests.peers.openvino_server import Stream, handler, step_forever


class Tokenizer:
    """A token for each word; a token's text is its number."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return SimpleNamespace(input_ids=SimpleNamespace(shape=(1, len(text.split()))))

    def decode(self, ids):
        return [" ".join(map(str, each)) for each in ids]


class Handle:
    def __init__(self, left):
        self.left = left
        self.begun = False
        self.fresh = []
        self.stopped = False

    def can_read(self):
        return bool(self.fresh)

    def read(self):
        ids, self.fresh = self.fresh, []
        return {0: SimpleNamespace(generated_ids=ids)}

    def stop(self):
        self.stopped = True


class Pipeline:
    """Stands in for ContinuousBatchingPipeline: the first step of a request yields nothing."""

    def __init__(self):
        self.handles = {}
        self.most_together = 0

    def add_request(self, number, prompt, settings):
        assert number not in self.handles
        assert settings["ignore_eos"]
        assert not settings["do_sample"]
        self.handles[number] = Handle(settings["max_new_tokens"] + 1)
        return self.handles[number]

    def step(self):
        running = [handle for handle in self.handles.values() if handle.left and not handle.stopped]
        assert running
        self.most_together = max(self.most_together, len(running))
        for handle in running:
            handle.left -= 1
            handle.fresh = [7] if handle.begun else []
            handle.begun = True


@pytest.fixture
def served():
    pipe, new = Pipeline(), SimpleQueue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(new))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=step_forever, args=(pipe, Tokenizer(), dict, new), daemon=True).start()
    port = server.server_address[1]
    yield pipe, Server("127.0.0.1", port, model="m", timeout_s=10.0)
    server.shutdown()
    server.server_close()


def test_answers_are_streamed_and_counted(served):
    pipe, server = served

    async def use():
        asked = [Request("one two three", 3, tokens) for tokens in (1, 5, 9)]
        return await asyncio.gather(*(complete(server, each) for each in asked))

    outcomes = asyncio.run(use())
    assert [o.error for o in outcomes] == [None] * 3
    assert [(o.prompt_tokens, len(o.chunks)) for o in outcomes] == [(3, 1), (3, 5), (3, 9)]
    assert len(pipe.handles) == 3


def test_what_waits_is_computed_together():
    pipe, new, sent = Pipeline(), SimpleQueue(), []
    streams = [Stream(sent.append, "one two", 2) for _ in range(3)]
    for stream in streams:
        new.put(stream)
    threading.Thread(target=step_forever, args=(pipe, Tokenizer(), dict, new), daemon=True).start()
    assert all(stream.ended.wait(10) for stream in streams)
    assert pipe.most_together == 3
    assert sent[-1].endswith(b"}}\n\ndata: [DONE]\n\n")


def test_a_client_that_leaves_harms_nobody(served):
    _, server = served
    assert asyncio.run(complete(server, Request("one two", 2, 50, leaves_after=2))).left
    assert asyncio.run(complete(server, Request("one two", 2, 3))).error is None


def test_it_says_what_it_serves(served):
    models = asyncio.run(get_json(served[1], "/v1/models"))
    assert models["data"][0]["id"] == "m"
