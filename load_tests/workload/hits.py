"""Predicts how many prompt tokens a prefix cache serves, from a plan's token ids alone.

The cache keeps whole blocks, a prompt's last token is always computed, and what is not computed
yet cannot be found. Requests are assumed to be admitted and computed in the order in which they
are sent, as by Ropewalk. With closed:N at most N - 1 requests are unanswered when one is sent, so
one of the N before it has been answered, and therefore every prompt N or more places back is in
the cache; sync is N = 1. Later prompts, and in an open loop all prompts, may or may not be there:
then the prediction is a range.

It holds for a cache that was empty, evicts nothing during the run
(`ropewalk_kv_evicted_blocks_total`) and shares prefixes, as encoder-decoder models do not. It
ignores the chance that a prompt continues another one just as the model does.
"""

from collections.abc import Sequence

from ropewalk.load_tests.common.types import Profile, Request


def cached_tokens(
    requests: Sequence[Request], profile: Profile, block_size: int
) -> tuple[int, int] | None:
    """Prompt tokens served from the cache, at least and at most; None if a prompt is text.

    `block_size` is the server's: label `block_size` of `ropewalk_cache_info`, or `/v1/cache`.
    """
    surely_after = None if profile.open_loop else profile.concurrency
    first_at: dict[int, int] = {}  # hash of a prefix of whole blocks → first request with it
    low = high = 0
    for place, request in enumerate(requests):
        if isinstance(request.prompt, str):
            return None
        blocks = _beginnings(request.prompt, block_size)
        reusable = blocks[: (len(request.prompt) - 1) // block_size]
        found = [first_at[block] for block in reusable if block in first_at]
        high += len(found)
        if surely_after is not None:
            low += sum(place - first >= surely_after for first in found)
        for block in blocks:
            first_at.setdefault(block, place)
    return low * block_size, high * block_size


def _beginnings(prompt: Sequence[int], block_size: int) -> list[int]:
    """A hash for each whole block, of it and all blocks before it."""
    chain: list[int] = []
    for start in range(0, len(prompt) - block_size + 1, block_size):
        before = chain[-1] if chain else 0
        chain.append(hash((before, tuple(prompt[start : start + block_size]))))
    return chain
