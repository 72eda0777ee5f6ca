"""Answers the same requests on the CPU and on a device of its own, as a server would on a GPU.

Run by test_another_device.py: python -m tests.server.serve_elsewhere MODEL [FLAG ...]. Exits with
an error if they differ, or if tensors of both devices meet.
"""

import sys

from tests.server.another_device import OTHER  # before all that is to be on it

# isort: split

import pytest
import torch

from server import build, placement
from server.metrics import Metrics
from server.request import Overflow
from server.wiring import wired
from tests.server.fake_engine import configured
from tests.server.test_ahead import LIMITS, WAYS, answers, without_numbers, workload

FLAGS = ["--attention", "sdpa", "--dtype", "float32", "--block-size", "4"]
FLAGS += ["--max-seqs", str(LIMITS.max_seqs), "--max-step-tokens", str(LIMITS.max_step_tokens)]
FLAGS += ["--max-model-len", str(LIMITS.max_context), "--kv-memory", "1M"]


def answered(device, flags):
    """The events of each request; steps are launched ahead if the device is not the CPU."""
    build.find_kernels = lambda device: "the other device has none"
    placement.pick_device = lambda wanted: device
    build.wired = lambda *parts, **more: wired(*parts, **more | {"ahead": device == OTHER})
    torch.set_num_threads(1)  # models are so small that another only costs time
    (loaded,) = build.load_models(configured(*flags, *FLAGS), Metrics())
    assert loaded.defect is None
    found = {}
    for seed in range(2):
        encoded = loaded.served.encoder_decoder is not None
        requests = workload(WAYS[:-1] if encoded else WAYS, seed)  # the last scores a prompt
        for each in requests:
            if encoded:
                each.source, each.tokens, each.num_prompt = tuple(each.tokens), [0], 1
            if each.source or loaded.facts.encoding in ("learned", "sinusoidal"):
                each.overflow = Overflow.REFUSE  # as these cannot shift
        for name, events in answers(loaded.engine, requests).items():
            found[seed, name] = without_numbers(events)
    assert loaded.engine.mutated_blocks == 0
    return found


def main(*flags):
    with pytest.raises(RuntimeError, match="on two devices"):
        torch.ones(2, device=OTHER) + torch.ones(2)
    here, elsewhere = (answered(device, flags) for device in (torch.device("cpu"), OTHER))
    assert elsewhere == here, [name for name in here if elsewhere[name] != here[name]]


if __name__ == "__main__":
    main(*sys.argv[1:])
