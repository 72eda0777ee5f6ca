"""`ropewalk family`: makes the bundled models from their texts; model/family does the work."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation import results
from ropewalk.model.family.evaluation.evaluate import Task
from ropewalk.model.family.evaluation.evaluate import evaluate as evaluate_models
from ropewalk.model.family.evaluation.report.card import write as write_card
from ropewalk.model.family.evaluation.results import QUICK, Sizes
from ropewalk.model.family.files import alone
from ropewalk.model.family.texts import corpus, fetch
from ropewalk.model.family.texts.corpus import Corpus
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.family.texts.prepare import prepare as prepare_texts
from ropewalk.model.family.training.losses import windows_of
from ropewalk.model.family.training.pack import COST_WINDOWS, loss_of
from ropewalk.model.family.training.pack import pack as pack_weights
from ropewalk.model.family.training.recipe import CONTEXT, ENCODINGS, Recipe, model_name, shape
from ropewalk.model.family.training.rehearsal import rehearse
from ropewalk.model.family.training.train import Pace, Training
from ropewalk.model.weights.base import CheckpointError
from ropewalk.server import download, hardware
from ropewalk.server.errors import CommandError
from ropewalk.server.studies.family_serving import served_logprobs
from ropewalk.server.terminal import bar

RESULT = "evaluation.json"


def folder() -> Path:
    """Where the family's files are: texts, corpus, checkpoints."""
    return download.home() / "family"


@contextmanager
def _told() -> Iterator[None]:
    """Raises what goes wrong in the family's code as CommandError."""
    try:
        yield
    except (FamilyError, CheckpointError) as error:
        raise CommandError(str(error)) from error


@_told()
def prepare(own_tokenizer: bool) -> None:
    """Prints the data card, and to standard error the corpus file's path. Raises CommandError."""
    given = SHIPPED_TOKENIZER if SHIPPED_TOKENIZER.exists() and not own_tokenizer else None
    try:
        with alone(folder()):
            done = prepare_texts(folder(), fetch.by_client, bar, given_tokenizer=given)
    except OSError as error:
        raise CommandError(
            f"{folder()} cannot be written ({error.strerror}); free some space there or set "
            "ROPEWALK_HOME to another folder"
        ) from error
    print(done.card, end="")
    print(done.path, file=sys.stderr)


