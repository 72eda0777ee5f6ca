"""`ropewalk family`: the bundled models, from the texts on; model/family does the work."""

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tqdm import tqdm

from model.family import fetch
from model.family.errors import FamilyError
from model.family.prepare import SHIPPED_TOKENIZER, Bar
from model.family.prepare import prepare as prepare_texts
from server import pull
from server.errors import CommandError


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
