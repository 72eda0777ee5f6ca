import sys

import pytest

from ropewalk.load_tests.client import process
from ropewalk.load_tests.run import serving
from ropewalk.report import page


@pytest.fixture
def outlined(monkeypatch):
    """Pages have frames for pictures, which take longer than all else to draw."""
    monkeypatch.setattr(page, "svg", lambda picture, prefix, *_: f"<svg>{picture.title}</svg>")


@pytest.fixture
def fake(monkeypatch):
    """Servers that are started have no model, and start at once."""
    monkeypatch.setattr(serving, "PROGRAM", (sys.executable, "-m", "tests.load_tests.fake_serve"))
    monkeypatch.setattr(process, "_POLL_S", 0.02)
