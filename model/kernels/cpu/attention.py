"""Attention on the CPU: one C++ kernel over the paged cache, any bias, any chunk."""

import torch
from torch import Tensor

from ropewalk.cache.kv import Int8LayerKV, PagedKV
from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.base import AttentionSpec, DenseBias, StepBias, why_not_bias
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import ContentBias, KeyBias, LinearBias, QueryBias, TableBias
from ropewalk.model.encodings.common.rotary import Rotation
from ropewalk.model.kernels.cpu.bindings import ATTENTION_SUFFIXES, AttendArguments, Kernels

# The kernel's codes for key storages that attention still has to rotate.
STORAGES = {KeyStorage.RAW: 1, KeyStorage.BLOCK: 2}


class CpuBackend:
    """Makes CpuAttention for a compiled library; `kernels` may be the reason why there is none."""

    name = "cpu"

    def __init__(self, kernels: Kernels | str) -> None:
        self.kernels = kernels

    def why_not(self, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"the device is {spec.device.type}"
        if spec.dtype not in ATTENTION_SUFFIXES:
            return f"it computes float32, float64 and bfloat16, not {spec.dtype}"
        return self.kernels if isinstance(self.kernels, str) else why_not_bias(spec)

    def __call__(self, spec: AttentionSpec) -> "CpuAttention":
        assert isinstance(self.kernels, Kernels), "ask why_not first"
        return CpuAttention(spec, self.kernels)


class CpuAttention:
    """Passes the addresses of one layer's tensors to the kernel."""

    def __init__(self, spec: AttentionSpec, kernels: Kernels) -> None:
        self.spec = spec
        self.kernels = kernels

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        batch: ForwardBatch,
        bias: StepBias | None,
        rotation: Rotation | None,
    ) -> Tensor:
        if q.dtype is not self.spec.dtype:  # the kernel would misread it
            raise TypeError(f"queries are {q.dtype}, but the model computes in {self.spec.dtype}")
        q = q.contiguous()
        out = torch.empty_like(q)
        arguments, _tensors = self.arguments(kv, batch, bias, rotation)
        arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
        self.kernels.attend(self.spec.dtype, arguments)
        return out

    def arguments(
        self, kv: PagedKV, batch: ForwardBatch, bias: StepBias | None, rotation: Rotation | None
    ) -> tuple[AttendArguments, tuple[Tensor, ...]]:
        """All but queries and output; and the tensors to keep alive while these are used."""
        spec = self.spec
        assert not (isinstance(kv, Int8LayerKV) and spec.dtype is torch.float64), (
            "float64 is for tests of the rest"
        )
        arguments = AttendArguments(
            positions=batch.positions.data_ptr(),
            query_starts=batch.query_starts.data_ptr(),
            context_lens=batch.context_lens.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            bases=batch.block_bases.data_ptr(),
            requests=len(batch.context_lens),
            table_width=batch.block_tables.stride(0),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=kv.keys.shape[1],
            window=spec.window or 0,
            causal=int(spec.causal),
            scale=spec.scale,
            cap=spec.cap or 0,
        )
        if batch.prompts is not None:
            arguments.prompts = batch.prompts.data_ptr()
        arguments.keys, arguments.values = kv.keys.data_ptr(), kv.values.data_ptr()
        if isinstance(kv, Int8LayerKV):
            arguments.key_scales = kv.key_scales.data_ptr()
            arguments.value_scales = kv.value_scales.data_ptr()
        if spec.gated:
            assert kv.gates is not None, "the cache was made without room for gates"
            arguments.gates = kv.gates.data_ptr()
        assert not isinstance(bias, ContentBias), "why_not refuses it"
        tensors: tuple[Tensor, ...] = ()
        if isinstance(bias, LinearBias):
            slopes = _per_head(bias.slopes, spec.num_heads)
            arguments.slopes = slopes.data_ptr()
            tensors = (slopes,)
        elif isinstance(bias, TableBias | KeyBias):
            table = _per_head(bias.table, spec.num_heads)
            arguments.bias_table = table.data_ptr()
            arguments.bias_span = table.shape[1]
            arguments.bias_by_key = int(isinstance(bias, KeyBias))
            if isinstance(bias, TableBias):
                arguments.bias_zero = bias.zero
            tensors = (table,)
        elif isinstance(bias, QueryBias):
            table = _per_head(bias.table, spec.num_heads)
            arguments.bias_table = table.data_ptr()
            arguments.bias_span, arguments.bias_by_row = table.shape[2], 1
            tensors = (table,)
        elif isinstance(bias, DenseBias):
            dense = _per_head(bias.values, spec.num_heads)
            arguments.dense_bias = dense.data_ptr()
            arguments.bias_span = dense.shape[2]
            tensors = (dense,)
        if rotation is not None:
            # In the dtype of the arithmetic: this copies for float64 only.
            wide = torch.promote_types(spec.dtype, torch.float32)
            cosines, sines = (table.to(wide).contiguous() for table in (rotation.cos, rotation.sin))
            arguments.cosines, arguments.sines = cosines.data_ptr(), sines.data_ptr()
            arguments.pairs = cosines.shape[1]
            arguments.storage = STORAGES[rotation.storage]
            arguments.interleaved = int(rotation.layout == "interleaved")
            arguments.magnitude = rotation.magnitude
            tensors += (cosines, sines)
            if rotation.far is not None:
                queries, keys = rotation.far.queries.contiguous(), rotation.far.keys.contiguous()
                arguments.far = rotation.far.start
                arguments.far_queries, arguments.far_keys = queries.data_ptr(), keys.data_ptr()
                tensors += (queries, keys)
        return arguments, tensors


def _per_head(values: Tensor, heads: int) -> Tensor:
    """[heads, ...] as the kernel reads it: float32, contiguous, a row for every query head."""
    return values.float().expand(heads, *values.shape[1:]).contiguous()
