"""What --audit costs: SmolLM2 with 32 requests at once. Run by hand.

    python -m tests.server.time_audit float32 off sample full

There is one engine for each mode; all get the same requests and are stepped in turn, so that each
step is compared with the same step of the others, and other load on the machine affects all alike.
Times are the processor time of one thread. Also printed: the auditor's share of its engine's time.
"""

import random
import sys
import time
from statistics import median

import torch

from ropewalk.cache.types import Audit
from ropewalk.model.sampling import SamplingParams
from ropewalk.server.engine.engine import Engine, Step
from ropewalk.server.engine.integrity import Auditor
from ropewalk.server.launch.build import load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.scheduling.request import Request
from tests.server.fake_engine import configured

CONCURRENT = 32
PROMPT = 64  # tokens
ANSWERS = (32, 64, 96, 128)  # tokens, so that requests come and go at different steps
STEPS = 100


class Timed(Auditor):
    """Adds up the seconds that its calls take."""

    seconds = 0.0

    def look(self):
        began = time.process_time()
        ends = super().look()
        self.seconds += time.process_time() - began
        return ends

    def sample(self):
        began = time.process_time()
        self._ledger.sample()  # what `look` takes is counted there
        ends = self._weigh()
        self.seconds += time.process_time() - began
        return ends + self.look()


class Arm:
    """One mode's engine, kept busy with the same requests as the others."""

    def __init__(self, mode: str, dtype: str) -> None:
        flags = ("--audit", mode, "--dtype", dtype, "--kv-memory", "512M", "--max-model-len", "512")
        (loaded,) = load_models(configured("smollm2", *flags), Metrics())
        self.engine: Engine = loaded.engine
        old = self.engine._auditor
        parts = (old._model, old._ledger, old._manager, old._scheduler, old._weights)
        self.auditor = Timed(*parts)
        self.engine._auditor = self.auditor
        self.random = random.Random(0)
        self.submitted = self.tokens = self.verified = 0
        self.times: list[float] = []
        for _ in range(CONCURRENT):
            self.submit()

    def submit(self) -> None:
        prompt = [self.random.randrange(1000, 40000) for _ in range(PROMPT)]
        params = SamplingParams(max_tokens=self.random.choice(ANSWERS), temperature=0.0)
        self.submitted += 1
        name = str(self.submitted)
        self.engine.submit(Request(name, prompt, PROMPT, params, 0.0, random.Random(0)))

    def step(self) -> None:
        began = time.process_time()
        step: Step = self.engine.step()
        self.times.append(time.process_time() - began)
        self.tokens += step.stats.generated_tokens
        self.verified += step.stats.verified_blocks
        assert step.stats.mutated_entries == 0
        for _ in step.stats.ended:
            self.submit()


def main() -> None:
    dtype, *modes = sys.argv[1:] or ["float32", *(mode.value for mode in Audit)]
    torch.set_num_threads(1)
    arms = {mode: Arm(mode, dtype) for mode in modes}
    for number in range(STEPS):
        turn = number % len(modes)
        for mode in modes[turn:] + modes[:turn]:
            arms[mode].step()
    base = arms[modes[0]]
    for mode, arm in arms.items():
        # Of each step against its twin: a disturbance of one step is one outlier.
        ratio = median(a / b for a, b in zip(arm.times, base.times, strict=True))
        print(
            f"{dtype} {mode:>6}: {arm.tokens / sum(arm.times):7.1f} tokens/s, median step "
            f"{1e3 * median(arm.times):6.1f} ms, x{ratio:.4f} of the first; auditor "
            f"{100 * arm.auditor.seconds / sum(arm.times):.2f} % of the time, "
            f"{arm.verified / STEPS:.1f} blocks verified a step"
        )


if __name__ == "__main__":
    main()
