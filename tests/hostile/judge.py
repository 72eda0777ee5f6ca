"""Opens hostile checkpoints, each in a process of its own, and says what became of them.

python -m tests.hostile.judge --seed 1 --jobs 2     the whole corpus, a line for each that fails
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS = 5.0  # of processor time: what a case takes where nothing else runs
MEMORY = 1 << 30  # bytes above what a process has that does nothing
PATIENCE = 60  # seconds by the clock
TEXTS = ("a", "The Nile, 3 km.", "naïve 日本語 😀\n\t", "a" * 300 + "!", "<x> </s> <|end|>" * 20)


@dataclass(frozen=True)
class Verdict:
    case: str
    outcome: str  # "loaded", or the sentence, or what else happened
    fault: str | None  # None: as it should be
    seconds: float
    mib: float


def judge(case) -> Verdict:
    """Fork a process for one case. Only where no other thread runs."""
    with tempfile.TemporaryDirectory(prefix="hostile") as folder:
        path = case.write(Path(folder))
        base = _idle()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _become_case(path, write)
        os.close(write)
        with open(read, encoding="utf-8", errors="replace") as pipe:
            outcome = pipe.read()
        _, status, used = os.wait4(pid, 0)
    seconds = used.ru_utime + used.ru_stime
    memory = max(0, used.ru_maxrss - base) << 10
    fault = None
    if status or not outcome:
        fault = f"ended with status {os.waitstatus_to_exitcode(status)}"
    elif outcome.startswith("Traceback"):
        fault = "raised something else than its sentence"
    elif "\n" in outcome or len(outcome) > 1000:
        fault = "is no single sentence"
    elif seconds > SECONDS:
        fault = f"took {seconds:.1f} s"
    elif memory > MEMORY:
        fault = f"took {memory >> 20} MiB"
    return Verdict(case.name, outcome, fault, seconds, memory / (1 << 20))


def _idle() -> int:
    """KiB of a forked process that does nothing."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.wait4(pid, 0)[2].ru_maxrss


def _become_case(path: Path, write: int) -> None:
    try:
        signal.alarm(PATIENCE)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the libraries say of their panics
        outcome = opened(path)
    except BaseException:
        outcome = traceback.format_exc()
    with open(write, "w", encoding="utf-8", errors="replace") as pipe:
        pipe.write(outcome)
    os._exit(0)


def opened(path: Path) -> str:
    """Load it as a server would, encode some texts and render a chat: "loaded", or the sentence."""
    # Imported by whoever forks, too, so that this costs nothing here.
    import torch

    from ropewalk.model.chat.template import ChatTemplateError
    from ropewalk.model.encodings.base import EncodingError
    from ropewalk.model.loading.checkpoints import CheckpointError
    from ropewalk.model.tokenizers.base import InvalidText
    from ropewalk.server.config import ModelOptions, ModelSource
    from ropewalk.server.errors import CommandError
    from ropewalk.server.launch.load_model import prepare

    options = ModelOptions(
        dtype=None,
        quantize=None,
        device="cpu",
        encoding=None,
        trust_encoding=(),
        encoding_option=(),
        attention=None,
        max_model_len=None,
        threads=None,
        chat_template=None,
    )
    try:
        checkpoint = prepare(
            options, ModelSource("hostile", str(path)), torch.device("cpu"), "none here"
        ).checkpoint
    except (CheckpointError, CommandError, EncodingError) as error:
        return str(error)
    for text in TEXTS:
        try:
            ids = checkpoint.tokenizer.encode(text, bos=True)
        except InvalidText:
            continue
        assert all(0 <= id < checkpoint.tokenizer.vocab_size for id in ids), ids
    if checkpoint.chat_template is not None:
        try:
            checkpoint.chat_template.render(
                [{"role": "user", "content": "hi"}], add_generation_prompt=True
            )
        except ChatTemplateError as error:
            return str(error)
    return "loaded"


def judged(names: Sequence[str] | None, seed: int) -> Iterator[Verdict]:
    """In this process, which should have no threads."""
    import ropewalk.server.launch.load_model  # noqa: F401  # so that forked processes have it
    from tests.hostile.corpus import cases

    for case in cases(seed):
        if names is None or case.name in names:
            yield judge(case)


def run(names: Sequence[str], seed: int, jobs: int) -> list[Verdict]:
    """Several processes that each fork one case after the other."""

    def some(share: Sequence[str]) -> list[Verdict]:
        import subprocess

        command = [
            sys.executable,
            "-m",
            "tests.hostile.judge",
            "--seed",
            str(seed),
            "--json",
            *share,
        ]
        printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        return [Verdict(**json.loads(line)) for line in printed.splitlines()]

    with ThreadPoolExecutor(jobs) as pool:
        shares = [names[start::jobs] for start in range(jobs)]
        return [verdict for of_one in pool.map(some, shares) for verdict in of_one]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print every verdict, one a line")
    parser.add_argument("cases", nargs="*", help="their names; default all")
    given = parser.parse_args()
    if given.json:
        for verdict in judged(given.cases or None, given.seed):
            print(json.dumps(asdict(verdict)), flush=True)
        return 0
    from tests.hostile.corpus import cases

    begun = time.monotonic()
    names = given.cases or [case.name for case in cases(given.seed)]
    verdicts = run(names, given.seed, given.jobs)
    faults = [verdict for verdict in verdicts if verdict.fault]
    for verdict in faults:
        print(f"{verdict.case}: {verdict.fault}: {verdict.outcome}")
    loaded = sum(verdict.outcome == "loaded" for verdict in verdicts)
    print(
        f"{len(verdicts)} cases in {time.monotonic() - begun:.0f} s: {len(faults)} wrong, {loaded} "
        f"loaded, {len(verdicts) - loaded - len(faults)} refused; at most "
        f"{max(verdict.seconds for verdict in verdicts):.1f} s and "
        f"{max(verdict.mib for verdict in verdicts):.0f} MiB"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
