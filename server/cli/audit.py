"""`ropewalk audit`: what server/studies/audit.py does. No torch before it is asked to."""

from pathlib import Path
from typing import Any

import click

from ropewalk.server.cli.options import A_MODEL, Command, count, trust_encoding

EXAMPLES = """\
Examples:
  ropewalk audit                                     every encoding, on a small random decoder
  ropewalk audit --html audit.html                   the same as a picture: start here
  ropewalk audit smollm2 --prompt "Why is the sky blue?" --steps 24
  ropewalk audit smollm2 --encodings rope,rope:dynamic,t5,alibi --html audit.html
  ropewalk audit --encodings t5,t5:table,t5:materialised --steps-table
  ropewalk audit ./model.gguf --json -               machine-readable
  PYTHONPATH=. ropewalk audit --encodings kerple:Kerple   one of your own, from ./kerple.py

Columns of the table; an entry is a key or value of one layer, head and position:
  written/token   new entries stored per token
  changed         earlier entries whose bytes a step changed
  should change   earlier entries that differ from recomputation at the new length
  stale           entries that should have changed in a step and are still wrong
changed, should change and stale count an entry again in every step.

rope:dynamic is the counter-example: `dynamic` scaling as published, whose frequencies depend on
the length, with the cache left as it is. rope:dynamic-rewrite rotates all stored keys again when
the frequencies change.

Exit status: 0, or 1 when a correct stored entry changed. See also docs/audit.md.
"""


@click.command(cls=Command, epilog=EXAMPLES)
@click.argument(
    "model",
    default="tiny",
    type=click.Path(),
    metavar="[MODEL]",
    help=f"{A_MODEL}; the audit needs 8 bytes per weight, so choose a small model (default: tiny, "
    "a small decoder with random weights)",
)
@click.option(
    "--encodings",
    metavar="NAME,...",
    help="encodings to audit, or all (default: all for tiny, else the model's own and "
    "rope:dynamic)",
)
@trust_encoding
@click.option("--prompt", metavar="TEXT", help="text of the prompt")
@click.option(
    "--prompt-tokens",
    type=count(1, 4096),
    help="length of a prompt of random tokens (default: 104 for tiny, else 24)",
)
@click.option(
    "--steps",
    type=count(1, 4096),
    help="tokens to generate after the prompt, one per step (default: 32 for tiny, else 16)",
)
@click.option(
    "--trained-length",
    type=count(1, 8192),
    help="length past which the dynamic variants change their frequencies (default: the prompt "
    "plus half of the steps)",
)
@click.option("--steps-table", is_flag=True, help="print every step, not only the totals")
@click.option(
    "--json",
    "json_to",
    type=click.Path(allow_dash=True, path_type=Path),
    metavar="FILE",
    help="write all results as JSON; - prints them instead of the table",
)
@click.option(
    "--html",
    "html_to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="write the picture as one self-contained file",
)
def audit(**given: Any) -> int:
    """Show what each generation step changes in the cache."""
    # Late: it loads torch.
    from ropewalk.server.studies.audit import run

    return run(**given)
