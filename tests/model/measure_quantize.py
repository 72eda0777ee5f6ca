"""Quality and speed with 8-bit and 4-bit weights, on SmolLM2: a measurement, not a test.

Run by hand, with nothing else on the machine and after `ropewalk family prepare`:
python -m tests.model.measure_quantize
Prints two tables. Loss: nats per token on the family's held-out texts. Time: a decoding step,
median and quartiles of rounds in which each precision runs once.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean, median, quantiles
from typing import Literal

import sentencepiece
import torch
import torch.nn.functional as F

from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import create
from ropewalk.model.family.texts import corpus
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.kernels.cpu.bindings import Kernels, load
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.loading.checkpoints import load_program, open_checkpoint
from ropewalk.model.program import quantized
from ropewalk.server.download import home
from tests.model.running import CPU, Running, make_batch, new_cache, run_uncached
from tests.smollm2 import smollm2_path

COUNT, LENGTH = 24, 512  # windows of text, and tokens of each
BATCHES, KEYS, ROUNDS, BLOCK = (1, 8, 32), 128, 40, 16
ROUNDED: Mapping[str, Literal[8, 4]] = {"bfloat16 int8": 8, "bfloat16 int4": 4}
PRECISIONS = ("float32", "bfloat16", *ROUNDED)


def decoders(kernels: Kernels, precisions: Sequence[str] = PRECISIONS) -> dict[str, Decoder]:
    checkpoint = open_checkpoint(smollm2_path())
    config = checkpoint.config
    made = {}
    for precision in precisions:
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        encoding = create(config.encoding, config, 1024, CPU)
        program = load_program(checkpoint, encoding, dtype=dtype, device=CPU)
        if precision in ROUNDED:
            program = quantized(program, ROUNDED[precision])
        made[precision] = Decoder(program, CpuExecutor(program, kernels))
    return made


def windows(count: int = COUNT) -> list[list[int]]:
    """Evenly from the held-out documents, in SmolLM2's tokens."""
    split = corpus.load(home() / "family" / "corpus.npz").held_out
    spoken = sentencepiece.SentencePieceProcessor(str(SHIPPED_TOKENIZER))
    tokenizer = open_checkpoint(smollm2_path()).tokenizer
    step = len(split.tokens) // count
    texts = [spoken.decode(split.tokens[i * step :][: 2 * LENGTH].tolist()) for i in range(count)]
    return [tokenizer.encode(text, bos=False)[: LENGTH + 1] for text in texts]


def losses(
    decoder: Decoder, texts: list[list[int]], stored: torch.dtype | None = None
) -> list[float]:
    """Nats per token of each text; stored: dtype of keys and values, if not the decoder's."""
    make_cache = partial(new_cache, stored=stored)
    found = []
    for text in texts:
        logits = run_uncached(decoder, text[:-1], make_cache=make_cache)
        found.append(float(F.cross_entropy(logits.float(), torch.tensor(text[1:]))))
    return found


def step_times(made: dict[str, Decoder], batch_size: int) -> dict[str, list[float]]:
    """Seconds of decoding one token of each request, by precision, round by round."""
    blocks = KEYS // BLOCK
    requests = [
        Running([7] * KEYS, list(range(i * blocks, (i + 1) * blocks)), computed=KEYS - 1)
        for i in range(batch_size)
    ]
    batch = make_batch([(request, 1) for request in requests], BLOCK)
    caches = {
        name: new_cache(decoder, batch_size * blocks, BLOCK) for name, decoder in made.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in made}
    for number in range(ROUNDS + 1):
        for name, decoder in made.items():
            start = time.perf_counter()
            decoder(batch, caches[name])
            if number:
                taken[name].append(time.perf_counter() - start)
    return taken


def main() -> None:
    made = decoders(load(home() / "kernels"))
    texts = windows()
    print(f"|precision|nats per token, {len(texts)} windows of {LENGTH}|\n|---|---:|")
    for precision, decoder in made.items():
        print(f"|{precision}|{mean(losses(decoder, texts)):.4f}|", flush=True)
    print("\n|batch|" + "".join(f"{name}, ms|" for name in made), end="")
    print("".join(f"{name} is faster by|" for name in ROUNDED))
    print("|---:|" + "---:|" * (len(made) + len(ROUNDED)))
    for batch_size in BATCHES:
        taken = step_times(made, batch_size)
        cells = [f"{1e3 * median(times):.1f}" for times in taken.values()]
        for name in ROUNDED:
            pairs = zip(taken["bfloat16"], taken[name], strict=True)
            low, middle, high = quantiles([plain / rounded for plain, rounded in pairs], n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"|{batch_size}|{'|'.join(cells)}|", flush=True)


if __name__ == "__main__":
    main()
