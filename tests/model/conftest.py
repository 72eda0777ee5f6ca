import gguf
import numpy as np
import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.server.engine.openmp import end_idle_threads
from tests.model.attention.triton_here import TritonHere
from tests.smollm2 import smollm2_path


@pytest.fixture(scope="session")
def smollm2_reader():
    """The weights as the gguf package reads them: slow, and independent of our reader.

    It slices several arrays for each of 100,000 strings, which are made here in the fastest way:
    without slicing a memmap or checking its byte order.
    """

    def cut(reader, offset, dtype, count=1, override_order=None):
        return np.frombuffer(reader.data, dtype, int(count), offset)

    path = smollm2_path()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        patch.setattr(gguf.GGUFReader, "_get", cut)
        return gguf.GGUFReader(path)


@pytest.fixture(scope="module")
def backends(kernels):
    """Every attention backend by its name; Triton's on a GPU or interpreted."""
    return {
        "reference": ReferenceAttention,
        "sdpa": SdpaAttention,
        "cpu": CpuBackend(kernels),
        "triton": TritonHere,
    }


@pytest.fixture
def threads():
    """Sets how many threads compute, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
    end_idle_threads()
