"""The layers of a decoder on a GPU, with few launches: a small model waits for these."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn

from cache.kv import KVCache
from model.attention.bias import StepBias
from model.attention.triton import FUSED
from model.batch import ForwardBatch
from model.config import Activation
from model.kernels.gpu_modules import TritonGate, TritonLinear, power_of_2
from model.transformer import (
    Activate,
    Block,
    GatedMLP,
    LayerNorm,
    Layers,
    RMSNorm,
    kept,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The linear layers of a block, and its activation."""

    qkv: TritonLinear
    out: TritonLinear
    up: TritonLinear
    activation: Activation
    gated: bool
    down: TritonLinear


def parts_of(block: Block) -> Parts | None:
    """None if one of its linear layers is not Triton's."""
    attention, mlp = block.attention, block.mlp
    up, activate = (mlp.gate_up, mlp.gate) if isinstance(mlp, GatedMLP) else (mlp.up, mlp.activate)
    linears: dict[str, nn.Module] = {
        "qkv": attention.qkv,
        "out": attention.out,
        "up": up,
        "down": mlp.down,
    }
    in_triton = {name: each for name, each in linears.items() if isinstance(each, TritonLinear)}
    if len(in_triton) < len(linears) or not isinstance(activate, TritonGate | Activate):
        return None
    return Parts(**in_triton, activation=activate.activation, gated=isinstance(mlp, GatedMLP))


class TritonLayers(Layers):
    """As Layers of Blocks, with few launches.

    Of few rows, the linear layers compute all that stands between them. Of more, each addition and
    the norm after it are one launch.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.kernels = import_module("model.kernels.triton_layer")
        self._parts = [parts_of(block) for block in layers if isinstance(block, Block)]

    @staticmethod
    def can_stand_for(layers: Layers) -> bool:
        return all(type(block) is Block for block in layers)

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: KVCache,
        biases: Iterable[StepBias | None],
        rows: Tensor | None = None,
    ) -> Tensor:
        added: Tensor | None = None  # what is still to be added to x
        for index, (block, bias) in enumerate(zip(self, biases, strict=True)):
            assert isinstance(block, Block)
            x, qkv = self._projected(x, added, block, self._parts[index])
            y = block.attention.attended(qkv, batch, kv.layer(index), bias)
            wanted = rows if index == len(self) - 1 else None
            x, added = self._after(kept(x, wanted), kept(y, wanted), block, self._parts[index])
        return x if added is None else x + added

    def _projected(
        self, x: Tensor, added: Tensor | None, block: Block, parts: Parts | None
    ) -> tuple[Tensor, Tensor]:
        """x + added, and its queries, keys and values."""
        if parts is not None and parts.qkv.takes(x):
            assert added is None, "the layer before had as many rows"
            given, norm = self._for_linear(x, block.attention_norm)
            return x, parts.qkv.few(given, norm=norm)
        x, normed = self.add_norm(x, added, block.attention_norm)
        return x, block.attention.qkv(normed)

    def _after(
        self, x: Tensor, y: Tensor, block: Block, parts: Parts | None
    ) -> tuple[Tensor, Tensor | None]:
        """The block's output, as x and what is to be added to it; y [rows, inputs of `out`]."""
        if parts is not None and parts.out.takes(x):
            x = parts.out.few(y, added=x)
            given, norm = self._for_linear(x, block.mlp_norm)
            y = parts.up.few(given, norm=norm, activation=parts.activation, gated=parts.gated)
            return parts.down.few(y, added=x), None
        x, normed = self.add_norm(x, block.attention.out(y), block.mlp_norm)
        return x, block.mlp(normed)

    def _for_linear(self, x: Tensor, norm: RMSNorm | LayerNorm) -> tuple[Tensor, RMSNorm | None]:
        """x and the norm that is left to a linear layer, which can take RMSNorm alone."""
        if isinstance(norm, RMSNorm):
            return x, norm
        return self.add_norm(x, None, norm)[1], None

    def add_norm(
        self, x: Tensor, added: Tensor | None, norm: RMSNorm | LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """x + added [T, width], and its norm."""
        out = torch.empty_like(x)
        total = x if added is None else torch.empty_like(x)
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        self.kernels.add_norm[(len(x),)](
            *(x, x if added is None else added, total, out, norm.weight),
            *(norm.weight if bias is None else bias, norm.eps),
            WIDTH=x.shape[1],
            ADDS=added is not None,
            CENTRED=isinstance(norm, LayerNorm),
            BIASED=bias is not None,
            COLUMNS=power_of_2(x.shape[1]),
            **FUSED,
        )
        return total, out
