"""`ropewalk serve` whose engine does, from some step on, what the file FAULT says.

    FAULT=file python -m tests.server.serve_faulty serve ...

error and exit: its thread raises; stuck: a step does not end, which is noticed within a second
instead of two minutes.
"""

import os
import time
from pathlib import Path

from server import async_engine, cli
from server.engine import Engine, Step

FAULT = Path(os.environ["FAULT"])
whole_step = Engine.step


def step(engine: Engine) -> Step:
    match FAULT.read_text() if FAULT.exists() else "":
        case "error":
            raise RuntimeError("an injected error")
        case "exit":
            raise SystemExit("an injected exit")
        case "stuck":
            time.sleep(3600)
    return whole_step(engine)


if __name__ == "__main__":
    async_engine.STALL_SECONDS = async_engine.WATCH_SECONDS = 0.3
    Engine.step = step
    raise SystemExit(cli.main())
