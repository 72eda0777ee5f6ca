"""The same loss as reported by the server: log-probabilities of tokens, over HTTP."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.model.family.evaluation.losses import token_losses
from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.evaluation.texts import Texts

DTYPES = ("float32", "bfloat16")
STRETCH = 2  # length of a text in trained lengths, if the encoding has the positions

# (checkpoint folder, dtype, context, prompts) → the log-probability of every token of each prompt
# but its first, from a server that answers prompts with one more token.
Serve = Callable[[Path, str, int, Sequence[Sequence[int]]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class ServedLoss:
    """Mean nats per token of the same texts, offline in float32 and from a server in `dtype`."""

    dtype: str
    texts: int
    length: int  # tokens of each
    offline: float
    served: float
    largest: float  # difference at any token


def measure(
    reader: Reader,
    texts: Texts,
    serve: Serve,
    folder: Path,
    context: int,
    done: Callable[[float], object],
) -> tuple[ServedLoss, ...]:
    """Empty if the model's own losses are not finite. `done` is called after each dtype.

    context: of the server; texts are cut to it.
    """
    prompts = [own[: context - 1] for own in texts.tokens]  # leaves room for the generated token
    offline = [loss for own in prompts for loss in token_losses(reader, own).tolist()]
    if not all(map(math.isfinite, offline)):
        return ()  # a server refuses to answer with NaN
    found = []
    for dtype in DTYPES:
        answers = serve(folder, dtype, context, prompts)
        served = [-one for answer in answers for one in answer]
        pairs = list(zip(offline, served, strict=True))
        found.append(
            ServedLoss(
                dtype=dtype,
                texts=len(prompts),
                length=context - 1,
                offline=sum(offline) / len(offline),
                served=sum(served) / len(served),
                largest=max(abs(a - b) for a, b in pairs),
            )
        )
        done(1)
    return tuple(found)
