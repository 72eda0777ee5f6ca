"""Parses request bodies, long ones in a thread, so that the event loop is not held up for long."""

from starlette.requests import Request

from ropewalk.server.long_work import off_loop
from ropewalk.server.openai.json_body import LONG, parse_object
from ropewalk.server.openai.schemas import AnyBody, read_body


async def body_of(request: Request, schema: type[AnyBody]) -> AnyBody:
    """Raises what `parse_object` and `read_body` raise."""
    data = await request.body()
    return await off_loop(lambda: read_body(schema, parse_object(data)), len(data), LONG)
