"""Flags of `ropewalk encodings` and `ropewalk explain`, and what their help says. No torch."""

import argparse

LIST_HELP = """\
examples:
  ropewalk encodings                                 what there is, and what it costs
  ropewalk encodings --json                          the same for programs
  PYTHONPATH=. ropewalk encodings --encoding kerple:Kerple
                                                     and one of your own, from ./kerple.py

A running server answers the same at /v1/encodings. docs/encodings.md says how to add one.
"""

OUTSIDE = "package.module:Class"


def add_list_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--encoding",
        action="append",
        default=[],
        metavar=OUTSIDE,
        help="list this one too, from outside of this project; repeatable",
    )
