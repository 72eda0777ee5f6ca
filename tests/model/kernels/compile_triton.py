"""Compiles the Triton kernels, as the backend launches them, for a GPU that need not exist.

Run by test_triton_attention.py, because one process cannot use both interpreter and compiler:
python -m tests.model.kernels.compile_triton CAPABILITY SHARED DTYPE HEAD_DIM BIAS STORAGE [int8]
with SHARED bytes of shared memory.
"""

import sys
from types import SimpleNamespace
from typing import get_args

import torch

from ropewalk.cache.types import KeyStorage
from ropewalk.model.encodings.common.rotary import Layout
from ropewalk.model.kernels.triton import (
    attention_kernels,
    launches,
    layer_kernels,
    linear_kernels,
    sampling_kernels,
    store_kernels,
)
from ropewalk.model.kernels.triton.attention import TritonAttention, size_of_loop
from ropewalk.model.kernels.triton.launches import (
    TritonExperts,
    TritonGate,
    TritonLinear,
    TritonNorm,
    TritonSampler,
    TritonStore,
)
from ropewalk.model.layers.executor import ACTIVATIONS
from ropewalk.model.program import Norm
from ropewalk.model.sampling import Ask, SamplingParams
from ropewalk.model.weights.quantize import Int8
from tests.model.attention.test_cpu import biases, problem, spec
from tests.model.attention.test_rotation import made
from tests.model.in_8_bits import in_8_bits as rounded
from tests.model.kernels.no_gpu import AsOnGPU, NoGPU


def main(capability, shared, dtype, head_dim, bias, storage, stored=""):
    gpu = NoGPU(int(capability), int(shared))
    dtype, head_dim, in_8_bits = getattr(torch, dtype), int(head_dim), stored == "int8"
    given = spec(32, 8, head_dim, dtype, cap=30.0 if int(bias) == 4 else None)
    q, kv, batch = problem(given, 16, [(30, 1), (0, 9)])
    kv = rounded(kv) if in_8_bits else kv
    attend = TritonAttention(given)
    attend.tile_bytes, attend.stages = size_of_loop(int(shared), head_dim)
    attend.kernels = on_gpu(attention_kernels, "attend", "merge")
    share = 4 if int(bias) % 2 else 3  # quarters of a head that rotate
    rope = made(KeyStorage(storage), dtype, width=head_dim * share // 4)
    attend(q, kv, batch, biases(32, batch)[int(bias)], rope.rotation())
    if storage == KeyStorage.RAW:
        rope = made(KeyStorage.RAW, dtype, width=head_dim * share // 4, near=9, group=4)
        attend(q, kv, batch, None, rope.rotation())

    for layout in (*get_args(Layout), None):
        half = layout and made(KeyStorage.ABSOLUTE, dtype, layout=layout, width=head_dim // 2)
        store = TritonStore(half)
        store.kernels = on_gpu(store_kernels, "store")
        store(q, q[:, :8], q[:, 8:16], batch, kv)

    x = q.flatten(1)
    width, weight = x.shape[1], torch.empty_like(x[0])
    norm = TritonNorm(Norm("x", "n", "rms", width, 1e-5), weight, None)
    centred = TritonNorm(Norm("x", "n", "layer", width, 1e-5, True, True), weight, weight)
    for each, added in ((norm, x), (centred, None)):
        each.kernels = on_gpu(layer_kernels, "add_norm")
        each(x, added)
    for activation in ACTIVATIONS:
        gate = TritonGate(activation)
        gate.kernels = on_gpu(layer_kernels, "gate")
        gate(x)

    launches.CANDIDATES = 2
    sampler = TritonSampler()
    sampler.kernels = on_gpu(sampling_kernels, "draw_kept")
    sampler.pick(
        torch.zeros(3, 5000), [Ask(SamplingParams(max_tokens=1, top_p=0.5), [], 0, 0.5)] * 3
    )

    launches.MANY_PROGRAMS = 1  # so that tiles are as large as they ever are
    for more in ({"added": x[:8, :64]}, {"norm": norm}, {"norm": norm, "gated": True}):
        if dtype in TritonLinear.DTYPES:
            weight = torch.zeros(128 if "gated" in more else 64, width, dtype=dtype)
            bias = torch.zeros(len(weight), dtype=dtype)
            linear = TritonLinear(Int8.of(weight) if in_8_bits else weight, bias)
            linear.kernels = on_gpu(linear_kernels, "linear")
            linear(x[:8], activation="gelu", **more)
    of = [torch.zeros(64, width, dtype=dtype) for _ in range(3)]
    of = [Int8.of(weight) for weight in of] if in_8_bits else of
    experts, picked = TritonExperts(of), torch.zeros(8, 2, dtype=torch.int64)
    experts.kernels = on_gpu(linear_kernels, "expert")
    experts(x[:8], picked, "silu")
    experts(x[:16], picked)
    for name, used in gpu.compiled:
        print(name, used, "bytes shared")


def on_gpu(module, *names):
    return SimpleNamespace(**{name: AsOnGPU(getattr(module, name)) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
