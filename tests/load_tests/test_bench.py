import io
import json
import shlex
import signal
import socket
import sys

import pytest

from ropewalk.load_tests.client.facts import Facts
from ropewalk.load_tests.client.process import StartFailed
from ropewalk.load_tests.report.result import read
from ropewalk.load_tests.run import bench
from ropewalk.load_tests.run.bench import main, sizes_within
from ropewalk.load_tests.run.options import parser
from ropewalk.load_tests.workload.workloads import EXTRAPOLATION, Sizes
from ropewalk.model.family.training import recipe
from tests.load_tests.sse_server import good, serving, whole

SMALL = ["--prompt-tokens", "4", "--output-tokens", "3", "--runs", "2", "--prompt-form", "ids"]
SMALL += ["--requests-per-worker", "2", "--arrivals", "4", "--prefixes", "2"]


@pytest.fixture
def measure(capsys, tmp_path, request):
    """Measures a server: the status, what was printed, the result, and what the server saw."""
    out = tmp_path / "out"

    def run(*options: str, answer=good, drawn=False):
        if not drawn:
            request.getfixturevalue("outlined")
        with serving(answer) as running:
            url = f"http://127.0.0.1:{running.port}"
            status = main(["--base-url", url, *SMALL, "--out", str(out), *options])
        path = out / "result.json"
        result = json.loads(path.read_text()) if path.exists() else None
        return status, capsys.readouterr(), result, running

    return run


def result_runs(tmp_path):
    return read(tmp_path / "out" / "result.json").runs


def measured_bodies(running) -> list[dict]:
    """Without the warm-up's."""
    return [body for body in running.bodies if body["max_tokens"] == 3]


def test_a_table_and_both_files(measure, tmp_path):
    status, captured, result, running = measure(drawn=True)
    assert status == 0
    assert "stream" in captured.out
    assert "TTFT" in captured.out
    assert str(tmp_path / "out" / "report.html") in captured.out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<svg" in page
    assert "tiny" in page
    assert [run["variant"] for run in result["runs"]] == ["tiny", "tiny"]
    assert result["baseline"] is None
    assert "round 2 of 2, tiny, stream sync" in captured.err
    # ids stay inside the vocabulary that /v1/models tells
    assert max(max(body["prompt"]) for body in running.bodies) < 1000
    prompts = [str(body["prompt"]) for body in running.bodies]
    assert len(set(prompts)) == len(prompts) == 4 + 2 * 2


