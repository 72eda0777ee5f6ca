"""The application that `serve run deploy/ray/ropewalk.yaml` starts; needs the extra `ray`.

Each replica is a process with the whole server but its socket: Ray's proxy has that.
"""

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from ropewalk.server.cli.serve import from_program, wait_briefly
from ropewalk.server.config import ServerConfig, server_config
from ropewalk.server.errors import UsageError
from ropewalk.server.metrics.exporter import ALIASES, Metrics
from ropewalk.server.ray.scaling import SEQUENCES
from ropewalk.server.tracing import Tracing

# What Ray does instead, and where its configuration says how.
_RAYS = {
    **dict.fromkeys(("host", "port", "uds", "ssl_certfile", "ssl_keyfile"), "http_options"),
    "threads": "num_cpus of ray_actor_options",
    "drain_timeout": "graceful_shutdown_timeout_s",
    **dict.fromkeys(("log_level", "log_format", "access_log"), "logging_config"),
}


@serve.ingress()
class Replica:
    """Raises CommandError, with one sentence, when a model cannot be served."""

    def __init__(self, options: Mapping[str, object]) -> None:
        config = configuration(options)
        wait_briefly(os.environ)
        # Late: it loads torch, which reads that variable, and which no other process of Ray needs.
        import ropewalk.server.launch.build as build

        traces = None if config.otlp_endpoint is None else Tracing(config.otlp_endpoint)
        metrics = Metrics(ALIASES[config.metrics_compat])
        built = build.application(config, metrics, lambda: None, traces)
        self._app, self._engine = built.app, built.engine

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises three times."""
        engine = self._engine
        if not engine.alive:
            raise RuntimeError(engine.failure or "the engine is not making progress")
        if engine.unsound is not None:
            raise RuntimeError(engine.unsound)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For server/ray/scaling.py: how many sequences run or wait."""
        return {SEQUENCES: self._engine.active()}


def application(options: dict[str, Any]) -> serve.Application:
    """The application of a YAML file, whose `args` are options of `ropewalk serve` by name.

    Raises UsageError for what they cannot be.
    """
    configuration(options)  # refused here, where whoever started it sees why
    return serve.deployment(Replica, name="Ropewalk").bind(options)


def configuration(options: Mapping[str, object]) -> ServerConfig:
    """The configuration of a replica: that of `ropewalk serve`, whose variables do not count."""
    for name in options.keys() & _RAYS.keys():
        raise UsageError(
            f"{name} is not an option of a replica, since Ray has its own; set {_RAYS[name]} of "
            "the YAML file instead"
        )
    # The proxy decides who reaches a replica, so its own address says nothing of hosts.
    return server_config(from_program({**options, "host": "0.0.0.0"}))
