"""Pictures and captions as one self-contained file: HTML with inline SVG, or PNG.

The same subject gives the same bytes. Knows no encodings.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave
from numpy.typing import NDArray

from ropewalk.report import page
from ropewalk.report.figure import THEME, WIDTH, Omitted, Picture, own_settings, render
from ropewalk.report.page import Page, Section
from ropewalk.report.svg import svg

Pixels = NDArray[np.uint8]
Progress = Callable[[], object]  # called once for each picture drawn
DPI = 150
UNDATED_PNG: Any = {"Software": None}  # so that equal pictures are equal files
COLUMNS = 138  # characters per line of caption


def to_html(
    title: str,
    summary: str,
    facts: Mapping[str, str],
    parts: Sequence[Picture | Omitted],
    drawn: Progress,
) -> str:
    """A whole page."""
    sections = []
    for picture in parts:
        if isinstance(picture, Picture):
            image = svg(picture, picture.key, THEME)
            sections.append(Section(picture.title, [image], note=picture.caption, wide=True))
            drawn()
    left_out = {part.title: part.reason for part in parts if isinstance(part, Omitted)}
    return page.to_html(
        Page(title, lead=[summary], facts=facts, sections=sections, left_out=left_out)
    )


def to_png(
    title: str,
    summary: str,
    facts: Mapping[str, str],
    parts: Sequence[Picture | Omitted],
    drawn: Progress,
) -> bytes:
    """One tall image: the same text and pictures, stacked."""
    with own_settings():
        strips = [_text([title], size=15, weight="bold"), _text(_wrapped(summary))]
        strips.append(_text([line for pair in facts.items() for line in _fact(*pair)]))
        for part in parts:
            if isinstance(part, Picture):
                strips.append(_text([part.title], size=11.5, weight="bold"))
                strips.append(_pixels(render(part)))
                strips.append(_text(_wrapped(part.caption)))
                drawn()
        if left_out := [part for part in parts if isinstance(part, Omitted)]:
            strips.append(_text(["Left out"], size=11.5, weight="bold"))
            strips.append(
                _text([line for part in left_out for line in _fact(part.title, part.reason)])
            )
        file = io.BytesIO()
        imsave(file, np.vstack(strips), format="png", dpi=DPI, metadata=UNDATED_PNG)
    return file.getvalue()


def _pixels(figure: Figure) -> Pixels:
    """[height, width, 4]."""
    file = io.BytesIO()
    figure.savefig(file, format="rgba", dpi=DPI)
    return np.frombuffer(file.getvalue(), np.uint8).reshape(-1, round(WIDTH * DPI), 4)


def _text(lines: Sequence[str], *, size: float = 9, weight: str = "normal") -> Pixels:
    """Lines of one font size across the whole width, with a small margin."""
    line = size * 1.45 / 72  # inches
    height = len(lines) * line + 0.16
    figure = Figure(figsize=(WIDTH, height))
    for row, text in enumerate(lines):
        at = 1 - (row * line + 0.08) / height
        figure.text(0.02, at, text, va="top", fontsize=size, fontweight=weight)
    return _pixels(figure)


def _fact(name: str, text: str) -> list[str]:
    return _wrapped(f"{name}: {text}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS) or [""]
