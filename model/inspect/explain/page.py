"""Pictures and captions as one self-contained file: HTML with inline SVG, or PNG.

The same subject gives the same bytes. Knows no encodings.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure, SubFigure

from ropewalk.report import page
from ropewalk.report.figure import Omitted, Picture, own_settings, render
from ropewalk.report.page import Page, Section

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
    sections = [
        Section(part.title, [part], note=part.caption, wide=True)
        for part in parts
        if isinstance(part, Picture)
    ]
    left_out = {part.title: part.reason for part in parts if isinstance(part, Omitted)}
    whole = Page(title, lead=[summary], facts=facts, sections=sections, left_out=left_out)
    return page.to_html(whole, drawn)


def to_png(
    title: str,
    summary: str,
    facts: Mapping[str, str],
    parts: Sequence[Picture | Omitted],
    drawn: Progress,
) -> bytes:
    """One tall image: the same text and pictures, stacked."""
    strips = [_text([title], size=15, weight="bold"), _text([summary])]
    strips.append(_text([f"{name}: {text}" for name, text in facts.items()]))
    for part in parts:
        if isinstance(part, Picture):
            strips += [_text([part.title], size=11.5, weight="bold"), part, _text([part.caption])]
    if left_out := [part for part in parts if isinstance(part, Omitted)]:
        strips.append(_text(["Left out"], size=11.5, weight="bold"))
        strips.append(_text([f"{part.title}: {part.reason}" for part in left_out]))
    heights = [strip.height for strip in strips]

    def draw(figure: Figure | SubFigure) -> None:
        rows = figure.subfigures(len(strips), 1, squeeze=False, height_ratios=heights)
        for row, strip in zip(rows[:, 0], strips, strict=True):
            strip.draw(row)
            if strip in parts:
                drawn()

    with own_settings():
        file = io.BytesIO()
        whole = render(Picture("", title, "", draw, sum(heights)))
        whole.savefig(file, format="png", dpi=DPI, metadata=UNDATED_PNG)
    return file.getvalue()


def _text(texts: Sequence[str], *, size: float = 9, weight: str = "normal") -> Picture:
    """Paragraphs of one font size across the whole width, with a small margin."""
    lines = [line for text in texts for line in textwrap.wrap(text, COLUMNS) or [""]]
    height = len(lines) * size * 1.45 / 72 + 0.16  # inches

    def draw(figure: Figure | SubFigure) -> None:
        style: Any = {"fontsize": size, "fontweight": weight, "linespacing": 1.2}
        figure.text(0.02, 1 - 0.08 / height, "\n".join(lines), va="top", **style)

    return Picture("", "", "", draw, height)
