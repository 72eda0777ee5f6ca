"""The time that each form of T5's bias adds, compared with no bias: a measurement, not a test.

Run by hand, with nothing else on the machine: python -m tests.model.time_bias_forms
Prints a table: the time of a step relative to the same step without a bias, as median and
quartiles of rounds in which each form runs once. One thread; only its own processor time counts.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import torch

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import EncodingSpec
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import create, freeze_all
from ropewalk.model.kernels.cpu.bindings import Kernels, load
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.program import encoding_parameters
from ropewalk.model.recipes import allocate, program
from tests.model.running import CPU, Running, make_batch, new_cache
from tests.model.tiny import CONFIG, T5

LENGTHS = (512, 2048, 8192)  # keys that the last row sees
ROWS = {"decode": 1, "prefill": 256}  # new tokens in the step, the last of the context
ROUNDS = {"decode": 200, "prefill": 15}
BLOCK = 16
SHAPE = replace(
    CONFIG,
    width=512,
    layers=4,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn_width=1024,
    windows=(None,) * 4,
)
ARMS = {
    "nope": EncodingSpec("nope", {}),
    **{
        form: EncodingSpec("t5", {**T5, "form": form})
        for form in ("window", "table", "materialised")
    },
}


def decoder(spec: EncodingSpec, kernels: Kernels) -> Decoder:
    """With the same weights for all encodings, and the kernels that a server would use."""
    shape = replace(SHAPE, encoding=spec)
    encoding = create(spec, shape, max(LENGTHS), CPU)
    weights = allocate(shape, encoding, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(encoding_parameters(encoding)) | weights
    for name, parameter in sorted(parameters.items()):
        size = 1.0 if name.startswith("encoding.") else 0.02
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    freeze_all(encoding)
    made = program(shape, weights, encoding)
    return Decoder(made, CpuExecutor(made, kernels))


def step(length: int, rows: int) -> ForwardBatch:
    """The last `rows` of a request; logits of the last one are wanted, as when serving."""
    blocks = (
        1 + torch.randperm(length // BLOCK, generator=torch.Generator().manual_seed(1))
    ).tolist()
    request = Running([7] * length, blocks, computed=length - rows)
    batch = make_batch([(request, rows)], BLOCK)
    return replace(batch, output_rows=torch.tensor([rows - 1]))


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def rounds(
    decoders: dict[str, Decoder], batch: ForwardBatch, kv: KVCache, count: int
) -> Iterator[dict[str, float]]:
    """The time of each form, in an order rotated from round to round; the first is dropped."""
    names = list(decoders)
    for number in range(count + 1):
        turned = names[number % len(names) :] + names[: number % len(names)]
        times = {name: seconds(lambda name=name: decoders[name](batch, kv)) for name in turned}
        if number:
            yield times


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kernels = load(Path(folder))
        decoders = {name: decoder(spec, kernels) for name, spec in ARMS.items()}
    kv = new_cache(decoders["nope"], max(LENGTHS) // BLOCK + 1, BLOCK)
    for layer in map(kv.layer, range(SHAPE.layers)):
        for cache in layer:
            cache.normal_(generator=torch.Generator().manual_seed(2))
    print("|step|keys|without, ms|" + "|".join(list(ARMS)[1:]) + "|")
    print("|---|---:|---:|" + "---:|" * (len(ARMS) - 1))
    for kind, rows in ROWS.items():
        for length in LENGTHS:
            taken = list(rounds(decoders, step(length, rows), kv, ROUNDS[kind]))
            print(f"|{kind}|{length:,}|{1e3 * median(each['nope'] for each in taken):.2f}|", end="")
            for name in list(ARMS)[1:]:
                low, middle, high = quantiles([each[name] / each["nope"] for each in taken], n=4)
                print(f"{middle:.3f} ({low:.3f} to {high:.3f})|", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
