"""The inside of a confined process: gives up what it does not need, then answers one by one.

Imports nothing but the standard library, so that it starts quickly.
"""

import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable

HEAD = struct.Struct("<Qd")  # bytes that follow, and seconds of processor time for the work
OUT_OF_MEMORY = 77  # exit status


def answer(handle: Callable[[bytes], bytes]) -> None:
    """Do each piece of work that arrives, within its limits, until there is no more.

    Too long or too large a piece ends the process: a signal without a handler also interrupts
    what never returns to Python.
    """
    _give_up(int(sys.argv[1]))
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    while head := incoming.read(HEAD.size):
        size, seconds = HEAD.unpack(head)
        data = incoming.read(size)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            result = handle(data)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        outgoing.write(HEAD.pack(len(result), 0) + result)
        outgoing.flush()


def _give_up(memory: int) -> None:
    """Files, further processes, and all memory but so many bytes more than now."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # exec keeps an ignored one ignored
    time.localtime()  # reads the time zone's file
    limits = {
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = mapped + memory
    except OSError:
        pass  # only Linux says how much a process has mapped
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
