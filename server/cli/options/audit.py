"""Flags of `ropewalk audit`, and what its help says. No torch."""

import argparse

from ropewalk.server.cli.options.base import add_trust_flag, checked, count

HELP = """\
examples:
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


def add_audit_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        default="tiny",
        help="a Hugging Face directory, a .gguf file, smollm2 or a hub id; the audit needs 8 bytes "
        "per weight, so choose a small model (default: tiny, a small decoder with random weights)",
    )
    add(
        "--encodings",
        metavar="NAME,...",
        help="encodings to audit, or all (default: all for tiny, else the model's own and "
        "rope:dynamic)",
    )
    add_trust_flag(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text of the prompt")
    prompt.add_argument(
        "--prompt-tokens",
        type=checked(count(1, 4096)),
        metavar="N",
        help="length of a prompt of random tokens (default: 104 for tiny, else 24)",
    )
    add(
        "--steps",
        type=checked(count(1, 4096)),
        metavar="N",
        default=None,
        help="tokens to generate after the prompt, one per step (default: 32 for tiny, else 16)",
    )
    add(
        "--trained-length",
        type=checked(count(1, 8192)),
        metavar="N",
        help="length past which the dynamic variants change their frequencies (default: the prompt "
        "plus half of the steps)",
    )
    add("--steps-table", action="store_true", help="print every step, not only the totals")
    add(
        "--json",
        metavar="FILE",
        help="write all results as JSON; - prints them instead of the table",
    )
    add("--html", metavar="FILE", help="write the picture as one self-contained file")
