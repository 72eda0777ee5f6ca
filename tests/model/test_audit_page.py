"""The picture of an audit: whole, asking for nothing, and true to the numbers that it holds."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ropewalk.model.inspect import audit_arms
from ropewalk.model.inspect.audit import Audit, AuditStep, Entry, Touched, audit
from ropewalk.model.inspect.audit_page import panel, to_html
from ropewalk.model.inspect.audit_report import HEADLINE, Report, as_json, summary

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


class Tags(HTMLParser):
    """Fails on a tag that is not closed in order; remembers texts of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attributes) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def step(**changes) -> AuditStep:
    usual = AuditStep(4, 1, (Touched(3, 2, 2),), (), (), (), (), 3, 6, 0)
    return replace(usual, **changes)


def drawn(*steps: AuditStep) -> list[tuple[str, float, float]]:
    """Class, first position and how many positions, of each rectangle of the last row."""
    text = panel(0, Audit("rope", "", None, steps))
    width = float(re.search(r'data-width="([\d.]+)"', text)[1])
    left = float(re.search(r'data-left="([\d.]+)"', text)[1])
    found = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', text)
    start = max(index for index, (kind, *_) in enumerate(found) if kind == "kept")
    return [
        (kind, round((float(x) - left) / width), round(float(across) / width))
        for kind, x, _, across in found[start + 1 :]
    ]


def test_the_page_is_whole(page) -> None:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    assert [tag for tag, _ in tags.seen].count("svg") == len(NAMES)
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")


def test_the_page_asks_for_nothing(page) -> None:
    tags = Tags()
    tags.feed(page)
    for _, attributes in tags.seen:
        assert not {"src", "href", "srcset", "data", "action"} & attributes.keys()
    assert "://" not in page and "@import" not in page and "url(" not in page
    assert "fetch(" not in page and "XMLHttpRequest" not in page
    assert "default-src 'none'" in page


def test_the_page_carries_the_headline_and_the_reports_numbers(page, report) -> None:
    assert HEADLINE.replace("'", "&#x27;") in page
    data = re.search(r'<script type="application/json" id="audit">(.*?)</script>', page)[1]
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
    text = panel(0, Audit("rope", "", None, (step(**changes),)))
    assert f">{badge}</span>" in text and words in text


def test_the_trained_length_is_marked_where_the_run_passes_it() -> None:
    steps = tuple(step(length=length) for length in (3, 4, 5))
    assert 'class="trained"' in panel(0, Audit("a", "", 4, steps))
    assert 'class="trained"' not in panel(0, Audit("a", "", 9, steps))
    assert 'class="trained"' not in panel(0, Audit("a", "", None, steps))
