"""Flags of `ropewalk encodings` and `ropewalk explain`, and what their help says. No torch."""

import argparse

from server.options import checked, count, number

LIST_HELP = """\
examples:
  ropewalk encodings                                 what there is, and what it costs
  ropewalk encodings --json                          the same for programs
  ropewalk encodings --operations                    what can be done to a cache, and what it takes
  PYTHONPATH=. ropewalk encodings --encoding kerple:Kerple
                                                     and one of your own, from ./kerple.py

A running server answers the same at /v1/encodings. docs/encodings.md says how to add one.
"""

OUTSIDE = "package.module:Class"


def add_list_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--operations",
        action="store_true",
        help="print what can be done to cached entries under each, measured on this machine",
    )
    parser.add_argument(
        "--encoding",
        action="append",
        default=[],
        metavar=OUTSIDE,
        help="list this one too, from outside of this project; repeatable",
    )


EXPLAIN_HELP = """\
examples:
  ropewalk explain rope                              rope.html, with the usual settings
  ropewalk explain rope --base 500000 --head-dim 128 --context 8k --out rope.png
  ropewalk explain rope --option width=16 --option 'scaling={"type": "linear", "factor": 4}'
  ropewalk explain alibi --heads 12
  ropewalk explain --model ./flan-t5-small           a checkpoint's own encoding, as it was trained
  PYTHONPATH=. ropewalk explain kerple:Kerple        one of your own, from ./kerple.py

The file needs no other and no network. `ropewalk encodings` lists encodings and their options.
"""


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "encoding", nargs="?", metavar="ENCODING", help=f"one of this project's, or {OUTSIDE}"
    )
    add = parser.add_argument
    add("--out", metavar="FILE", help="ends in .html or .png (default: the encoding's name, .html)")
    add(
        "--model",
        help="explain this checkpoint's encoding, with its own settings and trained weights: "
        "a directory, a .gguf file or smollm2",
    )
    add("--layer", type=checked(count(0, 4096)), help="which of the model's layers (default: 0)")
    add(
        "--context",
        type=checked(count(64, 1 << 17)),
        help="positions (default: 2048, or the model's)",
    )
    add("--heads", type=checked(count(1, 256)), help="heads of a layer (default: 8)")
    add("--head-dim", type=checked(count(2, 512)), help="coordinates of a head (default: 64)")
    add("--base", type=checked(number(1e-3, 1e12)), help="rope's base; short for --option base=...")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the encoding, the value as JSON or text; repeatable",
    )
