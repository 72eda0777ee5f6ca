"""What weights, keys and values in few bits cost and give: `--help` describes the method."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from statistics import mean, median, quantiles, stdev
from typing import Literal

import torch
import torch.nn.functional as F

from ropewalk.load_tests.common.rounds import rounds
from ropewalk.load_tests.micro.in_process import (
    blocks_for,
    new_cache,
    request,
    step,
    step_of,
    untouched_cache,
)
from ropewalk.load_tests.run.options import program
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import create
from ropewalk.model.family.texts import corpus
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.kernels.cpu.bindings import Kernels, load
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.loading.checkpoints import Checkpoint, load_program, open_checkpoint
from ropewalk.model.program import quantized
from ropewalk.model.tokenizers.base import decode
from ropewalk.model.tokenizers.spm import SpmTokenizer, read_model
from ropewalk.server.download import SMOLLM2, home, stored

CPU = torch.device("cpu")
TEXTS, TEXTS_OF_CACHE, LENGTH = 24, 8, 512  # windows of text, and tokens of each
BATCHES, CONTEXT, ROUNDS = (1, 8, 32), 128, 40
ROUNDED: Mapping[str, Literal[8, 4]] = {"bfloat16 int8": 8, "bfloat16 int4": 4}

_DESCRIPTION = f"""\
Quality and speed of SmolLM2 with weights in 8 and 4 bits, and with keys and values in 8.

Prints three tables. Loss of weights: nats per token on {TEXTS} windows of {LENGTH} tokens of the
family's held-out texts. Loss of keys and values: the same of {TEXTS_OF_CACHE} windows, and by how
much they differ, with the standard error over texts. Time: a decoding step at a context of
{CONTEXT}, median and quartiles of {ROUNDS} rounds in which each precision runs once.

Needs `ropewalk pull smollm2`, `ropewalk family prepare`, and nothing else on the machine.
"""


def decoders(checkpoint: Checkpoint, kernels: Kernels) -> dict[str, Decoder]:
    made = {}
    for precision in ("float32", "bfloat16", *ROUNDED):
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        encoding = create(checkpoint.config.encoding, checkpoint.config, 1024, CPU)
        program = load_program(checkpoint, encoding, dtype=dtype, device=CPU)
        if precision in ROUNDED:
            program = quantized(program, ROUNDED[precision])
        made[precision] = Decoder(program, CpuExecutor(program, kernels))
    return made


def windows(checkpoint: Checkpoint) -> list[list[int]]:
    """Evenly from the held-out documents, in SmolLM2's tokens."""
    tokens = corpus.load(home() / "family" / "corpus.npz").held_out.tokens
    family = SpmTokenizer(read_model(SHIPPED_TOKENIZER.read_bytes()))
    apart = len(tokens) // TEXTS
    texts = [decode(family, tokens[i * apart :][: 2 * LENGTH].tolist()) for i in range(TEXTS)]
    encode = checkpoint.tokenizer.encode
    return [encode(text, bos=False)[: LENGTH + 1] for text in texts]


def losses(
    decoder: Decoder, texts: Sequence[Sequence[int]], stored: torch.dtype | None = None
) -> list[float]:
    """Nats per token of each text; stored: dtype of keys and values, if not the decoder's."""
    kv = untouched_cache(decoder, blocks_for(1, LENGTH), dtype=stored)
    found = []
    for text in texts:
        rows = len(text) - 1
        batch = step_of([request("text", list(text[:-1]))], rows, CPU)
        logits = decoder(replace(batch, output_rows=torch.arange(rows)), kv)
        found.append(float(F.cross_entropy(logits.float(), torch.tensor(text[1:]))))
    return found


def step_times(made: Mapping[str, Decoder], requests: int) -> dict[str, list[float]]:
    """Seconds of decoding one token of each request, by precision, round by round."""
    batch, blocks = step(requests, CONTEXT, 1, CPU), blocks_for(requests, CONTEXT)
    calls = {name: partial(each, batch, new_cache(each, blocks)) for name, each in made.items()}
    taken = list(rounds(calls, ROUNDS, "wall", f"{requests} requests"))
    return {name: [each[name] for each in taken] for name in made}


def compare_weights(made: Mapping[str, Decoder], texts: Sequence[Sequence[int]]) -> None:
    print(f"|weights|nats per token, {len(texts)} windows of {LENGTH}|\n|---|---:|")
    for precision, decoder in made.items():
        print(f"|{precision}|{mean(losses(decoder, texts)):.4f}|", flush=True)


def compare_caches(made: Mapping[str, Decoder], texts: Sequence[Sequence[int]]) -> None:
    told = f"difference, {len(texts)} texts of {LENGTH}"
    print(f"\n|computed in|keys and values too|in int8|{told}|\n|---|---:|---:|---:|")
    for precision in ("float32", "bfloat16"):
        alike, rounded = (losses(made[precision], texts, each) for each in (None, torch.int8))
        more = [after - before for before, after in zip(alike, rounded, strict=True)]
        means = f"{mean(alike):.4f}|{mean(rounded):.4f}|{mean(more):+.4f}"
        print(f"|{precision}|{means} ± {stdev(more) / sqrt(len(more)):.4f}|", flush=True)


def compare_times(made: Mapping[str, Decoder]) -> None:
    faster = [f"{name} is faster by" for name in ROUNDED]
    print("\n|" + "|".join(["batch", *(f"{name}, ms" for name in made), *faster]) + "|")
    print("|" + "---:|" * (1 + len(made) + len(ROUNDED)))
    for requests in BATCHES:
        taken = step_times(made, requests)
        cells = [f"{1e3 * median(times):.1f}" for times in taken.values()]
        for name in ROUNDED:
            pairs = zip(taken["bfloat16"], taken[name], strict=True)
            low, middle, high = quantiles([plain / rounded for plain, rounded in pairs], n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"|{requests}|{'|'.join(cells)}|", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    program("python -m ropewalk.load_tests.micro.few_bits", _DESCRIPTION).parse_args(argv)
    path = stored(SMOLLM2, "smollm2")
    if path is None:
        print("SmolLM2's weights are missing; fetch them: ropewalk pull smollm2", file=sys.stderr)
        return 2
    checkpoint = open_checkpoint(path)
    made, texts = decoders(checkpoint, load(home() / "kernels")), windows(checkpoint)
    compare_weights(made, texts)
    compare_caches(made, texts[:: TEXTS // TEXTS_OF_CACHE])
    compare_times(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
