"""That a server on a GPU lets no tensors of two devices meet, shown without a GPU."""

import json
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
    "rope, block storage": ["--encoding-option", "storage=block"],
    "rope, raw storage, in 8 bits": [
        "--encoding-option",
        "storage=raw",
        "--kv-dtype",
        "int8",
    ],
    "alibi, weights in 8 bits": ["--quantize", "int8"],
    "t5": [],
    "t5, materialised": ["--encoding-option", "form=materialised"],
    "learned": [],
    "sinusoidal": [],
    "nope, in 8 bits": ["--kv-dtype", "int8", "--audit", "full"],
}
USUAL = {"sdpa": ("t5, materialised", "nope, in 8 bits", "rope"), "triton": ("rope",)}
# As small as Triton's interpreter, which needs milliseconds for each tile, makes it worth.
SHAPE = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def elsewhere():
    """Asks one process, as torch is another one there: serve_elsewhere.py."""
    serving = subprocess.Popen(
        [sys.executable, "-m", "tests.server.serve_elsewhere"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def check(attention, *flags):
        if attention == "triton":
            pytest.importorskip("triton", reason="Triton is not installed")
        print(json.dumps([attention, *flags]), file=serving.stdin, flush=True)
        assert json.loads(serving.stdout.readline()) == ""

    with serving:
        yield check
        serving.stdin.close()


@pytest.mark.parametrize(
    ("attention", "kind"),
    combined(USUAL, KINDS, always=lambda attention, kind: kind in USUAL[attention]),
)
def test_answers_there_are_those_of_the_cpu(attention, kind, elsewhere, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    encoding, *_ = kind.replace(",", "").split()
    elsewhere(attention, f"shape:{tmp_path / 'config.json'}", "--encoding", encoding, *KINDS[kind])


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("triton", marks=pytest.mark.full)])
def test_answers_of_an_encoder_decoder(attention, elsewhere, tmp_path):
    save(encoder_decoders.random_model(encoder_decoders.t5()), tmp_path)
    elsewhere(attention, str(tmp_path))
