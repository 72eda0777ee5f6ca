"""A GPU that need not exist: Triton compiles for it what is launched, and nothing is computed."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver


class NoGPU(DriverBase):
    """`compiled`: name and bytes of shared memory of each kernel, in the order of first launches.

    Whoever uses it takes tensors of the CPU for its memory.
    """

    def __init__(self, capability, shared):
        """shared: bytes that a program may have; Triton refuses kernels that need more."""
        super().__init__()
        self.capability, self.shared = capability, shared
        self.compiled = []
        self.utils = self
        driver.set_active(self)

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_properties(self, device):
        return {"max_shared_mem": self.shared}

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_benchmarker(self):
        raise NotImplementedError

    def launcher_cls(self, source, metadata):
        self.compiled.append((source.fn.__name__, metadata.shared))
        return lambda *given: None

    def load_binary(self, name, kernel, shared, device):
        assert kernel  # instructions of that GPU
        return self, 0, 0, 0, 1024  # a module, a function, registers, spills, threads

    def unload_module(self, module):
        """There is nothing to unload."""


class AsOnGPU:
    """Launches a kernel with what it would be told on a GPU."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        launch = self.kernel[grid]
        return lambda *given, **named: launch(*given, **named | _wide(named))


def _wide(named):
    """Only the interpreter's products have to be of float32."""
    return {"WIDE": False} if "WIDE" in named else {}
