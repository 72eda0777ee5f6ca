"""Trained weights made small: 8-bit rows with a scale each, as model/weights expands them."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.encodings.base import create
from model.family.dense import DenseAttention
from model.family.losses import later_half
from model.linear import rounded_rows
from model.loading import load_decoder, open_checkpoint
from model.transformer import Decoder
from model.weights.safetensors_dir import ROW_SCALE, SINGLE, SafetensorsDirectory


def pack(folder: Path, target: Path) -> None:
    """Write a checkpoint folder anew: matrices packed, norms and the encoding's own in float32."""
    weights = SafetensorsDirectory(folder)
    tensors: dict[str, Tensor] = {}
    for name in sorted(weights.names()):
        tensor = weights.read(name)
        if tensor.dim() == 2 and not name.startswith("encoding."):
            tensors[name], tensors[name + ROW_SCALE] = rounded_rows(tensor)
        else:
            tensors[name] = tensor.float()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    save_file(tensors, target / SINGLE, metadata={"format": "pt"})
    for file in folder.iterdir():
        if file.name != SINGLE:
            shutil.copyfile(file, target / file.name)


def loss_of(folder: Path, windows: Tensor) -> float:
    """Nats per token of a checkpoint folder at the later half of windows, in float32."""
    checkpoint = open_checkpoint(folder)
    config, device = checkpoint.config, windows.device
    encoding = create(config.encoding, config, config.trained_context, device)
    decoder = Decoder(config, encoding, DenseAttention, dtype=torch.float32, device=device)
    load_decoder(checkpoint, decoder)
    return later_half(decoder, windows)
