"""Evaluates all trained models in a folder, part by part, writing each part when it is done.

A part is skipped as long as the weights, texts and sizes that it was computed from are unchanged.
Models of other seeds than the served one get only curves and losses.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ropewalk.model.digests import of_parts
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation import (
    curves,
    losses,
    recalled,
    results,
    samples,
    served,
    shortened,
)
from ropewalk.model.family.evaluation.members import Member, digest, find_members, load, opened
from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.evaluation.results import Evaluation, Measured, Packed, Sizes
from ropewalk.model.family.evaluation.served import Serve
from ropewalk.model.family.evaluation.texts import Texts, texts_of
from ropewalk.model.family.texts.corpus import Corpus
from ropewalk.model.family.texts.prepare import Bar, Bars
from ropewalk.model.family.training.losses import windows_of
from ropewalk.model.family.training.pack import COST_WINDOWS, is_packed, loss_of
from ropewalk.model.weights.safetensors_dir import SINGLE


@dataclass(frozen=True, slots=True)
class Task:
    """What is the same for all models."""

    corpus: Corpus
    sizes: Sizes
    device: torch.device
    serve: Serve
    bars: Bars
    shipped: Path  # with a folder of packed weights for each model in the package
    trusted: Collection[str] = ()  # encodings outside this project whose code may run

    def texts(self, length: int, count: int) -> Texts:
        return texts_of(self.corpus.held_out, length, count)


class Subject:
    """One model, loaded."""

    def __init__(self, member: Member, task: Task) -> None:
        self.member = member
        self.checkpoint = opened(member, task.trusted)
        self.trained = self.checkpoint.config.trained_context
        self._bars = task.bars
        longest = max(task.sizes.context, shortened.needed(self.trained), *task.sizes.lengths)
        self.decoder = load(self.checkpoint, longest, task.device)
        self.reader = Reader(self.decoder, longest)

    def reach(self, context: int) -> int:
        """How many of `context` positions the encoding has."""
        return min(context, self.decoder.encoding.max_positions or context)

    def bar(self, title: str, total: int, unit: str) -> AbstractContextManager[Bar]:
        return self._bars(f"{self.member.name}: {title}", total, unit)


def evaluate(folder: Path, path: Path, task: Task) -> Evaluation:
    """Measure whatever is missing in the file at `path`. Raises FamilyError, OSError."""
    known = results.read(path)
    if known and (known.corpus, known.sizes) != (task.corpus.fingerprint, task.sizes):
        known = None  # none of it is comparable with what is measured now
    earlier = {one.name: one for one in known.members} if known else {}
    done: list[Measured] = []
    members = find_members(folder)
    for place, member in enumerate(members):
        later = [earlier[one.name] for one in members[place + 1 :] if one.name in earlier]
        for measured in _parts(member, earlier.get(member.name), task):
            now = Evaluation(
                results.SCHEMA, task.corpus.fingerprint, task.sizes, (*done, measured, *later)
            )
            results.write(now, path)
        done.append(measured)
    found = results.read(path)
    assert found is not None
    return found


def _parts(member: Member, earlier: Measured | None, task: Task) -> Iterator[Measured]:
    """Yields all results so far: with curve and packing first, then after each new part."""
    measured = _known(member, earlier, task)
    if member.log.exists():
        measured = _with(measured, "curve", of_parts(member.log), lambda: curves.read(member.log))
    packed = task.shipped / member.name
    if (packed / SINGLE).exists() and is_packed(member.folder, packed):
        mark = of_parts(measured.digest, task.corpus.fingerprint, packed / SINGLE)
        measured = _with(measured, "packed", mark, partial(_packed, member, packed, task))
    else:
        made_from = {name: m for name, m in measured.made_from.items() if name != "packed"}
        measured = replace(measured, packed=None, made_from=made_from)
    yield measured
    subject: Subject | None = None
    for name in PARTS if member.seed is None else SEEDS_TOO:
        mark = of_parts(measured.digest, task.corpus.fingerprint, repr(asdict(task.sizes)))
        if measured.made_from.get(name) != mark:
            subject = subject or Subject(member, task)
            measured = _with(measured, name, mark, partial(PARTS[name], subject, task))
            yield measured


def _known(member: Member, earlier: Measured | None, task: Task) -> Measured:
    checkpoint = opened(member, task.trusted)
    config = checkpoint.config
    own = digest(member, config.encoding.name)
    largest = int(task.corpus.held_out.tokens.max(initial=0))
    if largest >= config.vocab_size:
        raise FamilyError(
            f"{member.folder} knows {config.vocab_size:,} tokens and the corpus has token "
            f"{largest:,}; evaluate it on the corpus that it was trained on"
        )
    if earlier is not None and earlier.digest == own:
        return earlier
    sizes = [
        math.prod(piece.shape) for pieces in checkpoint.parameters.values() for piece in pieces
    ]
    return Measured(
        name=member.name,
        label=member.label,
        seed=member.seed,
        digest=own,
        encoding=config.encoding.name,
        parameters=sum(sizes),
        config=asdict(config),
    )


def _with(measured: Measured, name: str, mark: str, found: Callable[[], Any]) -> Measured:
    if measured.made_from.get(name) == mark:
        return measured
    made_from = {**measured.made_from, name: mark}
    return replace(measured, made_from=made_from, **{name: found()})


def _packed(member: Member, packed: Path, task: Task) -> Packed:
    context = opened(member, task.trusted).config.trained_context
    windows = windows_of(task.corpus.held_out, context, COST_WINDOWS)
    size = (packed / SINGLE).stat().st_size
    return Packed(size, loss_of(member.folder, windows), loss_of(packed, windows))


def _losses(subject: Subject, task: Task) -> losses.Losses:
    texts = task.texts(task.sizes.context, task.sizes.texts)
    with subject.bar("loss by position", len(texts.tokens), "text") as bar:
        return losses.measure(
            subject.reader,
            texts,
            trained=subject.trained,
            reach=subject.reach(task.sizes.context),
            refusal=type(subject.decoder.encoding).BEYOND_TRAINED,
            done=bar.update,
        )


def _held_out(subject: Subject, task: Task) -> losses.HeldOut:
    texts = task.texts(subject.trained, task.sizes.windows)
    with subject.bar("held-out text", len(texts.tokens), "window") as bar:
        return losses.held_out(subject.reader, texts, bar.update)


def _recalls(subject: Subject, task: Task) -> recalled.Recalls:
    lengths, trials = task.sizes.lengths, task.sizes.trials
    asked = recalled.asked(subject.checkpoint.tokenizer, task.sizes.distances, trials)
    reach = subject.reach(max(lengths))
    cells = recalled.cells_in(asked, lengths, reach)
    with subject.bar("recall", cells, "cell") as bar:
        return recalled.measure(
            subject.reader,
            asked,
            task.texts(max(lengths), trials).tokens,
            lengths,
            trained=subject.trained,
            reach=reach,
            done=bar.update,
        )


def _divergences(subject: Subject, task: Task) -> tuple[shortened.Divergence, ...]:
    texts = task.texts(shortened.needed(subject.trained), task.sizes.short_texts)
    with subject.bar("operations", shortened.CASES * len(texts.tokens), "text") as bar:
        return shortened.measure(subject.decoder, texts, subject.trained, bar.update)


def _served(subject: Subject, task: Task) -> tuple[served.ServedLoss, ...]:
    context = served.STRETCH * subject.trained
    texts = task.texts(context, task.sizes.served_texts)
    with subject.bar("over HTTP", len(served.DTYPES), "server") as bar:
        return served.measure(
            subject.reader,
            texts,
            task.serve,
            subject.member.folder,
            subject.reach(context),
            bar.update,
        )


def _samples(subject: Subject, task: Task) -> tuple[samples.Sample, ...]:
    return samples.measure(subject.reader, subject.checkpoint.tokenizer)


PARTS: Mapping[str, Callable[[Subject, Task], Any]] = {  # by field of Measured
    "held_out": _held_out,
    "losses": _losses,
    "divergences": _divergences,
    "served": _served,
    "samples": _samples,
    "recalls": _recalls,
}
SEEDS_TOO = ("held_out", "losses")
