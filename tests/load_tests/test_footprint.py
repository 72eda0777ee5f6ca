import os
import subprocess
import sys
import time

from ropewalk.load_tests.peers.systems import resident_bytes, session_processes

HOLDER = """
import subprocess, sys
if sys.argv[1:]:
    child = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
    child.stdout.readline()
held = b"x" * (32 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_of_a_session_counts_the_children_too(tmp_path):
    script = tmp_path / "holder (odd) name.py"
    script.write_text(HOLDER)
    started = subprocess.Popen(
        [sys.executable, str(script), "parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with started:
        assert started.stdout.readline() == b"ready\n"
        assert len(session_processes(started.pid)) == 2
        assert 64 << 20 < resident_bytes(started.pid) < 160 << 20
        started.stdin.close()
    deadline = time.monotonic() + 20
    while session_processes(started.pid) and time.monotonic() < deadline:  # nobody waits for it
        time.sleep(0.01)
    assert (session_processes(started.pid), resident_bytes(started.pid)) == ([], 0)


def test_others_are_not_in_the_session():
    assert os.getpid() in session_processes(os.getsid(0))
    assert os.getpid() not in session_processes(1 << 30)
