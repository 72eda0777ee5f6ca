"""`ropewalk chat`: one question to a running server, or a conversation on standard input.

Its variables begin with ROPEWALK_CHAT_, so that none is mistaken for one of the server's; what says
where that listens is shared with it. No torch.
"""

import io
import os
import stat
import sys
from functools import partial
from typing import Any

import click

from ropewalk.server import download
from ropewalk.server.cli import conversation
from ropewalk.server.cli.connect import reaching, server_of
from ropewalk.server.cli.options import Command, Setting, Value, count, number, seconds

PREFIX = "ROPEWALK_CHAT_"
_server, _answer = (partial(Setting, section, prefix=PREFIX) for section in ("Server", "Answer"))

SETTINGS = (
    *reaching(PREFIX),
    _server("--model", "name of the model to use", Value(str, "name"), shown="the server's first"),
    Setting("Server", "--api-key", "API key to send with every request"),
    _server("--timeout", "longest silence before giving up", seconds(1, 86400), 300),
    _answer("--system", "system message at the start of the conversation"),
    _answer(
        "--max-tokens",
        "longest answer, in tokens",
        count(1, 1 << 24),
        shown=f"{conversation.USUAL_TOKENS}, or as many as fit",
    ),
    _answer(
        "--temperature", "sampling temperature; 0: always the most likely token", number(0, 2), 0.3
    ),
    _answer(
        "--top-p",
        "sample from the most likely tokens whose probabilities add up to this share",
        number(0, 1),
        shown="the server's",
    ),
    _answer("--seed", "the same seed gives the same answer", count(0, (1 << 63) - 1)),
    _answer("--stats", "print tokens and speed after each answer", default=False),
)


@click.command(cls=Command, params=[*SETTINGS], epilog=conversation.HELP)
@click.argument(
    "question",
    required=False,
    metavar="[QUESTION]",
    help="ask this one question, with the text that is piped in, and exit",
)
@click.pass_context
def chat(ctx: click.Context, /, question: str | None, **values: Any) -> int:
    """Talk to a running server."""
    fields = ("max_tokens", "temperature", "top_p", "seed")
    options = conversation.ChatOptions(
        server=server_of(ctx),
        model=values["model"],
        api_key=values["api_key"],
        system=values["system"],
        sampling={name: values[name] for name in fields if values[name] is not None},
        timeout_s=values["timeout"],
        stats=values["stats"],
    )
    for stream in (sys.stdin, sys.stdout):  # neither may be able to hold every character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if question is not None:
        return conversation.ask(options, question + _piped(), sys.stdout)
    if not sys.stdin.isatty():
        return conversation.converse(options, iter(sys.stdin), sys.stdout, greet=False)
    lines = conversation.typed_lines(download.home() / "chat_history")
    return conversation.converse(options, lines, sys.stdout, greet=True)


def _piped() -> str:
    """What a file or another program gives to standard input, after an empty line."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or none
        return ""
    text = sys.stdin.read().strip() if stat.S_ISFIFO(kind) or stat.S_ISREG(kind) else ""
    return f"\n\n{text}" if text else ""
