"""The loss of quality from 8-bit keys and values, on SmolLM2: a measurement, not a test.

Run by hand, after `ropewalk family prepare`: python -m tests.model.measure_kv
Prints nats per token on the family's held-out texts with keys and values in the model's dtype and
in 8 bits, and by how much they differ, with the standard error over texts.
"""

from math import sqrt
from statistics import mean, stdev

import torch

from ropewalk.model.kernels.cpu.bindings import load
from ropewalk.server.download import home
from tests.model.measure_quantize import LENGTH, decoders, losses, windows

COUNT = 8  # texts


def main() -> None:
    texts = windows(COUNT)
    print(f"|computed in|keys and values too|in int8|difference, {COUNT} texts of {LENGTH}|")
    print("|---|---:|---:|---:|")
    for precision, decoder in decoders(load(home() / "kernels"), ("float32", "bfloat16")).items():
        alike, rounded = losses(decoder, texts), losses(decoder, texts, torch.int8)
        more = [after - before for before, after in zip(alike, rounded, strict=True)]
        error = stdev(more) / sqrt(len(more))
        means = f"{mean(alike):.4f}|{mean(rounded):.4f}"
        print(f"|{precision}|{means}|{mean(more):+.4f} ± {error:.4f}|", flush=True)


if __name__ == "__main__":
    main()
