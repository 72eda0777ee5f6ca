"""The layers of a decoder on a GPU, with few launches: a small model waits for these."""

from collections.abc import Iterable
from importlib import import_module
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ropewalk.cache.kv import KVCache
from ropewalk.model.attention.bias import StepBias
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.kernels.triton.attention import FUSED
from ropewalk.model.kernels.triton.modules import TritonGate, TritonLinear, power_of_2
from ropewalk.model.layers.decoder import (
    Activate,
    Block,
    GatedMLP,
    LayerNorm,
    Layers,
    RMSNorm,
    kept,
)
from ropewalk.model.layers.encoder_decoder import CrossBlock


class TritonLayers(Layers):
    """As Layers of blocks, with few launches.

    Of few rows, the linear layers compute all that stands between them. Of more, each addition and
    the norm after it are one launch.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.kernels = import_module("ropewalk.model.kernels.triton.layer_kernels")

    @staticmethod
    def can_stand_for(layers: Layers) -> bool:
        return all(type(block) in (Block, CrossBlock) for block in layers)

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
            attention, mlp, own = block.attention, block.mlp, kv.layer(index)
            x, qkv = self._of_norm(x, added, block.attention_norm, attention.qkv)
            y, out = attention.attended(qkv, batch, own, bias), attention.out
            if isinstance(block, CrossBlock):
                assert batch.cross is not None, "an encoder-decoder needs encoded prompts"
                x, added = self._onto(x, y, out)
                x, q = self._of_norm(x, added, block.cross_norm, block.cross.q)
                y, out = block.cross.attended(q, batch.cross.seen, own), block.cross.out
            wanted = rows if index == len(self) - 1 else None
            x, added = self._onto(kept(x, wanted), kept(y, wanted), out)
            if isinstance(mlp, GatedMLP):
                x, y = self._of_norm(x, added, block.mlp_norm, mlp.gate_up, mlp.gate)
            else:
                x, y = self._of_norm(x, added, block.mlp_norm, mlp.up, mlp.activate)
            x, added = self._onto(x, y, mlp.down)
        return _sum(x, added)

    def _of_norm(
        self,
        x: Tensor,
        added: Tensor | None,
        norm: RMSNorm | LayerNorm,
        linear: nn.Module,
        activate: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x + added, and activate(linear(norm(x + added)))."""
        if _takes(linear, x) and isinstance(activate, TritonGate | Activate | None):
            x = given = _sum(x, added)
            left = norm if isinstance(norm, RMSNorm) else None  # which linear layers can compute
            if left is None:
                _, given = self.add_norm(x, None, norm)
            return x, linear.few(
                given,
                norm=left,
                activation=None if activate is None else activate.activation,
                gated=isinstance(activate, TritonGate),
            )
        x, normed = self.add_norm(x, added, norm)
        y: Tensor = linear(normed)
        return x, y if activate is None else activate(y)

    def _onto(self, x: Tensor, y: Tensor, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        """x + linear(y), as one tensor or as two that are to be added."""
        if _takes(linear, x):
            return linear.few(y, added=x), None
        return x, linear(y)

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


def _takes(linear: nn.Module, x: Tensor) -> TypeGuard[TritonLinear]:
    return isinstance(linear, TritonLinear) and linear.takes(x)


def _sum(x: Tensor, added: Tensor | None) -> Tensor:
    return x if added is None else x + added
