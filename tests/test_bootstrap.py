"""scripts/bootstrap: what is installed, by which program, and which build of torch."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Stands in for .venv/bin/python: writes down what it is asked, and plays uv and pip.
PYTHON = """#!/bin/bash
echo "python $* [backend=$UV_TORCH_BACKEND index=$UV_INDEX links=$UV_FIND_LINKS]" >> "$LOG"
case "$*" in
    *"-m pip --version" | *version*torch*) ;;
    *"config list") printf '%s' "$PIP_SETTINGS" ;;
    *"pip install --quiet"*uv*) exit "$UV_MISSING" ;;
    *"uv --version") exit "$UV_MISSING" ;;
    *--dry-run*) [ -z "$UV_TORCH_BACKEND" ] || exit "$TORCH_INDEX_MISSING"; echo "$PLAN" ;;
    *"uv pip install"*) echo "error: no such package"; exit "$UV_FAILS" ;;
    *"pip install"*) echo "no such package"; exit "$PIP_FAILS" ;;
esac
"""
QUIET = {
    "PIP_SETTINGS": "",
    "UV_MISSING": "0",
    "UV_FAILS": "0",
    "PIP_FAILS": "0",
    "TORCH_INDEX_MISSING": "0",
    "PLAN": " + torch==2.13.0+cpu",
}


@dataclass(frozen=True)
class Start:
    """One run of scripts/serve in a folder whose .venv is played."""

    code: int
    shown: str
    asked: list[str]  # of python and ropewalk, in order

    @property
    def installed(self) -> list[str]:
        return [line for line in self.asked if " install " in line and "--dry-run" not in line]


@pytest.fixture
def start(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/serve", "scripts/bootstrap", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").write_text(PYTHON)
    (programs / "ropewalk").write_text('#!/bin/sh\necho "ropewalk $PWD $*" >> "$LOG"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(**changed: str) -> Start:
        log = tmp_path / "log"
        log.write_text("")
        usual = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        done = subprocess.run(
            ["bash", str(tmp_path / "scripts/serve"), "./model", "--port", "1"],
            cwd=elsewhere,
            env=usual | QUIET | {"LOG": str(log)} | changed,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Start(done.returncode, done.stderr, log.read_text().splitlines())

    return run


def test_requirement_of_torch_is_cut_out_of_the_project_file() -> None:
    script = ". scripts/bootstrap; torch_requirement"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"torch>=\d+\.\d+,<\d+\.\d+\n", done.stdout)


def test_second_start_installs_nothing(tmp_path: Path, start) -> None:
    """With a stamp that fits, the script goes straight to the server."""
    serving = f"ropewalk {tmp_path / 'elsewhere'} serve ./model --port 1"
    first = start()
    assert len(first.installed) == 3  # uv, torch, Ropewalk
    assert first.asked[-1] == serving
    assert start().asked == [serving]
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + "\n")
    assert len(start().asked) > 1


def test_the_build_of_torch_fits_the_driver(start) -> None:
    done = start()
    torch = done.installed[1]
    assert "uv pip install" in torch and "torch>=" in torch and "[backend=auto " in torch
    assert "cannot be reached" not in done.shown


def test_a_build_of_torch_can_be_chosen(start) -> None:
    assert "[backend=cu130 " in start(UV_TORCH_BACKEND="cu130").installed[1]


def test_without_pytorchs_indexes_torch_comes_from_pips(start) -> None:
    done = start(
        TORCH_INDEX_MISSING="1",
        PIP_SETTINGS=":env:.find-links='/a /b'\n"
        "global.extra-index-url='\\nhttps://one.example\\nhttps://two.example'\n"
        "global.find-links='/c'\n",
    )
    assert "PyTorch's own indexes cannot be reached" in done.shown
    wanted = "[backend= index= https://one.example https://two.example links=/a,/b]"
    assert all(line.endswith(wanted) for line in done.installed[1:])


@pytest.mark.parametrize("driver", [False, True])
def test_a_build_that_brings_cuda_for_nothing_is_announced(
    tmp_path: Path, start, driver: bool
) -> None:
    if not driver and Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    path = tmp_path / "bin"
    path.mkdir()
    if driver:
        (path / "nvidia-smi").write_text("#!/bin/sh\n")
        (path / "nvidia-smi").chmod(0o755)
    done = start(
        TORCH_INDEX_MISSING="1",
        PLAN=" + nvidia-cublas==13.1.1.3\n + torch==2.13.0",
        PATH=f"{path}:{os.environ['PATH']}",
    )
    assert ("PIP_EXTRA_INDEX_URL" in done.shown) is not driver


def test_pip_installs_where_uv_cannot_be_had(start) -> None:
    done = start(UV_MISSING="1")
    assert "uv cannot be had here" in done.shown
    assert all("-m pip install" in line for line in done.installed)
    assert done.asked[-1].startswith("ropewalk ")


def test_pip_installs_what_uv_cannot(start) -> None:
    done = start(UV_FAILS="1")
    assert "uv failed (no such package); pip tries" in done.shown
    assert "-m pip install" in done.installed[-1] and "-e ." in done.installed[-1]
    assert done.code == 0


def test_failed_installation_shows_why_and_leaves_no_stamp(tmp_path: Path, start) -> None:
    done = start(UV_MISSING="1", PIP_FAILS="1")
    assert done.code == 1
    assert "no such package" in done.shown
    assert "The step above failed" in done.shown
    assert not list((tmp_path / ".venv").glob(".ropewalk-*"))
