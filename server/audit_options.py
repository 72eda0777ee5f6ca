"""Flags of `ropewalk audit`, and what its help says. No torch."""

import argparse

from server.options import checked, count

HELP = """\
examples:
  ropewalk audit                                     every encoding, on a small random decoder
  ropewalk audit --html audit.html                   the same as a picture: look at this first
  ropewalk audit smollm2 --prompt "Why is the sky blue?" --steps 24
  ropewalk audit smollm2 --encodings rope,rope:dynamic,t5,alibi --html audit.html
  ropewalk audit --encodings t5,t5:table,t5:materialised --steps-table
  ropewalk audit ./model.gguf --json -               for programs
  PYTHONPATH=. ropewalk audit --encodings kerple:Kerple   one of your own, from ./kerple.py

Columns of the table, in keys and values of one layer, head and position:
  written/token   stored for each token where nothing was stored before
  changed         earlier ones whose bytes a step changed
  should change   earlier ones that are not what recomputation at the new length gives
  stale           of those, the ones that a step left wrong
changed, should change and stale count an entry anew in every step.

rope:dynamic follows the length, as `dynamic` scaling was published, and leaves its cache alone:
the counter-example. rope:dynamic-rewrite turns all stored keys when its frequencies change.

Exit status: 0, or 1 when a stored entry changed that was right. docs/audit.md says more.
"""


def add_audit_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        default="tiny",
        help="a Hugging Face directory, a .gguf file, smollm2 or a hub id; default tiny, a small "
        "random decoder. It computes in 8 bytes per weight, so take a small one",
    )
    add(
        "--encodings",
        metavar="NAME,...",
        help="which, or all (default: all for tiny, else the model's own and rope:dynamic)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="begin with this text")
    prompt.add_argument(
        "--prompt-tokens",
        type=checked(count(1, 4096)),
        metavar="N",
        help="begin with so many drawn tokens (default: 104 for tiny, else 24)",
    )
    add(
        "--steps",
        type=checked(count(1, 4096)),
        metavar="N",
        default=None,
        help="tokens generated after the prompt, one a step (default: 32 for tiny, else 16)",
    )
    add(
        "--trained-length",
        type=checked(count(1, 8192)),
        metavar="N",
        help="where the dynamic arms begin to stretch (default: half of the steps in)",
    )
    add("--steps-table", action="store_true", help="print every step, not only the sums")
    add("--json", metavar="FILE", help="write everything as JSON; - prints it instead of a table")
    add("--html", metavar="FILE", help="write the picture, one file that needs no other")
