"""Runs the cases of one kind, many connections at once, and keeps what it finds."""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from tqdm import tqdm

from tests.fuzz.streams import Stream

_STATUS = re.compile(rb"HTTP/1\.1 ([2-5][0-9][0-9]) ")

BATCH = 500
AT_ONCE = 48


@dataclass(frozen=True, slots=True)
class Finding:
    """`first` and `last`: numbers of the cases among which it is. One alone can be drawn again."""

    kind: str
    seed: int
    first: int
    last: int
    what: str
    stream: Stream | None = None
    answer: str = ""


class Kind(Protocol):
    name: str

    def draw(self, draw: Random) -> Stream: ...

    async def attempt(self, stream: Stream) -> tuple[str | None, bytes, float]:
        """What is wrong, if anything; what was answered; and the seconds it took."""
        ...

    def settle(self) -> Sequence[str]:
        """What is wrong once every connection of a batch is closed."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a campaign is. `found` counts findings, `answers` statuses, by name."""

    kind: str
    seed: int
    done: int = 0
    found: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0

    @property
    def path(self) -> str:
        return f"{self.kind}-{self.seed}.json"


def read_progress(folder: Path, kind: str, seed: int) -> Progress:
    """Where an earlier campaign stopped, or its start."""
    start = Progress(kind, seed)
    path = folder / start.path
    return Progress(**json.loads(path.read_text())) if path.exists() else start


def case_of(kind: Kind, seed: int, number: int) -> Stream:
    return kind.draw(Random(f"{kind.name} {seed} {number}"))


def run(
    kind: Kind, progress: Progress, cases: int, folder: Path, say: Callable[[str], None] = print
) -> Progress:
    """Try the cases from `progress` on up to number `cases`; returns how it went."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = tqdm(total=cases, initial=progress.done, desc=kind.name, unit=" cases", file=sys.stderr)
    with shown:
        while progress.done < cases:
            numbers = range(progress.done, min(progress.done + BATCH, cases))
            findings, answers, slowest = asyncio.run(_batch(kind, progress.seed, numbers))
            findings += [
                Finding(kind.name, progress.seed, numbers[0], numbers[-1], what)
                for what in kind.settle()
            ]
            found = Counter(progress.found)
            for finding in findings:
                found[heading(finding.what)] += 1
                shown.write(f"{finding.what[:200]}: {keep(finding, folder)}")
            progress = replace(
                progress,
                done=numbers[-1] + 1,
                found=dict(found),
                answers=dict(Counter(progress.answers) + answers),
                slowest=max(slowest, progress.slowest),
            )
            (folder / progress.path).write_text(json.dumps(asdict(progress)))
            shown.update(len(numbers))
    say(summary(progress))
    return progress


async def _batch(
    kind: Kind, seed: int, numbers: range
) -> tuple[list[Finding], Counter[str], float]:
    waiting = iter(numbers)
    findings: list[Finding] = []
    answers: Counter[str] = Counter()
    slowest = 0.0

    async def work() -> None:
        nonlocal slowest
        for number in waiting:
            stream = case_of(kind, seed, number)
            what, answer, seconds = await kind.attempt(stream)
            slowest = max(slowest, seconds)
            answers.update(status.decode() for status in _STATUS.findall(answer))
            if what is not None:
                text = answer.decode("latin-1")[:2000]
                findings.append(Finding(kind.name, seed, number, number, what, stream, text))

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    return findings, answers, slowest


def heading(what: str) -> str:
    """What a finding is counted as."""
    return "5xx" if what[:1] == "5" else what.partition(":")[0]


def keep(finding: Finding, folder: Path) -> Path:
    stream = None if finding.stream is None else finding.stream.plain()
    plain: dict[str, Any] = {**asdict(replace(finding, stream=None)), "stream": stream}
    path = folder / f"{finding.kind}-{finding.seed}-{finding.first}.finding.json"
    path.write_text(json.dumps(plain, indent=1))
    return path


def summary(progress: Progress) -> str:
    usual = ("5xx", "hang", "leak", "a refusal without its cause")
    names = [*usual, *sorted(set(progress.found) - set(usual))]
    counts = ", ".join(f"{name}: {progress.found.get(name, 0)}" for name in names)
    answers = ", ".join(f"{n:,} × {status}" for status, n in sorted(progress.answers.items()))
    return (
        f"{progress.kind}, seed {progress.seed}: {progress.done:,} cases; {counts}; "
        f"slowest {progress.slowest:.1f} s; answers: {answers}"
    )


def attempt_one(kind: Kind, stream: Stream) -> tuple[str | None, bytes]:
    """What is wrong with one case, and what was answered."""
    what, answer, _ = asyncio.run(kind.attempt(stream))
    return what or next(iter(kind.settle()), None), answer
