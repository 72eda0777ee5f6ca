"""Answers to schemas drawn at random, 32 at once beside free requests, in a cache too small.

Some dozens of schemas; 500 with --full.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from tests.server.grammars import Drawing
from tests.server.test_end_to_end import Served

AT_ONCE = 32
FREE = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    # Room for one answer as long as can be, or for six or seven: with more, preemptions depended
    # on how fast the clients were.
    flags = ("--kv-memory", "1408KiB", "--max-model-len", "352")
    flags += ("--max-seqs", str(AT_ONCE), "--max-queue", "600")
    made = Served("ropewalk-rope", folder, *flags, OMP_NUM_THREADS="1")
    yield made
    made.stop()


def asked(seed):
    schema = Drawing(seed).schema()
    form = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema}}
    return schema, {
        "prompt": f"Number {seed}, as JSON: ",
        "max_tokens": 320,
        "seed": seed,
        "response_format": form,
        **({"stream": True} if seed % 5 == 0 else {}),
        **({"logprobs": 1} if seed % 7 == 0 else {}),
        **({"repetition_penalty": 1.1} if seed % 3 == 0 else {}),
    }


def answer_of(server, body):
    """Its text, and why it ended."""
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    if not body.get("stream"):
        choice = json.loads(answer)["choices"][0]
        return choice["text"], choice["finish_reason"]
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def valid(schema):
    kind = jsonschema.Draft202012Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


@pytest.mark.timeout(1800)
def test_finished_answers_are_valid(server, request):
    count = 500 if request.config.getoption("--full") else 48
    alone = answer_of(server, FREE)
    drawn = [asked(seed) for seed in range(count)]
    with ThreadPoolExecutor(AT_ONCE) as clients:
        held = [clients.submit(answer_of, server, body) for _, body in drawn]
        free = [clients.submit(answer_of, server, FREE) for _ in range(count // 4)]
        for (schema, _), future in zip(drawn, held, strict=True):
            text, finish = future.result()
            if finish == "stop":
                valid(schema).validate(json.loads(text))
        assert {future.result() for future in free} == {alone}
    finished = sum(future.result()[1] == "stop" for future in held)
    assert finished > 0.9 * count
    assert server.metric("ropewalk_preemptions_total") > 5
    assert server.metric("ropewalk_forced_tokens_total") > count
