from dataclasses import replace

import pytest

from ropewalk.load_tests.report.compare import main, parse_condition
from ropewalk.load_tests.report.differences import Difference
from ropewalk.load_tests.report.result import write
from tests.load_tests.made_up import failed, longctx, result

FACTORS = {"nope": 1.0, "rope": 1.05, "t5": 1.3}
POINTS = longctx(512, 2048)
BEFORE = result(FACTORS, POINTS, rounds=5)


@pytest.fixture
def compare(tmp_path, capsys):
    """Status and output of comparing BEFORE with another result."""

    def run(after, *options, before=BEFORE):
        for name, each in (("a", before), ("b", after)):
            write(tmp_path / f"{name}.json", each)
        status = main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options])
        return status, capsys.readouterr().out

    return run


def lines_of(text, variant, metric="tpot_p50"):
    return [line for line in text.splitlines() if f" {variant} " in line and f" {metric} " in line]


def test_the_same_again_is_no_difference(compare):
    status, text = compare(BEFORE, "--fail-on", "tpot_p99>+0.1%")
    assert status == 0
    lines = lines_of(text, "t5")
    assert len(lines) == 2
    assert "15.1 ms  15.1 ms" in lines[0]
    assert all(line.endswith("no difference  nope") for line in lines)
    assert "tpot_p99>+0.1% does not hold" in text


def test_one_variant_that_got_slower(compare):
    status, text = compare(result({**FACTORS, "t5": 1.56}, POINTS, rounds=5))
    assert status == 0  # no condition was given
    assert all("+20." in line or "+19." in line for line in lines_of(text, "t5"))
    assert all(": slower" in line for line in lines_of(text, "t5"))
    assert all(": no difference" in line for line in lines_of(text, "rope"))


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ("tpot_p99>+10%", 1),
        ("tpot_p99>+0%", 1),
        ("tpot_p99<-0%", 0),
        ("tpot_p99>+30%", 0),
        ("tpot_p99<-1%", 0),
        ("output_tokens_per_s<-10%", 1),
        ("output_tokens_per_s<-30%", 0),
    ],
)
def test_a_condition_decides_the_status(compare, condition, status):
    slower = result({**FACTORS, "t5": 1.56}, POINTS, rounds=5)
    found, text = compare(slower, "--fail-on", condition)
    assert found == status
    if status:
        assert f"{condition} holds: longctx 512 sync, t5: " in text


def test_a_condition_needs_the_interval_behind_it(compare):
    noisy = result({**FACTORS, "t5": 1.4}, POINTS, rounds=3, noise=0.3)
    status, text = compare(noisy, "--fail-on", "tpot_p50>+5%")
    assert status == 0
    assert all(": no difference" in line for line in lines_of(text, "t5"))


def test_a_slower_machine_shows_in_the_baseline_alone(compare):
    slower = result(
        {variant: 1.4 * factor for variant, factor in FACTORS.items()}, POINTS, rounds=5
    )
    status, text = compare(slower, "--fail-on", "tpot_p50>+10%")
    assert status == 1  # of the baseline
    assert all(": slower" in line for line in lines_of(text, "nope"))
    assert all(": no difference" in line for line in lines_of(text, "t5"))
    _, plain = compare(slower, "--plain")
    assert all(": slower" in line for line in lines_of(plain, "t5"))


def test_what_is_in_one_result_alone_is_said(compare):
    status, text = compare(result({"nope": 1.0, "alibi": 1.1}, longctx(512, 8192), rounds=5))
    assert status == 0
    assert "Only in the first result: rope, t5." in text
    assert "Only in the second result: alibi." in text
    assert "Measured only in the second result: longctx 8,192 sync." in text


def test_another_machine_is_said(compare):
    _, text = compare(replace(BEFORE, environment={"processor": "one core"}))
    assert "two cores and one core; the results come from different machines" in text


def test_a_variant_that_fails_never_passes(compare):
    status, text = compare(failed(BEFORE, "t5", "status 500"), "--fail-on", "tpot_p50>+10%")
    assert status == 2
    assert "nothing can be concluded about longctx 512 sync t5" in text
    assert "40 requests of t5 failed in the second result." in text


def test_a_variant_that_fails_in_both_results_never_passes(compare):
    both = failed(BEFORE, "t5", "status 500")
    status, text = compare(both, "--fail-on", "tpot_p50>+10%", before=both)
    assert status == 2
    assert "longctx 512 sync t5, of which the second result served nothing" in text


def with_arguments(**arguments):
    return replace(BEFORE, arguments=BEFORE.arguments | arguments)


