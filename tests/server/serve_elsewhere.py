"""Answers the same requests on the CPU and on a device of its own, as a server would on a GPU.

Run by test_another_device.py. Reads lines of JSON, [ATTENTION, MODEL, FLAG, ...] with the other
device's attention: sdpa, or triton, whose kernels are interpreted and whose graphs are computed
anew. Writes a line for each, "" or what is wrong: answers differ, tensors of both devices meet, or
the server warns of anything.
"""

import json
import logging
import sys
import traceback
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

from tests.server.another_device import OTHER, Elsewhere  # before all that is to be on it

# isort: split

import pytest
import torch

from ropewalk.model.kernels.backends import TritonBackend
from ropewalk.model.kernels.triton import attention as triton
from ropewalk.model.kernels.triton import launches
from ropewalk.server import hardware
from ropewalk.server.engine.assemble import wired
from ropewalk.server.launch import build, graphs
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.scheduling.request import Overflow
from tests.interpreter import quicken
from tests.server.fake_engine import configured
from tests.server.test_ahead import LIMITS, PICKED_THERE, WAYS, answers, without_numbers, workload

FLAGS = ["--dtype", "float32", "--block-size", "4", "--kv-memory", "1M"]
FLAGS += ["--max-seqs", str(LIMITS.max_seqs), "--max-step-tokens", str(LIMITS.max_step_tokens)]
FLAGS += ["--max-model-len", str(LIMITS.max_context)]
FEW = 8  # tokens of an answer, where a step takes its time and nothing shifts
# How many requests, of what kinds, and how long: the interpreter takes its time, and steps are
# launched ahead where the device picks all tokens.
REQUESTS = {"sdpa": (2 * len(WAYS), WAYS, 30), "triton": (len(PICKED_THERE), PICKED_THERE, FEW)}


class Strict(logging.Handler):
    """A server goes on without graphs, or without launching ahead, and only warns of it."""

    def emit(self, record):
        raise AssertionError(self.format(record))


class There:
    """A Triton kernel, interpreted; it takes tensors of the other device alone, as a GPU would."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        launch = self.kernel[grid]
        return lambda *given, **named: launch(
            *map(_values, given), **{name: _values(each) for name, each in named.items()}
        )


def _values(argument):
    if not isinstance(argument, torch.Tensor):
        return argument
    assert isinstance(argument, Elsewhere), "a kernel takes a tensor of the CPU"
    return argument.here


def kernels_there(name):
    kernels = vars(import_module(name)).items()
    return SimpleNamespace(**{name: There(each) for name, each in kernels if hasattr(each, "fn")})


def record(compute):
    """In the place of a CUDA graph."""
    compute()
    return compute


def interpret():
    quicken(pytest.MonkeyPatch())
    for using in (triton, launches):
        using.import_module = kernels_there
    for backend in (triton.TritonAttention, TritonBackend):
        backend.why_not = staticmethod(
            lambda spec: None if spec.device == OTHER else "it is the CPU"
        )
    launches.CANDIDATES = 2  # most draws need more
    graphs.CudaGraphs = lambda device, alone: record


def answered(device, attention, count, ways, most, flags):
    """The events of each request; steps are launched ahead if the device is not the CPU."""
    build.find_kernels = lambda device: "the other device has none"
    hardware.pick_device = lambda wanted: device
    build.wired = lambda *parts, **more: wired(*parts, **more | {"ahead": device == OTHER})
    torch.set_num_threads(1)  # models are so small that another only costs time
    config = configured(*flags, *FLAGS, "--attention", attention)
    (loaded,) = build.load_models(config, Metrics())
    assert loaded.defect is None
    encoded = loaded.served.encoder_decoder is not None
    ways = [each for each in ways if not (encoded and "prompt_logprobs" in each)]
    requests = workload(ways, 0, count)
    most = FEW if encoded else most
    for each in requests:
        each.params = replace(each.params, max_tokens=min(each.params.max_tokens, most))
        if encoded:
            each.source, each.tokens, each.num_prompt = tuple(each.tokens), [0], 1
        if each.source or loaded.facts.encoding in ("learned", "sinusoidal"):
            each.overflow = Overflow.REFUSE  # as these cannot shift
    found = answers(loaded.engine, requests)
    assert loaded.engine.mutated_blocks == 0
    return without_numbers(found)


def check(attention, *flags):
    asked = REQUESTS[attention]
    here = answered(torch.device("cpu"), "sdpa", *asked, flags)
    elsewhere = answered(OTHER, attention, *asked, flags)
    assert elsewhere == here, [name for name in here if elsewhere[name] != here[name]]


def main():
    logging.basicConfig(handlers=[Strict(logging.WARNING)])
    with pytest.raises(RuntimeError, match="on two devices"):
        torch.ones(2, device=OTHER) + torch.ones(2)
    interpret()
    for line in sys.stdin:
        wrong = ""
        try:
            check(*json.loads(line))
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main()
