"""Every attention backend, fastest first: the one list that serving chooses from."""

from model.attention.base import AttentionBackend
from model.attention.cpu import CpuBackend
from model.attention.reference import ReferenceAttention
from model.attention.sdpa import SdpaAttention
from model.attention.triton import TritonAttention
from model.kernels.build import Kernels


def all_backends(kernels: Kernels | str) -> list[AttentionBackend]:
    """`kernels`: the compiled CPU kernels, or the reason why there are none."""
    return [TritonAttention, CpuBackend(kernels), SdpaAttention, ReferenceAttention]
