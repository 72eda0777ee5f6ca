"""The examples of docs/encodings.md: its class computes what it says, and its commands run."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.catalogue import SHAPE, Place, example
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import create, find
from ropewalk.server.cli import main
from ropewalk.server.launch.build import load_models
from ropewalk.server.metrics.exporter import Metrics
from tests.command_line import configured, understood
from tests.model.checkpoints import llama, random_model, save
from tests.server.fake_engine import make_request

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "encodings.md").read_text()
PLACE = Place([SdpaAttention, ReferenceAttention], torch.float32, torch.device("cpu"))


def code() -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def kerple(tmp_path, monkeypatch):
    """The page's example in a file of its own, in the folder one works in."""
    (tmp_path / "kerple.py").write_text(code())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "kerple:Kerple"
    sys.modules.pop("kerple", None)


def test_example_is_short() -> None:
    lines = [line for line in code().splitlines() if line.strip()]
    assert len(lines) <= 32


def test_example_computes_what_it_says(kerple) -> None:
    encoding = example(find(kerple), SHAPE, 100, {"r1": 2.0, "r2": 0.5})
    positions = torch.arange(100)
    found = encoding.score_bias().between(positions, positions)
    distance = (positions[:, None] - positions).clamp(min=0).double()
    assert torch.allclose(found.double(), -2 * torch.log(1 + 0.5 * distance), atol=1e-5)
    assert encoding.max_positions == 100
    assert encoding.work(SHAPE, 50, BLOCK_SIZE).flops == SHAPE.num_layers * SHAPE.num_heads * 50
    with pytest.raises(ValueError, match="kerple takes"):
        example(find(kerple), SHAPE, 100, {"r3": 1})


@pytest.mark.parametrize("attention", ["cpu", "sdpa", "reference"])
def test_example_is_served(kerple, tmp_path, attention) -> None:
    folder = save(random_model(llama()), tmp_path / "llama")
    flags = ["--dtype", "float32", "--kv-memory", "1M", "--attention", attention]
    answers = []
    for encoding in (kerple, "nope"):
        (loaded,) = load_models(configured(str(folder), "--encoding", encoding, *flags), Metrics())
        assert loaded.served.encoding == encoding
        request = make_request("a", list(range(40)), max_tokens=12)
        loaded.engine.submit(request)
        while loaded.engine.busy:
            loaded.engine.step()
        answers.append(request.tokens[40:])
    assert len(answers[0]) == 12
    assert answers[0] != answers[1]  # distance does count


def test_example_may_be_in_a_checkpoint(kerple) -> None:
    """Reading one asks for a decoder without memory."""
    encoding = create(EncodingSpec(kerple, {"r1": 2}), SHAPE, 64, torch.device("meta"))
    assert encoding.score_bias().table.shape == (SHAPE.num_heads, 64)


def commands() -> list[list[str]]:
    """Words of every `ropewalk` line, without the environment before it."""
    shell = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    lines = [shlex.split(line, comments=True) for line in shell.splitlines() if line.strip()]
    program = ".venv/bin/ropewalk"
    assert all(program in words for words in lines)
    return [words[words.index(program) + 1 :] for words in lines]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_understood_and_run(words, kerple, capsys, monkeypatch) -> None:
    monkeypatch.setattr("ropewalk.server.studies.encodings.this_machine", lambda: PLACE)
    assert understood(*words).info_name == words[0]
    if words[0] == "serve" or "--model" in words:
        return  # needs weights
    if words[0] == "explain" and kerple not in words:  # drawn in tests of their own
        monkeypatch.setattr("ropewalk.server.studies.explain.pictures", lambda subject: [])
    assert main.main(words) == 0
    said = capsys.readouterr()
    # On a busy machine a long measurement may say that it is one.
    assert said.out and "Error" not in said.err
    if words[0] == "explain":
        assert Path(said.out.strip()).stat().st_size > 1000
