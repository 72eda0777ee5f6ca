"""One OpenTelemetry span for each request that the engine is to answer, sent over OTLP.

Made when the request is over, of the times that it noted anyway, so that nothing waits for a span.
Inside it are spans for the queue, prefill and decode. Numbers and names only, never a text. Its
attributes are those of the GenAI conventions, where they have one.
"""

import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from ropewalk.model.sampling import SamplingParams
from ropewalk.server.errors import CommandError, ServeError
from ropewalk.server.http.middleware import header, state_of
from ropewalk.server.scheduling.request import FinishReason, Request
from ropewalk.server.versions import installed

CLOSING_SECONDS = 5  # to send the last spans
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    """Sends spans to `endpoint`, an OTLP collector's address over HTTP.

    Raises CommandError when the packages for it are not installed. OTEL_* variables say the rest:
    headers, resource attributes, sampling.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            sdk = import_module("opentelemetry.sdk.trace")
            exporters = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError:
            raise CommandError(
                "--otlp-endpoint needs packages that are not installed; install them with: "
                'pip install "ropewalk[otel]", or -e ".[otel]" in a clone'
            ) from None
        export = import_module("opentelemetry.sdk.trace.export")
        resources = import_module("opentelemetry.sdk.resources")
        context = import_module("opentelemetry.trace.propagation.tracecontext")
        self._api = import_module("opentelemetry.trace")
        self._propagator = context.TraceContextTextMapPropagator()
        version = installed("ropewalk")
        own = resources.Resource({"service.name": "ropewalk", "service.version": version})
        resource = own.merge(resources.OTELResourceDetector().detect())
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        bare = urlsplit(endpoint).path in ("", "/")
        url = f"{endpoint.rstrip('/')}/v1/traces" if bare else endpoint
        # None may try again after `close`.
        exporter = exporters.OTLPSpanExporter(endpoint=url, timeout=CLOSING_SECONDS / 2)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ropewalk", version)

    def record(self, scope: Scope, began: int) -> None:
        """A request is over. began: nanoseconds since the epoch."""
        state, api = state_of(scope), self._api
        operation = _OPERATIONS[scope["path"]]
        attributes = _attributes(scope, operation)
        model = state.get("model")
        end = time.time_ns()
        span = self._tracer.start_span(
            operation if model is None else f"{operation} {model}",
            context=self._propagator.extract(_carrier(scope)),
            kind=api.SpanKind.SERVER,
            attributes=attributes,
            start_time=began,
        )
        if "error.type" in attributes:
            span.set_status(api.Status(api.StatusCode.ERROR, attributes["error.type"]))
        inside = api.set_span_in_context(span)
        for name, first, last in _phases(state.get("requests", ()), end):
            self._tracer.start_span(name, context=inside, start_time=first).end(last)
        span.end(end)

    def close(self) -> None:
        """Send what is left, as far as the collector takes it in time."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)


def _carrier(scope: Scope) -> dict[str, str]:
    found = {name: header(scope, name.encode()) for name in ("traceparent", "tracestate")}
    return {name: value.decode("latin-1") for name, value in found.items() if value is not None}


def _attributes(scope: Scope, operation: str) -> dict[str, Any]:
    state = state_of(scope)
    refusal: ServeError | None = state.get("refusal")
    failure = state.get("failure") or (refusal and refusal.code)
    found = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ropewalk",
        "gen_ai.request.model": state.get("model"),
        "gen_ai.response.model": state.get("model"),
        "http.request.method": state["method"],
        "http.route": scope["path"],
        "http.response.status_code": state.get("status"),
        "http.response.header.x-request-id": [str(state["id"])],
        "error.type": failure,
    }
    requests: list[Request] = list(state.get("requests", ()))
    if requests:
        firsts, params = requests[:: state.get("n", 1)], requests[0].params
        found |= {
            "gen_ai.usage.input_tokens": sum(each.prompt_length for each in firsts),
            "gen_ai.usage.cache_read.input_tokens": sum(each.cached for each in firsts),
        }
        if operation != "embeddings":
            found |= {"gen_ai.usage.output_tokens": sum(each.num_generated for each in requests)}
            found |= _asked(params)
            if failure is None:
                found["gen_ai.response.finish_reasons"] = [_reason(each) for each in requests]
    return {name: value for name, value in found.items() if value is not None}


def _asked(params: SamplingParams) -> Mapping[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
    return {f"gen_ai.request.{name}": getattr(params, name) for name in names}


def _reason(request: Request) -> str:
    ended = request.abort_as is FinishReason.STOP or request.tokens[-1] in request.params.stop_ids
    return "stop" if ended else "length"


def _phases(requests: Iterator[Request], end: int) -> Iterator[tuple[str, int, int]]:
    """Name, first and last nanosecond of what all requests of one answer went through together."""
    asked = list(requests)
    if not asked:
        return
    clock = time.time_ns() - time.monotonic_ns()

    def at(seconds: float) -> int:
        return min(int(seconds * 1e9) + clock, end)

    admitted = [at(each.admitted) for each in asked if each.admitted is not None]
    begun = [at(each.first_token) for each in asked if each.first_token is not None]
    yield "queue", at(asked[0].arrival), min(admitted, default=end)
    if admitted:
        yield "prefill", min(admitted), max(begun, default=end)
    if begun and asked[0].pooling is None:
        yield "decode", max(begun), end
