"""The application that `serve run deploy/ray/ropewalk.yaml` starts; needs the extra `ray`.

Each replica is a process with the whole server but its socket: Ray's proxy has that.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from ropewalk.server.cli.serve import from_program
from ropewalk.server.config import ServerConfig, server_config
from ropewalk.server.errors import UsageError
from ropewalk.server.launch.build import make_application
from ropewalk.server.ray.scaling import SEQUENCES

# What Ray's proxy does instead; the YAML has its http_options for that.
_OF_THE_SOCKET = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "drain_timeout")


@serve.ingress()
class Replica:
    """Raises CommandError, with one sentence, when a model cannot be served."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._made = make_application(configuration(options), lambda: None)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._made.app

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises three times."""
        engine = self._made.engine
        if not engine.alive:
            raise RuntimeError(engine.failure or "the engine is not making progress")
        if engine.unsound is not None:
            raise RuntimeError(engine.unsound)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For server/ray/scaling.py: how many sequences run or wait."""
        return {SEQUENCES: self._made.engine.active()}


def application(options: dict[str, Any]) -> serve.Application:
    """The application of a YAML file, whose `args` are options of `ropewalk serve` by name.

    Raises UsageError for what they cannot be.
    """
    configuration(options)  # refused here, where whoever started it sees why
    return serve.deployment(Replica, name="Ropewalk").bind(options)


def configuration(options: Mapping[str, object]) -> ServerConfig:
    """The configuration of a replica: that of `ropewalk serve`, whose variables do not count."""
    for name in _OF_THE_SOCKET:
        if name in options:
            raise UsageError(
                f"{name} is not an option of a replica, since Ray's proxy has the socket; set "
                "http_options or graceful_shutdown_timeout_s of the YAML file instead"
            )
    # The proxy decides who reaches a replica, so its own address says nothing of hosts.
    return server_config(from_program({**options, "host": "0.0.0.0"}))
