"""What a soak draws and finds, and a few seconds of one."""

import os
import random
import sys
from contextlib import contextmanager
from dataclasses import replace

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import Server
from ropewalk.load_tests.run import soak
from ropewalk.load_tests.run.soak import State, draw, growth_mib, left_behind, main, too_much

MODELS = {
    "a": {"max_model_len": 128, "vocab_size": 500, "encoding": "rope"},
    "b": {"max_model_len": 64, "vocab_size": 300, "encoding": "alibi"},
}
IDLE = State(0, 0, 0, 20, 0)


def test_clients_are_of_every_kind():
    source = random.Random(1)
    clients = [draw(source, MODELS) for _ in range(4000)]
    right = [each for each in clients if not each.wrong]
    assert 0.08 < 1 - len(right) / len(clients) < 0.12
    assert 0.27 < sum(each.leaves_s is not None for each in right) / len(right) < 0.33
    assert any(each.pauses_s for each in right)
    assert {each.key for each in clients} == {"soak-one", "soak-two"}
    fields = {name for each in right for name in each.body}
    assert {"n", "echo", "stop", "logit_bias", "overflow", "seed", "stream", "priority"} <= fields
    overflows = {(each.body["model"], each.body.get("overflow")) for each in right}
    assert ("b", "slide") in overflows and ("a", "slide") not in overflows


def test_the_same_seed_draws_the_same_clients():
    first, second = random.Random("s"), random.Random("s")
    assert [draw(first, MODELS) for _ in range(50)] == [draw(second, MODELS) for _ in range(50)]


def test_what_is_left_behind():
    assert left_behind(IDLE, replace(IDLE, descriptors=22)) == []
    assert left_behind(IDLE, replace(IDLE, held_blocks=3)) == ["held_blocks is 3 instead of 0"]
    assert left_behind(IDLE, replace(IDLE, running=1, changed=2)) == [
        "running is 1 instead of 0",
        "changed is 2 instead of 0",
    ]
    assert left_behind(IDLE, replace(IDLE, descriptors=30)) == ["10 descriptors stay open"]


def test_growth_is_counted_after_the_warm_up():
    memory = [(at, 100.0 + min(at, 25)) for at in range(101)]
    assert growth_mib(memory, 100) == 0
    leaking = [(at, 100.0 + at) for at in range(101)]
    assert growth_mib(leaking, 100) == 65
    assert too_much(65) and not too_much(20)


def ended(tmp_path):
    """A server that has ended with its last words, and is a zombie."""
    words = [sys.executable, "-c", "print('last words')"]
    started = process.start("the server", words, tmp_path / "log")
    os.waitid(os.P_PID, started.popen.pid, os.WEXITED | os.WNOWAIT)
    return started


def test_a_server_that_ends_is_told_with_its_last_words_and_the_faults(
    tmp_path, monkeypatch, capsys
):
    @contextmanager
    def serve_alone(*_, **options):
        with ended(tmp_path) as started:
            yield Server(process.HOST, 1), started

    async def load(args, server, started, tally):
        tally.faults.append("a fault")
        soak._rss(started.popen.pid)

    monkeypatch.setattr(soak, "serve_alone", serve_alone)
    monkeypatch.setattr(soak, "_soak", load)
    assert main([]) == 1
    fault, told, words = capsys.readouterr().out.splitlines()
    assert (fault, words) == ("a fault", "last words")
    assert told.endswith("does not answer: its process has ended")


def test_a_few_seconds_of_a_soak(monkeypatch, capsys):
    find_rate = soak._find_rate
    monkeypatch.setattr(soak, "_find_rate", lambda *asked: find_rate(*asked[:-1], 0.3))  # seconds
    monkeypatch.setattr(soak, "_WORKERS", 6)  # each waits for the end of its answer
    assert main(["m=shape:tiny", "--minutes", "0.02"]) == 0
    assert "nothing leaked" in capsys.readouterr().out
