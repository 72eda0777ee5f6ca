"""The arms of a load test: models of running servers, or servers that it starts itself."""

import argparse
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from ropewalk.load_tests.client.client import DIALECTS, Arm, Server, split_base_url
from ropewalk.load_tests.client.facts import arms_of
from ropewalk.load_tests.run.options import DEFAULT_URL, ENCODINGS
from ropewalk.load_tests.run.serving import serving

ZERO = "nope"


@asynccontextmanager
async def arms_from(
    args: argparse.Namespace, context: int, tell: Callable[[str], object]
) -> AsyncIterator[list[Arm]]:
    """The arms that the options name, the baseline (zero) first, while their servers run.

    Started servers have room for `context` tokens. Raises Unreachable, StartFailed and ValueError.
    """
    if args.serve is None:
        yield _zero_first(await _running(args))
        return
    encodings = args.encodings or (() if args.arms else ENCODINGS)
    with tempfile.TemporaryDirectory(prefix="ropewalk-bench-") as logs:
        async with serving(
            args.serve,
            (ZERO, *(name for name in encodings if name != ZERO)),
            args.arms,
            Path(logs),
            context=context,
            timeout_s=args.timeout,
            tell=tell,
        ) as arms:
            limit = args.idle_timeout
            yield [replace(arm, server=replace(arm.server, idle_s=limit)) for arm in arms]


async def _running(args: argparse.Namespace) -> list[Arm]:
    arms: list[Arm] = []
    addresses = dict.fromkeys(map(split_base_url, args.base_url or [DEFAULT_URL]))
    for host, port in addresses:
        server = Server(
            host,
            port,
            DIALECTS[args.dialect],
            ignore_eos=args.ignore_eos,
            api_key=args.api_key,
            timeout_s=args.timeout,
            idle_s=args.idle_timeout,
        )
        arms += await arms_of(server, args.models)
    if len(addresses) == 1:
        return arms
    return [replace(arm, label=f"{arm.label}@{arm.server.host}:{arm.server.port}") for arm in arms]


def _zero_first(arms: Iterable[Arm]) -> list[Arm]:
    """`nope` first, if it is there; the others in the user's order."""
    return sorted(arms, key=lambda arm: arm.encoding != ZERO)
