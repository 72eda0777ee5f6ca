import os
from pathlib import Path

import pytest
import torch

from model.kernels.build import load

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """The compiled CPU kernels; from the model cache when one is named, to save the seconds."""
    home = os.environ.get("ROPEWALK_HOME")
    return load(Path(home) / "kernels" if home else tmp_path_factory.mktemp("kernels"))
