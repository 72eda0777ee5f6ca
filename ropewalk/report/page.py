"""A report as one HTML page that loads nothing else, for light and dark screens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

import jinja2

from ropewalk.report.figure import THEME, Picture
from ropewalk.report.svg import svg

Table = Sequence[Sequence[str]]  # the first line is the header


@dataclass(frozen=True, slots=True)
class Section:
    """What was found, the pictures that show it, and below them the same in numbers."""

    title: str
    pictures: Sequence[Picture]
    findings: Sequence[str] = ()
    note: str = ""  # how to read it
    table: Table = ()
    key: str = ""  # for links
    wide: bool = False  # pictures are as wide as the page
    badge: tuple[str, str] | None = None  # a colour's name, and the word


@dataclass(frozen=True, slots=True)
class Page:
    """All parts in their order on the page. Empty ones are left out."""

    title: str
    lead: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Table] = field(default_factory=dict)  # folded away
    reassurance: str = ""  # instead of warnings
    warnings: Sequence[str] = ()
    findings: Sequence[tuple[Section, str]] = ()
    legend: Sequence[tuple[str, str, str]] = ()  # a colour's name, its own, its meaning
    sections: Sequence[Section] = ()
    beside: bool = False  # sections side by side, where there is room
    left_out: Mapping[str, str] = field(default_factory=dict)
    table: Table = ()
    note: str = ""
    colors: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # beside THEME
    data: object = None  # for the script, as JSON
    script: str = ""  # trusted: not escaped


def to_html(page: Page, drawn: Callable[[], object] = lambda: None) -> str:
    """A whole page. What comes from elsewhere is escaped. `drawn` is called for each picture."""
    colors, numbers = dict(THEME) | dict(page.colors), count()

    def image(picture: Picture) -> str:
        text = svg(picture, f"p{next(numbers)}-", colors)
        drawn()
        return text

    return _template().render(page=page, colors=colors, image=image)


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html")
