import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from load_tests.page import page
from load_tests.terms import Point
from tests.load_tests.made_up import ENCODINGS, counted, failed, longctx, result

THREE = {"nope": 1, "rope": 1.05, "t5": 1.2}
LONGCTX = result(THREE, longctx(512, 2048))
HOSTILE = '<script>alert("1")</script>'
VOID = {"meta", "link", "br"}


class Tags(HTMLParser):
    """Every element is closed by its own end tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(text: str) -> list[str]:
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    return parser.seen


def test_a_page_is_whole_and_asks_for_nothing_else():
    text = page(LONGCTX)
    seen = tags(text)
    assert "script" not in seen
    assert "link" not in seen
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!#)", text)
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(chart)
    assert seen.count("details") == seen.count("section") + 1


def test_both_themes_have_every_colour_that_is_used():
    text = page(LONGCTX)
    light, dark = text.split("@media (prefers-color-scheme: dark)")[:2]
    dark = dark.split("body {")[0]
    for name in set(re.findall(r"var\((--\w+)\)", text)):
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_it_says_what_was_measured_and_how_to_do_it_again():
    text = page(LONGCTX)
    assert "<code>ropewalk bench --workload longctx</code>" in text
    assert "1234abc" in text
    assert "nope (the zero), rope, t5" in text
    assert "24, in 4 blocks" in text
    assert "m-t5" in text


def test_findings_are_listed_first_with_a_link_to_their_plot():
    text = page(LONGCTX)
    first = text.index("At 2,048 tokens of context, t5 costs")
    assert first < text.index("<svg")
    links = re.findall(r'href="#([^"]+)"', text)
    assert links[0] == "longctx"
    assert all(f'<section id="{key}">' in text for key in links)


def test_warnings_and_disagreements_are_there_each_once():
    counters = {arm: {} for arm in THREE}
    text = page(
        replace(
            counted(LONGCTX, counters, "the server counted 3 tokens more."),
            warnings=("the client was late.",),
        )
    )
    assert text.count("the server counted 3 tokens more. (8 runs)") == 3
    assert "<li>the client was late.</li>" in text
    assert text.index("the client was late.") < text.index("<svg")
    assert "No warnings" not in text
    assert "No warnings" in page(LONGCTX)


def test_what_others_wrote_is_escaped():
    arms = {HOSTILE: {"encoding": HOSTILE, "model": HOSTILE}, "nope": ENCODINGS["nope"]}
    points = [Point("chat", HOSTILE)]
    whole = result({HOSTILE: 1.5, "nope": 1}, points, arms=arms)
    whole = failed(whole, "nope", HOSTILE)
    whole = counted(whole, {HOSTILE: {}, "nope": {}}, HOSTILE)
    whole = replace(
        whole, command=HOSTILE, environment={HOSTILE: {"a": HOSTILE}}, warnings=(HOSTILE,)
    )
    assert "script" not in tags(page(whole))


SETTINGS = {
    "nope": {"encoding": "nope"},
    "t5:window": {"encoding": "t5"},
    "t5:table": {"encoding": "t5"},
}


@pytest.mark.parametrize(
    "whole",
    [
        failed(
            result(dict.fromkeys(SETTINGS, 1), longctx(512, 2048), arms=SETTINGS), "t5:table", "e"
        ),
        result({"rope": 1}, longctx(512, 2048)),
        failed(failed(failed(LONGCTX, "nope", "e"), "rope", "e"), "t5", "e"),
        replace(LONGCTX, runs=()),
    ],
    ids=["one setting served", "one arm", "nothing served", "nothing measured"],
)
def test_a_page_of_little(whole):
    tags(page(whole))


def test_eight_arms_stay_small():
    eight = {"nope": 1} | {f"arm {i}": 1 + i / 50 for i in range(7)}
    assert len(page(result(eight, longctx(512, 1024, 2048, 4096, 8192), blocks=5))) < 400_000