def test_a_result_is_saved_though_it_cannot_be_printed(outlined, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    with serving() as running, pytest.raises(UnicodeEncodeError):
        main(["--base-url", f"http://127.0.0.1:{running.port}", *SMALL, "--out", str(tmp_path)])
    assert len(read(tmp_path / "result.json").runs) == 2
    assert (tmp_path / "report.html").exists()


def test_models_are_variants_that_get_the_same_prompts(measure):
    status, _, result, running = measure("--models", "tiny,other")
    assert status == 0
    assert (list(result["variants"]), result["baseline"]) == (["tiny", "other"], "tiny")
    sent = {
        name: [body["prompt"] for body in measured_bodies(running) if body["model"] == name]
        for name in ("tiny", "other")
    }
    assert sent["tiny"] == sent["other"]


def test_the_variant_without_an_encoding_is_the_baseline(measure):
    cards = [{"id": "r", "encoding": "rope"}, {"id": "n", "encoding": "nope"}]

    def answer(path, body):
        return whole("200 OK", {"data": cards}) if path == "/v1/models" else good(path, body)

    _, _, result, _ = measure("--models", "r,n", answer=answer)
    assert result["baseline"] == "n"
    assert result["variants"]["r"]["encoding"] == "rope"


def test_servers_are_told_apart(measure):
    with serving() as second:
        url = f"http://127.0.0.1:{second.port}"
        status, _, result, first = measure("--base-url", url)
    assert status == 0
    ports = [first.port, second.port]
    assert list(result["variants"]) == [f"tiny@127.0.0.1:{port}" for port in ports]
    assert len(measured_bodies(first)) == len(measured_bodies(second)) == 4


def test_a_server_named_twice_is_one(outlined, tmp_path):
    with serving() as running:
        url = f"http://127.0.0.1:{running.port}"
        options = ("--base-url", url, "--base-url", f"{url}/v1", *SMALL, "--runs", "1")
        assert main([*options, "--out", str(tmp_path)]) == 0
    assert list(read(tmp_path / "result.json").variants) == ["tiny"]


def test_several_workloads_and_profiles(measure, tmp_path):
    options = ("--workload", "stream,cancel", "--profile", "closed:2,poisson:200")
    status, _, _, _ = measure(*options)
    assert status == 0
    cells = {(run.point.label, run.profile.label) for run in result_runs(tmp_path)}
    assert cells == {(a, b) for a in ("stream", "cancel") for b in ("closed:2", "poisson:200")}


def test_a_sweep_measures_from_one_request_to_many(measure, tmp_path):
    status, captured, _, _ = measure("--profile", "sweep", "--runs", "1")
    assert status == 0
    kinds = sorted(run.profile.kind for run in result_runs(tmp_path))
    assert kinds == ["closed", *["poisson"] * 4, "sync"]
    assert "finding the rates, tiny, stream closed:2" in captured.err


def test_options_reach_the_wire(measure):
    options = ("--models", "other", "--no-ignore-eos", "--prompt-form", "text", "--api-key", "k")
    status, _, _, running = measure(*options)
    assert status == 0
    body = running.bodies[-1]
    assert body["model"] == "other"
    assert "ignore_eos" not in body
    assert len(body["prompt"].split()) == 4
    assert "Bearer k" in running.heads[-1]


@pytest.mark.parametrize("key", [["--api-key", "sesame"], ["--api-key=sesame"]])
def test_the_key_is_nowhere_in_the_result(measure, tmp_path, key):
    _, captured, result, _ = measure(*key, drawn=True)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "sesame" not in captured.out + json.dumps(result) + page


def test_the_command_can_be_typed_again_and_another_seed_sends_other_prompts(measure):
    _, _, result, first = measure("--workload", "cancel")
    words = shlex.split(result["command"])
    assert words[:2] == ["ropewalk", "bench"]
    seed = parser().parse_args(words[2:]).seed
    _, _, _, second = measure("--workload", "cancel", "--seed", seed)
    _, _, _, other = measure("--workload", "cancel", "--seed", f"{seed}x")
    sent = [sorted(str(body["prompt"]) for body in each.bodies) for each in (first, second, other)]
    assert sent[0] == sent[1] and not set(sent[0]) & set(sent[2])


def failing(*places: int):
    """A server whose completions at `places`, counted from 1, go wrong."""
    count = 0

    def answer(path, body):
        nonlocal count
        count += path == "/v1/completions"
        wrong = path == "/v1/completions" and count in places
        return whole("500 No", {"error": "oh"}) if wrong else good(path, body)

    return answer


def test_some_failures_are_status_1_and_shown(measure, tmp_path):
    status, captured, _, _ = measure(answer=failing(6))
    assert status == 1
    assert "3/4" in captured.out
    assert "status 500" in (tmp_path / "out" / "report.html").read_text()


def test_nothing_but_failures_is_status_2(measure):
    status, _, _, _ = measure(answer=failing(*range(5, 99)))
    assert status == 2


def test_nobody_there_is_status_2_and_one_sentence(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        status = main(["--base-url", url, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert status == 2
    assert "cannot connect" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_test_reports_the_runs_until_then(measure, monkeypatch, number):
    real = bench.Runner.run
    runs = 0

    async def interrupted(*arguments):
        nonlocal runs
        runs += 1
        if runs == 2:
            signal.raise_signal(number)
        return await real(*arguments)

    monkeypatch.setattr(bench.Runner, "run", interrupted)
    status, captured, result, _ = measure(answer=failing(5))
    assert status == 130
    assert len(result["runs"]) == 1
    assert "interrupted" in captured.out


def test_a_context_is_outgrown_where_it_is_largest_and_all_else_fits_the_smallest():
    facts = [Facts(512, 512), Facts(2048, 1024), Facts()]
    sizes = sizes_within(Sizes(), facts)
    assert (sizes.context, sizes.trained_context) == (2048, 512)
    assert sizes_within(Sizes(), [Facts()]).context == Sizes().context


def test_what_no_server_has_room_for_is_status_2(measure):
    cards = [{"id": "r", "max_model_len": 64}]

    def answer(path, body):
        return whole("200 OK", {"data": cards}) if path == "/v1/models" else good(path, body)

    options = ("--workload", "longctx", "--contexts", "512")
    status, captured, _, _ = measure(*options, answer=answer)
    assert status == 2
    assert "Left out of longctx 512: r; " in captured.err


def test_the_family_is_started_with_the_context_that_extrapolation_needs(tmp_path, monkeypatch):
    started = []

    def serving(*_, context, **options):
        started.append(context)
        raise StartFailed("enough")

    monkeypatch.setattr(bench, "serving", serving)
    options = ["--workload", "extrapolate", "--out", str(tmp_path)]
    assert main(["--serve", "family", *options]) == 2
    assert started == [max(EXTRAPOLATION) * recipe.CONTEXT]


def test_compare_is_handed_on(monkeypatch):
    told = []
    monkeypatch.setattr(bench.compare, "main", lambda words: told.append(words) or 7)
    assert main(["compare", "a.json", "b.json"]) == 7
    assert told == [["a.json", "b.json"]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--base-url", "https://x"], "is not a base URL"),
        (["--serve", "shape:tiny", "--models", "x"], "drop --base-url and --models"),
        (["--serve", "shape:tiny", "--no-ignore-eos"], "drop them, or --serve"),
        (["--serve", "shape:tiny", "--dialect", "transformers"], "drop them, or --serve"),
        (["--encodings", "rope"], "need --serve"),
        (["--serve", "shape:tiny", "--workload", "extrapolate"], "random weights do not have"),
        (["--dialect", "transformers", "--prompt-form", "ids"], "text prompts only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, options, reason):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
