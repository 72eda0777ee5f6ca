"""Attention on a GPU: Triton kernels over the paged cache, any bias, any chunk."""

import os
import shutil
import sysconfig
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk.cache.kv import Int8LayerKV, PagedKV
from ropewalk.model.attention.base import AttentionSpec, DenseBias, StepBias, why_not_bias
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import ContentBias, KeyBias, LinearBias, QueryBias, TableBias
from ropewalk.model.encodings.common.rotary import Rotation

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_HEAD = 256  # a tile of wider heads would not fit beside its accumulators
SPLIT = 256  # keys, into which those of requests of one row are cut
# Of a launch over splits: several for each multiprocessor, as programs end at different times, and
# no more, as most of a long request's would have nothing to do in the short ones beside it.
PROGRAMS = 8192
SPLITS_AT_ONCE = 16  # splits that `merge` combines at a time
GATES_AT_ONCE, SUMMED_AT_ONCE = 8, 256  # heads of gates, and keys, that `forget` adds up at a time
LEAST = 16  # minimum rows and columns of a matrix product of tiles
# The largest tiles that ptxas compiles for compute capability 8.0 and 9.0 without spilling in
# bfloat16, by head_dim. Which sizes are fastest has not been measured.
TILE_BYTES = 16384  # of keys
ROOMY = 163 * 1024  # bytes of shared memory, as those have; with less, tiles are half as large
MOST_KEYS = 64
# Of the loop over keys. Two are spent on the block table, from which addresses follow: with fewer
# than five, the compiler waits for a tile before it asks for the next. Wide heads leave no room for
# as many where shared memory is small.
STAGES, FEW_STAGES, LEAST_STAGES = 5, 3, 2  # the last where the smallest tiles are too large
# Products are added unrounded. Said at every launch, as Triton 3.9 warns where it is not said, and
# 3.10 will not do it unasked.
FUSED = {"enable_fp_fusion": True}


