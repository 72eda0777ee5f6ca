"""`ropewalk explain`: one encoding, or a checkpoint's, as pictures in one file.

Reads the flags and writes the file; model/inspect/explain makes its content.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.inspect.explain.page import to_html, to_png
from ropewalk.model.inspect.explain.pictures import pictures
from ropewalk.model.inspect.explain.subject import Subject, from_checkpoint, from_name, shape
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from ropewalk.report.figure import Picture
from ropewalk.server import download
from ropewalk.server.cli.output_file import require_folder, write_file
from ropewalk.server.errors import CommandError, UsageError
from ropewalk.server.terminal import bar_if_long

HEADS, HEAD_DIM, CONTEXT = 8, 64, 2048


def run(flags: argparse.Namespace) -> Path:
    """The path of the pictures. Raises UsageError or CommandError, with one sentence."""
    if not flags.encoding and not flags.model:
        raise UsageError(
            "no encoding is given; name one, or a checkpoint with --model (see ropewalk explain "
            "--help)"
        )
    path = Path(flags.out or f"{_stem(flags)}.html")
    if path.suffix not in (".html", ".png"):
        raise UsageError(
            f"--out: {path} ends neither in .html nor in .png; use one of these suffixes"
        )
    require_folder(path)
    try:
        subject = _of_model(flags) if flags.model else _of_name(flags)
    except (EncodingError, CheckpointError) as error:
        raise CommandError(str(error)) from error
    parts = pictures(subject)
    count = sum(isinstance(part, Picture) for part in parts)
    render = to_png if path.suffix == ".png" else to_html
    with bar_if_long(f"drawing {path}", count, "picture") as bar:
        made = render(subject.title, subject.summary, facts(subject), parts, bar.update)
    write_file(path, made)
    return path


def facts(subject: Subject) -> dict[str, str]:
    """Label and text of each fact above the pictures."""
    config = subject.config
    work = subject.whole.work(config, subject.context, BLOCK_SIZE)
    layers = "1 layer" if config.layers == 1 else f"{config.layers} layers"
    told = {
        "touches": ", ".join(subject.hooks) or "nothing",
        "options": ", ".join(f"{k} {_shown(v)}" for k, v in subject.options.items()) or "none",
        "shown for": f"{config.heads} heads of {config.head_dim}, layer {subject.layer}, "
        f"a context of {subject.context:,}",
        "work per token": f"{work.flops:,} FLOPs and {work.bytes:,} bytes read or written, for "
        f"one new token that attends to {subject.context:,} keys, in {layers}",
        "hard limit": subject.limit,
        "past training": subject.beyond_trained,
    }
    if subject.weights == "drawn":
        told["weights"] = "random; use --model for those of a checkpoint"
    return told


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


def _stem(flags: argparse.Namespace) -> str:
    """The file's name without its suffix: rope, Kerple for kerple:Kerple, or the model's name."""
    if flags.model:
        return Path(flags.model).name.removesuffix(".gguf") or "model"
    return str(flags.encoding or "").rpartition(":")[2]


def _of_model(flags: argparse.Namespace) -> Subject:
    given = [name for name in ("heads", "head_dim", "base") if getattr(flags, name) is not None]
    if flags.encoding or given or flags.option:
        what = "an encoding's name" if flags.encoding else f"--{(given or ['option'])[0]}"
        raise UsageError(
            "--model uses the checkpoint's encoding and settings; leave out "
            f"{what.replace('_', '-')}"
        )
    checkpoint = open_checkpoint(download.locate(flags.model), flags.trust_encoding)
    return from_checkpoint(checkpoint, flags.context, flags.layer or 0)


def _of_name(flags: argparse.Namespace) -> Subject:
    if flags.layer is not None:
        raise UsageError("--layer applies only to --model; leave it out")
    options = dict(_option(text) for text in flags.option)
    if flags.base is not None:
        options["base"] = flags.base
    config = shape(
        heads=flags.heads or HEADS,
        head_dim=flags.head_dim or HEAD_DIM,
        context=flags.context or CONTEXT,
    )
    try:
        return from_name(flags.encoding, config, options)
    except TypeError as error:
        if not options:
            raise
        told = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise CommandError(f"{flags.encoding} cannot be made with {told}: {error}") from error


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"--option: {text!r} is not NAME=VALUE; write for example base=500000")
    try:
        return name, json.loads(value)
    except ValueError:  # not JSON, so it is text: half, interleaved
        return name, value
