"""Flags of `ropewalk encodings` and `ropewalk explain`, and what their help says. No torch."""

import argparse

from ropewalk.server.cli.options.base import add_trust_flag, checked, count, number

LIST_HELP = """\
examples:
  ropewalk encodings                                 all encodings and what they cost
  ropewalk encodings --json                          the same as JSON
  ropewalk encodings --operations                    which cache operations each allows, timed
  PYTHONPATH=. ropewalk encodings --encoding kerple:Kerple
                                                     also one of your own, from ./kerple.py

A running server returns the same at /v1/encodings. docs/encodings.md explains how to add
an encoding.
"""

OUTSIDE = "package.module:Class"


def add_list_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--operations",
        action="store_true",
        help="print which operations on cached entries each encoding allows, timed on this machine",
    )
    parser.add_argument(
        "--encoding",
        action="append",
        default=[],
        metavar=OUTSIDE,
        help="also list this encoding from outside the project; repeatable",
    )


EXPLAIN_HELP = """\
examples:
  ropewalk explain rope                              writes rope.html, with default settings
  ropewalk explain rope --base 500000 --head-dim 128 --context 8k --out rope.png
  ropewalk explain rope --option width=16 --option 'scaling={"type": "linear", "factor": 4}'
  ropewalk explain alibi --heads 12
  ropewalk explain --model ./flan-t5-small           a checkpoint's own encoding, as trained
  PYTHONPATH=. ropewalk explain kerple:Kerple        one of your own, from ./kerple.py

The file is self-contained and needs no network. `ropewalk encodings` lists encodings and their
options.
"""


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "encoding", nargs="?", metavar="ENCODING", help=f"name of a built-in encoding, or {OUTSIDE}"
    )
    add = parser.add_argument
    add(
        "--out",
        metavar="FILE",
        help="file to write, ending in .html or .png (default: the encoding's name with .html)",
    )
    add(
        "--model",
        help="explain this checkpoint's encoding, with its own settings and trained weights: "
        "a directory, a .gguf file or smollm2",
    )
    add_trust_flag(parser)
    add("--layer", type=checked(count(0, 4096)), help="layer of the model to explain (default: 0)")
    add(
        "--context",
        type=checked(count(64, 1 << 17)),
        help="context length in tokens (default: 2048, or the model's)",
    )
    add("--heads", type=checked(count(1, 256)), help="number of heads (default: 8)")
    add("--head-dim", type=checked(count(2, 512)), help="dimension of a head (default: 64)")
    add("--base", type=checked(number(1e-3, 1e12)), help="rope's base; short for --option base=...")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the encoding, its value as JSON or text; repeatable",
    )
