"""What tests of several commands ask for."""

import os
import sys

import pytest

from ropewalk.server.cli.options import OTHER_VARIABLES

OUTSIDE = '''
from ropewalk.model.encodings.base import PositionalEncoding

class Outside(PositionalEncoding):
    """Comes from a file of the user's."""
'''


@pytest.fixture
def no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        # ROPEWALK_HOME stays: the kernels that other tests have compiled are there.
        if name.startswith("ROPEWALK_") and name not in OTHER_VARIABLES:
            monkeypatch.delenv(name)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The name of an encoding that is none of ours."""
    (tmp_path / "users_own.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_own:Outside"
    sys.modules.pop("users_own", None)
