"""Long texts and lists are handled beside the event loop, in pieces that let others run."""

import json
import threading

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.server import long_work
from ropewalk.server.errors import DuplicateKey, InvalidBody
from ropewalk.server.long_work import PIECE, json_text
from ropewalk.server.openai import body as json_body
from ropewalk.server.openai.body import parse_object
from tests.server.toy import ByteTokenizer, ScriptedEngine, ask, complete, running, toy, toy_app

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


class Watched(ByteTokenizer):
    """Keeps the names of the threads in which it is used."""

    def __init__(self):
        self.threads = set()

    def encode(self, text, *, bos):
        self.threads.add(threading.current_thread().name)
        return super().encode(text, bos=bos)

    def token_bytes(self, token, *, first):
        self.threads.add(threading.current_thread().name)
        return super().token_bytes(token, first=first)


class Noted(ScriptedEngine):
    def start(self):
        super().start()
        self.loop = threading.current_thread().name


LONG = "naïve café " * 2000
ROUTES = {
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "messages": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "detokenize": ("/detokenize", {"tokens": list(LONG.encode())}),
    "many prompts": (
        "/v1/completions",
        {"prompt": ["a b c"] * 1024, "max_tokens": 0, "echo": True},
    ),
    "one prompt": ("/v1/completions", {"prompt": LONG, "max_tokens": 0, "echo": True}),
    "ids": ("/v1/completions", {"prompt": list(LONG.encode()), "max_tokens": 0, "echo": True}),
}


@pytest.mark.parametrize("name", ROUTES)
def test_long_texts_are_not_handled_on_the_event_loop(name):
    path, sent = ROUTES[name]
    tokenizer, engine = Watched(), Noted(lambda request: [])
    with running(toy_app(engine, [toy(tokenizer=tokenizer, max_context=1 << 16)])) as (url, _):
        answer = httpx.post(url + path, json=sent, timeout=60)
    assert answer.status_code in (200, 400)
    assert tokenizer.threads and engine.loop not in tokenizer.threads


def test_short_texts_change_no_thread():
    tokenizer = Watched()
    app = toy_app(served=[toy(tokenizer=tokenizer)])
    ask(app, "POST", "/tokenize", json={"prompt": "abc", "return_token_strs": True})
    complete(app, prompt=["abc", "def"], max_tokens=1)
    assert tokenizer.threads == {threading.current_thread().name}


@given(VALUES)
def test_pieces_make_the_text_that_one_call_makes(value):
    assert json_text(value) == json.dumps(value)


SCORES = {"tokens": ["a"] * 5000, "top_logprobs": [{"a": 0.5, "b": 1.0}] * 5000}
ENTRY = {"token": "a", "bytes": [1], "top_logprobs": [{"token": "b", "bytes": [2, 3]}] * 20}


@pytest.mark.parametrize(
    "value",
    [
        {"tokens": list(range(100_000)), "none": None},
        {"choices": [{"text": "t", "logprobs": SCORES}] * 3, "usage": {"a": 1}},
        {"choices": [{"logprobs": {"content": [ENTRY] * 3000}}]},
        {"choices": [{"logprobs": SCORES}] * 40, "prompt_token_ids": tuple(range(9000))},
        [[list(range(3000))] * 3] * 3,
        list(range(PIECE)),
        list(range(PIECE + 1)),
    ],
)
def test_no_call_writes_more_than_a_piece(value, monkeypatch):
    weights = []

    def counted(part):
        weights.append(long_work._weight(part))
        return json.dumps(part)

    monkeypatch.setattr(long_work, "dumps", counted)
    assert json_text(value) == json.dumps(value)
    assert max(weights) <= 2 * PIECE


NESTED = '{"a": [' + "[], " * 20_000 + "[]]}"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"prompt": list(range(40_000))}),
        json.dumps({"prompt": ["é\n"] * 40_000, "x": -1.5e3}),
        json.dumps({"prompt": "\n[{" * 40_000}),
        json.dumps({"messages": [{"role": "user", "n": i} for i in range(20_000)]}),
        NESTED,
    ],
    ids=["ids", "texts", "one text", "objects", "lists"],
)
def test_long_bodies_are_read_as_short_ones_are(text):
    assert len(text) > json_body.LONG
    assert parse_object(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"a": 1, "a": 2, "b": [%s 0]}', DuplicateKey),
        ('{"b": [%s NaN]}', InvalidBody),
        ('{"b": [%s 1e999]}', InvalidBody),
        ('{"b": [%s 0]', InvalidBody),
        ('{"b": [%s' + "[" * 80 + "]" * 80 + "]}", InvalidBody),
        ('{"b": [%s' + "[" * 100_000 + "]" * 100_000 + "]}", InvalidBody),
        ('{"b": [%s ' + "9" * 5000 + "]}", InvalidBody),
    ],
)
@pytest.mark.parametrize("filler", ["1, " * 30_000, "[], " * 30_000], ids=["patient", "slow"])
def test_long_bodies_are_refused_as_short_ones_are(text, error, filler):
    with pytest.raises(error) as long:
        parse_object((text % filler).encode())
    with pytest.raises(error) as short:
        parse_object((text % "").encode())
    if "at character" not in short.value.message:
        assert long.value.message == short.value.message


@pytest.mark.parametrize("text", ["1, " * 30_000, "[], " * 30_000, '"a", ' * 30_000])
def test_a_long_body_is_not_read_in_one_call_into_c(text):
    decoder = json_body._decoder(text)
    python = (json_body._integer, type(test_short_texts_change_no_thread))
    assert decoder.parse_int is python[0] or isinstance(decoder.scan_once, python[1])
    assert json_body._decoder(text[:100]) is json_body._DECODER
