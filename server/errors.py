"""Errors of the command line: one sentence with the cause and what to do next.

Knows no command. Errors a client of the server can see are in server/scheduling/request.py.
"""


class CommandError(Exception):
    """Printed as `ropewalk: <message>`; the process ends with `exit_code`."""

    exit_code = 1


class UsageError(CommandError):
    """A flag, an environment variable or an argument that cannot be used."""

    exit_code = 2
