"""Every attention backend, fastest first: the one list that serving chooses from."""

from ropewalk.model.attention.base import AttentionBackend
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.kernels.triton.attention import TritonAttention


def all_backends(kernels: Kernels | str) -> list[AttentionBackend]:
    """`kernels`: the compiled CPU kernels, or the reason why there are none."""
    return [TritonAttention, CpuBackend(kernels), SdpaAttention, ReferenceAttention]
