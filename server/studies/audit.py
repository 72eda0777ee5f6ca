"""`ropewalk audit`: what each step of a generation changes in the cache, encoding by encoding.

Chooses the arms, prints and writes; model/inspect/audit.py does the audit.
"""

import json
import random
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ropewalk.model.config import EncoderDecoderConfig
from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.formatting import where
from ropewalk.model.inspect import audit_arms
from ropewalk.model.inspect.audit import Arm, AuditStep, audit, entries
from ropewalk.model.inspect.audit_page import to_html
from ropewalk.model.inspect.audit_report import COLUMNS, HEADLINE, Report, as_json, cells
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from ropewalk.model.program import Program
from ropewalk.model.tokenizers.base import InvalidText
from ropewalk.report.table import aligned
from ropewalk.server import download
from ropewalk.server.config import model_source
from ropewalk.server.errors import CommandError, UsageError
from ropewalk.server.studies.output_file import require_folder, write_file
from ropewalk.server.terminal import bar_if_long, line_width, said_if_long

TINY = "tiny"
TINY_RUN, MODEL_RUN = (104, 32), (24, 16)  # tokens of the prompt, steps
NAMED_ENTRIES = 3  # how many wrongly changed entries to name
TINY_NOTE = "tiny is a small decoder with random weights: it shows mechanics, not quality."
STEP_COLUMNS = (
    "length",
    "written",
    "changed",
    "should change",
    "stale",
    "rotations",
    "bias values",
    "positional terms",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A decoder with its own encoding, and the prompt that it continues."""

    name: str
    note: str
    own: str | None  # the encoding that it was trained with
    program: Program
    prompt: Sequence[int]


def run(
    *,
    model: str,
    encodings: str | None,
    trust_encoding: Sequence[str],
    prompt: str | None,
    prompt_tokens: int | None,
    steps: int | None,
    trained_length: int | None,
    steps_table: bool,
    json_to: Path | None,
    html_to: Path | None,
) -> int:
    """Returns 1 when a correct entry changed, else 0. Raises UsageError or CommandError."""
    printed = json_to == Path("-")
    for path in (html_to, None if printed else json_to):
        if path is not None:
            require_folder(path)
    if prompt is not None and prompt_tokens is not None:
        raise UsageError("--prompt and --prompt-tokens exclude each other; leave one of them out")
    usual_prompt, usual_steps = TINY_RUN if model == TINY else MODEL_RUN
    steps = steps or usual_steps
    drawn = prompt_tokens or usual_prompt
    try:
        if model == TINY:
            subject = _tiny(prompt, drawn, steps)
        else:
            subject = _loaded(model, trust_encoding, prompt, drawn, steps)
        report = _audited(subject, list(_arms(encodings, trained_length, subject, steps)), steps)
    except (EncodingError, CheckpointError, InvalidText) as error:
        raise CommandError(str(error)) from error
    told = json.dumps(as_json(report), indent=2)
    if html_to is not None:
        _write(html_to, to_html(report))
    if printed:
        print(told)
    else:
        print("\n".join(lines(report, every_step=steps_table)))
        if json_to is not None:
            _write(json_to, told + "\n")
    for sentence in faults(report):
        print(f"ropewalk: {sentence}", file=sys.stderr)
    return 1 if report.unexpected else 0


def _audited(subject: Subject, arms: Sequence[Arm], steps: int) -> Report:
    with (
        bar_if_long(f"auditing {subject.name}", len(arms) * (steps + 1), "step") as bar,
        threads(1 if subject.name == TINY else torch.get_num_threads()),
    ):
        audits = []
        for arm in arms:
            with _foreign(arm.name):
                audits.append(audit(arm, subject.prompt, steps, bar.update))
    return Report(subject.name, subject.note, subject.program.config, tuple(audits))


@contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Raises whatever a user's own class raises as EncodingError."""
    try:
        yield
    except EncodingError:
        raise
    except Exception as error:  # foreign code may raise anything
        if name in (*audit_arms.ALL, *audit_arms.VARIANTS):
            raise
        raise EncodingError(
            f"{name} fails ({where(error)}); docs/encodings.md says what a class must keep to."
        ) from error


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets torch's threads inside the block: a small decoder only loses time with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tiny(text: str | None, drawn: int, steps: int) -> Subject:
    vocabulary = audit_arms.TINY.vocab_size  # one token per byte value
    prompt = _drawn(drawn, vocabulary) if text is None else list(text.encode())
    _refuse_empty(prompt)
    return Subject(TINY, TINY_NOTE, None, audit_arms.tiny(len(prompt) + steps), prompt)


def _loaded(
    model: str, trusted: Sequence[str], text: str | None, drawn: int, steps: int
) -> Subject:
    source = model_source(model)
    checkpoint = open_checkpoint(download.locate(source.source), trusted)
    if isinstance(checkpoint.config, EncoderDecoderConfig):
        raise CommandError(
            f"{source.name} is an encoder-decoder, but an audit runs only decoders; name another "
            "model, or none for the built-in tiny one"
        )
    embedded = checkpoint.config.vocab_size
    if text is None:
        prompt = _drawn(drawn, min(checkpoint.tokenizer.vocab_size, embedded))
    else:
        prompt = checkpoint.tokenizer.encode(text, bos=True)
        if max(prompt, default=0) >= embedded:
            raise UsageError(
                f"--prompt: the text has a token that {source.name} does not embed; leave it out"
            )
    _refuse_empty(prompt)
    with said_if_long(f"loading {source.name}"):
        program = audit_arms.from_checkpoint(checkpoint, len(prompt) + steps)
    own = checkpoint.config.encoding.name
    note = f"{source.name} was trained with {own}; the other arms show mechanics, not quality."
    return Subject(source.name, note, own, program, prompt)


def _drawn(count: int, vocabulary: int) -> list[int]:
    """Random tokens, the same every time."""
    source = random.Random(0)
    return [source.randrange(vocabulary) for _ in range(count)]


def _refuse_empty(prompt: Sequence[int]) -> None:
    if not prompt:
        raise UsageError("--prompt: the text has no tokens; give at least one word")


def _arms(
    encodings: str | None, trained_length: int | None, subject: Subject, steps: int
) -> Iterator[Arm]:
    wanted: Sequence[str] = audit_arms.ALL
    if encodings is not None and encodings != "all":
        wanted = [name.strip() for name in encodings.split(",") if name.strip()]
        if not wanted:
            raise UsageError("--encodings: the list is empty; give for example rope,t5")
    elif encodings is None and subject.own is not None:
        wanted = (subject.own, audit_arms.DYNAMIC)
    start = len(subject.prompt)
    trained_length = trained_length or start + steps // 2
    for name in dict.fromkeys(wanted):
        with _foreign(name):
            arm = audit_arms.arm(name, subject.program, start + steps, trained_length)
        yield arm


def lines(report: Report, *, every_step: bool) -> Iterator[str]:
    """The whole text: with `every_step` a table of steps, then a line per arm, notes, headline."""
    if every_step:
        for one in report.audits:
            yield one.name
            yield from aligned([STEP_COLUMNS, *map(_step_row, one.steps)], left=1)
            yield ""
    yield from aligned([COLUMNS, *map(cells, report.audits)], left=1)
    yield ""
    for one in report.audits:
        if one.note:
            yield from _wrapped(f"{one.name}: {one.note}.")
    yield from _wrapped(report.note)
    yield ""
    yield from _wrapped(HEADLINE)


def _step_row(step: AuditStep) -> tuple[str, ...]:
    counts = (step.written, step.changed, step.should_change, step.stale)
    return (
        f"{step.length:,}",
        *(f"{entries(touched):,}" for touched in counts),
        f"{step.rotations:,}",
        f"{step.bias_values:,}",
        terms(step),
    )


def terms(step: AuditStep) -> str:
    """Positions that something was computed for: "none", "120" or "7 to 120"."""
    first, last = step.first_term, step.length - 1
    if first > last:
        return "none"
    return f"{last}" if first == last else f"{first} to {last}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, line_width(), break_on_hyphens=False)


def faults(report: Report) -> Iterator[str]:
    """A sentence for each arm in which a correct entry changed."""
    for one in report.audits:
        found = [(step.length, entry) for step in one.steps for entry in step.unexpected]
        if not found:
            continue
        named = "; ".join(
            f"the {entry.kind} of layer {entry.layer}, head {entry.kv_head}, "
            f"position {entry.position} at length {length}"
            for length, entry in found[:NAMED_ENTRIES]
        )
        more = len(found) - NAMED_ENTRIES
        rest = f"; and {more:,} more entries" if more > 0 else ""
        yield (
            f"{one.name}: stored entries changed although they were correct, which no encoding "
            f"requires: {named}{rest}"
        )


def _write(path: Path, text: str) -> None:
    write_file(path, text)
    print(path, file=sys.stderr)
