"""Every attention backend and executor, fastest first: the one list that serving chooses from.

What serves only GPUs is imported where there is one.
"""

from logging import getLogger

from ropewalk.model.attention.base import Attend, AttentionBackend, AttentionSpec
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.cpu import executor as cpu
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.program import Program
from ropewalk.model.sampler import KernelSampler, Sampler

log = getLogger(__name__)


class TritonBackend:
    """Makes TritonAttention."""

    name = "triton"

    def why_not(self, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"the device is {spec.device.type}"
        from ropewalk.model.kernels.triton.attention import TritonAttention

        return TritonAttention.why_not(spec)

    def __call__(self, spec: AttentionSpec) -> Attend:
        from ropewalk.model.kernels.triton.attention import TritonAttention

        return TritonAttention(spec)


def all_backends(kernels: Kernels | str) -> list[AttentionBackend]:
    """`kernels`: the compiled CPU kernels, or the reason why there are none."""
    return [TritonBackend(), CpuBackend(kernels), SdpaAttention, ReferenceAttention]


def decoder_on(backend: AttentionBackend, program: Program, kernels: Kernels | str) -> Decoder:
    """The program on the fastest executor that computes attention with this backend."""
    if isinstance(backend, TritonBackend):
        from ropewalk.model.kernels.triton import executor as triton

        if triton.why_not(program) is None:
            return Decoder(program, triton.TritonExecutor(program))
    reason = cpu.why_not(program, kernels)
    if reason is None and isinstance(kernels, Kernels):
        own = isinstance(backend, CpuBackend)
        return Decoder(program, cpu.CpuExecutor(program, kernels, None if own else backend))
    if isinstance(kernels, Kernels):
        log.info("computed op by op in torch, not by the CPU's kernels: %s", reason)
    return Decoder(program, TorchExecutor(program, backend))


def sampler_of(decoder: Decoder, kernels: Kernels | str) -> Sampler:
    """The fastest that picks tokens from this decoder's logits. kernels: as above."""
    if isinstance(kernels, Kernels):
        return KernelSampler(kernels)
    if decoder.executor.name == "triton":
        from ropewalk.model.kernels.triton.launches import TritonSampler

        return TritonSampler()
    return Sampler()
