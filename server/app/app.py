"""The HTTP application: its routes, its middleware, and how errors become responses.

Is passed everything it uses: server/launch/build.py makes the models, the engine and the server.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from ropewalk.model.catalogue import Place
from ropewalk.server.app.cache import CachePlanner, cache_routes
from ropewalk.server.app.embeddings import embedding_routes
from ropewalk.server.app.openai import Serving, openai_routes
from ropewalk.server.app.operations import Loader, model_routes, operation_routes, position_routes
from ropewalk.server.app.tokens import token_routes
from ropewalk.server.app.translated import translated_routes
from ropewalk.server.config import HttpOptions
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.errors import MethodNotAllowed, RouteNotFound, ServeError, quoted
from ropewalk.server.http.access_log import HttpLog
from ropewalk.server.http.door import Door, Shedder
from ropewalk.server.http.middleware import (
    Addressed,
    Admission,
    Auth,
    BodyLimit,
    Callers,
    Guard,
    Origins,
    Paths,
    Recorded,
    Traced,
    Traces,
)
from ropewalk.server.http.streaming import Drain
from ropewalk.server.long_work import share_interpreter
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.served_models import Models
from ropewalk.server.versions import installed

Application = FastAPI
MAX_BODY = 4 << 20  # bytes, where the configuration sets no limit


def create_app(
    models: Models,
    engine: AsyncEngine,
    metrics: Metrics,
    options: HttpOptions,
    place: Place | None = None,
    planners: Mapping[str, CachePlanner] | None = None,
    traces: Traces | None = None,
    loader: Loader | None = None,
) -> FastAPI:
    """The application. Its lifespan starts and stops the engine.

    /v1/encodings describes `place`, `planners`, by model, answer /v1/cache/plan, and `loader` loads
    and unloads models; without them these routes do not exist. `app.state.drain` is the Drain for
    server/http/protocol.py's Server.
    """
    drain = Drain()
    log = HttpLog(metrics, access_log=options.access_log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, object]]:
        engine.start()
        share_interpreter()
        try:
            # For server/http/protocol.py.
            yield {"unread": log.unread, "shedder": Shedder(door, drain, callers.client, log)}
        finally:
            await models.close()
            await engine.stop()
            log.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = FastAPI(
        title="Ropewalk",
        version=installed("ropewalk"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.drain, app.state.models = drain, models
    door = Door(dict.fromkeys(models.names.values()), engine.outlook)
    callers = Callers(options.allowed_hosts, options.api_keys)
    serving = Serving(models, engine, metrics, drain, options)
    routers = [] if loader is None else [model_routes(serving, loader)]
    routers += [openai_routes(serving), translated_routes(serving)]
    routers += [embedding_routes(serving), token_routes(serving), position_routes(serving)]
    if planners is not None:
        routers.append(cache_routes(serving, planners))
    routers.append(operation_routes(serving, installed("ropewalk"), place))
    for router in routers:
        app.include_router(router)
    routes = [each for router in routers for each in router.routes if isinstance(each, Route)]
    for route in routes:
        metrics.add_route(route.path_format, route.methods or ())
    paths, prefix = Paths(routes), options.root_path

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> NoReturn:
        if options.explorer and request.scope["path"] == "/" and error.status_code == 404:
            raise RouteNotFound(
                "the explorer at this path is for browsers, which accept text/html; "
                "GET /docs lists what programs may ask for"
            )
        meant = paths.meant(request.scope["path"])
        raise _framework_error(
            error, _methods(routes, request.scope), None if meant is None else prefix + meant
        )

    # Innermost first.
    app.add_middleware(BodyLimit, limit=_body_limit(models, options))
    app.add_middleware(Admission, drain=drain, door=door)
    if options.api_keys or options.allowed_hosts:
        app.add_middleware(Auth, callers=callers, shared_prefixes=options.share_prefixes)
    app.add_middleware(Guard)
    if options.allowed_origins:  # without these headers browsers cannot even read errors
        app.add_middleware(Origins, origins=options.allowed_origins)
    if traces is not None:
        app.add_middleware(Traced, traces=traces)
    app.add_middleware(Recorded, log=log, paths=paths)
    app.add_middleware(Addressed, prefix=prefix, paths=paths)
    return app


def _methods(routes: Sequence[Route], scope: Scope) -> set[str]:
    """All that the path has: each route of a path knows its own ones only."""
    return {
        method
        for route in routes
        if route.matches(scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


def _framework_error(error: HTTPException, methods: set[str], meant: str | None) -> ServeError:
    if error.status_code == 405:
        return MethodNotAllowed(
            "this method is not allowed for this path; see the Allow header",
            ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set()))),
        )
    hint = "GET /docs lists what there is" if meant is None else f"did you mean {quoted(meant)}?"
    return RouteNotFound(f"there is nothing at this path; {hint}")


def _body_limit(models: Models, options: HttpOptions) -> int:
    if options.max_body_bytes is not None:
        return options.max_body_bytes
    loaded = [models.get(own) for own in models.names.values()]
    contexts = [served.max_context for served in loaded if served is not None]
    if len(contexts) < len(loaded):  # those of the others are not known yet
        return MAX_BODY
    return min(MAX_BODY, (64 << 10) + 256 * max(contexts))
