import pytest
import torch

from ropewalk.server.engine.openmp import end_idle_threads


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
    end_idle_threads()
