"""Pictures and captions as one self-contained file: HTML with inline SVG, or PNG.

The same subject gives the same bytes. Knows no encodings.
"""

import html
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from ropewalk.model.inspect.explain.figure import WIDTH, Omitted, Picture, own_settings

Pixels = NDArray[np.uint8]
Progress = Callable[[], object]  # called once for each picture drawn
DPI = 150
# No date, so that equal pictures are equal files.
UNDATED_SVG: Any = {"Date": None, "Creator": None}
UNDATED_PNG: Any = {"Software": None}
COLUMNS = 138  # characters per line of caption

LEFT_OUT = "Left out"
STYLE = """\
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: #555; } dd { margin: 0; }
figure { margin: 0; } svg { width: 100%; height: auto; }
figcaption, p { max-width: 52rem; }
"""


def to_html(
    title: str,
    summary: str,
    facts: Mapping[str, str],
    parts: Sequence[Picture | Omitted],
    drawn: Progress,
) -> str:
    """A whole page."""
    listed = "\n".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts.items()
    )
    body = "\n".join(_section(part, drawn) for part in parts if isinstance(part, Picture))
    if left_out := [part for part in parts if isinstance(part, Omitted)]:
        rows = "\n".join(
            f"<dt>{html.escape(part.title)}</dt><dd>{html.escape(part.reason)}</dd>"
            for part in left_out
        )
        body += f"\n<h2>{LEFT_OUT}</h2>\n<dl>\n{rows}\n</dl>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(summary)}</p>
<dl>
{listed}
</dl>
{body}
</body>
</html>
"""


def _section(picture: Picture, drawn: Progress) -> str:
    image = svg(picture)
    drawn()
    caption = html.escape(picture.caption)
    return (
        f"<h2>{html.escape(picture.title)}</h2>\n<figure>\n{image}\n"
        f"<figcaption>{caption}</figcaption>\n</figure>"
    )


def svg(picture: Picture) -> str:
    """The <svg> element, with ids that are unique on the page."""
    with own_settings():
        matplotlib.rcParams["svg.hashsalt"] = picture.key
        file = io.StringIO()
        _figure(picture).savefig(file, format="svg", metadata=UNDATED_SVG)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{picture.key}-", text)
    label = html.escape(picture.title, quote=True)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


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
                strips.append(_pixels(_figure(part)))
                strips.append(_text(_wrapped(part.caption)))
                drawn()
        if left_out := [part for part in parts if isinstance(part, Omitted)]:
            strips.append(_text([LEFT_OUT], size=11.5, weight="bold"))
            strips.append(
                _text([line for part in left_out for line in _fact(part.title, part.reason)])
            )
        file = io.BytesIO()
        imsave(file, np.vstack(strips), format="png", dpi=DPI, metadata=UNDATED_PNG)
    return file.getvalue()


def _figure(picture: Picture) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(WIDTH, picture.height), layout=layout)
    picture.draw(figure)
    return figure


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
        figure.text(0.02, at, text, va="top", fontsize=size, fontweight=weight, parse_math=False)
    return _pixels(figure)


def _fact(name: str, text: str) -> list[str]:
    return _wrapped(f"{name}: {text}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS) or [""]
