"""`ropewalk serve` whose engine does, from some step on, what the file FAULT says.

    FAULT=file python -m tests.server.serve_faulty serve ...

error and exit: its thread raises; stuck: a step does not end, which is noticed within a second
instead of two minutes. Whatever the file says, a prompt of TOO_LARGE tokens takes more memory than
there is.
"""

import os
import time
from pathlib import Path

import torch

from ropewalk.server.cli import main
from ropewalk.server.engine import async_engine
from ropewalk.server.engine.engine import Engine, Runner, Step

TOO_LARGE = 77
whole_step, run = Engine.step, Runner.__call__


def step(engine: Engine) -> Step:
    fault = Path(os.environ["FAULT"])
    match fault.read_text() if fault.exists() else "":
        case "error":
            raise RuntimeError("an injected error")
        case "exit":
            raise SystemExit("an injected exit")
        case "stuck":
            time.sleep(3600)
    return whole_step(engine)


def run_or_not(runner, work):
    if any(each.request.num_prompt == TOO_LARGE for each in work):
        torch.empty(1 << 50)
    return run(runner, work)


if __name__ == "__main__":
    Runner.__call__ = run_or_not
    async_engine.STALL_SECONDS = async_engine.WATCH_SECONDS = 0.3
    Engine.step = step
    raise SystemExit(main.main())
