"""What is left out of an SVG changes nothing that is seen, and nothing of a page's own is hit."""

import re
from xml.etree import ElementTree

from ropewalk.report.figure import INK, PAGE, THEME, Picture, one_axes, tell
from ropewalk.report.svg import svg

NAME = "<b> & \"id='x'\""


def draw(figure) -> None:
    axes = one_axes(figure)
    (line,) = axes.plot([0, 1, 2], [1.25, 2.5, 1.0], "o-", color=INK, markerfacecolor=PAGE)
    tell(line, "a line")
    (mark,) = axes.plot([1], [2], "s", color=INK, clip_on=False)
    tell(mark, NAME)
    (bar,) = axes.barh(1.0, 2.0, 0.5, color=INK)
    tell(bar, "bar: 3.14159")
    axes.fill_between([0, 1], [0, 0], [1, 2], color=INK, alpha=0.5)
    axes.set_title(NAME)


PICTURE = Picture("key", NAME, "", draw)


def test_it_is_well_formed_and_says_what_it_is() -> None:
    root = ElementTree.fromstring(svg(PICTURE, "a"))
    assert root.get("role") == "img" and root.get("aria-label") == NAME
    assert NAME in [one.text for one in root.iter() if one.tag.endswith("}text")]


def test_ids_are_its_own_and_all_that_are_used_are_there() -> None:
    text = svg(PICTURE, "a") + svg(PICTURE, "b")
    ids = re.findall(r'<\w+ id="([^"]+)"', text)
    assert ids and len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)
    classes = set(re.findall(r'class="([^"]+)"', text))
    assert {name[0] for name in classes} == {"a", "b"}
    assert all(f".{name} {{" in text for name in classes)


def test_tooltips_are_with_their_marks() -> None:
    root = ElementTree.fromstring(svg(PICTURE, "a"))
    marks = {
        group[0].text: [child.tag.partition("}")[2] for child in group[1:]]
        for group in root.iter()
        if len(group) and group[0].tag.endswith("}title")
    }
    assert marks["bar: 3.14159"] == ["path"]
    assert marks[NAME][-1] == "use"
    assert marks["a line"][0] == "path"


def test_a_page_chooses_the_colours_a_file_has_its_own() -> None:
    alone, themed = svg(PICTURE, "a"), svg(PICTURE, "a", THEME)
    assert INK in alone and "var(" not in alone and "pt" in re.search("<svg[^>]*>", alone)[0]
    assert "var(--ink)" in themed and "var(--page)" in themed
    assert not re.search(r": #\w{6}", themed)


def test_the_same_picture_is_the_same_file() -> None:
    assert svg(PICTURE, "a") == svg(PICTURE, "a")
