import gguf
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
    """The weights as the gguf package reads them: slow, and independent of our reader."""
    return gguf.GGUFReader(smollm2_path())
