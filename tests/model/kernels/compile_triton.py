"""Compiles the Triton kernels, as the backend launches them, for a GPU that need not exist.

Run by test_triton_attention.py, because one process cannot use both interpreter and compiler:
python -m tests.model.kernels.compile_triton CAPABILITY SHARED DTYPE HEAD_DIM BIAS FRAME [int8]
with SHARED bytes of shared memory.
"""

import sys
from types import SimpleNamespace
from typing import get_args

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from cache.terms import KeyFrame
from model.attention.triton import TritonAttention, tile_bytes
from model.kernels import triton_attention, triton_layer, triton_linear, triton_store
from model.kernels.gpu_layers import TritonLayers
from model.kernels.gpu_modules import TritonGate, TritonLinear, TritonStore
from model.kernels.modules import RotationTables
from model.linear import Int8Linear, Linear
from model.rotation import Layout
from model.transformer import ACTIVATIONS, Gate, LayerNorm, Layers, RMSNorm
from tests.model.attention.test_cpu import biases, problem, spec
from tests.model.attention.test_rotation import made
from tests.model.in_8_bits import in_8_bits

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES |= {torch.int8: "i8", torch.int64: "i64"}


class Compiling:
    """Replaces a kernel: compiles it for each launch, and launches nothing."""

    def __init__(self, kernel, capability):
        self.kernel = kernel
        self.target = GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *given, num_warps=4, num_stages=3, enable_fp_fusion=True, **named):
        given = dict(zip(self.kernel.arg_names, given, strict=False)) | named
        given |= {"WIDE": False} if "WIDE" in given else {}  # as on a GPU
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        constant |= {name for name in given if name in ("q_dim", "k_dim", "v_dim")}  # always 1
        signature = {name: _type(given[name], name in constant) for name in self.kernel.arg_names}
        source = ASTSource(
            self.kernel,
            signature,
            {(self.kernel.arg_names.index(name),): given[name] for name in constant},
            {
                (p.num,): [["tt.divisibility", 16]]
                for p in self.kernel.params
                if "*" in signature[p.name] and not p.do_not_specialize_on_alignment
            },
        )
        options = {
            "num_warps": num_warps,
            "num_stages": num_stages,
            "enable_fp_fusion": enable_fp_fusion,
        }
        found = compile(source, target=self.target, options=options)
        assert found.asm["cubin"]
        print(self.kernel.__name__, found.metadata.shared, "bytes shared")


def _type(value, constant):
    if constant:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def main(capability, shared, dtype, head_dim, bias, frame, stored=""):
    given = spec(32, 8, int(head_dim), getattr(torch, dtype))
    attend = TritonAttention(given)
    attend.tile_bytes = tile_bytes(int(shared))
    attend.kernels = compiling(triton_attention, ("attend", "merge"), capability)
    q, kv, batch = problem(given, 16, [(30, 1), (0, 9)])
    rope = made(KeyFrame(frame), given.dtype, width=int(head_dim))
    kv = in_8_bits(kv) if stored == "int8" else kv
    attend(q, kv, batch, biases(32, batch)[int(bias)], rope.rotation())

    k, v = q[:, :8], q[:, 8:16]
    halves = [
        made(KeyFrame.ABSOLUTE, given.dtype, layout=layout, width=int(head_dim) // 2)
        for layout in get_args(Layout)
    ]
    for tables in (*map(RotationTables, halves), None):
        storing = TritonStore(tables)
        storing.kernels = compiling(triton_store, ("store",), capability)
        storing(q, k, v, batch, kv)

    layers = TritonLayers(Layers())
    layers.kernels = compiling(triton_layer, ("add_norm",), capability)
    x = q.flatten(1)
    size, where = x.shape[1], (given.dtype, x.device)
    layers.add_norm(x, x, RMSNorm(size, 1e-5, *where))
    layers.add_norm(x, None, LayerNorm(size, 1e-5, True, *where))
    for activation in ACTIVATIONS:
        gate = TritonGate(Gate(activation))
        gate.kernels = compiling(triton_layer, ("gate",), capability)
        gate(x)

    if given.dtype not in TritonLinear.DTYPES:
        return
    norm, few = RMSNorm(size, 1e-5, *where), x[:8]
    for outputs, more in ((64, {"added": few[:, :64]}), (40_000, {"norm": norm, "gated": True})):
        plain = Linear(size, outputs, bias="norm" in more, dtype=given.dtype, device=x.device)
        linear = TritonLinear(Int8Linear(plain) if stored == "int8" else plain)
        linear.kernels = compiling(triton_linear, ("linear",), capability)
        linear.few(few, activation="gelu", **more)


def compiling(module, names, capability):
    kernels = {name: Compiling(getattr(module, name), int(capability)) for name in names}
    return SimpleNamespace(**kernels)


if __name__ == "__main__":
    main(*sys.argv[1:])
