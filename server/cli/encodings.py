"""`ropewalk encodings`: what server/studies/encodings.py lists. No torch before it is asked to."""

import click

from ropewalk.server.cli.options import Command

OUTSIDE = "package.module:Class"

EXAMPLES = """\
Examples:
  ropewalk encodings                                 all encodings and what they cost
  ropewalk encodings --json                          the same as JSON
  ropewalk encodings --operations                    which cache operations each allows, timed
  PYTHONPATH=. ropewalk encodings --encoding kerple:Kerple
                                                     also one of your own, from ./kerple.py

A running server returns the same at /v1/encodings. docs/encodings.md explains how to add
an encoding.
"""


@click.command(cls=Command, epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of text")
@click.option(
    "--operations",
    is_flag=True,
    help="print which operations on cached entries each encoding allows, timed on this machine",
)
@click.option(
    "--encoding",
    multiple=True,
    metavar=OUTSIDE,
    help="also list this encoding from outside the project; repeatable",
)
def encodings(as_json: bool, operations: bool, encoding: tuple[str, ...]) -> None:
    """List the positional encodings."""
    # Late: it loads torch.
    from ropewalk.server.studies.encodings import run

    run(encoding, operations=operations, as_lines_of_json=as_json)
