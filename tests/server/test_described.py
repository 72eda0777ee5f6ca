"""/openapi.json says what is answered: every route, and bodies as they are validated."""

import json
import re

import jsonschema
import pytest
from starlette.routing import Route

from ropewalk.server.errors import InvalidField
from ropewalk.server.openai.body import read_body
from ropewalk.server.openai.kept_bodies import BODIES as KEPT
from ropewalk.server.openai.schemas import BODIES as OWN
from tests.server.toy import ask, toy_app

BODIES = {body.__name__: body for body in (*OWN, *KEPT)}
WHOLE = {  # the least that each needs
    "CompletionBody": {"prompt": "a"},
    "ChatBody": {"messages": [{"role": "user", "content": "a"}]},
    "EmbeddingBody": {"input": "a"},
    "TokenizeBody": {},
    "FlushBody": {},
    "ModelBody": {},
    "DetokenizeBody": {"tokens": [1]},
    "CachePlanBody": {"operation": "append", "tokens": 1},
    "KeepBody": {"prompt": "a"},
    "OperationBody": {"operation": "fork", "count": 1},
}


@pytest.fixture(scope="module")
def app():
    return toy_app()


@pytest.fixture(scope="module")
def about(app):
    answer = ask(app, "GET", "/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_every_route_is_described(app, about):
    served = {
        (route.path_format, method.lower())
        for router in app.routes
        for route in getattr(router, "routes", [router])
        if isinstance(route, Route)
        for method in route.methods - {"HEAD"}
    }
    said = {(path, method) for path, each in about["paths"].items() for method in each}
    assert ("/v1/embeddings", "post") in said
    assert said >= served
    for path, method in said:
        operation = about["paths"][path][method]
        assert operation["description"] or path.startswith("/health")
        assert {"200", "400", "500"} <= operation["responses"].keys()
        assert "422" not in operation["responses"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 2},
        {"temperature": 2.5},
        {"temperature": None},
        {"n": 16.0},
        {"n": 17},
        {"stop": "x"},
        {"stop": ["x"] * 17},
        {"stop": 3},
        {"logit_bias": {"3": 100}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"3": 101}},
        {"user": "me"},
        {"user": 3},
        {"seed": -1},
        {"cache_salt": "a b"},
        {"overflow": "slide"},
        {"overflow": "fall"},
        {"prompt": ["a", "b"]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [1, "a"]},
        {"input": [[1, 2], [3]]},
        {"input": [-1]},
        {"dimensions": 0},
        {"encoding_format": "base64"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "king", "content": "a"}]},
        {"messages": []},
        {"tokens": [2**31]},
        {"nonsense": 1},
        {"model": "toy"},
        {"model": 3},
        {"stream_options": {"include_usage": None}, "stream": True},
    ],
    ids=str,
)
def test_bodies_are_described_as_they_are_read(change, about):
    described, accepted = {}, {}
    for name, kind in BODIES.items():
        body = WHOLE[name] | change
        schema = {"$ref": f"#/components/schemas/{name}", "components": about["components"]}
        described[name] = jsonschema.Draft202012Validator(schema).is_valid(body)
        try:
            read_body(kind, body)
        except InvalidField:
            accepted[name] = False
        else:
            accepted[name] = True
    assert described == accepted


def test_ranges_and_errors_are_said(about):
    fields = about["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"minimum": 0, "maximum": 2, "type": "number"}
    answers = about["paths"]["/v1/completions"]["post"]["responses"]
    assert "text/event-stream" in answers["200"]["content"]
    assert "queue_full" in answers["429"]["description"]
    assert "401" not in answers and "429" not in about["paths"]["/v1/models"]["get"]["responses"]


def test_the_page_needs_nothing_from_elsewhere(app):
    page = ask(app, "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    for said in ("/v1/embeddings", "presence_penalty", "from -2, to 2", "queue_full", "dimensions"):
        assert said in page.text
    assert not re.search(r"<script|https?://", page.text)


def test_a_key_is_needed_where_there_are_keys():
    app = toy_app(api_keys=("secret",))
    assert ask(app, "GET", "/openapi.json").status_code == 401
    about = ask(app, "GET", "/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert "401" in about["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in about["paths"]["/health"]["get"]


def test_every_reference_leads_somewhere(about):
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(about)))
    assert named >= {"ResponsesBody", "MessagesBody", "CountBody", "MessagesError"}
    assert named <= about["components"]["schemas"].keys()
