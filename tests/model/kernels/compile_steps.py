"""How many kernels a decoder's first steps compile for a GPU, and how many all later ones.

Run by test_triton_attention.py, because one process cannot use both interpreter and compiler:
python -m tests.model.kernels.compile_steps ENCODING [int8], of weights, keys and values.
"""

import random
import sys
from dataclasses import fields, replace

import torch

from ropewalk.model.batch import in_one_copy
from tests.model.kernels.no_gpu import NoGPU
from tests.model.running import CPU, Running, make_batch, new_cache
from tests.model.tiny import on_triton, tiny

BLOCK = 16
STEPS = 150


def step(lengths, draw):
    """Requests by (computed, new) tokens, in blocks and tables of any length; some rows wanted."""
    work = []
    for computed, new in lengths:
        blocks = draw.sample(range(1, 400), -(-(computed + new) // BLOCK) + draw.randint(0, 2))
        work.append((Running([1] * (computed + new), blocks, computed=computed), new))
    batch = make_batch(work, BLOCK)
    wanted = draw.randint(1, len(batch.output_rows))
    batch = replace(batch, output_rows=batch.output_rows[:wanted])
    # As `to` moves it: where a tensor begins depends on how long the others are.
    names = [
        each.name for each in fields(batch) if isinstance(getattr(batch, each.name), torch.Tensor)
    ]
    parts = in_one_copy([getattr(batch, name) for name in names], CPU)
    return replace(batch, **dict(zip(names, parts, strict=True)))


def main(encoding, stored=""):
    gpu, draw = NoGPU(90, 227 * 1024), random.Random(0)
    in_8_bits = stored == "int8"
    decoder = on_triton(tiny(encoding, dtype=torch.bfloat16), 8 if in_8_bits else 16)
    kv = new_cache(decoder, 400, BLOCK, torch.int8 if in_8_bits else None)
    compute = torch.inference_mode()(decoder.executor.compute)
    # What a start computes: one token for each of few requests and of many, and a prompt.
    for lengths in ([(20, 1)], [(20, 1)] * 20, [(0, 20)]):
        compute(step(lengths, draw), kv)
    print(len(gpu.compiled))
    for _ in range(STEPS):
        lengths = [
            (draw.choice([0, draw.randint(0, 90)]), draw.choice([1, 1, draw.randint(1, 30)]))
            for _ in range(draw.randint(1, 12))
        ]
        compute(step(lengths, draw), kv)
    print(len(gpu.compiled))


if __name__ == "__main__":
    main(*sys.argv[1:])
