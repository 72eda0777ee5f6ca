"""A picture as an <svg> element: a third of what matplotlib writes, with tooltips and themes."""

import html
import io
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ropewalk.report.figure import PAGE, TOLD, Picture, own_settings, render

UNDATED: Any = {"Date": None, "Creator": None}  # so that equal pictures are equal files
# What is so for the whole picture, or without being said.
_FAMILY = "font-family: 'DejaVu Sans', sans-serif"
_NEEDLESS = (
    f"{_FAMILY}; ",
    "text-anchor: start; ",
    "stroke-dashoffset: 0; ",
    "; stroke-linejoin: miter",
)


def svg(picture: Picture, prefix: str, colors: Mapping[str, tuple[str, str]] | None = None) -> str:
    """The <svg> element. Its ids and classes begin with `prefix`: they are the whole page's.

    With `colors`, as THEME has them, its size, its font and those colours are left to the page.
    """
    file = io.StringIO()
    with own_settings(prefix):
        ground = PAGE if colors is None else "none"
        render(picture).savefig(file, format="svg", metadata=UNDATED, facecolor=ground)
    text = _with_classes(_with_ids(_short(file.getvalue()), prefix), prefix)
    start = f'<svg role="img" aria-label="{html.escape(picture.title, quote=True)}"'
    if colors is None:
        return text.replace("<svg", f'{start} style="stroke-linejoin: round; {_FAMILY}"', 1)
    names = {light: f"var(--{name})" for name, (light, _) in colors.items()}
    text = re.sub(r"(?<=: )#\w{6}", lambda color: names.get(color[0], color[0]), text)
    start += "".join(f' data-{name}="{value:.5g}"' for name, value in picture.data.items())
    return re.sub(r'<svg width="\S+" height="\S+"', start, text, count=1)


def _short(text: str) -> str:
    """Without what a browser does not need."""
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"| version="1.1"', "", text)
    text = re.sub(r'<g/>|<path d="[^"]*" style="fill: none"/>|<defs>\s*</defs>', "", text)
    text = re.sub(r'(<path id=[^>]*) style="[^"]*"', r"\1", text)  # its uses have their own
    for needless in _NEEDLESS:
        text = text.replace(needless, "")
    opened: list[bool] = []  # for each open group, whether it says anything

    def keep(tag: re.Match[str]) -> str:
        if tag[0] != "</g>":
            opened.append(tag[0] != "<g>")
            return tag[0] if opened[-1] else ""
        return tag[0] if opened.pop() else ""

    text = re.sub(r"</?g\b[^>]*>", keep, text)
    text = re.sub(r' (d|x|y|width|height)="[^"]*"', _rounded, text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", ">\n<").strip()
    return re.sub(rf'<g id="{TOLD}([^"]*)">', r"<g><title>\1</title>", text)


def _rounded(attribute: re.Match[str]) -> str:
    """To a tenth of a point; rectangles by their corners."""
    text = re.sub(r"(\.\d)\d+", r"\1", attribute[0])
    if attribute[1] != "d":
        return text
    text = re.sub(r"\.0(?=\s)", "", text)
    text = re.sub(r'\s+"', '"', re.sub(r"\s*([MLQCz])\s*", r"\1", text))
    return re.sub(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+)L\1 \4z", r"M\1 \2H\3V\4H\1z", text)


def _with_ids(text: str, prefix: str) -> str:
    """Numbers for ids."""
    ids = {old: f"{prefix}{n}" for n, old in enumerate(re.findall(r'\bid="([\w-]+)"', text))}
    text = re.sub(r'\bid="([\w-]+)"', lambda at: f'id="{ids.get(at[1], at[1])}"', text)
    text = re.sub(r"url\(#([\w-]+)\)", lambda at: f"url(#{ids.get(at[1], at[1])})", text)
    text = re.sub(r'xlink:href="#([\w-]+)"', lambda at: f'href="#{ids.get(at[1], at[1])}"', text)
    return text if "xlink:href" in text else re.sub(r' xmlns:xlink="[^"]*"', "", text)


def _with_classes(text: str, prefix: str) -> str:
    """Classes for styles that are there several times."""
    uses = Counter(re.findall(r' style="([^"]*)"', text))
    classes = {style: f"{prefix}{n}" for n, style in enumerate(uses) if uses[style] > 2}
    for style, name in classes.items():
        text = text.replace(f' style="{style}"', f' class="{name}"')
    rules = "\n".join(f".{name} {{{style}}}" for style, name in classes.items())
    return text.replace(">", f">\n<style>\n{rules}\n</style>", 1)
