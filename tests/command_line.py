"""What the `ropewalk` command makes of words and variables, without doing it."""

import os
from unittest.mock import patch

import click

from ropewalk.server.cli.main import ropewalk
from ropewalk.server.cli.serve import as_told
from ropewalk.server.config import ServerConfig, server_config


def understood(*words: str, **environ: str) -> click.Context:
    """Of the command that is named, with its values. Raises click.UsageError or UsageError."""
    command, rest = ropewalk, list(words)
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    with patch.dict(os.environ, environ, clear=True):
        return command.make_context(command.name, rest)


def configured(*flags: str, **environ: str) -> ServerConfig:
    """The configuration of `ropewalk serve` with these flags and only these variables."""
    return server_config(as_told(understood("serve", *flags, **environ)))
