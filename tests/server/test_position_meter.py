"""Positional work per step: sums of the encoding's own figures, token by token."""

from dataclasses import asdict, replace

import pytest
import torch

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import create, find
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.loading.save import save_checkpoint
from ropewalk.model.recipes import allocate, program
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.scheduling.request import Work
from tests.model import checkpoints, tiny
from tests.model.tiny import ROPE, T5
from tests.server.fake_engine import loaded_app, make_engine, make_request
from tests.server.toy import asking, sample

BLOCK = 16


def cost(context):
    return PositionalWork(rotations=1, bias_values=context, flops=context**2, bytes=7)


def work(name="a", start=0, count=1, *, generated=0, source=()):
    request = make_request(name, range(start + count - generated or 1))
    request.tokens += [0] * generated
    request.source = source
    return Work(request, start, count)


def expected(contexts):
    total = PositionalWork()
    for context in contexts:
        each = cost(context)
        total += PositionalWork(**asdict(each))
    return total


def test_a_chunk_costs_what_its_tokens_cost():
    meter = PositionMeter(cost)
    spent = meter.measure([work(start=5, count=3)])
    assert spent == (expected([6, 7, 8]), PositionalWork())
    assert spent[0] == PositionalWork(3, 6 + 7 + 8, 0, 36 + 49 + 64, 21, 0)
    assert meter.measure([work(count=2)])[0] == expected([1, 2])


def test_each_context_length_is_worked_out_once():
    asked = []

    def remembered(context):
        asked.append(context)
        return cost(context)

    meter = PositionMeter(remembered)
    for _ in range(3):
        meter.measure([work(count=50), work("b", start=20, count=5)])
    assert asked == list(range(1, len(asked) + 1)) and len(asked) >= 50


def test_rows_count_as_prefill_until_a_request_has_its_first_token():
    meter = PositionMeter(cost)
    plan = [work(start=5, count=3), work("b", start=9, count=1, generated=2), work("c")]
    prefill, decode = meter.measure(plan)
    assert prefill == expected([6, 7, 8, 1])
    assert decode == expected([10])


def test_what_an_encoder_reads_sees_all_of_it():
    meter = PositionMeter(cost, lambda context: PositionalWork(bias_values=10 * context))
    first, later = work(source=(1, 2, 3)), work(start=1, source=(1, 2, 3))
    assert meter.measure([first])[0] == expected([1]) + PositionalWork(bias_values=3 * 30)
    assert meter.measure([later])[0] == expected([2])


def test_a_meter_of_nothing():
    assert PositionMeter().measure([work(count=9)]) == (PositionalWork(), PositionalWork())
    assert PositionMeter().extrapolated([work(count=9)], {}) == 0


def test_tokens_past_the_trained_context_are_counted():
    engine, _ = make_engine(meter=PositionMeter(trained_context=8))
    engine.submit(make_request("long", range(6), max_tokens=5))  # at positions 6 to 10
    engine.submit(make_request("short", range(3), max_tokens=5))  # 3 to 7
    counts = []
    while engine.busy:
        counts.append(engine.step().stats.extrapolated_tokens)
    assert counts == [0, 0, 1, 1, 1]


# ---------------------------------------------------------------------- on a live server

