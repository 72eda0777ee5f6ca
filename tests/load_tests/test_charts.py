import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ropewalk.load_tests.report.charts import (
    Mark,
    Row,
    Series,
    Span,
    bars,
    dots,
    lines,
    standalone,
    timeline,
)
from ropewalk.load_tests.report.svg import LINE, WIDTH, looks, wide

ARMS = ["nope", "rope", 'a<b & "c"', "t5:materialised"]
LOOKS = looks(ARMS, "nope")


def series(factor: float = 1.0) -> list[Series]:
    return [
        Series(
            arm,
            LOOKS[arm],
            tuple(Mark(x, y := factor * (i + x / 512), y - 0.1, y + 0.1, "x") for x in (512, 4096)),
        )
        for i, arm in enumerate(ARMS)
    ]


def rows(*values: float) -> list[Row]:
    return [
        Row(arm, LOOKS[arm], value, value - 1, value + 1, f"{value:+g} %", hollow=value < 2)
        for arm, value in zip(ARMS, values, strict=True)
    ]


def plain(value: float) -> str:
    return f"{value:g}"


SPANS = [Span(arm, LOOKS[arm], i, i + 0.9, arm) for i, arm in enumerate(ARMS)]
CHARTS = {
    "lines": lines("a title", series(), "tokens", plain),
    "differences": lines("a title", series(3.0), "tokens", plain, centred=True),
    "free": lines("a title", series(), "tokens/s", plain, free=True),
    "dots": dots("a title", {"one": rows(1, 2, 3, 40), "two": rows(0, 0, 0, 0)}, "%", plain),
    "centred": dots("a title", {"": rows(1, 2, 3, 40)}, "%", plain, centred=True),
    "bars": bars("a title", rows(0, 0, 10, 20)),
    "no bars": bars("a title", rows(0, 0, 0, 0)),
    "timeline": timeline("a title", SPANS, "minutes"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_well_formed_named_and_within_its_borders(name):
    root = ElementTree.fromstring(CHARTS[name])
    assert root.get("aria-label") == "a title"
    assert root.get("role") == "img"
    _, _, wide, high = map(float, root.attrib["viewBox"].split())
    assert wide == WIDTH
    for text in root.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= wide
        assert 0 <= float(text.attrib["y"]) <= high
    for line in root.iter("line"):
        assert 0 <= float(line.attrib["y1"]) <= high
        assert 0 <= float(line.attrib["x1"]) <= wide


@pytest.mark.parametrize("name", CHARTS)
def test_every_arm_is_named_beside_its_data(name):
    written = [text.text for text in ElementTree.fromstring(CHARTS[name]).iter("text")]
    assert set(ARMS) <= set(written)


@pytest.mark.parametrize("name", CHARTS)
def test_names_do_not_touch(name):
    texts = ElementTree.fromstring(CHARTS[name]).iter("text")
    heights = sorted(float(text.attrib["y"]) for text in texts if text.text in ARMS)
    assert all(after - before >= LINE - 0.2 for before, after in pairwise(heights))


def test_every_mark_tells_its_numbers():
    titles = [title.text for title in ElementTree.fromstring(CHARTS["lines"]).iter("title")]
    assert titles.count("rope: x") == 2


def test_what_does_not_differ_is_hollow():
    # One of four rows, whose marker is drawn beside its name and at its place.
    assert CHARTS["centred"].count('class="open"') == 2
    assert 'class="open"' not in dots("", {"": rows(5, 5, 5, 5)}, "", plain)


def test_what_does_not_differ_is_hollow_on_a_line_too():
    marks = (Mark(1, 0, -1, 1, "", hollow=True), Mark(2, 5, 4, 6, ""))
    drawn = lines("", [Series("rope", LOOKS["rope"], marks)], "", plain, centred=True)
    # The last full one is beside the name.
    assert re.findall('class="(open|full)"', drawn) == ["open", "full", "full"]


def test_higher_values_are_drawn_higher_and_longer():
    groups = re.findall(r'points="([^"]+)"', CHARTS["lines"])
    ends = [float(points.split()[-1].split(",")[1]) for points in groups]
    assert ends == sorted(ends, reverse=True)
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', CHARTS["bars"])]
    assert widths[:2] == [0, 0]
    assert widths[3] == pytest.approx(2 * widths[2], abs=0.2)


def test_small_differences_are_seen_beside_a_large_one():
    drawn = dots("", {"": rows(1, 2, 3, 400)}, "", plain, centred=True)
    assert ">100<" in drawn
    assert ">1<" in drawn


def test_latencies_that_differ_thirtyfold_are_on_a_logarithmic_axis():
    marks = tuple(Mark(x, y, y, y, "") for x, y in ((1, 5.0), (2, 5000.0)))
    drawn = lines("", [Series("rope", LOOKS["rope"], marks)], "", plain)
    assert ">1000<" in drawn
    assert ">0<" not in drawn


def test_a_stray_run_does_not_stretch_a_logarithmic_axis():
    marks = (Mark(1, 5, 0.001, 6, ""), Mark(2, 5000, 5000, 5000, ""))
    drawn = lines("", [Series("rope", LOOKS["rope"], marks)], "", plain)
    assert ">0.1<" not in drawn
    heights = [float(y) for y in re.findall(r'class="interval"[^>]* y1="([\d.]+)"', drawn)]
    assert max(heights) <= 244  # where the axis is


def test_labels_below_do_not_touch():
    drawn = dots("", {"": rows(-99, 99, 3, 1)}, "", lambda at: f"{at:+g} %", centred=True)
    texts = ElementTree.fromstring(drawn).iter("text")
    below = [
        (float(t.attrib["x"]), t.text or "") for t in texts if t.get("text-anchor") == "middle"
    ]
    assert "+0 %" in [label for _, label in below]
    edges = [(x - wide(label) / 2, x + wide(label) / 2) for x, label in sorted(below) if label]
    assert all(right <= left for (_, right), (left, _) in pairwise(edges))


def test_one_point_and_one_arm_are_drawn_too():
    drawn = lines("", [Series("rope", LOOKS["rope"], (Mark(8, 1, 1, 1, ""),))], "", plain)
    assert ">8<" in drawn


def test_a_file_has_its_colours_and_its_ground():
    text = standalone([CHARTS["lines"], CHARTS["dots"]])
    root = ElementTree.fromstring(text)
    assert float(root.attrib["width"]) == 2 * WIDTH
    assert "--a1: #" in text
    assert "prefers-color-scheme" not in text
    assert [child.get("x") for child in root if child.tag.endswith("}svg")] == ["0", f"{WIDTH:g}"]
