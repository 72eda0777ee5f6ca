import gguf
import numpy as np
import pytest

from model.kernels.build import load
from server.pull import home
from tests.smollm2 import smollm2_path


@pytest.fixture(scope="session")
def kernels():
    """The compiled CPU kernels, from where the server keeps them, to save the seconds."""
    return load(home() / "kernels")


@pytest.fixture(scope="session")
def smollm2_reader():
    """The weights as the gguf package reads them: slow, and independent of our reader.

    Not through a memmap: it takes several slices for each of 100,000 strings, and a slice of a
    memmap ten times as long as one of an array.
    """
    path = smollm2_path()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        return gguf.GGUFReader(path)
