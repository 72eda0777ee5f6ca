"""What one client sees of another's flood, through HTTP and a real engine."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.fake_engine import VOCAB, counting, engine_app, make_engine
from tests.server.toy import LABELS, ByteTokenizer, running, sample, toy, wait_for

PATH = "/v1/completions"


class Counted(ByteTokenizer):
    """Token ids below the fake model's vocabulary; counts texts."""

    def __init__(self):
        self.texts = 0

    def encode(self, text, *, bos):
        self.texts += 1
        return [each % VOCAB for each in text.encode()]


class Flooded:
    """A server over a slow engine, whose work is counted in steps."""

    def __init__(self, *, keys=(), **limits):
        self.steps = 0

        def slow(batch, kv):
            self.steps += 1
            time.sleep(0.004)
            return counting(batch, kv)

        made, _ = make_engine(slow, blocks=220, **{"max_seqs": 8} | limits)
        self.tokenizer = Counted()
        served = toy(vocab_size=VOCAB, max_context=100, tokenizer=self.tokenizer)
        self.app = engine_app(made, served, api_keys=frozenset(keys))

    def waiting(self) -> float:
        return sample(self.app.state.metrics, "requests_waiting", **LABELS)


def ask(url, key="", **body):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url + PATH, json=body, headers=headers, timeout=60)


LISTS = {"texts": ["a prompt"] * 80, "ids": [[1, 2, 3]] * 80, "long ones": [[1, 2, 3] * 20] * 80}


@pytest.mark.parametrize("name", LISTS)
def test_a_small_request_does_not_wait_for_a_list_of_another(name):
    """H10: it gets its tokens in steps of its own number, and a few more."""
    flooded = Flooded(max_queue=500)
    with running(flooded.app) as (url, _), ThreadPoolExecutor(1) as flood:
        body = {"prompt": LISTS[name], "max_tokens": 12}
        big = flood.submit(ask, url, **body)
        wait_for(lambda: flooded.waiting() > 50)
        before = flooded.steps
        small = ask(url, prompt=[7, 8], max_tokens=4)
        assert small.json()["usage"]["completion_tokens"] == 4
        assert flooded.steps - before <= 20  # of a hundred and more
        assert not big.done()
        answer = big.result().json()
    assert [each["index"] for each in answer["choices"]] == list(range(len(LISTS[name])))
    assert answer["usage"]["completion_tokens"] == 12 * len(LISTS[name])


def test_a_small_request_does_not_wait_for_many_of_another_key():
    flooded = Flooded(keys=("greedy", "modest"), max_queue=500, several_clients=True)
    with running(flooded.app) as (url, _), ThreadPoolExecutor(45) as flood:
        bodies = [{"prompt": [each % 40], "max_tokens": 24} for each in range(45)]
        sent = [flood.submit(ask, url, "greedy", **body) for body in bodies]
        wait_for(lambda: flooded.waiting() > 30)
        before = flooded.steps
        assert ask(url, "modest", prompt=[7, 8], max_tokens=4).status_code == 200
        assert flooded.steps - before <= 20
        assert not all(each.done() for each in sent)
        assert {each.result().status_code for each in sent} == {200}


def test_nothing_is_tokenised_for_a_request_that_finds_the_queue_full():
    """H12: a refusal costs next to nothing."""
    flooded = Flooded(max_seqs=1, max_queue=2)
    with running(flooded.app) as (url, _), ThreadPoolExecutor(3) as others:
        sent = [others.submit(ask, url, prompt=[each], max_tokens=90) for each in range(3)]
        wait_for(lambda: flooded.waiting() >= 2)
        assert ask(url, prompt="abc", max_tokens=1).status_code == 429
        assert ask(url, prompt=["abc"] * 3, max_tokens=1).status_code == 429
        assert flooded.tokenizer.texts == 0
        assert {each.result().status_code for each in sent} == {200}
