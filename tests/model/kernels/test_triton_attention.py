"""That the compiler takes the Triton kernels: it refuses more than the interpreter does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.server.download import home
from tests.products import combined

# Bytes that a block of threads may have, by compute capability.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}


@pytest.fixture(scope="module")
def compile():
    """Gives the lines that a process of its own prints, as one cannot interpret kernels as well.

    What has compiled once is kept beside the CPU's kernels, and is not compiled again.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    shared = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(home() / "kernels" / "triton")}

    def run(program, *told):
        made = subprocess.run(
            [sys.executable, "-W", "error", "-m", f"{__package__}.{program}", *map(str, told)],
            env=os.environ | shared,
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        return made.stdout.splitlines()

    return run


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "bias", "storage"),
    combined(
        SHARED,
        ("bfloat16", "float32"),
        (64, 128, 256),
        range(5),
        ("absolute", "raw", "block"),
        always=lambda *each: each == (86, "bfloat16", 128, 4, "block"),
    ),
)
def test_kernels_compile_for_a_gpu(capability, dtype, head_dim, bias, storage, compile):
    compiled(compile, capability, dtype, head_dim, bias, storage)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim"),
    combined(
        SHARED,
        ("bfloat16", "float16", "float32"),
        (64, 128, 256),
        always=lambda *each: False,  # what a start compiles in 8 bits, below, shows most of it
    ),
)
def test_they_compile_for_keys_and_values_in_8_bits(capability, dtype, head_dim, compile):
    compiled(compile, capability, dtype, head_dim, 2, "block", "int8")


def compiled(compile, capability, *told):
    """Compiles what it is told to; Triton refuses what needs more than a GPU's shared memory."""
    lines = compile("compile_triton", capability, SHARED[capability], *told)
    # Splits, their merge, chunks; keys stored in both layouts or not rotated; norms; activations;
    # draws; linear layers; layers of experts.
    assert len(lines) == 3 + 3 + 2 + 4 + 1 + (0 if "float16" in told else 3) + 2


@pytest.mark.parametrize(
    "told",
    combined(
        [("rope",), ("rope-raw",), ("alibi",), ("t5",), ("t5-materialised",), ("rope-raw", "int8")],
        always=lambda told: told == ("rope-raw", "int8"),
    ),
)
def test_nothing_is_compiled_after_a_start(told, compile):
    """Whatever a step's requests are, and wherever its integers lie."""
    started, later = compile("compile_steps", *told)
    assert started == later
