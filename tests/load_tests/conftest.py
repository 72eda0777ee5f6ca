"""What is measured may be Triton's kernels, interpreted."""

from tests.model.conftest import searched_once

__all__ = ["searched_once"]
