"""Decode steps that are replayed: where, and that answers are the same."""

import random
from dataclasses import replace

import pytest
import torch

from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.kernels.graphs import cuda_graph
from ropewalk.model.kernels.graphs.replay import CROWDED, ReplayedDecoder
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.server.launch import graphs
from ropewalk.server.launch.build import load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.scheduling.request import Limits
from tests.model import encoder_decoders
from tests.model.checkpoints import save
from tests.model.encoder_decoders import t5
from tests.model.running import new_cache
from tests.model.test_replay import Replaying
from tests.model.tiny import tiny
from tests.server.fake_engine import configured
from tests.server.recording import engine, request

LIMITS = Limits(max_seqs=4, max_step_tokens=16, max_context=200, max_queue=100)


def answers(forward, decoder):
    """Of more requests than there is room for, drawn from, some beginning while others go on."""
    running, manager, _ = engine(forward, decoder, blocks=30, limits=LIMITS)
    rng = random.Random(3)
    requests = [
        request(
            f"r{i}",
            [rng.randrange(61) for _ in range(rng.randrange(1, 12))],
            max_tokens=rng.randrange(4, 25),
            seed=i,
        )
        for i in range(8)
    ]
    for each in requests:
        running.submit(each)
        running.step()
    while running.busy:
        running.step()
        manager.check()
    return [each.tokens for each in requests]


@pytest.mark.parametrize("encoding", ["rope-block", "t5", "learned"])
def test_answers_are_the_same(encoding):
    decoder = tiny(encoding)
    replaying = Replaying(decoder, [(1, 200), (2, 200), (4, 20), (4, 200)])
    assert answers(replaying, decoder) == answers(decoder, decoder)
    assert len(replaying.replays) > 20 and set(replaying.replays) == {1, 2, 4}
    assert replaying.others


class Recorded(list):
    """In the place of CUDA graphs: which sizes were recorded."""

    def __init__(self, device, *, alone=True):
        self.device = device

    def __call__(self, compute):
        self.append(len(compute()))
        return compute


def on_triton(decoder, monkeypatch):
    """As if Triton attended in it, and a GPU could record that."""
    monkeypatch.setattr(type(decoder.executor), "recordable", True)
    monkeypatch.setattr(graphs, "CudaGraphs", Recorded)
    return decoder


def warm_cache(decoder):
    kv = new_cache(decoder, 60)
    for part in kv.whole:
        part.fill_(0.5)
    return kv


def made(decoder, kv):
    return graphs.record_graphs(decoder, kv, LIMITS, "m", otherwise=decoder)


def test_steps_are_recorded_where_triton_attends(monkeypatch, capsys):
    decoder = tiny("nope", SdpaAttention)
    kv = warm_cache(decoder)
    assert made(decoder, kv) is decoder
    assert graphs.recorder(decoder) is None
    assert isinstance(made(on_triton(decoder, monkeypatch), kv), ReplayedDecoder)
    assert "recording m:" in capsys.readouterr().err
    assert graphs.recorder(decoder).device == decoder.device


@pytest.mark.parametrize("others", [0, 1])
def test_a_model_that_is_loaded_beside_others_is_not_recorded_alone(others, monkeypatch):
    made = []

    class Told(Recorded):
        def __init__(self, device, *, alone):
            super().__init__(device)
            made.append(alone)

    monkeypatch.setattr(CpuExecutor, "recordable", True)
    monkeypatch.setattr(graphs, "CudaGraphs", Told)
    flags = ("ropewalk-rope", "--kv-memory", "4M", "--max-models", "2")
    load_models(configured(*flags), Metrics(), others)
    assert made == [others == 0]


