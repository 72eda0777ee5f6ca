"""Calls the C functions of the compiled kernels."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from ropewalk.cache.huge_pages import HugePages
from ropewalk.model.kernels.cpu.library import NoKernels, library
from ropewalk.model.sampling import SamplingParams
from ropewalk.model.weights.quantize import Int4

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
PACKED_SUFFIXES = SUFFIXES | {torch.int8: "i8"}
HALF = 16  # half of linear/weights.hpp's kStrip, the outputs stored side by side
ATTENTION_SUFFIXES = SUFFIXES | {torch.float64: "f64"}


class AttendArguments(ctypes.Structure):
    """Mirrors the struct of the same name in attention/base.hpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "values", "key_scales", "value_scales")),
        *((name, c_void_p) for name in ("out", "positions")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "tables", "bases")),
        ("prompts", c_void_p),
        *((name, c_void_p) for name in ("slopes", "bias_table", "dense_bias", "gates")),
        *(
            (name, c_int64)
            for name in ("bias_span", "bias_zero", "bias_by_row", "bias_by_key", "requests")
        ),
        *((name, c_int64) for name in ("table_width", "heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("block_size", "window", "causal")),
        ("kept", c_void_p),
        ("kept_rows", c_int64),
        *((name, c_void_p) for name in ("cosines", "sines")),
        *((name, c_int64) for name in ("pairs", "storage", "interleaved", "far")),
        *((name, c_void_p) for name in ("far_queries", "far_keys")),
        *((name, c_double) for name in ("scale", "magnitude", "cap")),
    )


class LinearArguments(ctypes.Structure):
    """Mirrors the struct of the same name in linear.hpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "scale", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "bits", "gated", "activation")),
    )


class NormArguments(ctypes.Structure):
    """Mirrors the struct of the same name in program.hpp."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("centred", c_int64))


class Columns(ctypes.Structure):
    """Mirrors the struct of the same name in program.hpp."""

    _fields_ = tuple((name, c_int64) for name in ("start", "width", "first", "count", "where"))


class OpArguments(ctypes.Structure):
    """Mirrors the struct of the same name in program.hpp."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "part", "kept", "begins")),
        *((name, Columns) for name in ("x", "y", "z", "to")),
        ("norm", NormArguments),
        ("linear", LinearArguments),
        *((name, c_void_p) for name in ("table", "vectors", "cosines", "sines")),
        *((name, c_int64) for name in ("rows", "pairs", "interleaved", "by_offset", "head_dim")),
        *((name, c_int64) for name in ("activation", "layer", "attends", "heedless")),
        ("experts", POINTER(LinearArguments)),
        *((name, c_int64) for name in ("used", "normalized")),
        ("number", c_double),
    )


class StepArguments(ctypes.Structure):
    """Mirrors the struct of the same name in program.hpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("scratch", "result", "tokens", "positions", "offsets")),
        *((name, c_void_p) for name in ("slots", "kept")),
        *((name, c_int64) for name in ("rows", "kept_rows", "each_row", "run")),
        ("attends", POINTER(AttendArguments)),
        ("gates", c_void_p),
        *((name, c_int64) for name in ("layer_bytes", "layer_scales", "layer_gates")),
        ("seconds", c_void_p),
    )


def has_bf16_arithmetic() -> bool:
    """Whether this CPU multiplies bfloat16 directly, without widening it."""
    return torch.cpu._is_avx512_bf16_supported()


