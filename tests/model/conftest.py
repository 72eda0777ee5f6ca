import gguf
import numpy as np
import pytest

from tests.smollm2 import smollm2_path


@pytest.fixture(scope="session")
def smollm2_reader():
    """The weights as the gguf package reads them: slow, and independent of our reader.

    It cuts several arrays for each of 100,000 strings, which are made here by the shortest way:
    no slice of a memmap, and no look at the order of its bytes.
    """

    def cut(reader, offset, dtype, count=1, override_order=None):
        return np.frombuffer(reader.data, dtype, int(count), offset)

    path = smollm2_path()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        patch.setattr(gguf.GGUFReader, "_get", cut)
        return gguf.GGUFReader(path)
