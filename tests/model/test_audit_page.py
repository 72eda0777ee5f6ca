"""The picture of an audit: whole, asking for nothing, and true to the numbers that it holds."""

import json
import re
from dataclasses import replace

import pytest

from ropewalk.model.inspect import audit_arms
from ropewalk.model.inspect.audit import Audit, AuditStep, Entry, Touched, audit
from ropewalk.model.inspect.audit_page import panel, rectangles, to_html
from ropewalk.model.inspect.audit_report import HEADLINE, Report, as_json, summary
from ropewalk.report.figure import THEME
from ropewalk.report.svg import svg
from tests.markup import elements

VOID = {"meta", "rect", "line"}  # of those on the page; in SVG they close themselves
NAMES = ("rope", "rope:dynamic", "rope:dynamic-rewrite", "t5", "nope")


@pytest.fixture(scope="module")
def report() -> Report:
    decoder = audit_arms.tiny(12)
    arms = [audit_arms.arm(name, decoder, 12, 10) for name in NAMES]
    audits = tuple(audit(arm, [5, 200, 31, 7, 88, 120, 3, 64], 4) for arm in arms)
    return Report("tiny </script><b>", "a & b", decoder.config, audits)


@pytest.fixture(scope="module")
def page(report) -> str:
    return to_html(report)


def step(**changes) -> AuditStep:
    usual = AuditStep(4, 1, (Touched(3, 2, 2),), (), (), (), (), 3, 6, 0)
    return replace(usual, **changes)


def drawn(step: AuditStep) -> list[tuple[str, int, int]]:
    """Colour, first position and how many positions, of each rectangle."""
    return [(kind, *places) for kind, *places, _, _ in rectangles(step) if kind != "kept"]


def shown(audit: Audit) -> str:
    """All texts of its section, and the picture."""
    found = panel(0, audit)
    return f"{found.badge[1]} {' '.join(found.findings)} {svg(found.pictures[0], 'p', THEME)}"


def test_the_page_is_whole(page) -> None:
    assert [tag for tag, _ in elements(page, VOID)].count("svg") == len(NAMES)
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")


def test_the_page_asks_for_nothing(page) -> None:
    for _, attributes in elements(page, VOID):
        assert not {"src", "href", "srcset", "data", "action"} & attributes.keys()
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")  # the name of a language
    assert "@import" not in page and "url(" not in page
    assert "fetch(" not in page and "XMLHttpRequest" not in page
    assert "default-src 'none'" in page


def test_the_page_carries_the_headline_and_the_reports_numbers(page, report) -> None:
    assert HEADLINE.replace("'", "&#39;") in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    assert json.loads(data) == as_json(report)
    assert "tiny &lt;/script&gt;&lt;b&gt;" in page and "a &amp; b" in page


def test_json_survives_the_way_through_text(report) -> None:
    told = as_json(report)
    assert json.loads(json.dumps(told)) == told
    arms = {arm["encoding"]: arm for arm in told["arms"]}
    assert list(arms) == list(NAMES)
    assert arms["rope:dynamic"]["steps"][3]["stale"][0] == [1, 4, 2]
    assert arms["rope:dynamic"]["trained_length"] == 10


def test_sums_count_an_entry_in_every_step(report) -> None:
    sums = {one.name: summary(one) for one in report.audits}
    # Positions 1 to 9 at length 11 and 1 to 10 at length 12: four keys and two values each.
    assert sums["rope:dynamic"].should_change == sums["rope:dynamic"].stale == (9 + 10) * 6
    assert sums["rope:dynamic"].changed == 0
    assert sums["rope:dynamic-rewrite"].changed == (9 + 10) * 4
    assert sums["rope"].written_per_token == 8 and sums["rope"].steps == 5
    assert sums["t5"].bias_values_at_end == 2 * 4 * 12


def test_cells_light_up_where_something_happened() -> None:
    assert drawn(step()) == [("w", 3, 1), ("t", 3, 1)]
    assert drawn(step(first_term=0)) == [("t", 0, 3), ("w", 3, 1), ("t", 3, 1)]
    stale = (Touched(1, 4, 0), Touched(2, 4, 2))
    assert drawn(step(stale=stale, first_term=4)) == [("s", 1, 2), ("w", 3, 1)]
    changed = step(changed=(Touched(0, 1, 0),), unexpected=(Entry("key", 0, 0, 0),), first_term=4)
    assert drawn(changed) == [("c", 0, 1), ("x", 0, 1), ("w", 3, 1)]


@pytest.mark.parametrize(
    ("changes", "badge", "words"),
    [
        ({}, "0 changed", "0 earlier entries changed, 0 should have changed; positional terms for"),
        ({"first_term": 4}, "0 changed", "no positional term"),
        ({"first_term": 0}, "0 changed", "positional terms for all 4 positions"),
        ({"first_term": 2}, "0 changed", "positional terms for the newest 2 positions"),
        ({"stale": (Touched(1, 1, 0),)}, "goes stale", ""),
        ({"changed": (Touched(1, 1, 0),)}, "keys rewritten", "1 earlier entries changed"),
        ({"unexpected": (Entry("key", 0, 0, 0),)}, "corrupted", ""),
    ],
)
def test_each_panel_says_what_became_of_it(changes, badge, words) -> None:
    text = shown(Audit("rope", "", None, (step(**changes),)))
    assert text.startswith(badge) and words in text


def test_the_trained_length_is_marked_where_the_run_passes_it() -> None:
    steps = tuple(step(length=length) for length in (3, 4, 5))
    assert "dasharray" in shown(Audit("a", "", 4, steps))
    assert "dasharray" not in shown(Audit("a", "", 9, steps))
    assert "dasharray" not in shown(Audit("a", "", None, steps))


def test_a_cell_is_where_the_script_looks_for_it() -> None:
    steps = tuple(step(length=length, first_term=length) for length in (4, 5))
    (picture,) = panel(0, Audit("a", "", None, steps)).pictures
    image = svg(picture, "p", THEME)
    width, height, left, top = (
        float(re.search(rf'data-{name}="([\d.]+)"', image)[1])
        for name in ("width", "height", "left", "top")
    )
    (box,) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', image)
    assert float(box[0]) == pytest.approx(left + 5 * width + 2)
    for row in (0, 1):  # position 3 was written; places are rounded to a tenth
        x, y, end = left + 3 * width, top + row * height, left + 4 * width
        assert f"M{x:.10g} {y:.10g}H{end:.10g}V" in image
