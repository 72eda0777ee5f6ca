"""The whole check on a CPU and a tiny shape; and scripts/gpu-check where there is no GPU."""

import gc
import itertools
import json
import subprocess
from pathlib import Path

import pytest
import torch

from ropewalk.load_tests.gpu import check, parts, peer
from ropewalk.load_tests.gpu.check import main
from ropewalk.load_tests.micro import in_process, roofline
from ropewalk.load_tests.micro.roofline import weight_bytes
from ropewalk.load_tests.micro.step_cost import AGAIN, VARIANTS
from ropewalk.model.loading.random_weights import SHAPES
from ropewalk.server import hardware

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--shapes", "tiny", "--batches", "1,2", "--contexts", "64"]
TINY += ["--prefill", "32", "--rounds", "2"]

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers


@pytest.fixture(autouse=True)
def small(monkeypatch):
    gc.freeze()  # what was imported, as by transformers: after each part, garbage is looked for
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "SIDE", {"cpu": 64})
    monkeypatch.setattr(parts, "STEPS", 3)


@pytest.fixture
def alone(monkeypatch):
    """Without the other system."""
    monkeypatch.setattr(peer, "missing", lambda: True)


def found_in(path: Path) -> dict:
    return json.loads(path.read_text())


def test_measures_prints_and_writes(tmp_path, capsys):
    assert main([*TINY, "--commit", "abc", "--out", str(tmp_path / "gpu")]) == 0
    out, told = capsys.readouterr()
    assert "tiny: transformers, steps" in told and "gpu.json" in told

    found = found_in(tmp_path / "gpu.json")
    assert found["kind"] == "ropewalk gpu check" and found["schema"] == 1
    assert found["environment"]["commit"] == "abc" and found["versions"]["torch"]
    assert found["ceiling"]["bytes_per_s"] > 0
    assert found["left_out"] == []
    measured = [
        (each["work"], each["system"], each["cell"]["batch"], each["cell"]["context"])
        for each in found["figures"]
    ]
    assert measured == [
        ("pass", "ropewalk", 1, 64),
        ("pass", "ropewalk", 2, 64),
        ("prefill", "ropewalk", 1, 32),
        ("step", "ropewalk", 1, 64),
        ("step", "ropewalk", 2, 64),
        ("pass", "transformers", 1, 64),
        ("prefill", "transformers", 1, 32),
        ("step", "transformers", 1, 64),
        ("step", "transformers", 2, 64),
    ]
    for each in found["figures"]:
        assert each["seconds"]["median"] > 0 and each["samples"]
        assert (each["least"] is not None) == (
            each["work"] != "step" and each["system"] == "ropewalk"
        )
    assert [each["work"] for each in found["encodings"]] == ["decode", "prefill"]
    assert [cost["variant"] for cost in found["encodings"][0]["costs"]] == [*VARIANTS, AGAIN]

    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|tiny|")]
    assert [row[1:3] for row in rows] == [
        *(["1", "64"], ["2", "64"], ["1", "64"], ["2", "64"], ["1", "32"])
    ]
    assert all(rows[at][-1] for at in (0, 2, 3, 4)) and not rows[1][-1]  # times as fast
    assert "Left out" not in out


def test_what_does_not_fit_is_named(alone, monkeypatch, capsys):
    """With room for the weights and one request."""
    weights = weight_bytes(SHAPES["tiny"], torch.float32)
    monkeypatch.setattr(hardware, "free_memory", lambda device: weights + 100_000)
    words = [*TINY, "--dtype", "float32", "--batches", "1,8"]
    main(words)
    out = capsys.readouterr().out
    assert "- all, decoding: tiny, batch 8, context 64: 0.52 MB of keys and values, and room" in out
    assert "|tiny|1|64|" in out and "|tiny|8|64|" not in out
    assert "- transformers, everything: tiny: transformers is not installed; pip install" in out


def test_nothing_fits(alone, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "free_memory", lambda device: 0)
    assert main(TINY) == 2
    out = capsys.readouterr().out
    assert "|" not in out and "batch 1, context 64" in out


