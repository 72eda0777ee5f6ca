"""What a CUDA device was once told to do is done again at one word: CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CudaGraphs:
    """Records what functions have a device do.

    All recordings share the memory that they work in, so only what a function writes into
    memory from elsewhere is still there when another has been played.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What plays `compute` again, which is called three times here.

        Once as usual: what it compiles and sets up must not happen while it is recorded. Then so
        that it fails where it waits for the device: a recording that did would leave the device's
        memory in disorder. Raises RuntimeError for that, and what `compute` raises.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
            with _forbidden_to_wait():
                compute()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@contextmanager
def _forbidden_to_wait() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
