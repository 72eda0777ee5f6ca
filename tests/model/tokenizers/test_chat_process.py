"""A template's processes: whatever a template does, it ends soon, alone, and is replaced."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ropewalk.model.chat import template as chat
from ropewalk.model.chat.template import ChatTemplate, ChatTemplateError
from ropewalk.model.confined.process import Confined

ROOT = Path(__file__).parents[3]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set ns = namespace(s='aaaaaaaaaaaaaaaa') %}"
    "{% for i in range(29) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | length }}"
)
EITHER = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
NAMES = (b"PYTHONPATH", b"MALLOC_ARENA_MAX", b"TOKENIZERS_PARALLELISM", b"TZ", b"LD_LIBRARY_PATH")
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc")


def says(content):
    return [{"role": "user", "content": content}]


def render(template, content="hi"):
    return template.render(says(content), add_generation_prompt=False)


def processes():
    """Ids of the processes for templates that are this one's."""
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                int(parent) == os.getpid()
                and b"ropewalk.model.chat.process" in (entry / "cmdline").read_bytes()
            ):
                found.add(int(entry.name))
    return found


def made(source):
    """A template, and the ids of its processes."""
    before = processes()
    template = ChatTemplate(source, {})
    end = time.monotonic() + 5
    # A process that has just begun has no command line for a moment.
    while len(own := processes() - before) < 2 and time.monotonic() < end:
        time.sleep(0.001)
    return template, own


def ended(pid, seconds=5.0):
    """Whether the process is gone, without a zombie, before so many seconds have passed."""
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def impatient(monkeypatch):
    """Shorter limits, as what reaches them takes as long."""
    monkeypatch.setattr(chat, "COMPILE_SECONDS", 0.5)
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)


@pytest.mark.parametrize(
    "source",
    [
        LOOP + "ok",
        DOUBLE,
        "{{ 'a' | center(6000000000) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ ([messages[0].content | center(9999999)] * 99) | join }}",
        "{{ ('x' * 9999999).replace('x', 'y' * 9999) }}",
        "{{ ((range(99999) | list) * 9999) | map('string') | join }}",
        "{{ (messages | length + 6) ** 999999999 % 10 }}",
        "{% macro f(n) %}{{ f(n + 1) if n < 60 }}{{ f(n + 1) if n < 60 }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_what_takes_too_much_is_stopped(source, impatient):
    template = ChatTemplate(source, {})
    begun = time.monotonic()
    for _ in range(2):  # the second time, in a new process
        with pytest.raises(ChatTemplateError, match=r" (used|needed|writes) more than "):
            render(template)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x" * 15_000_000, "more than the 1048576 characters allowed"),
        ("{{ x }}" * 140_000, "cannot be compiled"),
        ("{{ 1 + 2 * 3 - x }}" * 50_000, "cannot be compiled"),
        ("{{" + "(" * 50_000, "cannot be compiled"),
        ("{{" + "-" * 100_000 + "1 }}", "cannot be compiled"),
        ("{% if a %}" * 5_000, "cannot be compiled"),
        ("{{ 7 ** 99999999 % 10 }}" * 2 + "{% if", "cannot be compiled"),
    ],
)
def test_compiling_is_limited_too(source, message, impatient):
    begun = time.monotonic()
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {})
    assert time.monotonic() - begun < 10  # 5 where nothing else uses the processor


def test_a_stuck_chat_delays_no_other():
    template = ChatTemplate(EITHER, {})
    stuck = template.begin(says("loop"), add_generation_prompt=False)
    for _ in range(3):
        assert render(template) == "hi"
    assert not stuck.done()
    with pytest.raises(ChatTemplateError, match=r"it used more than 0\.5 s of processor time"):
        stuck.result()
    assert render(template) == "hi"


def test_there_are_always_two(monkeypatch, impatient):
    started = []

    class Noted(Confined):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(chat, "Confined", Noted)
    template = ChatTemplate(EITHER, {})
    assert len(started) == 2
    begun = [
        template.begin(says(text), add_generation_prompt=False)
        for text in ("loop", "a", "loop", "b", "c")
    ]
    assert [each.exception() is None for each in begun] == [False, True, False, True, True]
    assert render(template) == render(template) == "hi"
    deadline = time.monotonic() + 10  # the second one that was stopped may still be replaced
    while len(started) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [each.ended for each in started].count(False) == 2


@needs_proc
def test_a_process_that_was_killed_is_replaced():
    template, own = made(EITHER)
    for process in own:
        os.kill(process, signal.SIGKILL)
    time.sleep(0.1)
    assert render(template) == render(template) == "hi"


@pytest.mark.parametrize("text", ["\ud800", "é\u2028\x00\U0001f600", '"\\', "x" * 1_000_000])
def test_texts_come_back_as_they_were(text):
    assert render(ChatTemplate("{{ messages[0].content }}", {}), text) == text


def test_what_is_seldom_used_works_too():
    source = (
        r"{{ '\N{BULLET}\u00e9' }}{{ 'a b' | wordwrap(1) }}{{ [1] | pprint }}{{ 'x' | urlize }}"
        "{{ {'b': 1} | xmlattr }}{{ '%5.2f' | format(1.5) }}{{ 'é'.encode('latin-1') | length }}"
    )
    assert render(ChatTemplate(source, {})) == '•éa\nb[1]x b="1" 1.501'


@needs_proc
def test_a_process_has_nothing_of_the_server_s():
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        template, own = made("x")
        for process in own:
            deadline = time.monotonic() + 10  # the second one may still be starting
            while len(held := sorted(os.listdir(f"/proc/{process}/fd"))) > 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert held == ["0", "1", "2"]
            environment = Path(f"/proc/{process}/environ").read_bytes()
            names = {line.split(b"=")[0] for line in environment.split(b"\0") if line}
            assert names <= set(NAMES)
            assert os.getsid(process) == process
    assert render(template) == "x"


@needs_proc
def test_the_processes_end_with_their_template():
    template, own = made("x")
    assert len(own) == 2
    del template
    assert all(map(ended, own))


@needs_proc
@pytest.mark.parametrize("content", ["hi", "loop"])
def test_the_processes_end_with_a_server_that_is_killed(content):
    program = (
        "import sys, time\n"
        "from tests.model.tokenizers.test_chat_process import made\n"
        "template, own = made(sys.argv[1])\n"
        "messages = [{'role': 'user', 'content': sys.argv[2]}]\n"
        "begun = [template.begin(messages, add_generation_prompt=False) for _ in own]\n"
        "time.sleep(0.1)\n"
        "print(*own, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, EITHER, content],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:
        own = [int(pid) for pid in server.stdout.readline().split()]
        server.kill()
    assert len(own) == 2 and all(map(ended, own))


def test_what_a_process_imports():
    """Little, so that it starts quickly: neither torch nor what else the server is made of."""
    program = (
        "import sys, ropewalk.model.chat.process\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "print(*sorted(names - sys.stdlib_module_names - {'__main__'}))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('ropewalk')))\n"
    )
    site = str(Path(pytest.__file__).parents[1])
    printed = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{site}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert printed.splitlines() == [
        "jinja2 markupsafe ropewalk",
        "ropewalk ropewalk.model ropewalk.model.chat ropewalk.model.chat.process "
        "ropewalk.model.confined ropewalk.model.confined.inside",
    ]
