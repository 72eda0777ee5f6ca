"""Finds what an arm does not support, to leave it out, with the reason, instead of failing."""

import json
import re

from ropewalk.load_tests.client.client import Server, complete
from ropewalk.load_tests.common.types import Plan, Request

_OVERFLOW = "overflow"
_MESSAGE = re.compile(r'"message":\s*("(?:[^"\\]|\\.)*")')


async def why_not(server: Server, context: int | None, plan: Plan) -> str | None:
    """Why `plan` cannot be measured on `server`, in a few words; None when it can.

    `context` is how many tokens of prompt and answer together its model takes, None if unknown.
    Whether the server accepts unusual fields is tried with a prompt of one token.
    """
    if context is not None and (reason := _misfit(plan, context)) is not None:
        return reason
    special = next((request for request in plan.requests if request.extra), None)
    if special is None:
        return None
    prompt = "a" if isinstance(special.prompt, str) else special.prompt[:1]
    error = (await complete(server, Request(prompt, 1, 1, extra=special.extra))).error
    return None if error is None else _told(error)


def _told(error: str) -> str:
    """The message within the server's answer, of which `error` may hold only the beginning."""
    found = _MESSAGE.search(error)
    return error if found is None else str(json.loads(found[1])).removesuffix(".")


def _misfit(plan: Plan, context: int) -> str | None:
    for request in plan.requests:
        prompt = request.prompt_tokens or 0
        whole = prompt + request.output_tokens
        least = prompt + 1 if _OVERFLOW in request.extra else whole
        if least > context:
            return f"its context holds {context:,} tokens, but this needs {least:,}"
    return None
