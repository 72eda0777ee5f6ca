"""The real Prometheus: its two programs on the PATH, or in the folder that PROMETHEUS names."""

import os
import shutil

import pytest


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`; skips the calling test if it is missing."""
    folder = os.environ.get("PROMETHEUS", "")
    path = shutil.which(name, path=os.pathsep.join((folder, os.environ.get("PATH", ""))))
    if path is None:
        pytest.skip(f"{name} is missing: scripts/prometheus brings it, PROMETHEUS names its folder")
    return path
