import pytest


@pytest.fixture(autouse=True)
def triton(request):
    """Installed, or what runs its kernels is skipped."""
    if request.node.get_closest_marker("triton"):
        pytest.importorskip("triton", reason="Triton is not installed")
