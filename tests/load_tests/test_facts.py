import asyncio

import pytest

from ropewalk.load_tests.client.client import Server, Unreachable, Variant
from ropewalk.load_tests.client.facts import Facts, facts_of, least, variants_of
from tests.load_tests.sse_server import good, serving, whole

CARDS = {
    "data": [
        {"id": "r", "encoding": "rope", "max_model_len": 64, "trained_context": 32,
         "vocab_size": 300},
        {"id": "n", "encoding": "nope"},
    ]
}  # fmt: skip
CACHES = {"data": [{"model": "n", "block_size": 32}, {"model": "r", "block_size": 16}]}


def ours(path, body):
    pages = {"/v1/models": CARDS, "/v1/cache": CACHES}
    return whole("200 OK", pages[path]) if path in pages else good(path, body)


def ask(question, answer=ours, dialect="openai"):
    with serving(answer) as running:
        return asyncio.run(question(Server("127.0.0.1", running.port, dialect=dialect)))


def test_a_variant_for_each_model_asked_for():
    variants = ask(lambda server: variants_of(server, ("n", "r")))
    assert [(variant.label, variant.server.model, variant.encoding) for variant in variants] == [
        ("n", "n", "nope"),
        ("r", "r", "rope"),
    ]


def test_the_first_model_where_none_is_asked_for():
    (variant,) = ask(lambda server: variants_of(server, ()))
    assert variant.label == "r"


def test_a_wrong_model_names_the_right_ones():
    with pytest.raises(Unreachable, match=r"no model 'x'; its models are: r, n"):
        ask(lambda server: variants_of(server, ("x",)))


@pytest.mark.parametrize("answer", [{"data": []}, [], {"data": ["x"]}])
def test_a_server_without_models(answer):
    with pytest.raises(Unreachable, match="serves no model"):
        ask(lambda server: variants_of(server, ()), lambda path, body: whole("200 OK", answer))


def test_transformers_is_not_asked_what_it_serves():
    (variant,) = ask(lambda server: variants_of(server, ()), dialect="transformers")
    assert (variant.label, variant.server.model) == ("transformers", None)
    variants = ask(lambda server: variants_of(server, ("a", "b")), dialect="transformers")
    assert [(each.label, each.server.model) for each in variants] == [("a", "a"), ("b", "b")]


def test_facts_are_the_models_own():
    async def facts(server: Server) -> list[Facts]:
        return [await facts_of(variant) for variant in await variants_of(server, ("r", "n"))]

    assert ask(facts) == [Facts(64, 32, 300, 16), Facts(None, None, None, 32)]


def test_a_server_that_says_little():
    async def facts(server: Server) -> Facts:
        return await facts_of(Variant("a", Server(server.host, server.port, "tiny"), ""))

    assert ask(facts, good) == Facts(vocab_size=1000)


def test_the_least_of_what_is_known():
    assert least([3, None, 2]) == 2
    assert least([None]) is None
