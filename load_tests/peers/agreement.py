"""Measures one running server with `ropewalk bench` and aiperf in turn, and compares the figures.

docs/load-testing-agreement.md says how to install aiperf and how definitions differ.
"""

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ropewalk.load_tests.client.client import DIALECTS, Server, Unreachable, split_base_url
from ropewalk.load_tests.common.statistics import figures
from ropewalk.load_tests.common.types import Profile
from ropewalk.load_tests.report import result
from ropewalk.load_tests.run.serving import flush
from ropewalk.load_tests.workload.prompts import PromptMaker

LIMIT = 0.05  # relative difference that counts as agreement
METRICS = ("TTFT p50, ms", "TPOT p50, ms", "output tokens/s")
_LOG_LINES = 15
# aiperf needs a tokenizer file even if the server counts the tokens; this one knows no words.
_TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"},
}


class Failed(Exception):
    """A tool measured nothing, or not the load asked for; the message says which and why."""


class Reading(NamedTuple):
    """One tool's figures of one run, in the order of METRICS."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What both tools send: text prompts from a closed loop of `workers`."""

    base_url: str
    model: str
    workers: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def profile(self) -> Profile:
        """A closed loop."""
        return Profile("closed", concurrency=self.workers)

    def write(self, folder: Path, seed: str) -> None:
        """Write the prompts in each tool's format, and aiperf's tokenizer."""
        maker = PromptMaker(seed, "text")
        prompts = [maker.prompt(self.prompt_tokens) for _ in range(self.requests)]
        ours = [{"prompt": each, "max_tokens": self.output_tokens} for each in prompts]
        theirs = [{"text": each} for each in prompts]
        for name, lines in (("ours.jsonl", ours), ("theirs.jsonl", theirs)):
            (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for name, content in _TOKENIZER.items():
            (folder / name).write_text(json.dumps(content))

    def our_command(self, folder: Path) -> list[str]:
        """A command that leaves its result in `folder`/ours."""
        command = [
            sys.executable,
            "-m",
            "ropewalk.load_tests.run.bench",
            "--base-url",
            self.base_url,
        ]
        command += ["--models", self.model, "--workload", f"file:{folder / 'ours.jsonl'}"]
        command += ["--profile", self.profile.label, "--runs", "1"]
        return [*command, "--out", str(folder / "ours")]

    def their_command(self, aiperf: Path, folder: Path) -> list[str]:
        """A command that leaves its result in `folder`/theirs."""
        extra = {"max_tokens": self.output_tokens, "temperature": 0.0, "ignore_eos": True}
        command = [str(aiperf), "profile", "--url", self.base_url, "--model", self.model]
        command += ["--endpoint-type", "completions", "--streaming"]
        command += ["--extra-inputs", json.dumps(extra), "--use-server-token-count"]
        command += ["--input-file", str(folder / "theirs.jsonl")]
        command += ["--custom-dataset-type", "single-turn", "--tokenizer", str(folder)]
        command += ["--dataset-sampling-strategy", "sequential"]
        command += ["--concurrency", str(self.workers), "--request-count", str(self.requests)]
        command += ["--workers-max", "1", "--record-processors", "1", "--ui", "none"]
        command += ["--no-gpu-telemetry", "--no-server-metrics"]
        return [*command, "--artifact-dir", str(folder / "theirs")]


def our_reading(folder: Path, load: Load) -> Reading:
    """Read the result of `ropewalk bench`. Raises Failed."""
    (run,) = result.read(folder / "ours" / "result.json").runs
    found = figures(run)
    values = [found.values.get(name) for name in ("ttft_p50", "tpot_p50", "output_tokens_per_s")]
    if found.served != load.requests or None in values:
        raise Failed(f"ropewalk bench served {found.served} of {load.requests}: {found.failures}")
    ttft, tpot, rate = (value or 0.0 for value in values)
    return Reading(1e3 * ttft, 1e3 * tpot, rate)


def their_reading(folder: Path, load: Load) -> Reading:
    """Read the result of aiperf, whose inter-token latency is our TPOT. Raises Failed."""
    path = folder / "theirs" / "profile_export_aiperf.json"
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
    except OSError:
        raise Failed("aiperf left no profile_export_aiperf.json: is it version 0.13?") from None
    served, tokens = found["request_count"]["avg"], found["output_sequence_length"]
    if served != load.requests or {tokens["min"], tokens["max"]} != {load.output_tokens}:
        raise Failed(
            f"aiperf served {served:g} of {load.requests} requests with {tokens['min']:g} to "
            f"{tokens['max']:g} tokens instead of {load.output_tokens}"
        )
    return Reading(
        found["time_to_first_token"]["p50"],
        found["inter_token_latency"]["p50"],
        found["output_token_throughput"]["avg"],
    )


def table(ours: Sequence[Reading], theirs: Sequence[Reading]) -> tuple[str, bool]:
    """Medians over runs, with lowest and highest; and whether all differences are within LIMIT."""
    lines = [f"{'':<18}{'ropewalk bench':>26}{'aiperf':>26}{'difference':>12}"]
    agree = True
    for index, name in enumerate(METRICS):
        columns = [[reading[index] for reading in readings] for readings in (ours, theirs)]
        middle = [median(column) for column in columns]
        difference = middle[0] / middle[1] - 1
        agree &= abs(difference) <= LIMIT
        cells = [
            f"{median(column):.1f} [{min(column):.1f}, {max(column):.1f}]" for column in columns
        ]
        lines.append(f"{name:<18}{cells[0]:>26}{cells[1]:>26}{difference:>12.1%}")
    return "\n".join(lines), agree


def main(argv: Sequence[str] | None = None) -> int:
    """0: they agree; 1: they do not; 2: nothing was measured."""
    args = _options().parse_args(argv)
    load = Load(**{field.name: getattr(args, field.name) for field in fields(Load)})
    try:
        ours, theirs = _measure(load, args.aiperf, args.runs, args.seed)
    except (Failed, Unreachable, OSError, ValueError) as error:
        print(f"ropewalk.load_tests.peers.agreement: {error}", file=sys.stderr)
        return 2
    text, agree = table(ours, theirs)
    verdict = "agree" if agree else "do not agree"
    print(
        f"{text}\n\nThe two {verdict} within {LIMIT:.0%}; seed {args.seed}, {args.runs} runs each."
    )
    return 0 if agree else 1


def _measure(load: Load, aiperf: Path, runs: int, seed: str) -> tuple[list[Reading], list[Reading]]:
    """The tools alternate in going first, so that drift of the machine affects both."""
    host, port = split_base_url(load.base_url)
    server = Server(host, port, DIALECTS["openai"], load.model)
    ours: list[Reading] = []
    theirs: list[Reading] = []
    for run in range(runs):
        with tempfile.TemporaryDirectory(prefix="ropewalk-agreement-") as name:
            folder = Path(name)
            load.write(folder, f"{seed}/{run}")
            tools = [
                (load.our_command(folder), our_reading, ours),
                (load.their_command(aiperf, folder), their_reading, theirs),
            ]
            for command, read, readings in tools if run % 2 == 0 else reversed(tools):
                asyncio.run(flush(server))  # both send the same prompts
                _call(command)
                readings.append(read(folder, load))
                print(f"run {run + 1}: {readings[-1]}", file=sys.stderr)
    return ours, theirs


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
        raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="ropewalk.load_tests.peers.agreement", description=__doc__
    )
    options.add_argument("--aiperf", type=Path, required=True, help="path of the aiperf program")
    options.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL")
    options.add_argument("--model", required=True, help="name of a model on that server")
    for name, default in (
        ("--workers", 4),
        ("--requests", 64),
        ("--prompt-tokens", 128),
        ("--output-tokens", 64),
        ("--runs", 3),
    ):
        options.add_argument(
            name, type=int, default=default, metavar="N", help=f"default: {default}"
        )
    options.add_argument("--seed", default=secrets.token_hex(4), help="default: new each time")
    return options


if __name__ == "__main__":
    sys.exit(main())
