"""`python -m ropewalk` is the `ropewalk` command."""

import sys

from ropewalk.server.cli.main import run

sys.exit(run())
