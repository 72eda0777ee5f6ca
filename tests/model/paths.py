"""The ways to compute a token's logits: at once, in chunks, one by one, together with others, from
blocks that another request filled, and again after preemption.

Each path yields what it computed, to be compared with one uncached pass. `stored`: see new_cache.
"""

from typing import NamedTuple

import torch

from tests.model.running import Running, full_of_nan, make_batch, new_cache
from tests.server.recording import BLOCK, Recording, request

LENGTHS = (29, 9, 1, 18)
BASES = (0, 11, 40, 5)  # positions of the first tokens
VOCABULARY = 61


class Computed(NamedTuple):
    """One request's tokens and the rows of logits that were computed for it."""

    tokens: list[int]
    base: int  # position of the first
    shared: int  # tokens at its beginning whose keys and values another request had computed
    parts: list[tuple[int, torch.Tensor]]  # (index of the first row, rows)


def tokens(rng, count):
    return rng.choices(range(VOCABULARY), k=count)


def four_ragged(rng, bases=(0, 0, 0, 0)):
    """Four requests of different lengths in shuffled blocks."""
    needed = [-(-length // BLOCK) for length in LENGTHS]
    ids = rng.sample(range(1, sum(needed) + 1), sum(needed))
    return [
        Running(tokens(rng, length), [ids.pop() for _ in range(count)], base=base)
        for length, count, base in zip(LENGTHS, needed, bases, strict=True)
    ]


def advanced(decoder, rng, choose, stored):
    """Four requests that advance as `choose` says: unfinished ones → [(request, tokens)]."""
    sequences = four_ragged(rng, BASES)
    blocks = 1 + sum(len(s.blocks) for s in sequences)
    kv = full_of_nan(new_cache(decoder, blocks, BLOCK, stored))
    parts = {id(s): [] for s in sequences}
    while pending := [s for s in sequences if s.computed < len(s.tokens)]:
        work = [(s, min(count, len(s.tokens) - s.computed)) for s, count in choose(pending)]
        logits = decoder(make_batch(work, BLOCK, table_width=16), kv)
        for (sequence, count), rows in zip(work, logits.split([n for _, n in work]), strict=True):
            parts[id(sequence)].append((sequence.computed, rows))
            sequence.computed += count
    return [Computed(s.tokens, s.base, 0, parts[id(s)]) for s in sequences]


def prefill(decoder, rng, stored=None):
    """All of each request in one step."""
    return advanced(decoder, rng, lambda pending: [(s, len(s.tokens)) for s in pending], stored)


def chunked(decoder, rng, stored=None):
    """Chunks that begin and end within blocks."""
    return advanced(decoder, rng, lambda pending: [(s, 7) for s in pending], stored)


def decode(decoder, rng, stored=None):
    """After two thirds of its tokens, one of every request in a step."""

    def choose(pending):
        return [(s, 1 if s.computed else -(-2 * len(s.tokens) // 3)) for s in pending]

    return advanced(decoder, rng, choose, stored)


def ragged(decoder, rng, stored=None):
    """Random requests by random chunks, so that short and long ones share a step."""

    def choose(pending):
        chosen = rng.sample(pending, rng.randint(1, len(pending)))
        return [(s, rng.choice([1, rng.randint(1, len(s.tokens))])) for s in chosen]

    return advanced(decoder, rng, choose, stored)


def prefix_hit(decoder, rng, stored=None):
    """Prompts that share a prefix with an earlier one, up to a block's border or not."""
    recording = Recording(decoder, blocks=40, stored=stored)
    stem = tokens(rng, 23)
    requests = [
        request("first", stem, max_tokens=3),
        request("same", stem, max_tokens=3),
        request("longer", [*stem[:21], *tokens(rng, 9)], max_tokens=2),
    ]
    for each in requests:
        recording.finish(each)
    computed = [of_request(recording, each) for each in requests]
    assert [each.shared for each in computed] == [0, 20, 20]
    return computed


def preempted(decoder, rng, stored=None):
    """Blocks for only one of two requests, so that the second loses its own and starts again."""
    recording = Recording(decoder, blocks=7, stored=stored)
    requests = [request(name, tokens(rng, 9), max_tokens=7) for name in "ab"]
    recording.finish(*requests)
    assert recording.preempted > 0
    again = sum(len(rows) for _, rows in recording.parts(requests[1]))
    assert again > len(requests[1].tokens)
    return [of_request(recording, each) for each in requests]


def of_request(recording, each):
    """What was computed for a finished request, whose last token was not."""
    parts = recording.parts(each)
    return Computed(each.tokens[:-1], 0, parts[0][0], parts)


PATHS = {
    "prefill": prefill,
    "chunked": chunked,
    "decode": decode,
    "ragged": ragged,
    "prefix hit": prefix_hit,
    "preempted": preempted,
}
