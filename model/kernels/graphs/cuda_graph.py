"""CUDA graphs: recorded sequences of kernel launches that replay in one call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor


class CudaGraphs:
    """Records the device work of functions, while other threads may use the device.

    All recordings share one memory pool, so after another one has been replayed only results
    written to memory outside the pool are still valid.
    """

    def __init__(self, device: torch.device, *, alone: bool = True) -> None:
        """alone: no other thread uses the device before all is recorded."""
        self._device, self._alone = device, alone
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record `compute`, calling it three times; returns a function that replays it.

        First a normal call: compilation and setup must not happen during recording. Then one in
        which waiting for the device is an error: a recording that waited would leave the device's
        memory in disorder. Only if alone, as it would be an error in every thread. Raises
        RuntimeError for that and for what cannot be recorded, torch.AcceleratorError if the device
        is lost, and whatever `compute` raises.
        """
        try:
            return self._recorded(compute)
        except torch.AcceleratorError as error:
            require_device(error, self._device)
            raise RuntimeError(f"this cannot be recorded: {error}") from error

    def _recorded(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
            with _forbidden_to_wait() if self._alone else nullcontext():
                compute()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",  # "global" stops other threads' allocations
            ):
                result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def require_device(error: Exception, device: torch.device) -> None:
    """Raises torch.AcceleratorError if the device is lost, which not every such error says."""
    if isinstance(error, torch.AcceleratorError):
        torch.cuda.synchronize(device)


@contextmanager
def _forbidden_to_wait() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