@pytest.mark.parametrize(
    ("arguments", "others", "told"),
    [
        ({"prompt_tokens": 128}, {"prompt_tokens": 256}, "--prompt-tokens 128 and 256"),
        ({"ignore_eos": True}, {"ignore_eos": False}, "--ignore-eos True and False"),
        ({"serve": "shape:small"}, {"serve": "family"}, "--serve shape:small and family"),
        ({"serve": "shape:a/config.json"}, {"serve": "shape:b/config.json"}, None),
        ({"base_url": ["http://a:1"]}, {"base_url": ["http://b:2"]}, None),
        ({"prompt_tokens": 128}, {}, None),  # a file of before
        ({"context": None}, {"context": 2048}, None),  # what the first had by default
        ({"arrivals": 32}, {"arrivals": 64}, None),  # of loads that this test has none of
        ({"requests_per_worker": 2}, {"requests_per_worker": 4}, "--requests-per-worker 2 and 4"),
    ],
)
def test_results_of_different_tests_never_pass(compare, arguments, others, told):
    one, other = with_arguments(**arguments), with_arguments(**others)
    status, text = compare(other, "--fail-on", "tpot_p99>+10%", before=one)
    assert status == (2 if told else 0)
    assert ("The results are of different tests" in text) == bool(told)
    if told:
        assert f"of different tests: {told}.\n" in text
        assert f"nothing can be concluded about tests with {told}\n" in text
        assert compare(other, before=one)[0] == 0  # no condition was given


def test_what_the_second_result_lacks_never_passes(compare):
    fewer = result({"nope": 1.0, "rope": 1.05}, POINTS, rounds=5)
    status, text = compare(fewer, "--fail-on", "tpot_p99>+10%")
    assert status == 2
    lacking = "longctx 512 sync t5, which the second result lacks; longctx 2,048 sync t5, which"
    assert f"tpot_p99>+10%: nothing can be concluded about {lacking}" in text
    status, text = compare(result(FACTORS, POINTS[:1], rounds=5), "--fail-on", "tpot_p99>+10%")
    assert status == 2
    assert "longctx 2,048 sync nope, which the second result lacks" in text
    assert compare(BEFORE, "--fail-on", "tpot_p99>+10%", before=fewer)[0] == 0  # more is no doubt


def test_survivors_of_more_failures_never_pass(compare):
    runs = [
        replace(one, outcomes=(replace(one.outcomes[0], error="status 500"), *one.outcomes[1:]))
        if one.variant == "t5"
        else one
        for one in BEFORE.runs
    ]
    worse = replace(BEFORE, runs=tuple(runs))
    status, text = compare(worse, "--fail-on", "tpot_p50>+10%")
    assert status == 2
    assert "longctx 512 sync t5, which fails more often in the second result" in text
    assert compare(worse, "--fail-on", "tpot_p50>+10%", before=worse)[0] == 0
    assert compare(BEFORE, "--fail-on", "tpot_p50>+10%", before=worse)[0] == 0


def test_what_could_hide_is_said(compare):
    noisy = result({**FACTORS, "t5": 1.4}, POINTS, rounds=3, noise=0.3)
    _, text = compare(noisy, "--fail-on", "tpot_p50>+5%", "--fail-on", "tpot_p50<-5%")
    assert "(−33.4 to +97.3): no difference" in lines_of(text, "nope")[0]
    where = "could hide behind no difference: longctx 2,048 sync, nope"
    assert "(−92.7 to +500): no difference" in lines_of(text, "nope")[1]
    assert f"tpot_p50>+5% does not hold; +500 % {where}" in text
    assert f"tpot_p50<-5% does not hold; −92.7 % {where}" in text


def test_few_runs_conclude_nothing(compare):
    few = result(FACTORS, POINTS, rounds=2)
    status, text = compare(few, "--fail-on", "tpot_p50>+10%")
    assert status == 2
    assert "Unknown for longctx 512 sync nope, longctx 512 sync rope" in text
    assert "2 rounds have this figure" in text


def test_one_variant_without_a_baseline(compare):
    alone = result({"nope": 1.0}, POINTS, rounds=5)
    status, text = compare(result({"nope": 2.0}, POINTS, rounds=5), before=alone)
    assert status == 0
    assert all(": slower" in line and line.endswith(" –") for line in lines_of(text, "nope"))


def test_unusable_input_is_named(tmp_path, capsys):
    good, bad = tmp_path / "a.json", tmp_path / "bad.json"
    write(good, BEFORE)
    bad.write_text("{}")
    assert main([str(good), str(bad)]) == 2
    assert "bad.json: its kind is not" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), str(good)]) == 2
    write(bad, result({"alibi": 1.0}, POINTS))
    assert main([str(good), str(bad)]) == 2
    assert "no variant was measured at the same point" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["tpot_p99", "tpot_p99>10%", "tpot_p98>+10%", "tpot_p99>-10%", ""])
def test_what_is_no_condition_ends_with_status_2(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["a.json", "b.json", "--fail-on", text])
    assert "write one such as 'tpot_p99>+10%'" in capsys.readouterr().err


def test_a_condition_needs_a_verdict():
    condition = parse_condition("tpot_p99 > +10 %")
    slower = Difference(1.2, 1.15, 1.25, 0.001, "slower")
    assert condition.holds(slower)
    assert not condition.holds(replace(slower, verdict="no difference"))
    assert not condition.holds(replace(slower, value=1.09))
