"""Command lines of the load tests, whose errors are one sentence like those of `ropewalk`."""

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong and where to read on, instead of all options again."""

    def error(self, message: str) -> NoReturn:
        said = message.removeprefix("argument ").rstrip(".")
        print(f"{self.prog}: {said}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)
