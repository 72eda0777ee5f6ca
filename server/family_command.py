"""`ropewalk family`: the bundled models, from the texts on; model/family does the work."""

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from tqdm import tqdm

from model.encodings.base import EncodingError
from model.family import corpus, fetch
from model.family.corpus import Corpus
from model.family.errors import FamilyError
from model.family.evaluation import results
from model.family.evaluation.card import write as write_card
from model.family.evaluation.evaluate import PACKED_WINDOWS, Task
from model.family.evaluation.evaluate import evaluate as evaluate_models
from model.family.evaluation.results import QUICK, Sizes
from model.family.losses import windows_of
from model.family.pack import loss_of
from model.family.pack import pack as pack_weights
from model.family.prepare import SHIPPED_TOKENIZER, Bar
from model.family.prepare import prepare as prepare_texts
from model.family.recipe import CONTEXT, ENCODINGS, Recipe, model_name, shape
from model.family.train import Pace, Training
from model.weights.base import CheckpointError
from server import placement, pull
from server.errors import CommandError
from server.family_serving import served_logprobs

RESULT = "evaluation.json"


def folder() -> Path:
    """Where the family's files are: texts, corpus, checkpoints."""
    return pull.home() / "family"


def prepare(flags: argparse.Namespace) -> int:
    """Prints the data card; the corpus file's path goes to standard error. CommandError."""
    given = SHIPPED_TOKENIZER if SHIPPED_TOKENIZER.exists() and not flags.own_tokenizer else None
    try:
        done = prepare_texts(folder(), fetch.by_client, _bars, given_tokenizer=given)
    except FamilyError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(
            f"{folder()} cannot be written ({error.strerror}); free some space there or set "
            "ROPEWALK_HOME to another folder"
        ) from error
    print(done.card, end="")
    print(done.path, file=sys.stderr)
    return 0


def _bars(title: str, total: int, unit: str) -> AbstractContextManager[Bar]:
    every = 0.2 if sys.stderr.isatty() else 10  # seconds; a log file needs no animation
    made: AbstractContextManager[Bar] = tqdm(
        total=total, desc=title, unit=unit, unit_scale=unit in ("B", "token"), mininterval=every
    )
    return made


def train(flags: argparse.Namespace) -> int:
    """Prints the folder of each finished model. CommandError."""
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    device = placement.pick_device(flags.device)
    pace = Pace(
        device,
        autocast=placement.pick_dtype(None, device) is torch.bfloat16,
        compile=not flags.no_compile,
        at_once=1 if device.type == "cpu" else None,
    )
    recipe = Recipe(tokens=flags.tokens, seed=flags.seed)
    try:
        texts = corpus.load(folder() / "corpus.npz")
        for encoding in flags.encoding or ENCODINGS:
            print(_train_one(encoding, recipe, texts, pace))
    except (FamilyError, EncodingError, CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    return 0


def run_name(encoding: str, seed: int) -> str:
    """The folder of one training: the model's name, and the seed unless it is the shipped one."""
    return model_name(encoding) + (f".seed{seed}" if seed else "")


def _train_one(encoding: str, recipe: Recipe, texts: Corpus, pace: Pace) -> Path:
    name = run_name(encoding, recipe.seed)
    training = Training(shape(encoding), recipe, texts, folder() / "runs" / name, pace)
    with tqdm(
        desc=name,
        total=recipe.tokens,
        initial=training.tokens,
        unit="token",
        unit_scale=True,
        mininterval=0.2 if sys.stderr.isatty() else 30,
    ) as bar:

        def report(tokens: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(tokens)

        training.train(report)
    return training.finish(SHIPPED_TOKENIZER)


def pack(_: argparse.Namespace) -> int:
    """Prints what packing costs each model. CommandError when none is trained."""
    finished = sorted(folder().glob("runs/*/model"))
    shipped = [path for path in finished if path.parent.name in map(model_name, ENCODINGS)]
    if not shipped:
        raise CommandError(
            f"no model is trained to its end in {folder() / 'runs'}; run ropewalk family train"
        )
    try:
        texts = corpus.load(folder() / "corpus.npz")
        windows = windows_of(texts.held_out, CONTEXT, PACKED_WINDOWS)
        print(f"{'model':<20} {'trained':>9} {'packed':>9} {'cost':>9}   nats per token, held out")
        for path in tqdm(shipped, desc="packing", disable=None, leave=False):
            target = pull.FAMILY / path.parent.name
            pack_weights(path, target)
            before, after = loss_of(path, windows), loss_of(target, windows)
            print(f"{target.name:<20} {before:>9.4f} {after:>9.4f} {after - before:>+9.4f}")
    except (FamilyError, CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    return 0


def evaluate(flags: argparse.Namespace) -> int:
    """Prints where the figures are. CommandError."""
    device = placement.pick_device(flags.device)
    path = flags.result or folder() / ("quick-evaluation.json" if flags.quick else RESULT)
    sizes = QUICK if flags.quick else Sizes()
    try:
        texts = corpus.load(folder() / "corpus.npz")
        task = Task(texts, sizes, device, served_logprobs, _bars, pull.FAMILY)
        evaluate_models(flags.models or folder() / "runs", path, task)
    except (FamilyError, CheckpointError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror}); use --result") from error
    print(path)
    return 0


def report(flags: argparse.Namespace) -> int:
    """Prints where the card and its pictures are. CommandError."""
    path = flags.result or folder() / RESULT
    out = flags.out or folder() / "report"
    card = folder() / "data_card.md"
    try:
        found = results.read(path)
        if found is None:
            raise CommandError(f"{path} is missing; run ropewalk family evaluate")
        found = results.beside(found, results.read(pull.FAMILY.parent / RESULT))
        data = card.read_text(encoding="utf-8") if card.exists() else None
        notes = flags.notes.read_text(encoding="utf-8") if flags.notes else None
        written = write_card(found, data, notes, out)
    except FamilyError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename or out}: {error.strerror}; use --out") from error
    for each in written:
        print(each)
    return 0


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "prepare": prepare,
    "train": train,
    "pack": pack,
    "evaluate": evaluate,
    "report": report,
}
