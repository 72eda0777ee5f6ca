"""Tries a tokenizer's file where it can do no harm, before the server itself reads it."""

from ropewalk.model.confined.process import Stopped, attempt
from ropewalk.model.tokenizers.base import TokenizerError

PROBE = "a The 3 ropes: naïve, 日本語 — 😀\n\tx = f(1.5)"
MEMORY = 768 << 20  # bytes; a file of 35 MB with 260,000 tokens takes 350 MiB
SECONDS = 2.0
SECONDS_PER_BYTE = 1e-7  # 3.5 for that file, which takes 1.2


def try_file(what: str, package: str, module: str, file: bytes) -> None:
    """Have `module`, which uses `package`, read the file and encode a text. Raises TokenizerError.

    What passes can be read again here: it crashes nothing, and takes as much and no more.
    """
    seconds = SECONDS + SECONDS_PER_BYTE * len(file)
    try:
        reply = attempt(module, [package], file, memory=MEMORY, seconds=seconds)
    except Stopped as error:
        raise TokenizerError(f"{what} cannot be read ({error}): fetch it again.") from None
    if reply:
        reason = " ".join(reply.decode(errors="replace").split())[:200]
        raise TokenizerError(
            f"{what} cannot be read ({reason}): fetch it again or update `{package}`."
        )
