"""The layers of a decoder on a GPU, with few launches: a small model waits for these."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn

from cache.kv import KVCache
from model.attention.bias import StepBias
from model.batch import ForwardBatch
from model.config import Activation
from model.kernels.gpu_modules import FEW_ROWS, TritonGate, TritonLinear, power_of_2
from model.transformer import (
    Activate,
    Attention,
    Block,
    GatedMLP,
    LayerNorm,
    Layers,
    RMSNorm,
    kept,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a block, what is computed of few rows."""

    attention_norm: RMSNorm | LayerNorm
    qkv: TritonLinear
    attention: Attention
    out: TritonLinear
    mlp_norm: RMSNorm | LayerNorm
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
    return Parts(
        attention_norm=block.attention_norm,
        attention=attention,
        mlp_norm=block.mlp_norm,
        activation=activate.activation,
        gated=isinstance(mlp, GatedMLP),
        **in_triton,
    )


class TritonLayers(Layers):
    """As Layers of Blocks, with few launches.

    Of few rows, the linear layers compute all that stands between them. Of more, each addition and
    the norm after it are one launch.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.few_rows = FEW_ROWS
        self.kernels = import_module("model.kernels.triton_layer")
        found = [parts_of(block) for block in layers if isinstance(block, Block)]
        self._parts = [parts for parts in found if parts is not None]

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
        if len(x) <= self.few_rows and len(self._parts) == len(self):
            return self._of_few_rows(x, batch, kv, biases, rows)
        added: Tensor | None = None
        for index, (block, bias) in enumerate(zip(self, biases, strict=True)):
            assert isinstance(block, Block)
            wanted = rows if index == len(self) - 1 else None
            x, normed = self.add_norm(x, added, block.attention_norm)
            attended = block.attention(normed, batch, kv.layer(index), bias, wanted)
            x, normed = self.add_norm(kept(x, wanted), attended, block.mlp_norm)
            added = block.mlp(normed)
        return x if added is None else x + added

    def _of_few_rows(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: KVCache,
        biases: Iterable[StepBias | None],
        rows: Tensor | None,
    ) -> Tensor:
        for index, (parts, bias) in enumerate(zip(self._parts, biases, strict=True)):
            wanted = rows if index == len(self) - 1 else None
            given, norm = self._for_linear(x, parts.attention_norm)
            qkv = parts.qkv.few(given, norm=norm)
            y = parts.attention.attended(qkv, batch, kv.layer(index), bias)
            x = parts.out.few(kept(y, wanted), added=kept(x, wanted))
            given, norm = self._for_linear(x, parts.mlp_norm)
            y = parts.up.few(given, norm=norm, activation=parts.activation, gated=parts.gated)
            x = parts.down.few(y, added=x)
        return x

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
        )
        return total, out
