import json
from dataclasses import replace

import pytest

from ropewalk.load_tests.common.statistics import figures
from ropewalk.load_tests.common.types import Outcome, Point, Profile, Result, Run, ServerView
from ropewalk.load_tests.report.result import BadResult, as_json, from_json, read, write

START = 1234.5  # of the clock: a file begins at 0


def outcome(at=0.0, tokens=3, **changes):
    chunks = tuple((START + at + 0.5 + 0.012345 * n, n + 1) for n in range(tokens))
    values = {
        "intended": START + at,
        "sent": START + at + 0.001,
        "ended": START + at + 2,
        "chunks": chunks,
        "prompt_tokens": 512,
        "output_tokens": tokens,
        "cached_tokens": 16,
    }
    return Outcome(**(values | changes))


def run_of(*outcomes, **changes):
    view = ServerView({'ropewalk_requests_total{finish_reason="length"}': 4.0}, {"u": 0.5}, ("a.",))
    run = Run(
        "rope", Point("longctx", "512", 512), Profile("gamma", 1, 2.5, 0.5), 2,
        outcomes, START, START + 9, view,
    )  # fmt: skip
    return replace(run, **changes)


def result_of(*runs):
    variants = {"nope": {"model": "toy-nope"}, "rope": {"model": "toy-rope"}}
    return Result("ropewalk bench", {"runs": 3}, {"cores": 2}, variants, "nope", runs, ("slow",))


RESULT = result_of(
    run_of(
        outcome(),
        outcome(3, chunks=((START + 4, 1), (START + 4.2, 5)), output_tokens=5),
        outcome(4, chunks=(), error="status 500", cached_tokens=None),
        outcome(5, left=True),
    ),
    run_of(outcome(), server=None, profile=Profile("closed", 4)),
)


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "result.json"
    write(path, RESULT)
    found = read(path)
    assert replace(found, runs=()) == replace(RESULT, runs=())
    for mine, its in zip(found.runs, RESULT.runs, strict=True):
        assert replace(mine, outcomes=(), steady_from=0, steady_to=0) == replace(
            its, outcomes=(), steady_from=0, steady_to=0
        )
        assert (mine.steady_from, mine.steady_to) == (0.0, 9.0)
        assert figures(mine).values == pytest.approx(figures(its).values, abs=2e-6)
    bunched, failed, gone = found.runs[0].outcomes[1:]
    assert bunched.chunks == ((4.0, 1), (4.2, 5))
    assert (failed.error, failed.cached_tokens, failed.chunks) == ("status 500", None, ())
    assert gone.left
    write(tmp_path / "again.json", found)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_what_ran_when_is_kept(tmp_path):
    later = run_of(outcome(60), steady_from=START + 60, steady_to=START + 69)
    write(tmp_path / "result.json", result_of(run_of(outcome()), later))
    first, second = read(tmp_path / "result.json").runs
    assert (first.steady_from, second.steady_from, second.steady_to) == (0.0, 60.0, 69.0)
    assert second.outcomes[0].intended == 60.0


def test_a_long_test_stays_small(tmp_path):
    requests = [outcome(2.0 * n, tokens=64) for n in range(4)]
    counters = {f'ropewalk_some_long_name_{n}{{phase="decode"}}': 123456.0 + n for n in range(60)}
    view = ServerView(counters, {}, ())
    path = tmp_path / "result.json"
    write(path, result_of(*[run_of(*requests, server=view)] * (8 * 3 * 5)))
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "schema is 2 and this program reads 1"),
        (lambda d: d.update(kind="?"), "is it a file of ropewalk bench"),
        (lambda d: d.pop("command"), "command is missing"),
        (lambda d: d.update(baseline="t5"), "baseline is 't5', which is none of its variants"),
        (lambda d: d["runs"][1].update(variant="t5"), r"runs\[1\].variant is 't5'"),
        (lambda d: d["runs"][1].update(round=True), r"runs\[1\].round is true, not a whole"),
        (lambda d: d["runs"][1].update(profile="burst"), r"runs\[1\].profile is 'burst'"),
        (lambda d: d["runs"][0]["requests"][3].pop("sent"), r"requests\[3\].sent is missing"),
        (lambda d: d["runs"][0]["requests"][0].update(gaps=[1, "2"]), r"gaps\[1\] is \"2\""),
        (lambda d: d["runs"][0]["requests"][1].update(tokens=[1]), "1 entries for 2 chunks"),
        (lambda d: d["runs"][0]["server"].update(gauges={}), r"server.gauges is {}, not a list"),
        (
            lambda d: d["runs"][0]["server"].update(counters=["1"]),
            r"counters\[0\] is \"1\", not a num",
        ),
        (lambda d: d["runs"][0]["server"].update(counters=[]), "0 entries for 1 series"),
        (lambda d: d.pop("series"), "series is missing"),
        (lambda d: d.update(variants={"nope": 3, "rope": {}}), "variants.nope is 3"),
        (lambda d: d.update(runs=[7]), r"runs\[0\] is 7, not an object"),
    ],
)
def test_the_field_at_fault_is_named(change, message):
    data = json.loads(json.dumps(as_json(RESULT)))
    change(data)
    with pytest.raises(BadResult, match=message):
        from_json(data)


@pytest.mark.parametrize("text", ["", "[1", "[]", '{"schema": NaN}'])
def test_another_file_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BadResult, match=r"other\.json"):
        read(path)
