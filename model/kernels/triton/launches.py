"""Parts of a layer on a GPU: one launch where torch takes several.

Each computes what the ops do up to rounding. Nothing waits for the device.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from ropewalk.cache.kv import Int8LayerKV, PagedKV
from ropewalk.cache.types import KeyStorage
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import Activation
from ropewalk.model.encodings.base import ForgetGates
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.triton.attention import FUSED, of_cache
from ropewalk.model.program import Norm
from ropewalk.model.sampler import Drawn, Rule, Sampler, among_best
from ropewalk.model.weights.quantize import Int8

# Which of these numbers are fastest has not been measured.
HEADS_AT_ONCE = 8  # per program
GATES_AT_ONCE = 1024
FEW_ROWS = 16  # the least that a product of tiles has; with more, linear layers are torch's
WEIGHTS_AT_ONCE = 256  # of each output
OUTPUTS_AT_ONCE = 16  # or twice as many, if that leaves at least MANY_PROGRAMS; gated, of each half
MANY_PROGRAMS = 1024
CANDIDATES = 1024  # for a draw; a row that keeps more tokens is read some 70 times
TOKENS_AT_ONCE = 2048


class TritonStore:
    """Rotates queries and keys, and writes keys and values to the cache, in one launch.

    Positions and slots are not checked: positions must be below max_positions, as the server's are.
    """

    def __init__(self, rope: RoPE | None) -> None:
        """`rope`: whose tables rotate; None for an encoding that does not."""
        self.rope = rope if rope is not None and rope.key_storage is not KeyStorage.RAW else None
        if self.rope is not None:
            self.tables = self.rope.cos.contiguous(), self.rope.sin.contiguous()
        # Imported by name, and only here: machines without a GPU have no Triton.
        self.kernels = import_module("ropewalk.model.kernels.triton.store_kernels")

    def fixed_tensors(self) -> dict[str, Tensor]:
        """The tables, which may be copies of the encoding's."""
        if self.rope is None:
            return {}
        return dict(zip(("cos", "sin"), self.tables, strict=True))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        rope = self.rope
        rows, kv_heads, head_dim = k.shape
        at, cos, sin, pairs = batch.offsets, q, q, 0  # placeholders, which are not read
        if rope is not None:
            at = batch.offsets if rope.key_storage is KeyStorage.BLOCK else batch.positions
            (cos, sin), pairs = self.tables, rope.cos.shape[1]
        rotates = rope is not None and rope.key_storage is KeyStorage.ABSOLUTE
        heads = q.shape[1] if rotates else 0
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device) if rotates else q
        tiles = sum(-(-count // HEADS_AT_ONCE) for count in (heads, kv_heads))
        self.kernels.store[rows, tiles](
            *(q, k, v, rotated, *of_cache(kv), batch.slots, at, cos, sin),
            *(*q.stride(), *k.stride(), *v.stride()),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAIRS=pairs,
            INTERLEAVED=rope is not None and rope.layout == "interleaved",
            SCALED=isinstance(kv, Int8LayerKV),
            TILE=HEADS_AT_ONCE,
            ROTATED=power_of_2(pairs),
            REST=power_of_2(head_dim - 2 * pairs),
            DIMS=power_of_2(head_dim),
            enable_fp_fusion=False,  # rounds products separately, as torch does
        )
        return rotated


class TritonForget:
    """Computes an encoding's gates and writes them to the cache, in one launch."""

    def __init__(self, gates: ForgetGates) -> None:
        self.weight, self.bias = (each.detach().float() for each in (gates.weight, gates.bias))
        self.kernels = import_module("ropewalk.model.kernels.triton.store_kernels")

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: PagedKV) -> None:
        heads, width = self.weight.shape
        self.kernels.forget[len(x), -(-heads // HEADS_AT_ONCE)](
            *(x.contiguous(), self.weight.contiguous(), self.bias, kv.gates, batch.slots),
            HEADS=heads,
            WIDTH=width,
            BLOCK_SIZE=kv.keys.shape[1],
            TILE=HEADS_AT_ONCE,
            COLUMNS=WEIGHTS_AT_ONCE,
            **FUSED,
        )


class TritonGate:
    """x [T, 2 · width] = gate, up → activation(gate) · up."""

    def __init__(self, activation: Activation) -> None:
        self.activation = activation
        self.kernels = import_module("ropewalk.model.kernels.triton.layer_kernels")

    def __call__(self, x: Tensor) -> Tensor:
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


class TritonNorm:
    """A norm over whole rows, perhaps of a sum, which is returned as well."""

    def __init__(self, op: Norm, weight: Tensor, bias: Tensor | None) -> None:
        self.op, self.weight, self.bias = op, weight, bias
        self.kernels = import_module("ropewalk.model.kernels.triton.layer_kernels")

    def __call__(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + added [T, width], and its norm."""
        out = torch.empty_like(x)
        total = x if added is None else torch.empty_like(x)
        self.kernels.add_norm[(len(x),)](
            *(x, x if added is None else added, total, out, self.weight),
            *(_or(self.bias, self.weight), self.op.eps),
            WIDTH=x.shape[1],
            ADDS=added is not None,
            CENTRED=self.op.centred,
            BIASED=self.bias is not None,
            COLUMNS=power_of_2(x.shape[1]),
            **FUSED,
        )
        return total, out


class TritonLinear:
    """A linear layer that reads its weights once, for few rows.

    For bfloat16 and float32: float16 could not hold a row times RMSNorm's weights before the norm
    divides it.
    """

    DTYPES = (torch.bfloat16, torch.float32)

    def __init__(self, weight: Tensor | Int8, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.kernels = import_module("ropewalk.model.kernels.triton.linear_kernels")

    def __call__(
        self,
        x: Tensor,
        *,
        norm: TritonNorm | None = None,
        activation: Activation | None = None,
        gated: bool = False,
        added: Tensor | None = None,
    ) -> Tensor:
        """added + activation(linear(norm(x))), for at most FEW_ROWS of x [rows, inputs].

        Gated, the activation is that of the first half of the outputs, times the other half.
        """
        scale: Tensor | None = None
        if isinstance(self.weight, Int8):
            weight, scale = self.weight.rounded, self.weight.scale
        else:
            weight = self.weight
        outputs, inputs = weight.shape
        outputs //= 2 if gated else 1
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
        # Gated, a tile has two matrices already; twice as large, they would not fit a GPU of 8.6.
        twice = not gated and outputs >= 2 * OUTPUTS_AT_ONCE * MANY_PROGRAMS
        tile = OUTPUTS_AT_ONCE * (2 if twice else 1)
        self.kernels.linear[(-(-outputs // tile),)](
            *(x, weight, _or(scale, x), _or(self.bias, x)),
            *(x if norm is None else norm.weight, 0.0 if norm is None else norm.op.eps),
            *(_or(added, x), out, len(x)),
            INPUTS=inputs,
            OUTPUTS=outputs,
            SCALED=scale is not None,
            BIASED=self.bias is not None,
            NORMED=norm is not None,
            GATED=gated,
            ACTIVATION=activation or "none",
            ADDS=added is not None,
            ROWS=FEW_ROWS,
            TILE_IN=WEIGHTS_AT_ONCE // (2 if x.dtype is torch.float32 else 1),
            TILE_OUT=tile,
            WIDE=x.device.type == "cpu",
            num_warps=tile // 8,  # that many columns are a warp's least; more warps repeat its work
            num_stages=4 if scale is None else 6,  # tiles on their way: as many bytes of each kind
            **FUSED,
        )
        return out


class TritonExperts:
    """One layer of all experts, each row through those that are picked for it.

    A row reads the weights of its own experts, so this is for few rows to each expert. The host
    need not know which they are.
    """

    TYPES: ClassVar[dict[torch.dtype, str]] = {
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
        torch.float32: "float32",
        torch.int8: "int8",
    }

    def __init__(self, layers: Sequence[Tensor | Int8]) -> None:
        first = layers[0]
        self.held = layers
        self.scaled = isinstance(first, Int8)
        stored = [each.rounded if isinstance(each, Int8) else each for each in layers]
        scales = [each.scale if isinstance(each, Int8) else each for each in layers]
        self.addresses = {
            name: torch.tensor([each.data_ptr() for each in of], device=stored[0].device)
            for name, of in (("weights", stored), ("scales", scales))
        }
        self.dtype, (self.outputs, self.inputs) = stored[0].dtype, first.shape
        self.kernels = import_module("ropewalk.model.kernels.triton.linear_kernels")
        self.language = import_module("triton.language")

    def __call__(self, x: Tensor, picked: Tensor, activation: Activation | None = None) -> Tensor:
        """x [T, inputs] or [T · used, inputs], picked [T, used] → [T · used, outputs].

        With an activation, gated by it: that is of the first half of the outputs, times the other.
        """
        gated = activation is not None
        outputs, pairs = self.outputs // (2 if gated else 1), picked.numel()
        out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
        self.kernels.expert[-(-outputs // OUTPUTS_AT_ONCE), pairs](
            *(x.contiguous(), picked.contiguous(), *self.addresses.values(), out),
            INPUTS=self.inputs,
            OUTPUTS=outputs,
            PAIRS=pairs // len(x),
            STORED=getattr(self.language, self.TYPES[self.dtype]),
            SCALED=self.scaled,
            GATED=gated,
            ACTIVATION=activation or "none",
            TILE_IN=WEIGHTS_AT_ONCE,
            TILE_OUT=OUTPUTS_AT_ONCE,
            **FUSED,
        )
        return out


class TritonSampler(Sampler):
    """Picks tokens on a GPU; the host need not try again where top_p and min_p keep many."""

    def __init__(self) -> None:
        self.kernels = import_module("ropewalk.model.kernels.triton.sampling_kernels")

    def among_best(self, rows: Tensor, rule: Rule, top_k: int, candidates: int | None) -> Drawn:
        if top_k or rows.shape[-1] <= CANDIDATES:
            return super().among_best(rows, rule, top_k, None)
        tokens, enough = among_best(rows, rule, CANDIDATES, whole=False)
        rules = torch.cat((rule.temperature, rule.top_p, rule.min_p, rule.uniform), dim=1)
        self.kernels.draw_kept[(len(rows),)](
            *(rows.contiguous(), rules, enough, tokens),
            VOCAB=rows.shape[-1],
            TILE=TOKENS_AT_ONCE,
            num_warps=8,
            **FUSED,
        )
        return tokens, torch.ones_like(enough)


def _or(given: Tensor | None, placeholder: Tensor) -> Tensor:
    """Kernels take an address even of what they do not read."""
    return placeholder if given is None else given


def power_of_2(count: int) -> int:
    """The smallest power of 2 that is at least `count`; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()
