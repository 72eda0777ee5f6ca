"""Packs trained weights: 8-bit rows with a scale each, which model/weights expands."""

import shutil
import stat
from filecmp import cmp
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ropewalk.model.encodings.base import create
from ropewalk.model.family.files import put, replacing
from ropewalk.model.family.training.dense import DenseAttention
from ropewalk.model.family.training.losses import later_half
from ropewalk.model.family.training.train import LOG
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.loading.checkpoints import load_program, open_checkpoint
from ropewalk.model.weights.quantize import rounded_rows
from ropewalk.model.weights.safetensors_dir import ROW_SCALE, SINGLE, SafetensorsDirectory

COST_WINDOWS = 64  # of held-out text, to measure what packing costs


def pack(folder: Path, target: Path) -> None:
    """Write a packed copy of a checkpoint folder, replacing `target`. Raises OSError.

    Files that the folder above `target` holds, as the family's tokenizer, are left out, and so is
    the training's log.
    """
    scratch = target.parent / ".partial"  # outside the folders searched for models
    made = scratch / target.name
    shutil.rmtree(made, ignore_errors=True)  # left by a process that was killed
    made.mkdir(parents=True)
    try:
        with replacing(made / SINGLE) as partial:
            save_file(_packed(folder), partial, metadata={"format": "pt"})
        for file in folder.iterdir():
            above = target.parent / file.name
            is_above = above.is_file() and cmp(above, file, shallow=False)
            if file.name not in (SINGLE, LOG) and not is_above:
                shutil.copyfile(file, made / file.name)
        (made / SINGLE).chmod(stat.S_IMODE((made / "config.json").stat().st_mode))
        put(made, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def is_packed(folder: Path, target: Path) -> bool:
    """Whether `target` holds what `pack` would write for the weights in `folder`."""
    try:
        found = load_file(target / SINGLE)
    except SafetensorError:  # damaged, or only a pointer file
        return False
    wanted = _packed(folder)
    return wanted.keys() == found.keys() and all(
        tensor.dtype == found[name].dtype and torch.equal(tensor, found[name])
        for name, tensor in wanted.items()
    )


def _packed(folder: Path) -> dict[str, Tensor]:
    """Matrices as 8-bit rows with a scale each; norms and the encoding's parameters in float32."""
    weights = SafetensorsDirectory(folder)
    tensors: dict[str, Tensor] = {}
    for name in sorted(weights.names()):
        tensor = weights.read(name)
        if tensor.dim() == 2 and not name.startswith("encoding."):
            tensors[name], tensors[name + ROW_SCALE] = rounded_rows(tensor)
        else:
            tensors[name] = tensor.float()
    return tensors


def loss_of(folder: Path, windows: Tensor) -> float:
    """A checkpoint's nats per token over the later half of windows, in float32."""
    checkpoint = open_checkpoint(folder)
    config, device = checkpoint.config, windows.device
    encoding = create(config.encoding, config, config.trained_context, device)
    program = load_program(checkpoint, encoding, dtype=torch.float32, device=device)
    return later_half(TorchExecutor(program, DenseAttention), windows)
