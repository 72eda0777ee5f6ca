"""Trained models in a folder: each in its own folder, named after its encoding and seed."""

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import EncodingError, create
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.training.recipe import ENCODINGS, code_digest
from ropewalk.model.family.training.train import LOG
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.loading.checkpoints import (
    Checkpoint,
    CheckpointError,
    load_program,
    open_checkpoint,
)
from ropewalk.model.tokenizers.loading import vocabulary_file

PREFIX = "ropewalk-"
_NAME = re.compile(rf"(?:{PREFIX})?(?P<label>.+?)(?:\.seed(?P<seed>\d+))?")
DIGESTED = ("config.json", "model.safetensors")  # and the vocabulary


@dataclass(frozen=True, slots=True)
class Member:
    """One trained model. `seed` is None for the served one."""

    name: str
    label: str  # of its encoding, for tables and pictures
    seed: int | None
    folder: Path  # with the checkpoint
    log: Path  # log of its training, which may not exist


def find_members(folder: Path) -> list[Member]:
    """Finished models in a folder, the six encodings first. Raises FamilyError if there are none.

    Each is a training run with its checkpoint in `model`, or a checkpoint itself.
    """
    checkpoints = {path.parent: path.parent for path in folder.glob("*/config.json")}
    checkpoints |= {path.parents[1]: path.parent for path in folder.glob("*/model/config.json")}
    if not checkpoints:
        raise FamilyError(
            f"{folder} holds no trained model; run ropewalk family train, or name another folder "
            "with --models"
        )
    return sorted((_member(run, path) for run, path in checkpoints.items()), key=_place)


def _member(run: Path, checkpoint: Path) -> Member:
    found = _NAME.fullmatch(run.name)
    assert found is not None, "every name matches"
    seed = int(found["seed"]) if found["seed"] else None
    beside = checkpoint / LOG  # the run's may be that of a longer training, not finished
    log = beside if beside.exists() else run / LOG
    return Member(run.name, found["label"], seed, checkpoint, log)


def _place(member: Member) -> tuple[int, str, int]:
    known = ENCODINGS.index(member.label) if member.label in ENCODINGS else len(ENCODINGS)
    return known, member.label, -1 if member.seed is None else member.seed


def digest(member: Member, encoding: str) -> str:
    """Digest of all that the model computes with, including a custom encoding's code."""
    made = hashlib.sha256(code_digest(encoding).encode())
    vocabulary = vocabulary_file(member.folder, shared=True)
    for path in (*(member.folder / name for name in DIGESTED), vocabulary):
        if path is not None and path.exists():
            made.update(f"{path.name} {path.stat().st_size}\n".encode())
            made.update(path.read_bytes())
    return made.hexdigest()


def opened(member: Member, trusted: Collection[str] = ()) -> Checkpoint:
    """`trusted` as in open_checkpoint. Raises FamilyError."""
    try:
        return open_checkpoint(member.folder, trusted)
    except CheckpointError as error:
        raise FamilyError(str(error)) from error


def load(checkpoint: Checkpoint, context: int, device: torch.device) -> Decoder:
    """In float32, for `context` positions or all that the encoding has. Raises FamilyError."""
    config = checkpoint.config
    try:
        encoding = create(config.encoding, config, context, device)
        program = load_program(checkpoint, encoding, dtype=torch.float32, device=device)
    except (CheckpointError, EncodingError) as error:
        raise FamilyError(str(error)) from error
    except Exception as error:  # a custom class may raise anything
        raise FamilyError(
            f"{checkpoint.path}: {config.encoding.name} fails at {context:,} positions "
            f"({type(error).__name__}: {error})"
        ) from error
    return Decoder(program, TorchExecutor(program, SdpaAttention))
