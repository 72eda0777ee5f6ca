"""The load for replicas, against scripted servers; and what a check behind Ray finds fault with."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ropewalk.load_tests.client.client import Unreachable
from ropewalk.load_tests.run import behind_ray, behind_routers
from ropewalk.load_tests.run.replicas import (
    Answer,
    Sent,
    Sizes,
    disturbed_table,
    faults,
    main,
    requests_of,
    send_disturbed,
    server_at,
)
from tests.load_tests.sse_server import event, serving, stream, text_event, usage_event, whole

SMALL = ("--requests", "12", "--prefixes", "3", "--workers", "2", "--timeout", "5")
METRICS = """\
# TYPE ropewalk_prefix_cache_hit_tokens_total counter
ropewalk_prefix_cache_hit_tokens_total{model_name="m"} %d.0
# TYPE ropewalk_prompt_tokens_total counter
ropewalk_prompt_tokens_total{model_name="m",source="computed"} %d.0
ropewalk_prompt_tokens_total{model_name="m",source="cached"} %d.0
"""


def url_of(running) -> str:
    return f"http://127.0.0.1:{running.port}"


def good(path, body):
    assert body["stream"] and body["temperature"] == 0.0
    return stream([text_event(body["prompt"][-5:]), usage_event(10, 1, 4), event("[DONE]")])


def test_the_same_sizes_make_the_same_requests_and_every_beginning_is_used_as_often():
    prompts = [each.prompt for each in requests_of(Sizes(requests=40, prefixes=4))]
    assert prompts == [each.prompt for each in requests_of(Sizes(requests=40, prefixes=4))]
    begins = [" ".join(prompt.split()[:200]) for prompt in prompts]
    assert {begins.count(each) for each in begins} == {10} and len(set(prompts)) == 40
    assert begins[:10] != sorted(begins[:10])


def test_answers_are_compared_with_one_server_s(tmp_path, capsys):
    kept = str(tmp_path / "one.json")
    with serving(good) as running:
        url = url_of(running)
        assert main(["--url", url, *SMALL, "--save", kept]) == 0
        assert main(["--url", url, *SMALL, "--like", kept, "--title", "same"]) == 0
    assert "|same|12 of 12|12|40.0%|" in capsys.readouterr().out
    with serving(
        lambda *_: stream([text_event("x"), usage_event(10, 1), event("[DONE]")])
    ) as other:
        main(["--url", url_of(other), *SMALL, "--like", kept, "--title", "other"])
    assert "|other|12 of 12|0|0.0%|" in capsys.readouterr().out


def test_a_load_to_compare_with_is_looked_at_before_anything_is_sent(tmp_path, capsys):
    kept = tmp_path / "one.json"
    with serving(good) as running:
        words = ["--url", url_of(running), *SMALL]
        main([*words, "--save", str(kept)])
        sent = len(running.bodies)
        for more in (["--requests", "13"], ["--seed", "x"], ["--output-tokens", "3"]):
            with pytest.raises(SystemExit, match="2"):
                main([*words, "--like", str(kept), *more])
            assert "is of other requests; repeat" in capsys.readouterr().err
        for text, reason in ((None, "No such file"), ("[]", "none of the files that --save")):
            kept.unlink() if text is None else kept.write_text(text)
            with pytest.raises(SystemExit, match="2"):
                main([*words, "--like", str(kept)])
            assert reason in capsys.readouterr().err
        assert len(running.bodies) == sent


def test_what_was_measured_is_kept_for_the_same_model_and_sizes(tmp_path, monkeypatch):
    titles = []

    class Running:
        def __init__(self, *_):
            pass

        async def start(self):
            pass

    async def send_all(title, server, sizes, metrics, fields):
        titles.append(sizes.requests)
        return sent(title=title)

    monkeypatch.setattr(behind_routers, "Running", Running)
    monkeypatch.setattr(behind_routers, "send_all", send_all)
    router = behind_routers.Command("router", (), server_at("http://h:1", 5.0))
    stack = behind_routers.Stack("a stack", router)

    def load(model, requests):
        sizes = Sizes(requests=requests)
        return asyncio.run(behind_routers.load(stack, model, sizes, tmp_path))

    assert load("m", 10) == load("m", 10)
    assert titles == [10]
    assert load("m", 20).sizes.requests == 20
    assert load("other", 20).model == "other"
    assert titles == [10, 20, 20]


def test_behind_ray_it_is_kept_likewise(tmp_path, monkeypatch):
    titles = []

    async def fresh(check, name, router):
        titles.append(name)

    async def send_all(title, server, sizes):
        return sent(title=title)

    monkeypatch.setattr(behind_ray.Check, "_fresh", fresh)
    monkeypatch.setattr(behind_ray, "send_all", send_all)
    for model in ("m", "m", "other"):
        check = behind_ray.Check(SimpleNamespace(proxy=None), model, Sizes(), tmp_path)
        asyncio.run(check.routed("round robin"))
    assert titles == ["round robin"] * 2


def test_routers_that_do_not_answer_are_told_in_a_sentence(tmp_path, monkeypatch, capsys):
    async def measure(*_):
        raise Unreachable("http://h:1/metrics: cannot connect")

    monkeypatch.setattr(behind_routers, "measure", measure)
    monkeypatch.setattr(behind_routers.subprocess, "run", lambda *_, **options: None)
    assert behind_routers.main(["--out", str(tmp_path)]) == 2
    told = f"http://h:1/metrics: cannot connect; {tmp_path} has the logs\n"
    assert capsys.readouterr().err == told


def test_hits_are_those_of_the_replicas_metrics_where_they_are_named(capsys):
    looks = iter([(0, 50, 0), (30, 60, 30)])

    def metrics(path, body):
        text = METRICS % next(looks)
        return [f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()]

    with serving(good) as router, serving(metrics) as replica:
        urls = [url_of(each) for each in (router, replica)]
        assert main(["--url", urls[0], *SMALL, "--metrics", urls[1]]) == 0
    assert "|75.0%|" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            [text_event("x"), event({"error": {"message": "gone"}})],
            "in its stream: error in the stream: gone",
        ),
        ([text_event("x"), usage_event(1, 1)], "in its stream: the stream ended without [DONE]"),
        (None, "before its first token: status 503"),
    ],
)
def test_what_was_lost_is_said(answer, line, capsys):
    pieces = whole("503 Service Unavailable", {}) if answer is None else stream(answer)
    with serving(lambda *_: pieces) as running:
        assert main(["--url", url_of(running), *SMALL]) == 1
    assert capsys.readouterr().out.count(line) == 12


def sent(hits=8, lost=0, text="a", error="error in the stream: gone", title="x"):
    fine = Answer(text, prompt_tokens=10, cached_tokens=hits, seconds=1.0)
    return Sent(title, [*[replace(fine, error=error)] * lost, *[fine] * (10 - lost)], 1.0)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"keyed": sent(hits=7)}, ["less than 90 % of one", "less than 1.5 times"]),
        ({"robin": sent(hits=6)}, ["less than 1.5 times"]),
        ({"keyed": sent(lost=1)}, ["not all requests"]),
        ({"robin": sent(hits=5, text="b")}, ["some answers differ"]),
        ({"disturbed": sent(lost=8)}, []),
        ({"disturbed": sent(lost=9)}, ["9 requests were lost"]),
        ({"drained": sent(lost=1)}, ["1 requests were lost"]),
        (
            {"disturbed": sent(lost=1, error="no complete answer within 60 s")},
            ["hung until its timeout"],
        ),
    ],
)
def test_a_check_finds_what_does_not_hold(changed, found):
    given = {
        "keyed": sent(),
        "robin": sent(hits=5),
        "disturbed": sent(),
        "drained": sent(),
    } | changed
    disturbed = {"killed": given.pop("disturbed"), "drained": given.pop("drained")}
    said = list(faults(sent(), given, "robin", "keyed", disturbed))
    assert len(said) == len(found)
    assert all(part in line for part, line in zip(found, said, strict=True))


def test_a_disturbed_load_says_what_was_lost_and_how_long_it_took():
    lost = sent(lost=1, title="killed")
    begun = replace(lost, answers=[replace(each, begun=True) for each in lost.answers], whole_s=9.2)
    assert disturbed_table([lost, begun]).splitlines()[2:] == [
        "|killed|9 of 10|0|1|1.0 s||",
        "|killed|9 of 10|1|0|1.0 s|9 s|",
    ]


def test_replicas_are_disturbed_when_a_third_is_answered():
    seen = []

    async def act():
        seen.append(len(running.bodies))
        return 1.5

    with serving(good) as running:
        sizes = Sizes(requests=12, prefixes=3, workers=1)
        found = asyncio.run(send_disturbed("x", server_at(url_of(running), 5), sizes, act))
        assert {body["max_tokens"] for body in running.bodies} == {64}
    assert (found.whole_s, len(found.good)) == (1.5, 12)
    assert 4 <= seen[0] <= 6  # one more may be on its way


def test_replicas_are_started_as_the_shipped_file_says():
    pytest.importorskip("yaml")
    config = behind_ray.configuration("a b", "round robin", "ropewalk-t5", 81, 3, max_queue="9")
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    assert (config["http_options"]["port"], application["name"]) == (81, "a-b")
    assert (
        application["args"] | {"models": ["ropewalk-t5"], "max_queue": "9"} == application["args"]
    )
    assert deployment["autoscaling_config"]["max_replicas"] == 3
    assert "RoundRobin" in deployment["request_router_config"]["request_router_class"]
    assert deployment["graceful_shutdown_timeout_s"] > 300
