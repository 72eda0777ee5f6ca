"""Trained weights made small: 8-bit rows with a scale each, as model/weights expands them."""

import shutil
import stat
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.encodings.base import create
from model.family.dense import DenseAttention
from model.family.files import put, replacing
from model.family.losses import later_half
from model.linear import rounded_rows
from model.loading import load_decoder, open_checkpoint
from model.transformer import Decoder
from model.weights.safetensors_dir import ROW_SCALE, SINGLE, SafetensorsDirectory

COST_WINDOWS = 64  # of held-out text, to tell what packing costs


def pack(folder: Path, target: Path) -> None:
    """Write a checkpoint folder anew, in place of what was there. Raises OSError."""
    scratch = target.parent / ".partial"  # where nobody looks for models
    made = scratch / target.name
    shutil.rmtree(made, ignore_errors=True)  # left by a process that was killed
    made.mkdir(parents=True)
    try:
        with replacing(made / SINGLE) as partial:
            save_file(_packed(folder), partial, metadata={"format": "pt"})
        for file in folder.iterdir():
            if file.name != SINGLE:
                shutil.copyfile(file, made / file.name)
        (made / SINGLE).chmod(stat.S_IMODE((made / "config.json").stat().st_mode))
        put(made, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def is_packed(folder: Path, target: Path) -> bool:
    """Whether `target` holds what `pack` makes of the weights in `folder`."""
    try:
        found = load_file(target / SINGLE)
    except SafetensorError:  # it is damaged, or not there but as a pointer
        return False
    wanted = _packed(folder)
    return wanted.keys() == found.keys() and all(
        tensor.dtype == found[name].dtype and torch.equal(tensor, found[name])
        for name, tensor in wanted.items()
    )


def _packed(folder: Path) -> dict[str, Tensor]:
    """Matrices as 8-bit rows with a scale each; norms and the encoding's own in float32."""
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
    """Nats per token of a checkpoint folder at the later half of windows, in float32."""
    checkpoint = open_checkpoint(folder)
    config, device = checkpoint.config, windows.device
    encoding = create(config.encoding, config, config.trained_context, device)
    decoder = Decoder(config, encoding, DenseAttention, dtype=torch.float32, device=device)
    load_decoder(checkpoint, decoder)
    return later_half(decoder, windows)
