"""What docs/speed.md says is true: commands would run, and what it counts is what is counted."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ropewalk.load_tests.gpu import check
from ropewalk.load_tests.micro.roofline import kv_bytes, weight_bytes
from ropewalk.model.loading.random_weights import SHAPES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "speed.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/python -m .*$|(?<=`)\.venv/bin/python -m [^`]+", PAGE, re.M)


def test_programs_are_there():
    modules = {shlex.split(command)[2] for command in COMMANDS}
    assert {
        "ropewalk.load_tests.gpu.check",
        "ropewalk.load_tests.peers.peers",
        "tests.model.measure_quantize",
    } <= modules
    assert [name for name in modules if find_spec(name) is None] == []


def test_the_small_form_is_understood():
    small = [words for words in map(shlex.split, COMMANDS) if "--shapes" in words]
    assert small
    for words in small:
        assert check.parser().parse_args(words[3:])


@pytest.mark.parametrize("shape", ["smollm2", "llama-1b"])
def test_bytes_of_a_shape(shape):
    weights = weight_bytes(SHAPES[shape], torch.bfloat16) / 1e6
    stored = kv_bytes(SHAPES[shape], torch.bfloat16, 1, 1)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"|`{shape}`"))
    assert row.endswith(f"|{weights:,.0f} MB|{stored:,} bytes|")


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE)
    assert len(links) > 4
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
