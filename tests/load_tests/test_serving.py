"""Servers of a comparison: which are started, with what, and that none is left running."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import Unreachable, complete
from ropewalk.load_tests.client.process import StartFailed
from ropewalk.load_tests.common.types import Request
from ropewalk.load_tests.run import serving
from ropewalk.load_tests.run.serving import flush, model_of, parse_serve, parse_setting
from tests.command_line import configured

ROOT = Path(__file__).parents[2]
SMALL = "shape:small"


def said(logs):
    """What each of the fake servers said, the one with the most models first.

    One that was ended while it started said nothing.
    """
    lines = [
        [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        for log in logs.iterdir()
    ]
    return sorted(filter(None, lines), key=lambda each: -len(each[0]["models"]))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def served(logs, encodings, settings=(), source=SMALL, inside=None, **options):
    """The variants, as they are while the servers run."""

    async def use():
        options.setdefault("context", 100)
        async with serving.serving(source, encodings, settings, logs, **options) as variants:
            if inside is not None:
                await inside(variants)
            return variants

    return asyncio.run(use())


# ---- what to serve ----


def test_what_may_be_served(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert model_of(parse_serve("shape:smollm2"), "t5") == "shape:smollm2:t5"
    assert model_of(parse_serve(str(path)), "nope") == f"shape:{path}:nope"
    assert model_of(parse_serve("family"), "alibi") == "ropewalk-alibi"
    assert model_of(parse_serve("family"), "kerple:Kerple") == "ropewalk-kerple"


@pytest.mark.parametrize("text", ["", "shape:", "smollm2", "/no/such/config.json"])
def test_what_may_not_be_served(text):
    with pytest.raises(ValueError, match=r"cannot be served; use family, shape:smollm2 or"):
        parse_serve(text)


def test_settings():
    assert parse_setting("t5:materialised") == ("t5", "materialised")
    assert parse_setting("rope:block") == ("rope", "block")


@pytest.mark.parametrize("text", ["t5", "t5:block", "rope:table", "alibi:window", "", "rope:"])
def test_other_settings_are_refused(text):
    with pytest.raises(ValueError, match=r"use some of t5:window, .*rope:block"):
        parse_setting(text)


# ---- which processes ----


def test_a_trained_table_of_positions_keeps_its_own_context(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(serving, "_free_share", lambda variants: 1000)
    variants = served(tmp_path, ["nope", "learned", "t5"], source="family", context=300)
    assert [variant.label for variant in variants] == ["nope", "learned", "t5"]
    shared, own = (lines[0] for lines in said(tmp_path))
    assert (shared["models"], shared["max_model_len"], shared["kv_memory"]) == (
        ["nope=ropewalk-nope", "t5=ropewalk-t5"],
        300,
        2000,
    )
    assert (own["models"], own["max_model_len"]) == (["learned=ropewalk-learned"], 50)
    assert "--max-model-len" not in own["argv"]


def test_a_random_table_is_as_long_as_asked_for(tmp_path, fake):
    served(tmp_path, ["nope", "learned"], context=300)
    ((shared, *_),) = said(tmp_path)
    assert (len(shared["models"]), shared["max_model_len"]) == (2, 300)


def test_all_encodings_share_a_process_and_each_setting_has_its_own(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(serving, "_free_share", lambda variants: 1000)
    settings = ["t5:table", "rope:block"]
    variants = served(tmp_path, ["t5", "nope"], settings, context=300, timeout_s=7.0)
    assert [(variant.label, variant.encoding, variant.setting) for variant in variants] == [
        ("t5", "t5", ""),
        ("nope", "nope", ""),
        ("t5:table", "t5", "table"),
        ("rope:block", "rope", "block"),
    ]
    assert [variant.server.model for variant in variants] == [variant.label for variant in variants]
    assert {variant.server.timeout_s for variant in variants} == {7.0}
    shared, *own = (lines[0] for lines in said(tmp_path))
    assert shared["models"] == ["t5=shape:small:t5", "nope=shape:small:nope"]
    assert (shared["encoding_option"], shared["kv_memory"]) == (None, 2000)
    assert {tuple(each["models"]): each["encoding_option"] for each in own} == {
        ("t5:table=shape:small:t5",): "form=table",
        ("rope:block=shape:small:rope",): "storage=block",
    }
    assert {each["kv_memory"] for each in own} == {1000}
    assert {each["max_model_len"] for each in [shared, *own]} == {300}
    assert {each["request_timeout"] for each in [shared, *own]} == {7}
    for each in [shared, *own]:
        assert configured(*each["argv"]).port == each["port"]
    ports = Counter(variant.server.port for variant in variants)
    assert sorted(ports.values()) == [1, 1, 2]
    assert {each["port"] for each in [shared, *own]} == set(ports)


def test_settings_alone_need_no_process_for_the_rest(tmp_path, fake):
    (variant,) = served(tmp_path, [], ["t5:window"])
    assert (variant.label, len(said(tmp_path))) == ("t5:window", 1)


def test_memory_is_shared_out_over_all_variants(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(serving, "free_memory", lambda: 40_000)
    served(tmp_path, ["rope", "nope"], ["t5:table", "t5:window"])
    assert sorted(lines[0]["kv_memory"] for lines in said(tmp_path)) == [2500, 2500, 5000]


def test_a_variant_is_flushed_by_its_name(tmp_path, fake):
    async def inside(variants):
        for variant in variants:
            await flush(variant.server)

    served(tmp_path, ["nope"], ["t5:table"], inside=inside)
    flushed = [
        line["asked"] for lines in said(tmp_path) for line in lines[1:] if "flush" in str(line)
    ]
    assert sorted(flushed) == [
        "POST /v1/cache/flush?model=nope",
        "POST /v1/cache/flush?model=t5%3Atable",
    ]


def test_a_users_own_settings_do_not_reach_the_servers(tmp_path, fake, monkeypatch):
    for name in ("OMP_NUM_THREADS", "ROPEWALK_API_KEYS", "ROPEWALK_ENCODING", "ROPEWALK_HOME"):
        monkeypatch.setenv(name, "1")
    served(tmp_path, ["nope"])
    environ = said(tmp_path)[0][0]["environ"]
    assert [name for name in environ if name.startswith(("OMP_", "ROPEWALK_"))] == ["ROPEWALK_HOME"]


def test_waiting_is_told(tmp_path, fake):
    told = []
    served(tmp_path, ["rope", "t5"], tell=told.append)
    assert told[0] == "starting rope, t5: 0 s"


# ---- what goes wrong ----


def pids(logs):
    return [lines[0]["pid"] for lines in said(logs) if lines]


def test_a_server_that_does_not_come_up_shows_its_last_words_and_ends_the_others(tmp_path, fake):
    with pytest.raises(StartFailed, match=r"(?s)^bad: .*ended at its start\n.*no such model"):
        served(tmp_path, ["bad"], ["t5:table"])
    assert not any(map(alive, pids(tmp_path)))


def test_a_server_alone_that_ended_has_the_last_word(fake):
    with (
        pytest.raises(StartFailed, match=r"(?s)ended: gone\n.*no such model"),
        serving.serve_alone("a=bad") as (_, started),
    ):
        started.popen.wait()
        raise Unreachable("gone")


def test_a_server_alone_that_runs_is_unreachable_as_it_says(fake):
    with pytest.raises(Unreachable, match=r"^busy$"), serving.serve_alone("a=a"):
        raise Unreachable("busy")


def test_a_program_that_is_missing_ends_those_that_started(tmp_path, fake, monkeypatch):
    started = []
    real = process.start

    def start(title, words, log):
        if started:
            words = ["/no/such/program"]
        started.append(real(title, words, log))
        return started[-1]

    monkeypatch.setattr(process, "start", start)
    with pytest.raises(StartFailed, match="/no/such/program: No such file"):
        served(tmp_path, ["nope"], ["t5:table"])
    assert started[0].popen.returncode is not None


def test_a_context_that_is_cut_short_is_an_error(tmp_path, fake):
    with pytest.raises(StartFailed, match="nope has room for 50 tokens instead of the 100"):
        served(tmp_path, ["nope"], source="shape:short")
    assert not any(map(alive, pids(tmp_path)))


def test_an_unknown_setting_starts_nothing(tmp_path, fake):
    with pytest.raises(ValueError, match="is no bias form"):
        served(tmp_path, ["nope"], ["t5:block"])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_inside_stops_all_even_the_stubborn(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(process, "_STOP_LIMIT_S", 0.1)

    async def inside(variants):
        assert all(map(alive, pids(tmp_path)))
        raise KeyError("inside")

    with pytest.raises(KeyError):
        served(tmp_path, ["nope"], ["t5:table"], "shape:stubborn", inside)
    assert len(pids(tmp_path)) == 2
    assert not any(map(alive, pids(tmp_path)))


INTERRUPTED = """
import asyncio, sys
from pathlib import Path
from ropewalk.load_tests.run import serving

