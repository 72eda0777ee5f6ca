"""That a server on a GPU lets no tensors of two devices meet, shown without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.model import encoder_decoders
from tests.model.checkpoints import save
from tests.products import combined

# An experimental part of torch.
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device that is written in Python",
)

KINDS = {
    "rope": [],
    "rope in the frame block": ["--encoding-option", "frame=block"],
    "rope in the frame raw, in 8 bits": ["--encoding-option", "frame=raw", "--kv-dtype", "int8"],
    "alibi, weights in 8 bits": ["--quantize", "int8"],
    "t5": [],
    "t5, materialised": ["--encoding-option", "form=materialised"],
    "learned": [],
    "sinusoidal": [],
    "nope, in 8 bits": ["--kv-dtype", "int8", "--audit", "full"],
}
USUAL = {"sdpa": ("t5, materialised", "nope, in 8 bits", "rope"), "triton": ("rope",)}


@pytest.mark.parametrize(
    ("attention", "kind"),
    combined(USUAL, KINDS, always=lambda attention, kind: kind in USUAL[attention]),
)
def test_answers_there_are_those_of_the_cpu(attention, kind):
    encoding, *_ = kind.replace(",", "").split()
    check(attention, "shape:tiny", "--encoding", encoding, *KINDS[kind])


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("triton", marks=pytest.mark.full)])
def test_answers_of_an_encoder_decoder(attention, tmp_path):
    save(encoder_decoders.random_model(encoder_decoders.t5()), tmp_path)
    check(attention, str(tmp_path))


def check(attention, *flags):
    if attention == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    made = subprocess.run(
        [sys.executable, "-m", "tests.server.serve_elsewhere", attention, *flags],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