def test_a_part_that_fails_leaves_the_others(alone, monkeypatch, tmp_path, capsys):
    def fails(*_):
        raise RuntimeError("no kernel\nand much more")

    monkeypatch.setattr(parts, "prefill_of", fails)
    assert main([*TINY, "--out", str(tmp_path / "gpu")]) == 1
    assert "- ropewalk, prompts: tiny: RuntimeError: no kernel\n" in capsys.readouterr().out
    found = found_in(tmp_path / "gpu.json")
    assert [each["work"] for each in found["figures"]] == ["pass", "pass", "step", "step"]
    assert [each["failed"] for each in found["left_out"]] == [True, False]


def test_a_system_that_cannot_be_made_leaves_the_other(monkeypatch, tmp_path, capsys):
    """Its package may be there and not fit what lies beside it."""

    def fails(*_):
        raise ImportError("huggingface-hub is too new")

    monkeypatch.setattr(peer, "model_of", fails)
    assert main([*TINY, "--out", str(tmp_path / "gpu")]) == 1
    told = "- transformers, everything: tiny: ImportError: huggingface-hub is too new\n"
    assert told in capsys.readouterr().out
    assert len(found_in(tmp_path / "gpu.json")["figures"]) == 5


@pytest.mark.parametrize(
    ("where", "before"), [((hardware, "return_freed_memory"), 1), ((parts, "prefill_of"), 0)]
)
def test_a_device_that_is_lost_ends_the_run_and_leaves_what_it_had(
    where, before, alone, monkeypatch, capsys
):
    calls = itertools.count()

    def lost(*_):
        if next(calls) >= before:
            raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(*where, lost)
    assert main(TINY) == 1
    assert "|tiny|2|64|" in capsys.readouterr().out


def test_a_run_that_is_cut_short_leaves_what_it_had(alone, monkeypatch, tmp_path, capsys):
    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "encodings_of", cut)
    assert main([*TINY, "--out", str(tmp_path / "gpu")]) == 1
    found = found_in(tmp_path / "gpu.json")
    assert [each["work"] for each in found["figures"]] == ["pass", "pass", "prefill"]
    assert "|tiny|2|64|" in capsys.readouterr().out


def test_one_system_alone(capsys):
    assert main([*TINY, "--systems", "ropewalk"]) == 0
    assert "transformers," not in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*TINY, "--systems", "other"])
    assert "'other' is no system" in capsys.readouterr().err


def test_a_shape_that_is_none(capsys):
    with pytest.raises(SystemExit):
        main(["--shapes", "tiny,no"])
    assert "'no' is no shape; use tiny, small" in capsys.readouterr().err


def test_the_file_is_named_after_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (x)")
    assert check._named(torch.device("cuda"), ["a", "b"]) == "gpu-nvidia-h200-x"
    assert check._named(torch.device("cuda"), ["a"]) == "gpu-nvidia-h200-x-a"


def test_the_script_says_that_there_is_no_gpu(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/gpu-check", "scripts/bootstrap", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "ropewalk"):
        (programs / name).write_text('#!/bin/sh\n[ "$1" != -c ]\n')  # torch sees none
        (programs / name).chmod(0o755)
    command = ["bash", str(tmp_path / "scripts/gpu-check")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "torch finds no CUDA device here; the small form for a CPU is: .venv/bin"
    )
    words = last.partition("ropewalk.load_tests.gpu.check ")[2].split()
    assert words == TINY[:8] and check.parser().parse_args(words)


def test_passes_that_could_not_be_recorded_are_told(alone, monkeypatch, capsys):
    def record(compute):
        raise RuntimeError("no memory")

    for module in (in_process, parts):
        monkeypatch.setattr(module, "recorder", lambda decoder: record)
    assert main(TINY) == 0
    told = "ropewalk, tiny, batch 2, context 64: no CUDA graph could be recorded, as the log says."
    assert told in capsys.readouterr().out
