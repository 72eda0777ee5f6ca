"""How often a layer launches something on a GPU: counted on a device that computes nothing."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk.cache.kv import KVCache
from ropewalk.model.encodings.base import create, freeze_all
from ropewalk.model.kernels.graphs.replay import Bucket
from ropewalk.model.kernels.triton import attention
from ropewalk.model.kernels.triton import launches as fused
from ropewalk.model.kernels.triton.executor import TritonExecutor
from ropewalk.model.kernels.triton.launches import FEW_ROWS
from ropewalk.model.recipes import allocate, program
from tests.model.tiny import CONFIG, CONTEXT, ENCODINGS
from tests.products import pairs

META = torch.device("meta")
ALLOCATE = ("aten::empty", "aten::new_empty")


class Launches(TorchDispatchMode):
    """Counts torch's operations that are neither views nor allocations, and our kernels."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        kernels = ("attend", "merge", "store", "add_norm", "gate", "linear")
        self.kernels = SimpleNamespace(**{name: self.kernel(name) for name in kernels})

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        if not operation.is_view and not operation.name().startswith(ALLOCATE):
            self.counts[operation.name().partition("::")[2]] += 1
        return operation(*given, **(named or {}))

    def kernel(self, name):
        def launch(*given, **named):
            self.counts[name] += 1

        return Kernel(launch)


class Kernel:
    """In the place of one of Triton's."""

    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        return self.launch


def launches(monkeypatch, encoding, layers, stored, requests):
    """Of a decoding step."""
    counting = Launches()
    for using in (attention, fused):
        monkeypatch.setattr(using, "import_module", lambda name: counting.kernels)
    config = replace(
        CONFIG, encoding=ENCODINGS[encoding], num_layers=layers, windows=(None,) * layers
    )
    kv = KVCache(config, blocks=40, block_size=16, dtype=stored, device=META)
    made = create(config.encoding, config, CONTEXT, META)
    weights = allocate(config, made, dtype=torch.bfloat16, device=META)
    freeze_all(made)
    executor = TritonExecutor(program(config, weights, made))
    with counting:
        executor.compute(Bucket(requests, CONTEXT, kv).batch, kv)
    return counting.counts


ATTENTION = {"store": 1, "attend": 1, "merge": 1}
OTHERS = {FEW_ROWS: {"linear": 4}, FEW_ROWS + 1: {"mm": 4, "add_norm": 2, "gate": 1}}


# Other encodings of ENCODINGS rotate in torch, or have tensors on the CPU.
@pairs(
    requests=OTHERS,
    encoding=[
        *("nope", "rope", "rope-partial", "rope-raw", "alibi"),
        *("t5", "t5-table", "learned", "sinusoidal"),
    ],
    stored=[torch.bfloat16, torch.int8],
)
def test_a_layer_takes_as_many_launches_under_every_encoding(
    requests, encoding, stored, monkeypatch
):
    two, three = (launches(monkeypatch, encoding, count, stored, requests) for count in (2, 3))
    assert three - two == ATTENTION | OTHERS[requests]
