"""The HTTP application: its routes, its middleware, and how errors become responses.

Is passed everything it uses: server/build.py makes the models, the engine and the server.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from model.catalogue import Place
from server.async_engine import AsyncEngine
from server.cache_plan import CachePlanner
from server.config import HttpOptions
from server.http_errors import (
    InternalError,
    MethodNotAllowed,
    RouteNotFound,
    error_bytes,
    error_headers,
    rejection_reason,
)
from server.lifeline import Drain
from server.metrics import Metrics
from server.middleware import (
    AllowedHosts,
    Auth,
    BodyLimit,
    Guard,
    InFlight,
    RequestId,
    RootPath,
    state_of,
)
from server.models import Models
from server.request import RequestFailed, ServeError
from server.routes.cache import cache_routes
from server.routes.encodings import encoding_routes
from server.routes.openai import Serving, openai_routes
from server.routes.operations import operation_routes
from server.routes.tokens import token_routes

_log = logging.getLogger("server.http")


def create_app(
    models: Models,
    engine: AsyncEngine,
    metrics: Metrics,
    options: HttpOptions,
    place: Place | None = None,
    planners: Mapping[str, CachePlanner] | None = None,
) -> FastAPI:
    """The application. Its lifespan starts and stops the engine.

    /v1/encodings describes `place`, and `planners`, by model, answer /v1/cache/plan; without them
    these routes do not exist. `app.state.drain` is the Drain for server/protocol.py's Server.
    """
    drain = Drain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(
        title="Ropewalk",
        version=own_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.drain = drain
    serving = Serving(models, engine, metrics, drain, options)
    app.include_router(openai_routes(serving))
    app.include_router(token_routes(serving))
    if place is not None:
        app.include_router(encoding_routes(models, place))
    if planners is not None:
        app.include_router(cache_routes(serving, planners))
    app.include_router(operation_routes(serving, own_version()))
    _add_error_handlers(app, metrics)
    _add_middleware(app, models, metrics, options, drain)
    return app


def own_version() -> str:
    try:
        return version("ropewalk")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = _framework_error(error)
        assert isinstance(error, ServeError)  # the only types registered below
        _count(metrics, error, state_of(request.scope).get("model"))
        body = error_bytes(error)
        response = Response(body, error.status)
        response.raw_headers = error_headers(error, len(body))
        return response

    app.add_exception_handler(ServeError, refuse)
    app.add_exception_handler(HTTPException, refuse)


def _framework_error(error: HTTPException) -> ServeError:
    if error.status_code == 405:
        headers: Mapping[str, str] = error.headers or {}
        return MethodNotAllowed(
            "this method is not allowed for this path; see the Allow header",
            headers.get("Allow", ""),
        )
    return RouteNotFound("there is nothing at this path; see the API in README.md")


def _count(metrics: Metrics, error: ServeError, model: str | None) -> None:
    # Failures inside the engine are counted there, by finish reason.
    if isinstance(error, InternalError) or not isinstance(error, RequestFailed):
        metrics.reject(model, rejection_reason(error))


def _add_middleware(
    app: FastAPI, models: Models, metrics: Metrics, options: HttpOptions, drain: Drain
) -> None:
    """Innermost first."""
    app.add_middleware(BodyLimit, limit=_body_limit(models, options))
    app.add_middleware(InFlight, drain=drain)
    if options.api_keys:
        app.add_middleware(Auth, keys=options.api_keys, shared_prefixes=options.share_prefixes)
    if options.allowed_hosts:
        app.add_middleware(AllowedHosts, hosts=options.allowed_hosts)
    app.add_middleware(Guard, refused=lambda error: _count(metrics, error, None))
    if options.allowed_origins:  # without these headers browsers cannot even read errors
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestId)
    if options.root_path:
        app.add_middleware(RootPath, prefix=options.root_path)


def _body_limit(models: Models, options: HttpOptions) -> int:
    if options.max_body_bytes is not None:
        return options.max_body_bytes
    longest = max(served.max_context for served in models)
    return min(4 << 20, (64 << 10) + 256 * longest)
