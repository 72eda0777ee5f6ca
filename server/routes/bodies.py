"""Parses request bodies, long ones in a thread, so that the event loop is not held up for long."""

import asyncio

from starlette.requests import Request

from server.body import parse_object
from server.schemas import AnyBody, read_body

LONG = 1 << 16  # bytes, which take some milliseconds to parse


async def body_of(request: Request, schema: type[AnyBody]) -> AnyBody:
    """Raises what `parse_object` and `read_body` raise."""
    data = await request.body()

    def read() -> AnyBody:
        return read_body(schema, parse_object(data))

    return await asyncio.to_thread(read) if len(data) > LONG else read()
