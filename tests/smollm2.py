"""Finds real weights for tests, where `ropewalk pull smollm2` puts them."""

from pathlib import Path

import pytest

from ropewalk.server.download import SMOLLM2, stored


def smollm2_path() -> Path:
    """The GGUF file; skips the calling test if it was not pulled."""
    path = stored(SMOLLM2, "smollm2")
    if path is None:
        pytest.skip("the SmolLM2 weights are missing: `ropewalk pull smollm2` fetches them")
    return path
