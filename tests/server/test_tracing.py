"""Spans, as a collector of OTLP over HTTP receives them."""

import contextlib
import sys
import time
from unittest.mock import patch

import httpx
import pytest

from ropewalk.server.errors import CommandError
from ropewalk.server.http.middleware import ANSWERED
from ropewalk.server.tracing import Tracing
from tests.server.fake_engine import engine_app, make_engine
from tests.server.fake_server import serving
from tests.server.test_embeddings import hiding
from tests.server.toy import running, toy

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def spoken():
    """The messages of OTLP."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    return pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


@contextlib.contextmanager
def collector(spoken, status=200):
    """(its address, the spans it gets)."""
    spans = []

    def answer(path, asked):
        assert path == "/v1/traces"
        for each in asked.resource_spans:
            assert values(each.resource.attributes)["service.name"] == "ropewalk"
            spans.extend(span for scope in each.scope_spans for span in scope.spans)
        return status, b""

    with serving(answer, read=spoken.ExportTraceServiceRequest.FromString) as seen:
        yield seen.url, spans


def values(attributes):
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def traced_app(traces):
    """A real engine over a fake model, under the toy's name."""
    served = toy(max_context=100, vocab_size=50, stop_ids=frozenset({9}))
    return engine_app(make_engine(hiding([]))[0], served, traces=traces)


def ask(url, path, **body):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=20)


def test_a_request_is_a_span_with_its_phases(spoken):
    with collector(spoken) as (endpoint, spans), running(traced_app(Tracing(endpoint))) as (url, _):
        began = time.time_ns()
        answer = ask(
            url, "/v1/completions", prompt=[[5], [6, 7]], max_tokens=3, temperature=0, stream=True
        )
        assert answer.status_code == 200
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"text_completion toy", "queue", "prefill", "decode"}
    root = by_name["text_completion toy"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    inner = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in inner} == {root.span_id}
    times = [at for each in inner for at in (each.start_time_unix_nano, each.end_time_unix_nano)]
    assert began - 1e9 <= times[0] and times == sorted(times)
    assert times[-1] <= root.end_time_unix_nano
    found = values(root.attributes)
    assert found.pop("http.response.header.x-request-id") == [answer.headers["x-request-id"]]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "ropewalk",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3 + 2,
        "gen_ai.response.finish_reasons": ["length", "stop"],
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }


def test_every_answer_of_the_engine_is_traced(spoken, caplog):
    paths = ANSWERED - {"/v1/embeddings"}
    with collector(spoken) as (endpoint, spans), running(traced_app(Tracing(endpoint))) as (url, _):
        for path in paths:
            ask(url, path, n=99)
    assert {values(span.attributes)["http.route"] for span in spans} == paths
    assert "could not be traced" not in caplog.text


def test_refusals_and_embeddings(spoken):
    with collector(spoken) as (endpoint, spans), running(traced_app(Tracing(endpoint))) as (url, _):
        ask(url, "/v1/chat/completions", messages=[{"role": "user", "content": "secret"}], n=99)
        ask(url, "/v1/embeddings", input=[[1, 2], [3]])
        ask(url, "/tokenize", prompt="a")
    roots = {span.name: values(span.attributes) for span in spans if "." not in span.name}
    assert set(roots) == {"chat", "embeddings toy", "queue", "prefill"}
    assert roots["chat"]["error.type"] == "invalid_value"
    assert roots["chat"]["http.response.status_code"] == 400
    assert roots["embeddings toy"]["gen_ai.usage.input_tokens"] == 3
    assert "secret" not in str(spans)


@pytest.mark.parametrize("status", [None, 400])
def test_a_collector_that_fails_changes_no_answer(spoken, status):
    with collector(spoken, status or 200) as (endpoint, _):
        app = traced_app(Tracing(endpoint if status else "http://127.0.0.1:9"))
        with running(app) as (url, _):
            answer = ask(url, "/v1/completions", prompt=[5], max_tokens=3)
        assert answer.status_code == 200


def test_a_span_that_fails_changes_no_answer(caplog):
    class Broken:
        def record(self, scope, began):
            raise ValueError("a bug")

        def close(self):
            pass

    with running(traced_app(Broken())) as (url, _):
        assert ask(url, "/v1/completions", prompt=[5], max_tokens=3).status_code == 200
    assert "could not be traced" in caplog.text


def test_without_the_packages_one_sentence_says_so():
    gone = patch.dict(sys.modules, {"opentelemetry.sdk.trace": None})
    with gone, pytest.raises(CommandError, match=r'pip install "ropewalk\[otel\]"'):
        Tracing("http://localhost:4318")
