"""Versions of what runs, without importing it."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed(name: str) -> str:
    """The version of a distribution, or of "python"."""
    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