def test_steps_of_an_encoder_decoder_are_recorded(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(save(encoder_decoders.random_model(t5()), tmp_path))
    decoder = on_triton(encoder_decoders.loaded(checkpoint), monkeypatch)
    over = made(decoder, warm_cache(decoder))
    assert isinstance(over, ReplayedDecoder)
    assert all(bucket.batch.cross is not None for bucket, _ in over._recorded)


@pytest.mark.parametrize("lost", [False, True])
def test_what_cannot_be_recorded_is_no_lost_device(lost, monkeypatch):
    def refuse(*_):
        raise torch.AcceleratorError("not permitted")

    recording = cuda_graph.CudaGraphs.__new__(cuda_graph.CudaGraphs)
    recording._device = torch.device("cuda")
    monkeypatch.setattr(cuda_graph.CudaGraphs, "_recorded", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse if lost else lambda device: None)
    with pytest.raises(RuntimeError) as raised:
        recording(lambda: None)
    assert isinstance(raised.value, torch.AcceleratorError) == lost


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("during", ["recording", "comparing"])
def test_nothing_is_served_by_a_device_that_is_lost(lost, during, monkeypatch, caplog):
    """Memory that the driver itself has not is such an error, too."""

    def refuse(*_, **__):
        raise torch.AcceleratorError("out of memory")

    decoder = on_triton(tiny("nope", SdpaAttention), monkeypatch)
    if during == "recording":
        monkeypatch.setattr(Recorded, "__call__", refuse)
    else:
        monkeypatch.setattr(graphs, "_agrees", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse if lost else lambda device: None)
    if lost:
        with pytest.raises(torch.AcceleratorError):
            made(decoder, warm_cache(decoder))
    else:
        assert made(decoder, warm_cache(decoder)) is decoder
        assert "without CUDA graphs" in caplog.text


@pytest.mark.parametrize(("encoding", "crowded"), [("t5", CROWDED), ("t5-materialised", 1)])
def test_a_dense_bias_has_no_larger_steps_than_the_cache(encoding, crowded, monkeypatch):
    """It takes memory for each request and key of a bucket."""
    asked = []

    def none(*_, crowded, **__):
        asked.append(crowded)
        return []

    decoder = on_triton(tiny(encoding, SdpaAttention), monkeypatch)
    monkeypatch.setattr(graphs, "buckets", none)
    made(decoder, warm_cache(decoder))
    assert asked == [crowded]


def test_a_device_that_records_nothing_serves_all_the_same(monkeypatch, caplog):
    def full(graphs, compute):
        raise torch.OutOfMemoryError("no memory is left")

    decoder = on_triton(tiny("nope"), monkeypatch)
    monkeypatch.setattr(Recorded, "__call__", full)
    assert made(decoder, new_cache(decoder, 60)) is decoder
    assert "serving m without CUDA graphs" in caplog.text and "no memory" in caplog.text


@pytest.mark.parametrize("wrong", [1.0, torch.nan])
@pytest.mark.parametrize("bucket", range(4))
def test_graphs_that_compute_something_else_are_not_used(bucket, wrong, monkeypatch, caplog):
    """Whichever bucket it is: of requests 4, 2, 1, 1, the first of the single ones longer."""

    def changed(graphs, compute):
        graphs.append(len(compute()))
        if len(graphs) - 1 != bucket:
            return compute
        return lambda: compute().index_fill(0, torch.tensor([graphs[bucket] - 1]), wrong)

    decoder = on_triton(tiny("rope"), monkeypatch)
    monkeypatch.setattr(Recorded, "__call__", changed)
    long = replace(LIMITS, max_context=3000)
    kv = warm_cache(decoder)
    assert graphs.record_graphs(decoder, kv, long, "m", otherwise=decoder) is decoder
    assert "CUDA graphs of m compute different logits from its decoder" in caplog.text


def test_recording_leaves_the_cache_alone(monkeypatch):
    """But for the block that no request has."""
    decoder = on_triton(tiny("nope"), monkeypatch)
    kv = warm_cache(decoder)
    assert made(decoder, kv) is not decoder
    for part in kv.whole:
        assert (part[:, 1:] == 0.5).all() and not (part[:, 0, 0] == 0.5).any()
