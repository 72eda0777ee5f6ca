"""`import ropewalk`: what it loads, answers, shares, shows, refuses and gives back."""

import asyncio
import gc
import json
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import httpx
import pytest

import ropewalk
from ropewalk.server import library
from ropewalk.server.launch.build import application
from ropewalk.server.metrics.exporter import Metrics
from tests.server.toy import running

ROOT = Path(__file__).parents[1]
MEMBER = "ropewalk-rope"
OPTIONS = {"kv_memory": "64M", "dtype": "float32"}
PROMPT = (
    "In the morning the old captain came down to the harbour, and there he found his ship, and "
    "all the men of the village standing about her."
)
GREEDY = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def model():
    with ropewalk.load(MEMBER, **OPTIONS) as loaded:
        yield loaded


@pytest.fixture
def server():
    """The same model behind a real socket: its address."""
    config = library._config(MEMBER, OPTIONS)
    app = application(config, Metrics(), lambda: None).app
    with running(app) as (url, _):
        yield url


def test_importing_it_is_cheap_and_names_what_there_is() -> None:
    program = (
        "import sys, ropewalk\n"
        "assert not {'torch', 'ropewalk.server', 'ropewalk.model'} & set(sys.modules)\n"
        "assert set(ropewalk.__all__) == {'Answer', 'CommandError', 'Model', 'ServeError', 'load'}"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    assert all(getattr(ropewalk, name) for name in ropewalk.__all__)
    with pytest.raises(AttributeError):
        _ = ropewalk.nothing


def test_the_example_in_the_readme_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(import ropewalk\n.*?)^```", readme, re.M | re.S)
    assert len(program.splitlines()) <= 10
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 20


def test_the_page_says_what_there_is(capsys) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    (program,) = re.findall(r"^```python\n(import ropewalk\n.*?)^```", page, re.M | re.S)
    exec(program, {})
    assert "length 0" in capsys.readouterr().out


@pytest.mark.parametrize("fields", [GREEDY, {"max_tokens": 24, "seed": 7, "top_p": 0.9}])
def test_streaming_equals_generating(model, fields) -> None:
    answer = model.generate(PROMPT, **fields)
    assert len(answer.tokens) == 24 and answer.finish_reason == "length"
    pieces = list(model.stream(PROMPT, **fields))
    assert len(pieces) > 10
    assert "".join(pieces) == answer.text == str(answer)


def test_token_ids_are_a_prompt_too(model) -> None:
    answer = model.generate(PROMPT, **GREEDY)
    again = model.generate((5, *answer.tokens), max_tokens=1)
    assert again.prompt_tokens == 25


def test_two_generations_share_a_prefix(model) -> None:
    first = model.generate("First of all. " + PROMPT, **GREEDY)
    assert first.cached_tokens == 0
    second = model.generate("First of all. " + PROMPT + " And then", **GREEDY)
    assert second.cached_tokens >= first.prompt_tokens - 16


def test_an_answer_ends_at_a_stop_string_and_holds_nothing_afterwards(model) -> None:
    whole = model.generate(PROMPT, **GREEDY)
    word = whole.text.split()[3]
    answer = model.generate(PROMPT, stop=word, **GREEDY)
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text.partition(word)[0]
    assert model.cache()["requests"] == []


def test_the_cache_shows_who_holds_its_blocks(model) -> None:
    pieces = model.stream(PROMPT, max_tokens=100, temperature=0)
    next(pieces)
    cache = model.cache()
    (request,) = cache["requests"]
    assert len(request["blocks"]) == cache["blocks"]["active"] > 1
    assert cache["audit"]["verified"] > 0 and cache["audit"]["mutated"] == 0
    assert json.loads(json.dumps(cache)) == cache
    del pieces  # a stream that nobody reads any more is not generated either
    assert model.cache()["requests"] == []


def test_threads_are_answered_together(model) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(model.generate, f"{i} {PROMPT}", **GREEDY) for i in range(4)]
        answers = [each.result() for each in asked]
    assert [answer.text for answer in answers] == [
        model.generate(f"{i} {PROMPT}", **GREEDY).text for i in range(4)
    ]


def test_greedy_text_and_cache_are_those_of_the_server(model, server) -> None:
    body = {"prompt": PROMPT, **GREEDY}
    answered = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()
    answer = model.generate(PROMPT, **GREEDY)
    assert answered["choices"][0]["text"] == answer.text
    assert answered["usage"]["prompt_tokens"] == answer.prompt_tokens
    (shown,) = httpx.get(f"{server}/v1/cache").json()["data"]
    own = model.cache()
    assert shown.keys() == own.keys()
    assert {name: shown[name] for name in ("model", "block_size", "max_context")} == {
        name: own[name] for name in ("model", "block_size", "max_context")
    }


@pytest.mark.parametrize(
    ("prompt", "fields", "said"),
    [
        (PROMPT, {"temperature": 3}, "temperature should be less than or equal to 2"),
        (PROMPT, {"temprature": 1}, "'temprature' is not a parameter"),
        (PROMPT, {"n": 2}, "n is for requests over HTTP"),
        (PROMPT, {"sequence": "seq-1"}, "sequence is for requests over HTTP"),
        (PROMPT, {"keep": True}, "keep is for requests over HTTP"),
        (PROMPT, {"stop": b"x"}, "prompt and fields must be what JSON can hold"),
        (PROMPT, {"max_tokens": 10_000}, "this model's maximum context length is 512"),
        ([], {}, "prompt should have at least"),
        (None, {}, "prompt should be a text, token ids or a list of messages"),
        (5, {}, "prompt should be a text, token ids or a list of messages"),
        (b"ab", {}, "prompt should be a text, token ids or a list of messages"),
        ({"role": "user"}, {}, "prompt should be a text, token ids or a list of messages"),
        ([[1, 2], [3]], {}, "ask for one at a time"),
        ([{"role": "user", "content": "Hello"}], {}, "has no chat template"),
    ],
)
def test_requests_are_refused_in_one_sentence(model, prompt, fields, said) -> None:
    with pytest.raises(ropewalk.ServeError, match=re.escape(said)) as refused:
        model.stream(prompt, **fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nowhere", {}, "nowhere is neither a file nor a directory"),
        ("family", {}, "family is 6 models; load one of them"),
        (MEMBER, {"dtype": "float8"}, "'float8' is not one of the choices"),
        (
            MEMBER,
            {"dtyp": "float32"},
            "dtyp is not an option of ropewalk serve; did you mean",
        ),
        (MEMBER, {"encoding": "t5"}, "has trained weights"),
    ],
)
def test_loading_is_refused_in_one_sentence(name, options, said) -> None:
    with pytest.raises(ropewalk.CommandError, match=re.escape(said)) as refused:
        ropewalk.load(name, **options)
    assert "\n" not in str(refused.value)


def test_a_salt_keeps_prefixes_apart(model) -> None:
    prompt = f"Salted. {PROMPT}"
    salts = (None, None, "a", "a")
    cached = [model.generate(prompt, cache_salt=each, **GREEDY).cached_tokens for each in salts]
    assert [count > 0 for count in cached] == [False, True, False, True]


@pytest.mark.timeout(60)
def test_a_stream_that_is_collected_on_the_models_own_thread_stops(model) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself, self.stream = self, model.stream(PROMPT, max_tokens=300, ignore_eos=True)

    next(Cycle().stream)
    done = threading.Event()
    model._opened()._loop.call_soon_threadsafe(lambda: (gc.collect(), done.set()))
    assert done.wait(30)
    assert model.cache()["requests"] == []


def test_leaving_the_context_frees_what_it_holds() -> None:
    before = set(threading.enumerate())
    with ropewalk.load(MEMBER, prefix_sharing=False, **OPTIONS) as loaded:
        engine = weakref.ref(loaded._opened().loaded.engine)
        cached = weakref.ref(loaded._opened().loaded.engine._kv)
        unread = loaded.stream(PROMPT, max_tokens=100)
        assert len(list(islice(unread, 2))) == 2
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) <= before
    for use in (lambda: next(unread), lambda: loaded.generate(PROMPT), loaded.cache):
        with pytest.raises(RuntimeError, match="the model is closed; load it again"):
            use()
    loaded.close()
    gc.collect()
    assert engine() is None and cached() is None


@pytest.mark.timeout(60)
def test_closing_ends_what_another_thread_waits_for() -> None:
    loaded = ropewalk.load(MEMBER, **OPTIONS)
    with ThreadPoolExecutor(1) as pool:
        # The first answer of a form starts a process, which takes longer than to close.
        asked = pool.submit(loaded.generate, PROMPT, guided_regex="[a-z]{3}", max_tokens=8)
        while not asyncio.run_coroutine_threadsafe(_tasks(), loaded._opened()._loop).result():
            pass
        loaded.close()
        with pytest.raises(RuntimeError, match="the model is closed; load it again"):
            asked.result(30)


async def _tasks() -> bool:
    """Whether the loop has others than this one and the engine's."""
    return any("compiled_grammar" in repr(task) for task in asyncio.all_tasks())


@pytest.mark.smollm2
@pytest.mark.timeout(300)
def test_messages_are_a_chat() -> None:
    limits = {"max_model_len": "1k", "kv_memory": "256M"}
    with ropewalk.load("smollm2", dtype="float32", **limits) as loaded:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = loaded.generate(messages, max_tokens=24, temperature=0)
        assert "Paris" in answer.text
        assert "".join(loaded.stream(messages, max_tokens=24, temperature=0)) == answer.text