def in_strips(rows: Tensor) -> Tensor:
    """[2 · width, ..] of gate, up → strips of HALF rows of gate, then HALF of up, zero-padded
    at the end."""
    count, *rest = rows.shape
    strips = -(-count // (2 * HALF))
    halves = rows.new_zeros(2, strips * HALF, *rest)
    halves[:, : count // 2] = rows.view(2, count // 2, *rest)
    return halves.view(2, strips, HALF, *rest).transpose(0, 1).reshape(-1, *rest)


class Kernels:
    """The compiled library. Tensors passed in must be contiguous, on the CPU, of one dtype."""

    def __init__(self, library: Path) -> None:
        # torch was imported above, so that both share one OpenMP runtime and one pool of threads.
        self._library = ctypes.CDLL(str(library))
        self._pages = HugePages()
        self._draw = self._library.draw_token
        self._draw.restype = c_int64

    def pack(self, weight: Tensor, gated: bool = False) -> Tensor:
        """[outputs, inputs] → bytes in the packed format that `linear` reads.

        gated: whether the outputs are gate, up.
        """
        pack = getattr(self._library, f"pack_{PACKED_SUFFIXES[weight.dtype]}")
        pack.restype = c_int64
        weight = in_strips(weight) if gated else weight.contiguous()
        sizes = [c_int64(size) for size in weight.shape]
        packed = self._pages.empty(pack(_as_c(weight), None, *sizes), dtype=torch.uint8)
        pack(_as_c(weight), _as_c(packed), *sizes)
        return packed

    def multiplies_int4(self) -> bool:
        """Whether this processor has a format for `pack_int4`."""
        return self._size_of_int4(1, 1) > 0

    def pack_int4(self, weight: Int4, gated: bool = False) -> Tensor:
        """Like `pack`."""
        order = in_strips if gated else Tensor.contiguous
        given = [order(each) for each in (weight.numbers, weight.scales, weight.leasts)]
        outputs, inputs = given[0].shape
        packed = self._pages.empty(self._size_of_int4(outputs, inputs), dtype=torch.uint8)
        sizes = c_int64(outputs), c_int64(inputs)
        self._library.pack_i4(*map(_as_c, (*given, packed)), *sizes)
        return packed

    def _size_of_int4(self, outputs: int, inputs: int) -> int:
        pack = self._library.pack_i4
        pack.restype = c_int64
        size: int = pack(None, None, None, None, c_int64(outputs), c_int64(inputs))
        return size

    def largest(self, logits: Tensor) -> tuple[list[float], list[int]]:
        """Per row of logits [S, vocab]: its maximum, NaN if it has one, and its first index."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        values, tokens = (c_float * rows)(), (c_int64 * rows)()
        sizes = c_int64(rows), c_int64(vocab)
        self._function("largest", logits.dtype)(_as_c(logits), values, tokens, *sizes)
        return list(values), list(tokens)

    def scores(self, logits: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Like model/sampler.py's `token_scores`, except for rounding. count: at most vocab."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        if count > vocab:
            raise ValueError(f"{count} of {vocab} tokens were requested")
        found = torch.empty(rows, 2 + 2 * count, dtype=torch.float64)
        sizes = c_int64(rows), c_int64(vocab), c_int64(count)
        scores = self._function("scores", logits.dtype)
        scores(*map(_as_c, (logits, tokens, found)), *sizes)
        return found

    def draw(self, row: Tensor, params: SamplingParams, uniform: float) -> int:
        """Like model/sampler.py's `Sampler.draw`, for one float32 row and always exact."""
        row = row.contiguous()
        token: int = self._draw(
            _as_c(row),
            c_int64(len(row)),
            c_double(params.temperature),
            c_int64(params.top_k),
            c_double(params.top_p),
            c_double(params.min_p),
            c_double(uniform),
        )
        return token

    def pick_allowed(
        self, logits: Tensor, rows: Sequence[int], masks: Tensor, rules: Sequence[Sequence[float]]
    ) -> list[int]:
        """A token for some rows of float32 logits [S, vocab], among those that masks allow.

        masks [R, bytes] uint8: as `masks_of` makes them. rules, R of them: temperature (0: the
        largest logit), top_k, top_p, min_p, and a number in [0, 1) that selects the token.
        """
        logits = logits.contiguous()
        tokens = (c_int64 * len(rows))()
        tensors = (torch.tensor(rows), masks, torch.tensor(rules, dtype=torch.float64))
        sizes = c_int64(len(rows)), c_int64(logits.shape[1])
        self._library.pick_allowed(*map(_as_c, (logits, *tensors)), tokens, *sizes)
        return list(tokens)

    def fold_sums(self, stored: Tensor, blocks: Tensor, multipliers: Tensor) -> Tensor:
        """Like cache/ledger.py's function of that name."""
        layers, all_blocks, integers = stored.shape
        sums = torch.empty(len(blocks), layers, dtype=torch.int64)
        sizes = (len(blocks), layers, all_blocks, integers * stored.element_size())
        tensors = (stored, blocks, multipliers, sums)
        self._library.fold_sums(*map(_as_c, tensors), *map(c_int64, sizes))
        return sums

    def attend(self, dtype: torch.dtype, arguments: AttendArguments) -> None:
        getattr(self._library, f"attend_{ATTENTION_SUFFIXES[dtype]}")(ctypes.byref(arguments))

    def run(
        self,
        dtype: torch.dtype,
        ops: "ctypes.Array[OpArguments]",
        which: range,
        step: StepArguments,
    ) -> None:
        """Run some of a program's ops. Raises IndexError for a token that is in no embedding."""
        first = ctypes.byref(ops, which.start * ctypes.sizeof(OpArguments))
        known: int = self._function("run", dtype)(first, c_int64(len(which)), ctypes.byref(step))
        if not known:
            raise IndexError("a token is not in the vocabulary")

    def _function(self, name: str, dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
        return getattr(self._library, f"{name}_{SUFFIXES[dtype]}")  # type: ignore[no-any-return]


def _as_c(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def load(folder: Path) -> Kernels:
    """The kernels of this machine, compiled into `folder` when not there. Raises NoKernels."""
    path = library(folder)
    try:
        return Kernels(path)
    except OSError as error:
        raise NoKernels(f"{path.name} cannot be loaded: {error}; delete it") from error