CONTEXT = 90
CONFIG = replace(tiny.CONFIG, vocab_size=260, trained_context=50, encoding=EncodingSpec("nope", {}))
ENCODINGS = {
    "rope": EncodingSpec("rope", ROPE),
    "t5-window": EncodingSpec("t5", T5),
    "t5-table": EncodingSpec("t5", T5 | {"form": "table"}),
    "t5-materialised": EncodingSpec("t5", T5 | {"form": "materialised"}),
    "alibi": EncodingSpec("alibi", {}),
    "sinusoidal": EncodingSpec("sinusoidal", find("sinusoidal").usual_options(CONFIG)),
    "nope": EncodingSpec("nope", {}),
}
PROMPTS = {"short": list(range(5)), "long": [(7 * index) % 200 for index in range(40)]}
GENERATED = 30
REUSED = 32  # tokens in two full blocks of the long prompt, when it comes again


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    """({model: (its encoding, config)}, metrics) after the same three requests to each."""
    folder, configs = tmp_path_factory.mktemp("served"), {}
    tokenizer_folder = tmp_path_factory.mktemp("tokenizer")
    checkpoints.tiny_tokenizer().save(str(tokenizer_folder / "tokenizer.json"))
    for name, spec in ENCODINGS.items():
        config = configs[name] = replace(CONFIG, encoding=spec)
        encoding = create(spec, config, CONTEXT, checkpoints.CPU)
        weights = allocate(config, encoding, dtype=torch.float32, device=checkpoints.CPU)
        parameters = dict(program(config, weights, encoding).named_parameters())
        for parameter in parameters.values():
            parameter.normal_(std=0.1)
        tokenizer = [tokenizer_folder / "tokenizer.json"]
        save_checkpoint(parameters, config, folder / name, tokenizer=tokenizer)
    flags = ("--dtype", "float32", "--kv-memory", "16M", "--max-model-len", str(CONTEXT))
    sources = [f"{name}={folder / name}" for name in ENCODINGS]
    app = loaded_app(*sources, *flags)
    with asking(app) as client:
        for name in ENCODINGS:
            for prompt in (PROMPTS["short"], PROMPTS["long"], PROMPTS["long"]):
                body = {"model": name, "prompt": prompt, "max_tokens": GENERATED}
                answer = client.post("/v1/completions", json=body | {"ignore_eos": True})
                assert answer.status_code == 200, answer.text
    return configs, app.state.metrics


def contexts():
    """Of every computed token: (prefill, decode). The last generated token is never computed."""
    prefill, decode = [], []
    for prompt, found in (("short", 0), ("long", 0), ("long", REUSED)):
        length = len(PROMPTS[prompt])
        prefill += range(found + 1, length + 1)
        decode += range(length + 1, length + GENERATED)
    return prefill, decode


FAR = 113  # from here on T5's window adds nothing
ALL = CONFIG.num_layers * CONFIG.num_heads
COSTS = {  # by hand: rotations, bias values added and bias values built of one token of n keys
    "rope": lambda n: (CONFIG.num_layers * (CONFIG.num_heads + CONFIG.num_kv_heads), 0, 0),
    "t5-window": lambda n: (0, ALL * min(n, FAR), 0),
    "t5-table": lambda n: (0, ALL * n, 0),
    "t5-materialised": lambda n: (0, ALL * n, CONFIG.num_heads * n),
    "alibi": lambda n: (0, ALL * n, 0),
    "sinusoidal": lambda n: (0, 0, 0),
    "nope": lambda n: (0, 0, 0),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_metrics_of_a_workload_are_the_analytic_values(name, workload):
    configs, metrics = workload
    config = configs[name]
    labels = {"model_name": name, "encoding": config.encoding.name}

    def value(series, **more):
        return sample(metrics, series, **labels, **more)

    encoding = create(config.encoding, config, CONTEXT, checkpoints.CPU)
    computed = 0
    for phase, seen in zip(("prefill", "decode"), contexts(), strict=True):
        computed += len(seen)
        by_hand = [COSTS[name](n) for n in seen]
        told = [encoding.work(config, n, BLOCK) for n in seen]
        for column, series in enumerate(("rotations", "bias_values", "bias_built")):
            wanted = sum(cost[column] for cost in by_hand)
            assert value(f"position_{series}_total", phase=phase) == wanted
        for series in ("flops", "bytes", "bias_bytes"):
            wanted = sum(getattr(each, series) for each in told)
            assert value(f"position_{series}_total", phase=phase) == wanted
    assert value("kv_written_bytes_total") == computed * 2 * 3 * 2 * 8 * 4
    assert value("kv_written_entries_total") == computed * 2 * 3 * 2
    stored = [len(prompt) + GENERATED - 1 for prompt in (PROMPTS["short"], PROMPTS["long"])]
    full = stored[0] // BLOCK + 2 * (stored[1] // BLOCK) - REUSED // BLOCK
    assert value("kv_blocks_sealed_total") == full
    # Each when it was given up, those found again twice; and by sample.
    assert value("kv_blocks_verified_total") >= full + 2 * (REUSED // BLOCK)
    past = len(PROMPTS["long"]) + GENERATED - config.trained_context
    assert value("extrapolated_tokens_total") == 2 * past
    for never in ("mutated_entries", "stale_entries"):
        assert value(f"kv_{never}_total") == 0
    assert value("kv_rewritten_entries_total", cause="context_shift") == 0
    assert value("kv_moved_bytes_total") == 0
