"""Faster substitutes for parts of the decoder on a GPU: one launch where torch takes several.

Each computes what the part does up to rounding. Nothing waits for the device.
"""

from importlib import import_module

import torch
from torch import Tensor, nn

from ropewalk.cache.kv import Int8LayerKV, PagedKV
from ropewalk.cache.types import KeyFrame
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import Activation
from ropewalk.model.kernels.cpu.modules import RotationTables
from ropewalk.model.kernels.triton.attention import FUSED
from ropewalk.model.layers.decoder import Gate, RMSNorm
from ropewalk.model.layers.linear import Int8Linear, Linear

# Which of these numbers are fastest has not been measured.
HEADS_AT_ONCE = 8  # per program
GATES_AT_ONCE = 1024
FEW_ROWS = 8  # with more, linear layers are torch's
ROWS = 16  # of a tile, the least that a product of tiles has
WEIGHTS_AT_ONCE = 256  # of each output
OUTPUTS_AT_ONCE = 16  # or twice as many, if that leaves at least MANY_PROGRAMS; gated, of each half
MANY_PROGRAMS = 1024


class TritonStore:
    """Attention's `stored` in one launch: rotates, and writes keys and values to the cache.

    Positions and slots are not checked: positions must be below max_positions, as the server's are.
    """

    def __init__(self, tables: RotationTables | None) -> None:
        """`tables`: None for an encoding that does not rotate."""
        rotates = tables is not None and tables.key_frame is not KeyFrame.RAW
        self.tables = tables if rotates else None
        # Imported by name, and only here: machines without a GPU have no Triton.
        self.kernels = import_module("ropewalk.model.kernels.triton.store_kernels")

    def fixed_tensors(self) -> dict[str, Tensor]:
        """See model/weights/fixed.py."""
        return {} if self.tables is None else self.tables.fixed_tensors()

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
            TURNED=power_of_2(pairs),
            REST=power_of_2(head_dim - 2 * pairs),
            DIMS=power_of_2(head_dim),
            enable_fp_fusion=False,  # rounds products separately, as torch does
        )
        return turned


class TritonGate(nn.Module):
    """As Gate, in one launch."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.activation = gate.activation
        self.kernels = import_module("ropewalk.model.kernels.triton.layer_kernels")

    def forward(self, x: Tensor) -> Tensor:
        rows, width = len(x), x.shape[1] // 2
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        self.kernels.gate[rows, -(-width // GATES_AT_ONCE)](
            *(x, out),
            WIDTH=width,
            ACTIVATION=self.activation,
            COLUMNS=GATES_AT_ONCE,
            **FUSED,
        )
        return out


class TritonLinear(nn.Module):
    """A linear layer that reads its weights once for few rows; with more rows it is torch's.

    For bfloat16 and float32: float16 could not hold a row times RMSNorm's weights before the norm
    divides it.
    """

    DTYPES = (torch.bfloat16, torch.float32)

    def __init__(self, linear: Linear | Int8Linear) -> None:
        super().__init__()
        self.linear = linear
        self.few_rows = FEW_ROWS
        self.kernels = import_module("ropewalk.model.kernels.triton.linear_kernels")

    def forward(self, x: Tensor) -> Tensor:
        if self.takes(x):
            return self.few(x)
        y: Tensor = self.linear(x)
        return y

    def takes(self, x: Tensor) -> bool:
        """Whether x has few rows."""
        return 0 < len(x) <= self.few_rows

    def few(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        added: Tensor | None = None,
    ) -> Tensor:
        """added + activation(linear(norm(x))), for at most ROWS of x [rows, inputs].

        Gated, the activation is that of the first half of the outputs, times the other half.
        """
        linear, scale = self.linear, None
        if isinstance(linear, Int8Linear):
            weight, scale = linear.rounded, linear.scale
        else:
            weight = linear.weight
        outputs, inputs = weight.shape
        outputs //= 2 if gated else 1
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
        # Gated, a tile has two matrices already; twice as large, they would not fit a GPU of 8.6.
        twice = not gated and outputs >= 2 * OUTPUTS_AT_ONCE * MANY_PROGRAMS
        tile = OUTPUTS_AT_ONCE * (2 if twice else 1)
        self.kernels.linear[(-(-outputs // tile),)](
            *(x, weight, _or(scale, x), _or(linear.bias, x)),
            *(x if norm is None else norm.weight, 0.0 if norm is None else norm.eps),
            *(_or(added, x), out, len(x)),
            INPUTS=inputs,
            OUTPUTS=outputs,
            SCALED=scale is not None,
            BIASED=linear.bias is not None,
            NORMED=norm is not None,
            GATED=gated,
            ACTIVATION=activation or "none",
            ADDS=added is not None,
            ROWS=ROWS,
            TILE_IN=WEIGHTS_AT_ONCE // (2 if x.dtype is torch.float32 else 1),
            TILE_OUT=tile,
            WIDE=x.device.type == "cpu",
            num_stages=4 if scale is None else 6,  # tiles on their way: as many bytes of each kind
            **FUSED,
        )
        return out


def _or(given: Tensor | None, placeholder: Tensor) -> Tensor:
    """Kernels take an address even of what they do not read."""
    return placeholder if given is None else given


def power_of_2(count: int) -> int:
    """The smallest power of 2 that is at least `count`; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()
