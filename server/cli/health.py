"""`ropewalk health`: for container health checks. No torch."""

from functools import partial
from typing import Any

import click

from ropewalk.server.cli.connect import connected, reaching, server_of
from ropewalk.server.cli.options import Command, Setting, seconds
from ropewalk.server.errors import CommandError

PREFIX = "ROPEWALK_HEALTH_"
_server = partial(Setting, "Server", prefix=PREFIX)

SETTINGS = (
    *reaching(PREFIX),
    _server("--timeout", "longest wait for the answer", seconds(0.1, 600), 3),
    _server(
        "--ready",
        "check that the server accepts requests, not only that it is alive",
        default=False,
    ),
)


@click.command(cls=Command, params=[*SETTINGS])
@click.pass_context
def health(ctx: click.Context, /, ready: bool, timeout: float, **_: Any) -> None:
    """Check the health of a running server.

    Exit status: 0 when the server answers 200, else 1.
    """
    server = server_of(ctx)
    path = "/health/ready" if ready else "/health/live"
    with connected(server, timeout) as connection:
        connection.request("GET", server.prefix + path)
        status = connection.getresponse().status
    said = f"{server.url}{path} answered {status}"
    if status != 200:
        raise CommandError(said)
    print(said)
