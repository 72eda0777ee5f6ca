"""Faster substitutes for parts of the decoder on a GPU: one launch where torch takes several.

Each computes what the part does up to rounding. Nothing waits for the device.
"""

from collections.abc import Iterable
from importlib import import_module

import torch
from torch import Tensor, nn

from cache.kv import Int8LayerKV, KVCache, PagedKV
from cache.terms import KeyFrame
from model.attention.bias import StepBias
from model.batch import ForwardBatch
from model.kernels.modules import RotationTables
from model.transformer import Block, Gate, LayerNorm, Layers, RMSNorm, kept

# Per program. Which numbers are fastest has not been measured.
HEADS_AT_ONCE = 8
GATES_AT_ONCE = 1024


class TritonStore:
    """Attention's `stored` in one launch: rotates, and writes keys and values to the cache.

    Positions and slots are not checked: positions must be below max_positions, as the server's are.
    """

    def __init__(self, tables: RotationTables | None) -> None:
        """`tables`: None for an encoding that does not rotate."""
        rotates = tables is not None and tables.key_frame is not KeyFrame.RAW
        self.tables = tables if rotates else None
        # Imported by name, and only here: machines without a GPU have no Triton.
        self.kernels = import_module("model.kernels.triton_store")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        tables = self.tables
        rows, kv_heads, head_dim = k.shape
        at, cos, sin, pairs = batch.offsets, q, q, 0  # placeholders, which are not read
        if tables is not None:
            at = batch.offsets if tables.key_frame is KeyFrame.BLOCK else batch.positions
            cos, sin, pairs = tables.cos, tables.sin, tables.cos.shape[1]
        turns = tables is not None and tables.key_frame is KeyFrame.ABSOLUTE
        heads = q.shape[1] if turns else 0
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device) if turns else q
        scales = kv[2:] if isinstance(kv, Int8LayerKV) else kv
        tiles = sum(-(-count // HEADS_AT_ONCE) for count in (heads, kv_heads))
        self.kernels.store[rows, tiles](
            *(q, k, v, turned, kv.keys, kv.values, *scales, batch.slots, at, cos, sin),
            *(*q.stride(), *k.stride(), *v.stride()),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAIRS=pairs,
            INTERLEAVED=tables is not None and tables.interleaved,
            SCALED=isinstance(kv, Int8LayerKV),
            TILE=HEADS_AT_ONCE,
            TURNED=_power_of_2(pairs),
            REST=_power_of_2(head_dim - 2 * pairs),
            DIMS=_power_of_2(head_dim),
            enable_fp_fusion=False,  # rounds products separately, as torch does
        )
        return turned


class TritonGate(nn.Module):
    """As Gate, in one launch."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.activation = gate.activation
        self.kernels = import_module("model.kernels.triton_layer")

    def forward(self, x: Tensor) -> Tensor:
        rows, width = len(x), x.shape[1] // 2
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        self.kernels.gate[rows, -(-width // GATES_AT_ONCE)](
            x, out, WIDTH=width, ACTIVATION=self.activation, COLUMNS=GATES_AT_ONCE
        )
        return out


class TritonLayers(Layers):
    """As Layers of Blocks; each addition and the norm after it are one launch."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.kernels = import_module("model.kernels.triton_layer")

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
        added: Tensor | None = None
        for index, (block, bias) in enumerate(zip(self, biases, strict=True)):
            assert isinstance(block, Block)
            wanted = rows if index == len(self) - 1 else None
            x, normed = self.add_norm(x, added, block.attention_norm)
            attended = block.attention(normed, batch, kv.layer(index), bias, wanted)
            x, normed = self.add_norm(kept(x, wanted), attended, block.mlp_norm)
            added = block.mlp(normed)
        return x if added is None else x + added

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
            COLUMNS=_power_of_2(x.shape[1]),
        )
        return total, out


def _power_of_2(count: int) -> int:
    """The smallest power of 2 that is at least `count`; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()
