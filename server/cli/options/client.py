"""Options of the commands that talk to a running server: chat and health.

Most of their variables begin with ROPEWALK_CHAT_ or ROPEWALK_HEALTH_, so that none is mistaken
for one of the server's; what says where it listens is shared with it. No torch.
"""

from dataclasses import replace

from ropewalk.server.cli.options.base import Option, count, number, seconds, switch
from ropewalk.server.cli.options.serve import CONFIG, HOST, PORT, SSL_CERTFILE, UDS

CLIENT_KEY = "ROPEWALK_API_KEY"  # load_tests/run/options.py has it, too
_HOST = replace(HOST, group="server", help="host of the server")
_PORT = replace(PORT, group="server", help="port of the server")
_CONFIG = replace(
    CONFIG, group="server", help="file of the server's settings, which say where it listens"
)
_UDS = replace(UDS, group="server", help="Unix socket of the server, instead of host and port")
_SSL_CERTFILE = replace(
    SSL_CERTFILE,
    group="server",
    help="certificate of the server, or of its issuer, to trust, which makes host and port https; "
    "without it the system's are trusted, or those in the variable SSL_CERT_FILE",
)


def _url(variable: str) -> Option:
    return Option(
        "--url",
        "server",
        "URL of the server, instead of host and port: https://example.org, or unix:PATH",
        str,
        None,
        "none",
        "URL",
        env=variable,
    )


CHAT_OPTIONS = (
    _HOST,
    _PORT,
    _UDS,
    _SSL_CERTFILE,
    _CONFIG,
    _url("ROPEWALK_CHAT_URL"),
    Option(
        "--model",
        "server",
        "name of the model to use",
        str,
        None,
        "the server's first",
        "NAME",
        env="ROPEWALK_CHAT_MODEL",
    ),
    Option(
        "--api-key",
        "server",
        "API key to send with every request",
        str,
        None,
        "none",
        "KEY",
        env=CLIENT_KEY,
    ),
    Option(
        "--timeout",
        "server",
        "longest silence before giving up",
        seconds(1, 86400),
        300.0,
        "300",
        "SECONDS",
        env="ROPEWALK_CHAT_TIMEOUT",
    ),
    Option(
        "--system",
        "answer",
        "system message at the start of the conversation",
        str,
        None,
        "none",
        "TEXT",
        env="ROPEWALK_CHAT_SYSTEM",
    ),
    Option(
        "--max-tokens",
        "answer",
        "longest answer, in tokens",
        count(1, 1 << 24),
        512,
        metavar="TOKENS",
        env="ROPEWALK_CHAT_MAX_TOKENS",
    ),
    Option(
        "--temperature",
        "answer",
        "sampling temperature; 0: always the most likely token",
        number(0, 2),
        0.3,
        metavar="NUMBER",
        env="ROPEWALK_CHAT_TEMPERATURE",
    ),
    Option(
        "--top-p",
        "answer",
        "sample from the most likely tokens whose probabilities add up to this share",
        number(0, 1),
        None,
        "the server's",
        "SHARE",
        env="ROPEWALK_CHAT_TOP_P",
    ),
    Option(
        "--seed",
        "answer",
        "the same seed gives the same answer",
        count(0, (1 << 63) - 1),
        None,
        "none",
        "NUMBER",
        env="ROPEWALK_CHAT_SEED",
    ),
    Option(
        "--stats",
        "answer",
        "print tokens and speed after each answer",
        switch,
        False,
        "off",
        env="ROPEWALK_CHAT_STATS",
    ),
)

HEALTH_OPTIONS = (
    _HOST,
    _PORT,
    _UDS,
    _SSL_CERTFILE,
    _CONFIG,
    _url("ROPEWALK_HEALTH_URL"),
    Option(
        "--timeout",
        "server",
        "longest wait for the answer",
        seconds(0.1, 600),
        3.0,
        "3",
        "SECONDS",
        env="ROPEWALK_HEALTH_TIMEOUT",
    ),
    Option(
        "--ready",
        "server",
        "check that the server accepts requests, not only that it is alive",
        switch,
        False,
        "off",
        env="ROPEWALK_HEALTH_READY",
    ),
)
