"""Compiles the C++ kernels on first use and keeps the library.

The file is named after what it was compiled from, by and for (source, compiler, processor), so that
a copied folder never gives a wrong one, and after its own content, so that a damaged one is
compiled again instead of ending the process that loads it.
"""

import errno
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path

from ropewalk.model import digests

log = getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
SOURCES = sorted(SOURCE.glob("*.cpp"))
HEADERS = sorted(SOURCE.rglob("*.hpp"))
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    # What vectorising sums and divisions requires. Not -ffast-math, which would also make every
    # thread of the process that loads the library flush denormals to zero.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
    *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "i686") else []),
    "-fopenmp",
    "-fPIC",
]
UNUSED_S = 30 * 86400  # after which a library of another version or processor is deleted
_SCRATCH = "compiling-"  # begins the names of folders that only the holder of the lock has


class NoKernels(RuntimeError):
    """The C++ kernels cannot be built here; the message says why in one sentence."""


def library(folder: Path) -> Path:
    """The library for this machine, compiled into `folder` when not there (some 15 seconds).

    Raises NoKernels when there is no compiler or it fails.
    """
    compiler = _find_compiler()
    stem = f"cpu-{_fingerprint(compiler)}"
    try:
        found = _intact(folder, stem)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):  # servers that start at once compile once
                found = _intact(folder, stem)
                if found is None:
                    _sweep(folder, stem)
                    found = _compile(compiler, folder, stem)
    except OSError as error:
        raise NoKernels(f"the kernels cannot be built in {folder}: {_reason(error)}") from error
    with suppress(OSError):  # a folder that may only be read
        os.utime(found)
    return found


def _find_compiler() -> list[str]:
    try:
        compiler = shlex.split(os.environ.get("CXX", ""))  # may have arguments, as in "ccache g++"
    except ValueError as error:
        raise NoKernels(f"CXX is not a command: {error}") from error
    if compiler:
        return compiler
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise NoKernels("no C++ compiler was found; install g++ or set CXX")
    return [found]


def _intact(folder: Path, stem: str) -> Path | None:
    for path in folder.glob(f"{stem}-*.so"):
        with suppress(FileNotFoundError):  # damaged, and just swept by another process
            if path == _named(path, stem):
                return path
    return None


def _named(file: Path, stem: str) -> Path:
    """What the library in `file` is called in its folder."""
    return file.with_name(f"{stem}-{digests.of_file(file)[:16]}.so")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is compiling the kernels; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path, stem: str) -> None:
    """Delete what broken-off compilations left, damaged libraries, and those long unused."""
    for left in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    now = time.time()
    for path in folder.glob("cpu-*.so"):
        if path.name.startswith(stem) or now - path.stat().st_mtime > UNUSED_S:
            path.unlink()


def _compile(compiler: list[str], folder: Path, stem: str) -> Path:
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in SOURCES]
        with ThreadPoolExecutor() as pool:  # in sequence it would take twice as long
            compiled = [
                pool.submit(_run, compiler, scratch, "-c", "-o", to, str(source))
                for source, to in zip(SOURCES, objects, strict=True)
            ]
        for each in compiled:
            each.result()
        built = Path(scratch) / "built"
        _run(compiler, scratch, "-shared", "-o", str(built), *objects)
        _flush(built)
        target = folder / _named(built, stem).name
        built.replace(target)
        _flush(folder)
        return target


def _flush(path: Path) -> None:
    """To disk, so that a power failure leaves the whole library or none."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run(compiler: list[str], scratch: str, *arguments: str) -> None:
    done = subprocess.run(
        [*compiler, *FLAGS, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": scratch},
    )
    if done.returncode == 0:
        return
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode < 0:
        reason = f"was ended by {signal.Signals(-done.returncode).name}; is there enough memory?"
    else:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = "failed: " + next((line for line in lines if "error" in line), lines[-1])
    raise NoKernels(f"{shlex.join(compiler)} {reason}")


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "no space is left there; free some 20 MB and start again"
    return str(error)


def _fingerprint(compiler: list[str]) -> str:
    try:
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, check=False
        ).stdout
    except OSError as error:
        raise NoKernels(f"{shlex.join(compiler)} cannot be run: {error}") from error
    parts = (
        *(each.read_text(encoding="utf-8") for each in (*SOURCES, *HEADERS)),
        version,
        *compiler[1:],
        " ".join(FLAGS),
        _processor(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model", "model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0] in wanted))
