"""The loss of accuracy from shifting a cached context: a measurement, not a test.

Run by hand: python -m tests.model.measure_shifts
Prints two tables. Drift: how far stored keys are from correctly placed ones after a number of
shifts (position error). Divergence: SmolLM2's next-token distributions with a shifted cache,
compared with the same tokens computed again, which includes the context error, and with a frame
whose keys never change, which isolates the position error.
"""

from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from ropewalk.cache.kv import KVCache, restored, rounded
from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.operations import Operations
from ropewalk.cache.types import Audit, Evict
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import EncodingSpec
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import create
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.bindings import load
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.loading.checkpoints import Checkpoint, load_program, open_checkpoint
from ropewalk.server.download import home
from tests.model.running import CPU, new_cache
from tests.smollm2 import smollm2_path

BLOCK = 16
COUNTS = (1, 10, 100)  # shifts after which it is measured
CONTEXT = 512
ASKED = 16  # tokens compared after each count of shifts: what one slide makes room for
ROOT = Path(__file__).parents[2]


def drift() -> None:
    """Shifts block by block from position 4,096 down, and in one rotation over the distance."""
    keys = torch.randn(256, 4, 128, generator=torch.Generator().manual_seed(0)).double()
    rope = RoPE(base=10000.0, width=128, layout="half", context=4097, device=CPU)
    print("|dtype|" + "|".join(f"{count} of {BLOCK}" for count in COUNTS) + "|one of 1,600|")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        cells = []
        for count, delta in [*((count, BLOCK) for count in COUNTS), (1, BLOCK * COUNTS[-1])]:
            stored = kept(rope.shift(keys, 4096), dtype)
            for _ in range(count):
                stored = kept(rope.shift(stored, -delta), dtype)
            right = rope.shift(keys, 4096 - count * delta)
            error = (stored.double() - right).norm() / right.norm()
            cells.append(f"{float(error):.1e}")
        print(f"|{str(dtype).removeprefix('torch.')}|{'|'.join(cells)}|")


def kept(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values as a cache of that dtype returns them."""
    if dtype is torch.int8:
        return restored(*rounded(keys), torch.float32)
    return keys.to(dtype)


class Stream:
    """A text fed to a decoder whose context is shortened whenever it is full."""

    def __init__(self, decoder: Decoder, shift: bool) -> None:
        self.decoder = decoder
        self.shift = shift
        self.kv: KVCache = new_cache(decoder, CONTEXT // BLOCK + 1, BLOCK)
        self.manager = CacheManager(CONTEXT // BLOCK + 1, BLOCK, prefix_sharing=False)
        rules = [decoder.encoding.for_layer(layer) for layer in range(decoder.config.layers)]
        self.operations = Operations(self.manager, self.kv, rules, Ledger(self.kv, Audit.OFF))
        self.tokens: list[int] = []  # of the context
        self.shifts = 0

    def feed(self, tokens: list[int]) -> torch.Tensor:
        """Logits of each token; all must fit into the context."""
        start, length = len(self.tokens), len(self.tokens) + len(tokens)
        self.tokens += tokens
        self.manager.reserve("s", self.tokens, length)
        logits = forward(self.decoder, self.kv, self.manager, tokens, start)
        self.manager.commit("s", self.tokens, length)
        return logits

    def shorten(self) -> None:
        movable = CONTEXT // BLOCK - 1
        count = -(-movable // 2) if self.shift else 1
        self.operations.apply(Evict("s", 1, count, renumber=True))
        del self.tokens[BLOCK : (1 + count) * BLOCK]
        self.shifts += 1


def forward(
    decoder: Decoder, kv: KVCache, manager: CacheManager, tokens: list[int], start: int
) -> torch.Tensor:
    index = torch.arange(start, start + len(tokens))
    table = manager.table("s")
    blocks, bases = torch.tensor(table.blocks), torch.tensor(table.bases)
    batch = ForwardBatch(
        tokens=torch.tensor(tokens),
        positions=bases[index // BLOCK] + index % BLOCK,
        offsets=index % BLOCK,
        slots=blocks[index // BLOCK] * BLOCK + index % BLOCK,
        query_starts=torch.tensor([0, len(tokens)]),
        context_lens=torch.tensor([start + len(tokens)]),
        block_tables=blocks[None],
        block_bases=bases[None],
        output_rows=torch.arange(len(tokens)),
        max_query=len(tokens),
        max_context=start + len(tokens),
    )
    return decoder(batch, kv).float().log_softmax(-1)


def followed(decoder: Decoder, text: list[int], *, shift: bool) -> dict[int, torch.Tensor]:
    """Log-probabilities of ASKED tokens after each count of shifts, and of recomputation."""
    stream, at, found = Stream(decoder, shift), 0, {}
    while at < len(text):
        if len(stream.tokens) + ASKED > CONTEXT:
            stream.shorten()
        logits = stream.feed(text[at : at + ASKED])
        at += ASKED
        if stream.shifts in COUNTS and stream.shifts not in found:
            again = Stream(decoder, shift).feed(stream.tokens)[-ASKED:]
            found[stream.shifts] = torch.stack((logits, again))
    return found


def divergence(of: torch.Tensor, against: torch.Tensor) -> float:
    """Mean KL(against || of) over tokens, in nats."""
    return mean((against.exp() * (against - of)).sum(-1).tolist())


def decoder_of(checkpoint: Checkpoint, frame: str, dtype: torch.dtype) -> Decoder:
    kernels = load(home() / "kernels")
    options = {**checkpoint.config.encoding.options, "frame": frame}
    config = replace(checkpoint.config, encoding=EncodingSpec("rope", options))
    encoding = create(config.encoding, config, CONTEXT, CPU)
    changed = replace(checkpoint, config=config)
    program = load_program(changed, encoding, dtype=dtype, device=CPU)
    return Decoder(program, CpuExecutor(program, kernels))


def divergences() -> None:
    checkpoint = open_checkpoint(smollm2_path())
    pages = ("LICENSE", "README.md", "docs/audit.md", "docs/encodings.md")
    prose = "\n".join((ROOT / page).read_text() for page in pages)
    text = checkpoint.tokenizer.encode(prose, bos=False)[: 3500 // ASKED * ASKED]
    print("|overflow|frame|dtype|against|" + "|".join(f"{count} shifts" for count in COUNTS) + "|")
    for dtype in (torch.float32, torch.bfloat16):
        steady: dict[bool, dict[int, torch.Tensor]] = {}
        for frame, shift in (("block", False), ("block", True), ("absolute", True)):
            found = followed(decoder_of(checkpoint, frame, dtype), text, shift=shift)
            steady.setdefault(shift, found)
            rows = {"recomputation": {n: divergence(each[0], each[1]) for n, each in found.items()}}
            if frame != "block":
                rows["block frame"] = {
                    n: divergence(each[0], steady[shift][n][0]) for n, each in found.items()
                }
            for against, values in rows.items():
                cells = (f"{values[n]:.1e}" if n in values else "" for n in COUNTS)
                name = "shift" if shift else "slide"
                kind = str(dtype).removeprefix("torch.")
                print(f"|{name}|{frame}|{kind}|{against}|{'|'.join(cells)}|", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        drift()
        divergences()
