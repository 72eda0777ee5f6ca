import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from ropewalk.load_tests.common.types import Point
from ropewalk.load_tests.report.charts import WIDTH
from ropewalk.load_tests.report.page import main, page
from ropewalk.load_tests.report.result import read, write
from tests.load_tests.made_up import ENCODINGS, counted, failed, longctx, result
from tests.markup import elements

THREE = {"nope": 1, "rope": 1.05, "t5": 1.2}
LONGCTX = result(THREE, longctx(512, 2048))
HOSTILE = '<script>alert("1")</script>'
VOID = {"meta", "link", "br"}


def tags(text: str) -> list[str]:
    return [tag for tag, _ in elements(text, VOID)]


@cache
def whole() -> str:
    return page(LONGCTX)


def test_a_page_is_whole_and_asks_for_nothing_else():
    text = whole()
    seen = tags(text)
    assert "script" not in seen
    assert "link" not in seen
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!#)", text)
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(chart)
    assert seen.count("details") == seen.count("section") + 1


def test_both_themes_have_every_colour_that_is_used():
    text = whole()
    light, dark = text.split("@media (prefers-color-scheme: dark)")[:2]
    dark = dark.split("body {")[0]
    for name in set(re.findall(r"var\((--\w+)\)", text)):
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_it_says_what_was_measured_and_how_to_do_it_again():
    text = whole()
    assert "<code>ropewalk bench --workload longctx</code>" in text
    assert "1234abc" in text
    assert "nope (the baseline), rope, t5" in text
    assert "24, in 4 rounds" in text
    assert "m-t5" in text
    assert "No warnings" in text


def test_findings_are_listed_first_with_a_link_to_their_plot():
    text = whole()
    first = text.index("At 2,048 tokens of context, t5 costs")
    assert first < text.index("<svg")
    links = re.findall(r'<a href="#([^"]+)"', text)
    assert links[0] == "longctx"
    assert all(f'<section id="{key}">' in text for key in links)


def test_warnings_and_disagreements_are_there_each_once(outlined):
    counters = {variant: {} for variant in THREE}
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


def test_what_others_wrote_is_escaped():
    variants = {HOSTILE: {"encoding": HOSTILE, "model": HOSTILE}, "nope": ENCODINGS["nope"]}
    points = [Point("chat", HOSTILE)]
    whole = result({HOSTILE: 1.5, "nope": 1}, points, variants=variants)
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
            result(dict.fromkeys(SETTINGS, 1), longctx(512, 2048), variants=SETTINGS),
            "t5:table",
            "e",
        ),
        result({"rope": 1}, longctx(512, 2048)),
        failed(failed(failed(LONGCTX, "nope", "e"), "rope", "e"), "t5", "e"),
        replace(LONGCTX, runs=()),
    ],
    ids=["one setting served", "one variant", "nothing served", "nothing measured"],
)
def test_a_page_of_little(whole):
    assert "h1" in tags(page(whole))


def test_eight_variants_stay_small():
    eight = {"nope": 1} | {f"variant {i}": 1 + i / 50 for i in range(7)}
    assert len(page(result(eight, longctx(512, 1024, 2048, 4096, 8192), rounds=5))) < 400_000


@pytest.fixture
def stored(tmp_path):
    write(tmp_path / "result.json", LONGCTX)
    return tmp_path


def test_the_command_writes_the_page_of_a_file(stored, outlined):
    out = stored / "report.html"
    assert main([str(stored / "result.json"), str(out)]) == 0
    assert out.read_text(encoding="utf-8") == page(read(stored / "result.json"))


def test_the_command_writes_one_plot_for_a_readme(stored):
    out = stored / "plot.svg"
    assert main([str(stored / "result.json"), "--plot", "longctx", str(out)]) == 0
    root = ElementTree.parse(out).getroot()
    assert float(root.get("width").removesuffix("pt")) == pytest.approx(2 * 72 * WIDTH)


def test_a_plot_that_is_not_there_is_refused_with_those_that_are(stored, capsys):
    out = stored / "plot.svg"
    assert main([str(stored / "result.json"), "--plot", "shift", str(out)]) == 2
    assert "there are: longctx, longctx-first" in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_holds_no_load_test_is_refused(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    assert main([str(tmp_path / "other.json"), str(tmp_path / "report.html")]) == 2
    assert "is it a file of ropewalk bench?" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json"), str(tmp_path / "report.html")]) == 2
