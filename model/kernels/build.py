"""Compiles cpu.cpp on first use, keeps the result, and calls it through plain C entry points.

The library is built for the processor it runs on (-march=native) and stored under a name made
of source, compiler and processor, so that a copied cache folder never holds a wrong one.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffast-math",
    "-fno-finite-math-only",
    "-mprefer-vector-width=512",
    "-fopenmp",
    "-shared",
    "-fPIC",
]
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NoKernels(RuntimeError):
    """The C++ kernels cannot be built here; the message says why in one sentence."""


class AttendArguments(ctypes.Structure):
    """Mirrors the struct of the same name in cpu.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "values", "out", "positions")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "tables", "bases")),
        *((name, c_void_p) for name in ("slopes", "bias_table")),
        *((name, c_int64) for name in ("bias_span", "bias_zero", "requests", "table_width")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")),
        ("scale", c_float),
    )


class Kernels:
    """The compiled library. Tensors handed in are contiguous, on the CPU, of one dtype."""

    def __init__(self, library: Path) -> None:
        # torch is imported above: both then share one OpenMP runtime, and one pool of threads.
        self._library = ctypes.CDLL(str(library))
        self._panel = self._library.panel_columns()

    def pack(self, weight: Tensor) -> Tensor:
        """[outputs, inputs] → the panels that `linear` reads, of the same dtype."""
        outputs, inputs = weight.shape
        packed = weight.new_empty(-(-outputs // self._panel), inputs, self._panel)
        self._function("pack", weight.dtype)(
            c_void_p(weight.contiguous().data_ptr()),
            c_void_p(packed.data_ptr()),
            c_int64(outputs),
            c_int64(inputs),
        )
        return packed

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """x [T, inputs] times packed weights, plus a float32 bias [outputs] → [T, outputs]."""
        x = x.contiguous()
        rows, inputs = x.shape
        y = x.new_empty(rows, outputs)
        self._function("linear", x.dtype)(
            c_void_p(x.data_ptr()),
            c_void_p(packed.data_ptr()),
            None if bias is None else c_void_p(bias.data_ptr()),
            c_void_p(y.data_ptr()),
            c_int64(rows),
            c_int64(inputs),
            c_int64(outputs),
        )
        return y

    def attend(self, dtype: torch.dtype, arguments: AttendArguments) -> None:
        self._function("attend", dtype)(ctypes.byref(arguments))

    def _function(self, name: str, dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
        return getattr(self._library, f"{name}_{SUFFIXES[dtype]}")  # type: ignore[no-any-return]


def load(folder: Path) -> Kernels:
    """The kernels of this machine, compiled into `folder` when not there yet (a few seconds).

    Raises NoKernels when there is no compiler or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoKernels("no C++ compiler was found; install g++ or set CXX")
    library = folder / f"cpu-{_fingerprint(compiler)}.so"
    if not library.exists():
        _compile(compiler, library)
    try:
        return Kernels(library)
    except OSError as error:
        raise NoKernels(f"{library.name} cannot be loaded: {error}; delete it") from error


def _compile(compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *FLAGS, "-o", str(built), str(SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise NoKernels(f"{compiler} failed: {last}")
            built.replace(library)  # atomic: two servers may start at once
    except OSError as error:
        raise NoKernels(f"the kernels cannot be built in {library.parent}: {error}") from error


def _fingerprint(compiler: str) -> str:
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False
        ).stdout
    except OSError as error:
        raise NoKernels(f"{compiler} cannot be run: {error}") from error
    parts = (SOURCE.read_text(), version, " ".join(FLAGS), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model", "model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split("\t")[0] in wanted))
