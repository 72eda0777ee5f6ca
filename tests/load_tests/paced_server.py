"""A completions server with a known pace, which a load generator should measure.

`python -m tests.load_tests.paced_server PORT`; docs/load-testing-agreement.md shows the results.
"""

import asyncio
import json
import sys
from collections.abc import Iterator

from tests.load_tests.sse_server import chunk, event, prompt_length, whole

FIRST_S = 0.3  # from the request to its first token
GAP_S = 0.04  # from each token to the next
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n"
FRAME = {"id": "paced", "object": "text_completion", "created": 1, "model": "m"}


def tokens(body: dict) -> Iterator[bytes]:
    """The events of an answer, one for each token."""
    prompt, count = prompt_length(body), body["max_tokens"]
    for number in range(1, count + 1):
        choice = {
            "index": 0,
            "text": f" {number}",
            "finish_reason": "length" if number == count else None,
        }
        yield event({**FRAME, "choices": [choice], "usage": usage(prompt, number)})


def usage(prompt: int, generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


async def complete(writer: asyncio.StreamWriter, body: dict) -> None:
    """Each token at a fixed time after the start, so that delays do not add up."""
    clock = asyncio.get_running_loop().time
    due = clock() + FIRST_S
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for data in tokens(body):
        await asyncio.sleep(max(0.0, due - clock()))
        writer.write(chunk(data))
        await writer.drain()
        due += GAP_S
    total = usage(prompt_length(body), body["max_tokens"])
    for last in (event({**FRAME, "choices": [], "usage": total}), event("[DONE]")):
        writer.write(chunk(last))
    writer.write(b"0\r\n\r\n")


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
    content = await reader.readexactly(length)
    path = head.split(" ")[1]
    if path == "/v1/completions":
        await complete(writer, json.loads(content))
    elif path.startswith(("/v1/models", "/v1/cache/flush")):
        models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        writer.write(b"".join(whole("200 OK", models)))
    else:
        writer.write(b"".join(whole("404 Not Found", {})))
    writer.close()


async def main(port: int) -> None:
    async with await asyncio.start_server(handle, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