class TritonAttention:
    """Serves CUDA devices with one to three kernels per call, whatever the requests' rows."""

    name = "triton"

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"the device is {spec.device.type}"
        if spec.dtype not in DTYPES:
            return f"it computes bfloat16, float16 and float32, not {spec.dtype}"
        if spec.head_dim > WIDEST_HEAD:
            return f"heads have {spec.head_dim} coordinates, and it takes {WIDEST_HEAD} at most"
        return _lacking() or why_not_bias(spec)

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.tile_bytes, self.stages = size_of_loop(_shared_memory(spec.device), spec.head_dim)
        # Imported by name, and only here: machines without a GPU have no Triton.
        self.kernels = import_module("ropewalk.model.kernels.triton.attention_kernels")

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        batch: ForwardBatch,
        bias: StepBias | None,
        rotation: Rotation | None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        constant = self._constant(kv, q, rotation) | _of_bias(bias, q) | _of_rotation(rotation, q)
        constant |= self._of_gates(kv, q, batch)
        if len(batch.context_lens) > 1 or batch.max_query == 1:
            self._single_rows(q, kv, out, batch, constant)
        if batch.max_query > 1:
            self._chunks(q, kv, out, batch, constant)
        return out

    def _single_rows(
        self, q: Tensor, kv: PagedKV, out: Tensor, batch: ForwardBatch, given: dict[str, Any]
    ) -> None:
        """Requests of one row: programs share the splits of their keys, then all are combined."""
        spec, requests = self.spec, len(batch.context_lens)
        splits = max(1, -(-batch.max_context // SPLIT))
        size = (requests, spec.num_heads, splits)
        parts = torch.empty(*size, spec.head_dim, dtype=torch.float32, device=q.device)
        maxima = torch.empty(size, dtype=torch.float32, device=q.device)
        sums = torch.empty_like(maxima)
        across = -(-spec.num_heads // (spec.num_kv_heads * LEAST)) * spec.num_kv_heads
        sharing = max(1, min(splits, PROGRAMS // (across * requests)))
        self.kernels.attend[across, requests, sharing](
            *(q, *of_cache(kv), parts, maxima, sums, *_where(batch), requests, splits),
            **given,
            SPLIT=SPLIT,
            QUERIES=LEAST,
        )
        self.kernels.merge[requests, spec.num_heads](
            *(parts, maxima, sums, out, batch.query_starts, batch.context_lens, splits),
            HEADS=spec.num_heads,
            HEAD_DIM=spec.head_dim,
            WINDOW=spec.window or 0,
            SPLIT=SPLIT,
            AT_ONCE=SPLITS_AT_ONCE,
            DIMS=given["DIMS"],
            **FUSED,
        )

    def _chunks(
        self, q: Tensor, kv: PagedKV, out: Tensor, batch: ForwardBatch, given: dict[str, Any]
    ) -> None:
        """Requests of several rows: each tile of rows iterates over all keys it attends to."""
        spec = self.spec
        # float32 products use no tensor cores and need more registers.
        rows = 2 * LEAST if spec.dtype is torch.float32 else 4 * LEAST
        rows = LEAST if given["num_stages"] == LEAST_STAGES else rows
        requests = len(batch.context_lens)
        tiles = len(q) * (spec.num_heads // spec.num_kv_heads) // rows + requests
        self.kernels.attend[(tiles * spec.num_kv_heads,)](
            *(q, *of_cache(kv), out, out, out, *_where(batch), requests, 0),
            **given,
            SPLIT=0,
            QUERIES=rows,
            num_warps=8 if spec.head_dim > 64 else 4,
        )

    def _of_gates(self, kv: PagedKV, q: Tensor, batch: ForwardBatch) -> dict[str, Any]:
        """Kernel arguments for the sums of stored gates, as `forgotten` has them."""
        if not self.spec.gated:
            return {"forgotten": q, "longest": 0, "GATED": False}
        assert kv.gates is not None, "the cache was made without room for gates"
        requests, heads = len(batch.context_lens), self.spec.num_heads
        size = (requests, heads, batch.max_context)
        sums = torch.empty(size, dtype=torch.float64, device=q.device)
        self.kernels.forget[requests, -(-heads // GATES_AT_ONCE)](
            *(kv.gates, sums, batch.context_lens, batch.block_tables),
            *(batch.block_tables.stride(0), batch.max_context),
            HEADS=heads,
            BLOCK_SIZE=kv.keys.shape[1],
            KEYS=SUMMED_AT_ONCE,
            TILE=GATES_AT_ONCE,
            **FUSED,
        )
        return {"forgotten": sums, "longest": batch.max_context, "GATED": True}

    def _constant(self, kv: PagedKV, q: Tensor, rotation: Rotation | None) -> dict[str, Any]:
        """Kernel arguments that follow from the spec, the cache, queries and what is rotated."""
        spec = self.spec
        row, head, dim = q.stride()
        width = _padded(spec.head_dim)
        # Beside keys that are rotated lie their cosines and sines, in float32.
        tile = self.tile_bytes if rotation is None else self.tile_bytes // 2
        keys = tile // (width * q.element_size())
        return {
            "q_row": row,
            "q_head": head,
            "q_dim": dim,
            "scale": spec.scale,
            "HEADS": spec.num_heads,
            "KV_HEADS": spec.num_kv_heads,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_SIZE": kv.keys.shape[1],
            "WINDOW": spec.window or 0,
            "CAUSAL": spec.causal,
            "CAP": spec.cap,
            "SCALED": isinstance(kv, Int8LayerKV),
            "KEYS": max(LEAST, min(MOST_KEYS, keys)),
            "num_stages": self.stages if keys >= LEAST else LEAST_STAGES,
            "DIMS": width,
            "WIDE": q.device.type == "cpu",
            **FUSED,
        }


def size_of_loop(shared: int, head_dim: int) -> tuple[int, int]:
    """Bytes of a tile of keys, and stages, for programs that may use `shared` bytes of memory."""
    roomy = shared >= ROOMY
    stages = STAGES if roomy or head_dim <= WIDEST_HEAD // 2 else FEW_STAGES
    return TILE_BYTES if roomy else TILE_BYTES // 2, stages


def _shared_memory(device: torch.device) -> int:
    """Bytes available to a program; enough where kernels are interpreted."""
    if device.type != "cuda":
        return ROOMY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # missing in builds for AMD


def _lacking() -> str | None:
    """What Triton lacks on this machine; None if nothing. It compiles a C file of its own."""
    if find_spec("triton") is None:
        return "Triton is not installed; PyTorch's CUDA builds bring it"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler; install gcc or set CC"
    # Where Triton itself looks: in a relocated Python, INCLUDEPY is a path of the build machine.
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's scheme for packages that users install themselves
        scheme = "posix_prefix"
    headers = sysconfig.get_path("include", scheme)
    if not Path(headers, "Python.h").exists():
        return f"Triton needs Python.h, which is not in {headers}; install python3-dev"
    return None


def of_cache(kv: PagedKV) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales; without scales, placeholders that the kernel does not read."""
    if isinstance(kv, Int8LayerKV):
        return kv.keys, kv.values, kv.key_scales, kv.value_scales
    return kv.keys, kv.values, kv.keys, kv.values


def _where(batch: ForwardBatch) -> tuple[Any, ...]:
    """Kernel arguments that locate queries and keys."""
    return (
        batch.positions,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_bases,
        batch.block_tables.stride(0),
    )


def _of_bias(bias: StepBias | None, q: Tensor) -> dict[str, Any]:
    """Kernel arguments for a bias; without one, a placeholder address that is not read."""
    heads = q.shape[1]
    told = {"bias": q, "bias_head": 0, "bias_row": 0, "bias_span": 0, "bias_zero": 0}
    if bias is None:
        return told | {"BIAS": "none"}
    if isinstance(bias, LinearBias):
        slopes = bias.slopes.float().contiguous().expand(heads)
        return told | {"BIAS": "linear", "bias": slopes, "bias_head": slopes.stride(0)}
    if isinstance(bias, DenseBias):
        dense = bias.values.float().contiguous()
        dense = dense.expand(heads, *dense.shape[1:])
        return told | {
            "BIAS": "dense",
            "bias": dense,
            "bias_head": dense.stride(0),
            "bias_row": dense.stride(1),
        }
    assert not isinstance(bias, ContentBias), "why_not refuses it"
    table = bias.table.float().contiguous()
    table = table.expand(heads, *table.shape[1:])
    return told | {
        "BIAS": "key" if isinstance(bias, KeyBias) else "table",
        "bias": table,
        "bias_head": table.stride(0),
        "bias_row": table.stride(1) if isinstance(bias, QueryBias) else 0,
        "bias_span": table.shape[-1],
        "bias_zero": bias.zero if isinstance(bias, TableBias) else 0,
    }


def _of_rotation(rotation: Rotation | None, q: Tensor) -> dict[str, Any]:
    """Kernel arguments for a rotation; without one, placeholder addresses that are not read."""
    if rotation is None:
        return {
            "cosines": q,
            "sines": q,
            "magnitude": 1.0,
            "far": 0,
            "far_queries": q,
            "far_keys": q,
            "FAR": False,
            "STORAGE": "none",
            "PAIRS": 0,
            "INTERLEAVED": False,
            "ROTATED": LEAST,
            "REST": LEAST,
        }
    pairs, far = rotation.cos.shape[1], rotation.far
    return {
        "cosines": rotation.cos.contiguous(),
        "sines": rotation.sin.contiguous(),
        "magnitude": rotation.magnitude,
        "far": 0 if far is None else far.start,
        "far_queries": q if far is None else far.queries.contiguous(),
        "far_keys": q if far is None else far.keys.contiguous(),
        "FAR": far is not None,
        "STORAGE": rotation.storage.value,
        "PAIRS": pairs,
        "INTERLEAVED": rotation.layout == "interleaved",
        "ROTATED": _padded(pairs),
        "REST": _padded(q.shape[2] - 2 * pairs),
    }


def _padded(count: int) -> int:
    """`count` rounded up to a power of two that a matrix product of tiles accepts."""
    return max(LEAST, 1 << (count - 1).bit_length())
