"""The HTTP application: its routes, its middleware, and how errors become responses.

Is passed everything it uses: server/launch/build.py makes the models, the engine and the server.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from ropewalk.model.catalogue import Place
from ropewalk.server.app.cache import cache_routes
from ropewalk.server.app.cache_plan import CachePlanner
from ropewalk.server.app.encodings import encoding_routes
from ropewalk.server.app.openai import Serving, openai_routes
from ropewalk.server.app.operations import operation_routes
from ropewalk.server.app.paths import Paths
from ropewalk.server.app.tokens import token_routes
from ropewalk.server.config import HttpOptions
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.errors import MethodNotAllowed, RouteNotFound, ServeError, quoted
from ropewalk.server.http.access_log import HttpLog
from ropewalk.server.http.middleware import (
    AllowedHosts,
    Auth,
    BodyLimit,
    Guard,
    Head,
    InFlight,
    Logged,
    Origins,
    Queued,
    RequestId,
    RootPath,
    TrailingSlash,
    state_of,
)
from ropewalk.server.http.streaming import Drain
from ropewalk.server.long_work import share_interpreter
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.served_models import Models
from ropewalk.server.scheduling.queue import Door
from ropewalk.server.versions import installed


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
    these routes do not exist. `app.state.drain` is the Drain for server/http/protocol.py's Server.
    """
    drain = Drain()
    log = HttpLog(metrics, access_log=options.access_log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, object]]:
        engine.start()
        share_interpreter()
        try:
            yield {"unread": log.unread}  # called by server/http/protocol.py
        finally:
            await engine.stop()
            log.close()

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
    door = Door((served.name for served in models), engine.outlook)
    serving = Serving(models, engine, metrics, drain, options)
    routers = [openai_routes(serving), token_routes(serving)]
    if place is not None:
        routers.append(encoding_routes(models, place))
    if planners is not None:
        routers.append(cache_routes(serving, planners))
    routers.append(operation_routes(serving, own_version()))
    for router in routers:
        app.include_router(router)
    routes = [each for router in routers for each in router.routes if isinstance(each, Route)]
    for route in routes:
        metrics.add_route(route.path_format, route.methods or ())
    paths = Paths(routes)
    _add_error_handlers(app, paths, options.root_path)
    _add_middleware(app, models, options, drain, door, log, paths)
    return app


def own_version() -> str:
    return installed("ropewalk")


def _add_error_handlers(app: FastAPI, paths: Paths, root_path: str) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            meant = paths.meant(request.scope["path"])
            error = _framework_error(error, None if meant is None else root_path + meant)
        assert isinstance(error, ServeError)  # the only types registered below
        state_of(request.scope)["refusal"] = error
        body = error.body()
        response = Response(body, error.status)
        response.raw_headers = error.headers(len(body))
        return response

    app.add_exception_handler(ServeError, refuse)
    app.add_exception_handler(HTTPException, refuse)


def _framework_error(error: HTTPException, meant: str | None) -> ServeError:
    if error.status_code == 405:
        allowed = {method.strip() for method in (error.headers or {}).get("Allow", "").split(",")}
        if "GET" in allowed:
            allowed.add("HEAD")
        return MethodNotAllowed(
            "this method is not allowed for this path; see the Allow header",
            ", ".join(sorted(allowed)),
        )
    hint = "see the API in README.md" if meant is None else f"did you mean {quoted(meant)}?"
    return RouteNotFound(f"there is nothing at this path; {hint}")


def _add_middleware(
    app: FastAPI,
    models: Models,
    options: HttpOptions,
    drain: Drain,
    door: Door,
    log: HttpLog,
    paths: Paths,
) -> None:
    """Innermost first."""
    app.add_middleware(Head)
    app.add_middleware(BodyLimit, limit=_body_limit(models, options))
    app.add_middleware(Queued, door=door)
    app.add_middleware(InFlight, drain=drain)
    if options.api_keys:
        app.add_middleware(Auth, keys=options.api_keys, shared_prefixes=options.share_prefixes)
    if options.allowed_hosts:
        app.add_middleware(AllowedHosts, hosts=options.allowed_hosts)
    app.add_middleware(Guard)
    if options.allowed_origins:  # without these headers browsers cannot even read errors
        app.add_middleware(Origins, origins=options.allowed_origins)
        app.add_middleware(Guard)  # for what the former refuses
    app.add_middleware(Logged, log=log, template=paths.template)
    app.add_middleware(RequestId)
    app.add_middleware(TrailingSlash)
    if options.root_path:
        app.add_middleware(RootPath, prefix=options.root_path, known=paths.template)


def _body_limit(models: Models, options: HttpOptions) -> int:
    if options.max_body_bytes is not None:
        return options.max_body_bytes
    longest = max(served.max_context for served in models)
    return min(4 << 20, (64 << 10) + 256 * longest)
