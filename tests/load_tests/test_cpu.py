import os
import subprocess
import sys
import time

import pytest

from load_tests.cpu import CpuMeter

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc")

SPIN = "import time; end = time.time() + 20\nwhile time.time() < end: pass"
# The busy process is a grandchild: servers keep their workers in processes of their own.
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


def test_without_a_process_there_is_no_answer():
    assert CpuMeter(None).stop() is None


def test_the_servers_children_are_the_server():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True)
    try:
        time.sleep(0.3)
        meter = CpuMeter(parent.pid)
        time.sleep(0.6)
        shares = meter.stop()
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
    assert shares is not None
    assert shares.server > 0.02  # of all cores, and others may want them too
    assert shares.client < 0.2
    assert 0 <= shares.other <= 1


def test_what_the_client_burns_is_the_clients():
    meter = CpuMeter(os.getppid())
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    shares = meter.stop()
    assert shares is not None
    assert shares.client > 0.02
