import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ropewalk.load_tests.report.charts import (
    WIDTH,
    Mark,
    Series,
    bars,
    dots,
    lines,
    side_by_side,
    timeline,
)
from ropewalk.report.figure import PAGE, SMALL, looks
from ropewalk.report.statistics import Estimate
from ropewalk.report.svg import svg

VARIANTS = ["nope", "rope", 'a<b & "c"', "t5:materialised"]
LOOKS = looks(VARIANTS, "nope")


def flat(value: float) -> Estimate:
    return Estimate(value, value, value)


def series(factor: float = 1.0) -> list[Series]:
    marks = {
        variant: [
            Mark(Estimate(y := factor * (i + x / 512), y - 0.1, y + 0.1), "x", x=x)
            for x in (512, 4096)
        ]
        for i, variant in enumerate(VARIANTS)
    }
    return [Series(variant, LOOKS[variant], own) for variant, own in marks.items()]


def rows(*values: float) -> list[Series]:
    return [
        Series(
            variant,
            LOOKS[variant],
            [Mark(Estimate(v, v - 1, v + 1), "", f"{v:+g} %", hollow=v < 2)],
        )
        for variant, v in zip(VARIANTS, values, strict=True)
    ]


def plain(value: float) -> str:
    return f"{value:g}"


def drawn(chart) -> str:
    return svg(chart, "c")


def elements(text: str, name: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(text).iter() if one.tag.endswith(f"}}{name}")]


def style(element: ElementTree.Element, text: str) -> str:
    """Its own, or that of its class; a mark's is that of its uses."""
    rules = dict(re.findall(r"\.(\w+) {(.*?)}", text))
    return element.get("style") or rules.get(element.get("class"), "")


def hollow(text: str) -> list[bool]:
    """Whether each mark is."""
    return [f"fill: {PAGE}" in style(use, text) for use in elements(text, "use")]


def ways(text: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a chart of lines, from left to right."""
    return [
        [tuple(map(float, at.split())) for at in re.split("[ML]", path.get("d"))[1:]]
        for path in elements(text, "path")
        if "stroke-width: 1.4" in style(path, text)
    ]


SPANS = [
    Series(variant, LOOKS[variant], [Mark(Estimate(i, i, i + 0.9), variant)])
    for i, variant in enumerate(VARIANTS)
]
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


@pytest.fixture(scope="module", params=CHARTS)
def chart(request) -> str:
    return drawn(CHARTS[request.param])


def test_a_chart_is_well_formed_named_and_within_its_borders(chart):
    root = ElementTree.fromstring(chart)
    assert root.get("aria-label") == "a title"
    assert root.get("role") == "img"
    _, _, wide, high = map(float, root.attrib["viewBox"].split())
    assert wide == pytest.approx(72 * WIDTH)
    for text in elements(chart, "text"):
        assert 0 <= float(text.attrib["x"]) <= wide
        assert 0 <= float(text.attrib["y"]) <= high


def test_every_variant_is_named_beside_its_data_and_names_do_not_touch(chart):
    texts = elements(chart, "text")
    assert set(VARIANTS) <= {text.text for text in texts}
    heights = sorted(float(text.attrib["y"]) for text in texts if text.text in VARIANTS)
    assert all(after - before >= SMALL for before, after in pairwise(heights))


def test_every_mark_tells_its_numbers():
    titles = [title.text for title in elements(drawn(CHARTS["lines"]), "title")]
    assert titles.count("rope: x") == 2


def test_what_does_not_differ_is_hollow():
    assert hollow(drawn(CHARTS["centred"])) == [True, False, False, False]
    assert not any(hollow(drawn(dots("", {"": rows(5, 5, 5, 5)}, "", plain))))


def test_what_does_not_differ_is_hollow_on_a_line_too():
    marks = (Mark(Estimate(0, -1, 1), "", x=1, hollow=True), Mark(Estimate(5, 4, 6), "", x=2))
    found = drawn(lines("", [Series("rope", LOOKS["rope"], marks)], "", plain, centred=True))
    # The first is beside the name.
    assert hollow(found) == [False, True, False]


def test_higher_values_are_drawn_higher_and_longer():
    ends = [points[-1][1] for points in ways(drawn(CHARTS["lines"]))]
    assert len(ends) == 4 and ends == sorted(ends, reverse=True)
    found = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)V', drawn(CHARTS["bars"]))[1:]
    widths = [float(end) - float(start) for start, end in found]
    assert widths[:2] == [0, 0]
    assert widths[3] == pytest.approx(2 * widths[2], abs=0.2)


def test_small_differences_are_seen_beside_a_large_one():
    found = drawn(dots("", {"": rows(1, 2, 3, 400)}, "", plain, centred=True))
    assert ">100<" in found
    assert ">1<" in found


def test_latencies_that_differ_thirtyfold_are_on_a_logarithmic_axis():
    marks = tuple(Mark(flat(y), "", x=x) for x, y in ((1, 5.0), (2, 5000.0)))
    found = drawn(lines("", [Series("rope", LOOKS["rope"], marks)], "", plain))
    assert ">1000<" in found
    assert ">0<" not in found


def test_a_stray_run_does_not_stretch_a_logarithmic_axis():
    marks = (Mark(Estimate(5, 0.001, 6), "", x=1), Mark(flat(5000), "", x=2))
    found = drawn(lines("", [Series("rope", LOOKS["rope"], marks)], "", plain))
    assert ">0.1<" not in found
    lowest = max(float(text.attrib["y"]) for text in elements(found, "text") if text.text == "1")
    (bar,) = [path for path in elements(found, "path") if "1.2" in style(path, found)]
    assert all(float(at.split()[1]) <= lowest for at in re.split("[ML]", bar.get("d"))[1:])


def test_labels_below_do_not_touch():
    found = drawn(dots("", {"": rows(-99, 99, 3, 1)}, "", lambda at: f"{at:+g} %", centred=True))
    below = [
        (float(text.attrib["x"]), text.text)
        for text in elements(found, "text")
        if "text-anchor: middle" in style(text, found)
    ]
    assert "+0 %" in [label for _, label in below]
    edges = [(x - 2.9 * len(label), x + 2.9 * len(label)) for x, label in sorted(below)]
    assert all(right <= left for (_, right), (left, _) in pairwise(edges))


def test_one_point_and_one_variant_are_drawn_too():
    found = drawn(lines("", [Series("rope", LOOKS["rope"], [Mark(flat(1), "", x=8)])], "", plain))
    assert ">8<" in found


def test_charts_side_by_side_are_one_file_with_its_colours_and_its_ground():
    text = drawn(side_by_side([CHARTS["lines"], CHARTS["dots"]]))
    root = ElementTree.fromstring(text)
    assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(2 * 72 * WIDTH)
    assert LOOKS["rope"].color in text and PAGE in text
    assert "prefers-color-scheme" not in text and "var(" not in text
    starts = [float(one.attrib["x"]) for one in elements(text, "text") if one.text == "a title"]
    assert starts[1] - starts[0] == pytest.approx(72 * WIDTH, abs=8)
