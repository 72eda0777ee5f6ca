"""Nats per token of windows or pieces: what training minimises and what measures its progress."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts.corpus import Split
from ropewalk.model.family.training.dense import dense_logits, refreeze
from ropewalk.model.layers.executor import TorchExecutor

_AT_ONCE = 8  # windows


def token_losses(decoder: TorchExecutor, tokens: Tensor, autocast: bool = False) -> Tensor:
    """tokens [windows, length + 1] → nats [windows, length] of each next token.

    autocast: compute in bfloat16, where the hardware supports it.
    """
    dtype = torch.bfloat16 if autocast else torch.float32
    with torch.autocast(tokens.device.type, dtype, enabled=autocast):
        logits = dense_logits(decoder, tokens[:, :-1], dtype)
    losses = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1)


@torch.no_grad()
def later_half(decoder: TorchExecutor, windows: Tensor, autocast: bool = False) -> float:
    """Nats per token over the later half of the positions of windows [windows, length + 1]."""
    refreeze(decoder)
    half = windows.shape[1] // 2
    found = [
        token_losses(decoder, windows[first : first + _AT_ONCE], autocast)[:, half:]
        for first in range(0, len(windows), _AT_ONCE)
    ]
    return float(torch.cat(found).mean())


def pieces(windows: Tensor, length: int, bos: int) -> Tensor:
    """[windows, n · length + 1] → [n · windows, length + 1], each with <s> as its first token."""
    found = windows.unfold(1, length + 1, length).flatten(0, 1).clone()
    found[:, 0] = bos
    return found


def windows_of(split: Split, length: int, most: int) -> Tensor:
    """[windows, length + 1] int64: at most `most`, spread evenly over all documents, each with <s>.

    Raises FamilyError when no document has that many tokens.
    """
    found = []
    for number in range(len(split.starts)):
        document = split.document(number)
        found += [
            document[start : start + length + 1]
            for start in range(0, len(document) - length, length)
        ]
    if not found:
        raise FamilyError(f"no held-out text has {length + 1} tokens; run ropewalk family prepare")
    chosen = np.linspace(0, len(found) - 1, min(most, len(found))).astype(int)
    windows = torch.from_numpy(np.stack([found[number] for number in chosen]).astype(np.int64))
    return pieces(windows, length, split.bos)
