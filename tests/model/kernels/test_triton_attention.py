"""That the compiler takes the Triton kernels: it refuses more than the interpreter does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.products import combined

# Bytes that a block of threads may have, by compute capability.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "bias", "frame"),
    combined(
        SHARED,
        ("bfloat16", "float32"),
        (64, 128, 256),
        range(5),
        ("absolute", "raw", "block"),
        always=lambda *each: (
            each in ((90, "bfloat16", 64, 2, "block"), (86, "bfloat16", 128, 2, "raw"))
        ),
    ),
)
def test_kernels_compile_for_a_gpu(capability, dtype, head_dim, bias, frame, tmp_path):
    compiled(tmp_path, capability, dtype, head_dim, bias, frame)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim"),
    combined(
        SHARED,
        ("bfloat16", "float16", "float32"),
        (64, 128, 256),
        always=lambda *each: each == (90, "bfloat16", 64),
    ),
)
def test_they_compile_for_keys_and_values_in_8_bits(capability, dtype, head_dim, tmp_path):
    compiled(tmp_path, capability, dtype, head_dim, 2, "absolute", "int8")


def compiled(tmp_path, capability, *told):
    """Compiles what it is told to; Triton refuses what needs more than a GPU's shared memory."""
    lines = run_compiler(tmp_path, "compile_triton", capability, SHARED[capability], *told)
    # Splits, their merge, chunks; keys stored in both layouts or not rotated; norms; activations;
    # linear layers.
    assert len(lines) == 3 + 3 + 2 + 4 + (0 if "float16" in told else 3)


@pytest.mark.parametrize(
    "told",
    combined(
        [("rope",), ("rope-raw",), ("alibi",), ("t5",), ("t5-materialised",), ("rope", "int8")],
        always=lambda told: told in (("rope",), ("t5-materialised",)),
    ),
)
def test_nothing_is_compiled_after_a_start(told, tmp_path):
    """Whatever a step's requests are, and wherever its integers lie."""
    started, later = run_compiler(tmp_path, "compile_steps", *told)
    assert started == later


def run_compiler(tmp_path, program, *told):
    """Lines that a process of its own prints, as one process cannot interpret kernels as well."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    made = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.model.kernels.{program}", *map(str, told)],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.splitlines()