async def use():
    serving.PROGRAM = (sys.executable, "-m", "tests.load_tests.fake_serve")
    source, logs = "shape:small", Path(sys.argv[1])
    async with serving.serving(source, ["nope"], ["t5:table"], logs, context=100):
        print("up", flush=True)
        await asyncio.sleep(60)

try:
    asyncio.run(use())
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(tmp_path, number):
    script, logs = tmp_path / "bench.py", tmp_path / "logs"
    script.write_text(INTERRUPTED)
    logs.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    bench = subprocess.Popen(
        [sys.executable, script, logs], stdout=subprocess.PIPE, cwd=ROOT, env=environ
    )
    with bench, bench.stdout as output:
        assert output.readline() == b"up\n"
        found = pids(logs)
        assert len(found) == 2 and all(map(alive, found))
        bench.send_signal(number)
        assert bench.wait(20) == 130
    assert not any(map(alive, found))


# ---- the real thing ----


def test_random_models_of_a_shape_answer_and_are_flushed(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "_free_share", lambda variants: 1 << 22)
    answered = []

    async def inside(variants):
        for variant in variants:
            ids = Request(tuple(range(64)), 64, 3)
            text = Request(" ".join(map(str, range(64))), 64, 3)
            for request in (ids, text):
                answered.append(await complete(variant.server, request))
            await flush(variant.server)
            answered.append(await complete(variant.server, ids))

    served(tmp_path, ["learned", "t5"], inside=inside)
    assert [outcome.error for outcome in answered] == [None] * 6
    assert [outcome.cached_tokens for outcome in answered] == [0, 48, 0] * 2
    assert {outcome.chunks[-1][1] for outcome in answered} == {3}  # all of it visible