@_told()
def train(
    *,
    encoding: Sequence[str],
    tokens: int,
    growing: int,
    seed: int,
    device: str | None,
    threads: int | None,
    no_compile: bool,
) -> None:
    """Prints the folder of each finished model. Raises CommandError."""
    if threads is not None:
        torch.set_num_threads(threads)
    place = hardware.pick_device(device)
    if place.type == "cpu" and not no_compile:
        _need_compiler()
    autocast = hardware.pick_dtype(None, place) is torch.bfloat16
    pace = Pace(
        place,
        autocast=autocast,
        compile=not no_compile,
        at_once=(4 if autocast else 1) if place.type == "cpu" else None,
    )
    growing = min(growing, tokens // 2)  # so that every model also sees whole windows
    recipe = Recipe(tokens=tokens, seed=seed, growing=growing)
    wanted = encoding or ENCODINGS
    _need_names(wanted)
    try:
        texts = corpus.load(folder() / "corpus.npz")
        for each in wanted:
            rehearse(each, Sizes().context, compiled=pace.compile)
        for each in wanted:
            print(_train_one(each, recipe, texts, pace))
    except OSError as error:
        raise CommandError(
            f"{error.filename or folder()} cannot be written ({_reason(error)}); fix this and run "
            "the same command again to resume the training"
        ) from error


def _need_names(encodings: Sequence[str]) -> None:
    """Raises CommandError when two encodings would be trained in the same folder."""
    names = [model_name(encoding) for encoding in encodings]
    for name, encoding in zip(names, encodings, strict=True):
        if names.count(name) > 1:
            raise CommandError(
                f"--encoding {encoding}: {name} is given more than once; give it once, or rename "
                "one of the classes"
            )


def _need_compiler() -> None:
    """Raises CommandError: torch would take twenty lines, and fail only in the first step."""
    program = os.environ.get("CXX", "g++")  # torch, too, takes it as one word
    if shutil.which(program) is None:
        raise CommandError(
            f"torch.compile finds no C++ compiler {program!r}; install g++, set CXX to another "
            "compiler, or train more slowly with --no-compile"
        )


def _reason(error: OSError) -> str:
    """The reason; libraries raise some errors without `strerror`."""
    return error.strerror or str(error)


def _train_one(encoding: str, recipe: Recipe, texts: Corpus, pace: Pace) -> Path:
    name = model_name(encoding) + (f".seed{recipe.seed}" if recipe.seed else "")
    run = folder() / "runs" / name
    with alone(run):
        training = Training(shape(encoding), recipe, texts, run, pace)
        with bar(name, recipe.tokens, "token", done=training.tokens, log_every_s=30) as shown:

            def report(tokens: int, loss: float) -> None:
                shown.set_postfix(loss=f"{loss:.3f}", refresh=False)
                shown.update(tokens)

            training.train(report)
        return training.finish()


@_told()
def pack() -> None:
    """Prints what packing costs each model. Raises CommandError when none is trained."""
    finished = sorted(folder().glob("runs/*/model"))
    shipped = [path for path in finished if path.parent.name in map(model_name, ENCODINGS)]
    if not shipped:
        raise CommandError(
            f"{folder() / 'runs'} has no completely trained model; run ropewalk family train"
        )
    try:
        texts = corpus.load(folder() / "corpus.npz")
        windows = windows_of(texts.held_out, CONTEXT, COST_WINDOWS)
        print(f"{'model':<20} {'trained':>9} {'packed':>9} {'cost':>9}   nats per token, held out")
        for path in tqdm(shipped, desc="packing", disable=None, leave=False):
            target = download.FAMILY / path.parent.name
            pack_weights(path, target)
            before, after = loss_of(path, windows), loss_of(target, windows)
            print(f"{target.name:<20} {before:>9.4f} {after:>9.4f} {after - before:>+9.4f}")
    except OSError as error:
        raise CommandError(
            f"{download.FAMILY} cannot be written ({_reason(error)}); run this from an "
            "installation that you may write to, such as a checkout"
        ) from error


@_told()
def evaluate(
    *,
    models: Path | None,
    result: Path | None,
    trust_encoding: Sequence[str],
    quick: bool,
    device: str | None,
) -> None:
    """Prints the path of the figures. Raises CommandError."""
    path = result or folder() / ("quick-evaluation.json" if quick else RESULT)
    sizes = QUICK if quick else Sizes()
    try:
        texts = corpus.load(folder() / "corpus.npz")
        serve = partial(served_logprobs, trusted=trust_encoding)
        place = hardware.pick_device(device)
        task = Task(texts, sizes, place, serve, bar, download.FAMILY, trust_encoding)
        evaluate_models(models or folder() / "runs", path, task)
    except OSError as error:
        raise CommandError(
            f"{error.filename or path} cannot be read or written ({_reason(error)}); see --result"
        ) from error
    print(path)


@_told()
def report(*, result: Path | None, out: Path | None, notes: Path | None) -> None:
    """Prints the paths of the card and its pictures. Raises CommandError."""
    path = result or folder() / RESULT
    out = out or folder() / "report"
    card = folder() / "data_card.md"
    try:
        found = results.read(path)
        if found is None:
            raise CommandError(f"{path} is missing; run ropewalk family evaluate")
        found = results.beside(found, results.read(download.FAMILY.parent / RESULT))
        data = card.read_text(encoding="utf-8") if card.exists() else None
        written = write_card(found, data, _notes(notes), out)
    except OSError as error:
        raise CommandError(
            f"{error.filename or out} cannot be read or written ({_reason(error)}); see --result "
            "and --out"
        ) from error
    for each in written:
        print(each)


def _notes(path: Path | None) -> str | None:
    """Raises CommandError."""
    try:
        return path.read_text(encoding="utf-8") if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"the notes {path} cannot be read ({error}); see --notes") from error
