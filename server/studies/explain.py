"""`ropewalk explain`: one encoding, or a checkpoint's, as pictures in one file.

Writes the file; model/inspect/explain makes its content.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.model.catalogue import hooks, summary
from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.inspect.explain.page import to_html, to_png
from ropewalk.model.inspect.explain.pictures import pictures
from ropewalk.model.inspect.explain.subject import Subject, from_checkpoint, from_name, shape
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from ropewalk.report.figure import Picture
from ropewalk.server import download
from ropewalk.server.errors import CommandError, UsageError
from ropewalk.server.studies.output_file import require_folder, write_file
from ropewalk.server.terminal import bar_if_long

HEADS, HEAD_DIM, CONTEXT = 8, 64, 2048


def run(
    *,
    encoding: str | None,
    out: str | None,
    model: str | None,
    trust_encoding: Sequence[str],
    layer: int | None,
    context: int | None,
    heads: int | None,
    head_dim: int | None,
    base: float | None,
    option: Sequence[tuple[str, Any]],
) -> Path:
    """The path of the pictures. Raises UsageError or CommandError, with one sentence."""
    if not encoding and not model:
        raise UsageError(
            "no encoding is given; name one, or a checkpoint with --model (see ropewalk explain "
            "--help)"
        )
    path = Path(out or f"{_stem(encoding, model)}.html")
    if path.suffix not in (".html", ".png"):
        raise UsageError(
            f"--out: {path} ends neither in .html nor in .png; use one of these suffixes"
        )
    require_folder(path)
    shaping = {"heads": heads, "head-dim": head_dim, "base": base, "option": option or None}
    try:
        if model:
            given = ["an encoding's name"] * bool(encoding)
            given += [f"--{name}" for name, value in shaping.items() if value is not None]
            if given:
                raise UsageError(
                    f"--model uses the checkpoint's encoding and settings; leave out {given[0]}"
                )
            checkpoint = open_checkpoint(download.locate(model), trust_encoding)
            subject = from_checkpoint(checkpoint, context, layer or 0)
        else:
            if layer is not None:
                raise UsageError("--layer applies only to --model; leave it out")
            config = shape(
                heads=heads or HEADS, head_dim=head_dim or HEAD_DIM, context=context or CONTEXT
            )
            options = dict(option) | ({} if base is None else {"base": base})
            subject = from_name(str(encoding), config, options)
    except (EncodingError, CheckpointError) as error:
        raise CommandError(str(error)) from error
    parts = pictures(subject)
    count = sum(isinstance(part, Picture) for part in parts)
    render = to_png if path.suffix == ".png" else to_html
    with bar_if_long(f"drawing {path}", count, "picture") as bar:
        about = summary(type(subject.whole))
        made = render(subject.title, about, facts(subject), parts, bar.update)
    write_file(path, made)
    return path


def facts(subject: Subject) -> dict[str, str]:
    """Label and text of each fact above the pictures."""
    config, whole = subject.config, subject.whole
    work = whole.work(config, subject.context, BLOCK_SIZE)
    layers = "1 layer" if config.num_layers == 1 else f"{config.num_layers} layers"
    told = {
        "touches": ", ".join(hooks(type(whole))) or "nothing",
        "options": ", ".join(f"{k} {_shown(v)}" for k, v in subject.options.items()) or "none",
        "shown for": f"{config.num_heads} heads of {config.head_dim}, layer {subject.layer}, "
        f"a context of {subject.context:,}",
        "work per token": f"{work.flops:,} FLOPs and {work.bytes:,} bytes read or written, for "
        f"one new token that attends to {subject.context:,} keys, in {layers}",
        "hard limit": whole.LIMIT,
        "past training": whole.BEYOND_TRAINED,
    }
    if subject.weights == "drawn":
        told["weights"] = "random; use --model for those of a checkpoint"
    return told


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


def _stem(encoding: str | None, model: str | None) -> str:
    """The file's name without its suffix: rope, Kerple for kerple:Kerple, or the model's name."""
    if model:
        return Path(model).name.removesuffix(".gguf") or "model"
    return str(encoding or "").rpartition(":")[2]
