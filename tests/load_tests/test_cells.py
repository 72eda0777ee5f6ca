from dataclasses import replace

from ropewalk.load_tests.common.types import Point, Profile
from ropewalk.load_tests.report.cells import cells
from tests.load_tests.made_up import failed, longctx, result

CHAT = Point("chat", "chat")


def test_cells_are_in_the_order_of_context_and_load():
    made = result({"nope": 1, "rope": 1}, longctx(2048, 512))
    assert [cell.point.context for cell in cells(made)] == [512, 2048]
    profiles = [Profile("poisson", rate=2), Profile("poisson", rate=0.5), Profile("sync")]
    made = result({"nope": 1, "rope": 1}, [CHAT], profiles)
    assert [cell.load for cell in cells(made)] == [1, 0.5, 2]


def test_a_cell_has_its_runs_by_variant_in_the_order_of_the_result():
    made = result({"t5": 1.5, "nope": 1}, longctx(512, 2048), rounds=3)
    first, second = cells(made)
    assert list(first.runs) == ["t5", "nope"]
    assert [len(runs) for runs in second.runs.values()] == [3, 3]


def test_figures_spread_over_the_runs_and_compare_with_the_baseline():
    made = result({"nope": 1, "t5": 1.5}, longctx(512), rounds=5)
    (cell,) = cells(made)
    one = cell.spread("t5", "itl_p50")
    assert one is not None
    assert one.low < one.value < one.high
    against = cell.against("nope", ["t5"], "itl_p50")["t5"]
    assert abs(against.value - 1.5) < 0.02
    assert against.verdict == "slower"


def test_a_variant_is_not_compared_with_itself_nor_without_a_baseline():
    (cell,) = cells(result({"nope": 1, "t5": 1.5}, longctx(512)))
    assert list(cell.against("nope", ["nope", "t5", "absent"], "itl_p50")) == ["t5"]
    assert cell.against(None, ["t5"], "itl_p50") == {}


def test_verdicts_of_one_cell_are_corrected_together():
    variants = {"nope": 1.0, "a little": 1.01} | {f"another {i}": 1.0 for i in range(30)}
    (cell,) = cells(result(variants, longctx(512)))
    assert cell.against("nope", ["a little"], "itl_p50")["a little"].verdict == "slower"
    assert cell.against("nope", variants, "itl_p50")["a little"].verdict == "no difference"


def test_a_variant_that_served_nothing_has_no_figures():
    (cell,) = cells(failed(result({"nope": 1, "t5": 1}, longctx(512)), "t5", "status 500"))
    assert cell.spread("t5", "output_tokens_per_s") is None
    assert cell.against("nope", ["t5"], "output_tokens_per_s")["t5"].verdict == "unknown"
    assert cell.spread("nope", "output_tokens_per_s") is not None


def test_a_cell_is_named_by_what_tells_it_apart():
    (cell,) = cells(result({"nope": 1}, longctx(2048)))
    assert (cell.label, cell.where) == ("longctx 2,048", "At 2,048 tokens of context")
    eight = replace(cell, point=CHAT, profile=Profile("closed", concurrency=8))
    assert (eight.label, eight.where) == ("chat, closed:8", "Under chat, closed:8")
