"""A server behind a real socket, in a thread of this process: for what is measured over HTTP."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ropewalk.server import listen
from ropewalk.server.http.protocol import Server

HOST = "127.0.0.1"


@contextmanager
def in_thread(server: Server, began: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Yields the server's port and stops it on exit. `began` is called in its event loop."""

    async def run() -> None:
        began()
        await server.serve(sockets=[listener])

    with listen.bind(HOST, 0) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(run()), name="event loop")
        thread.start()
        try:
            while thread.is_alive() and not server.started:
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
