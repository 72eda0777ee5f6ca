"""`ropewalk explain`: what server/studies/explain.py draws. No torch before it is asked to."""

import logging
from typing import Any

import click

from ropewalk.server.cli.encodings import OUTSIDE
from ropewalk.server.cli.options import A_MODEL, Command, Value, count, number, trust_encoding
from ropewalk.server.config import encoding_option

EXAMPLES = """\
Examples:
  ropewalk explain rope                              writes rope.html, with default settings
  ropewalk explain rope --base 500000 --head-dim 128 --context 8k --out rope.png
  ropewalk explain rope --option width=16 --option 'scaling={"type": "linear", "factor": 4}'
  ropewalk explain alibi --heads 12
  ropewalk explain --model ./flan-t5-small           a checkpoint's own encoding, as trained
  PYTHONPATH=. ropewalk explain kerple:Kerple        one of your own, from ./kerple.py

The file is self-contained and needs no network. `ropewalk encodings` lists encodings and their
options.
"""


@click.command(cls=Command, epilog=EXAMPLES)
@click.argument(
    "encoding",
    required=False,
    metavar="[ENCODING]",
    help=f"name of a built-in encoding, or {OUTSIDE}",
)
@click.option(
    "--out",
    type=click.Path(),
    metavar="FILE",
    help="file to write, ending in .html or .png (default: the encoding's name with .html)",
)
@click.option(
    "--model",
    type=click.Path(),
    metavar="MODEL",
    help="explain this checkpoint's encoding, with its own settings and trained weights: "
    f"{A_MODEL}",
)
@trust_encoding
@click.option("--layer", type=count(0, 4096), help="layer of the model to explain (default: 0)")
@click.option(
    "--context",
    type=count(64, 1 << 17),
    help="context length in tokens (default: 2048, or the model's)",
)
@click.option("--heads", type=count(1, 256), help="number of heads (default: 8)")
@click.option("--head-dim", type=count(2, 512), help="dimension of a head (default: 64)")
@click.option("--base", type=number(1e-3, 1e12), help="rope's base; short for --option base=...")
@click.option(
    "--option",
    multiple=True,
    type=Value(encoding_option),
    metavar="NAME=VALUE",
    help="an option of the encoding, its value as JSON or text; repeatable",
)
def explain(**given: Any) -> None:
    """Draw what a positional encoding does, as one HTML or PNG file."""
    # matplotlib's messages about its caches and fonts are no use to the user.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    # Late: it loads torch and matplotlib.
    from ropewalk.server.studies.explain import run

    print(run(**given))
