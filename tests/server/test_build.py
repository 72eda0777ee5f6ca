"""From a configuration to loaded models: what is chosen, and what is refused in one sentence."""

import gc
import json
import random
import shutil
from unittest.mock import Mock

import pytest
import torch

from ropewalk.cache.huge_pages import HugePages
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.kernels.cpu.library import NoKernels
from ropewalk.model.program import Program
from ropewalk.server import hardware
from ropewalk.server.errors import CommandError
from ropewalk.server.launch import build, load_model
from ropewalk.server.launch.build import load_models
from ropewalk.server.metrics.exporter import Metrics
from tests.model.checkpoints import llama, random_model, save, tiny_tokenizer, write_gguf
from tests.model.families import FAMILIES
from tests.model.test_parity import BLOCKED, drawn
from tests.server.fake_engine import configured, make_request
from tests.server.test_banner import FACTS

SMALL = ("--kv-memory", "1M", "--max-model-len", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(random_model(llama()), tmp_path_factory.mktemp("tiny"))


def load(*flags):
    return load_models(configured(*flags), Metrics())


def generated(loaded, prompt, max_tokens=8, **params):
    request = make_request("a", prompt, max_tokens=max_tokens, **params)
    loaded.engine.submit(request)
    while loaded.engine.busy:
        loaded.engine.step()
    return request.tokens[len(prompt) :]


def test_a_model_is_loaded_and_generates(folder):
    (loaded,) = load(f"m={folder}", "--kv-memory", "1M", "--dtype", "float32")
    assert (loaded.served.name, loaded.served.encoding) == ("m", "rope")
    assert loaded.served.max_context == loaded.facts.trained_context == 256
    assert loaded.served.vocab_size == 258  # the tokenizer's, smaller than the embedding's 260
    assert loaded.facts.attention == "cpu"
    # 2 · 3 layers · 2 heads · 10 float32, in blocks of 16 tokens, one of which is reserved.
    assert loaded.facts.kv_bytes_per_token == 480
    assert loaded.facts.blocks == (1 << 20) // (480 * 16) - 1
    assert len(generated(loaded, [1, 2, 3])) == 8


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_loading_leaves_no_weights_to_be_collected(family, tmp_path):
    """The server never looks for garbage among what was there when it began to serve."""
    save(drawn(FAMILIES[family].config), tmp_path)
    gc.collect()
    gc.disable()
    try:
        models = load(f"m={tmp_path}", "--kv-memory", "1M")
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, torch.Tensor | Program)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert models and not left


def test_a_tokenizer_larger_than_the_embedding(folder, tmp_path):
    """Its first tokens are the model's; the others can be neither sent nor generated."""
    larger = shutil.copytree(folder, tmp_path / "larger")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<more{index}>" for index in range(6)])
    tokenizer.save(str(larger / "tokenizer.json"))
    (loaded,) = load(f"m={larger}", *SMALL)
    assert (loaded.served.tokenizer.vocab_size, loaded.served.vocab_size) == (264, 260)
    assert loaded.served.details["vocab_size"] == 260
    assert loaded.served.tokenizer.encode("<more5>", bos=False) == [263]
    hot = {"temperature": 2.0, "logit_bias": {259: 100.0}}
    assert generated(loaded, [1, 2, 3], **hot) == [259] * 8


@pytest.mark.parametrize(
    "taken",
    [
        lambda: bytearray(1 << 60),
        lambda: torch.empty(1 << 50),
        lambda: HugePages().empty(1 << 50, dtype=torch.uint8),
    ],
)
@pytest.mark.parametrize("where", ["load_program", "decoder_on"])
def test_memory_that_runs_out_while_loading_is_one_sentence(where, taken, folder, monkeypatch):
    monkeypatch.setattr(load_model, where, lambda *given, **more: taken())
    said = "not have enough memory for the weights of m; free some"
    with pytest.raises(CommandError, match=said):
        load(f"m={folder}", *SMALL)


def test_other_failures_while_loading_are_no_lack_of_memory(folder, monkeypatch):
    def failing(*given, **more):
        raise RuntimeError("a bug")

    monkeypatch.setattr(load_model, "load_program", failing)
    with pytest.raises(RuntimeError, match="a bug"):
        load(f"m={folder}", *SMALL)


def test_backends_and_dtypes_agree(folder):
    answers = [
        generated(load(str(folder), "--kv-memory", "1M", *flags)[0], [5, 6, 7, 8])
        for flags in (
            ["--dtype", "float32"],
            ["--dtype", "float32", "--attention", "sdpa"],
            ["--dtype", "float32", "--attention", "reference"],
        )
    ]
    assert answers[0] == answers[1] == answers[2]


def test_another_encoding_is_an_experiment_one_can_ask_for(folder):
    (loaded,) = load(
        str(folder), "--kv-memory", "16M", "--encoding", "nope", "--max-model-len", "9k"
    )
    assert loaded.served.encoding == "nope"
    assert (loaded.facts.trained_context, loaded.served.max_context) == (256, 9216)
    prompt = [1, 2, 3, 4]
    (plain,) = load(str(folder), "--kv-memory", "16M")
    assert generated(loaded, prompt) != generated(plain, prompt)


def test_one_shape_under_two_encodings():
    """At a context that no table was trained for."""
    loaded = load(
        *("plain=shape:small", "learned=shape:small:learned"),
        *("--max-model-len", "9k", "--kv-memory", "16M"),
    )
    assert [each.served.name for each in loaded] == ["plain", "learned"]
    assert [each.served.encoding for each in loaded] == ["rope", "learned"]
    assert {each.facts.trained_context for each in loaded} == {9216}
    assert len(generated(loaded[1], [1, 2, 3])) == 8


@pytest.mark.parametrize("attention", ["cpu", "sdpa"])
def test_int8_models_are_served(attention) -> None:
    flags = ("--quantize", "int8", "--attention", attention, *SMALL)
    (loaded,) = load("shape:small", *flags)
    (plain,) = load("shape:small", "--attention", attention, *SMALL)
    prompt = list(range(40))
    assert len(generated(loaded, prompt)) == len(generated(plain, prompt)) == 8


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_weights_that_a_file_has_in_4_bits_stay_in_these(kind, tmp_path, kernels, caplog) -> None:
    if not kernels.multiplies_int4():
        pytest.skip("this processor does not multiply 8-bit integers, or the compiler is told so")
    caplog.set_level("INFO")
    path = write_gguf(tmp_path / "tiny.gguf", random_model(llama(**BLOCKED)), kind)
    (loaded,) = load(f"m={path}", "--quantize", "int4", *SMALL)
    assert loaded.facts.quantize == "int4"
    assert loaded.defect is None
    assert "m: 13 linear layers in 4 bits, 0 in 8" in caplog.text
    assert len(generated(loaded, list(range(40)))) == 8
    assert "keeps them in 4 bits" not in caplog.text
    load(f"m={path}", *SMALL)
    assert (
        "m: the file's weights are in 4 bits; --quantize int4 keeps them in 4 bits" in caplog.text
    )


def test_other_files_say_nothing_of_4_bits(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    path = write_gguf(tmp_path / "tiny.gguf", random_model(llama(**BLOCKED)), "Q8_0")
    load(f"m={path}", *SMALL)
    assert "4 bits" not in caplog.text


def test_weights_that_would_lose_by_4_bits_get_8(kernels, caplog) -> None:
    if not kernels.multiplies_int4():
        pytest.skip("this processor does not multiply 8-bit integers, or the compiler is told so")
    (loaded,) = load("shape:small", "--quantize", "int4", *SMALL)
    (in_8,) = load("shape:small", "--quantize", "int8", *SMALL)
    assert (
        "shape:small: 4 bits would lose accuracy in every layer, so all are in 8 bits"
        in caplog.text
    )
    assert generated(loaded, [1, 2, 3]) == generated(in_8, [1, 2, 3])
    assert loaded.facts.quantize == in_8.facts.quantize == "int8"


def test_4_bits_are_refused_where_nothing_multiplies_them(folder, monkeypatch) -> None:
    flags = (str(folder), "--quantize", "int4", *SMALL)
    monkeypatch.setattr(Kernels, "multiplies_int4", lambda self: True)
    with pytest.raises(CommandError, match="needs --dtype bfloat16 or float32; use int8"):
        load(*flags, "--dtype", "float16")
    monkeypatch.setattr(Kernels, "multiplies_int4", lambda self: False)
    with pytest.raises(CommandError, match=r"needs a processor that .*\(AVX2\); use int8"):
        load(*flags)
    monkeypatch.setattr(load_model, "load_kernels", Mock(side_effect=NoKernels("no compiler")))
    with pytest.raises(CommandError, match="needs the CPU kernels, but no compiler; use int8"):
        load(*flags)


@pytest.mark.parametrize("attention", ["cpu", "sdpa", "reference"])
def test_keys_and_values_in_8_bits_take_less_and_say_so(folder, attention) -> None:
    flags = (str(folder), *SMALL, "--dtype", "float32", "--attention", attention)
    (loaded,) = load(*flags, "--kv-dtype", "int8")
    (plain,) = load(*flags)
    assert (loaded.facts.dtype, loaded.facts.kv_dtype) == ("float32", "int8")
    assert plain.facts.kv_dtype == "float32"
    # 2 · 3 layers · 2 heads · (10 bytes and a scale)
    assert loaded.facts.kv_bytes_per_token == loaded.planner.bytes_per_token == 168
    assert loaded.facts.blocks == (1 << 20) // (168 * 16) - 1
    assert loaded.defect is None
    prompt = list(range(1, 40))
    answer = generated(loaded, prompt)
    assert generated(loaded, prompt) == answer  # the prompt is found this time
    assert len(answer) == len(generated(plain, prompt)) == 8


def test_a_shape_takes_the_options_of_its_encoding():
    (loaded,) = load("shape:small", "--encoding", "t5", "--encoding-option", "form=table", *SMALL)
    assert loaded.served.encoding == "t5"
    with pytest.raises(CommandError, match="alibi, which takes only bias_max"):
        load("shape:small:alibi", "--encoding-option", "form=table", *SMALL)


@pytest.mark.parametrize("attention", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize("storage", ["raw", "block"])
def test_rope_keys_in_the_storage_asked_for(folder, storage, attention):
    flags = (str(folder), "--kv-memory", "16M", "--dtype", "float32", "--attention", attention)
    (loaded,) = load(*flags, "--encoding-option", f"storage={storage}")
    (plain,) = load(*flags)
    assert (loaded.facts.key_storage, plain.facts.key_storage) == (storage, None)
    prompt = list(range(1, 40))
    assert generated(loaded, prompt) == generated(plain, prompt)
    stored, turned = (each.engine._kv.layer(0) for each in (loaded, plain))
    full = slice(1, 3)  # blocks of the prompt; slots that no token has may hold anything
    assert torch.equal(stored.values[full], turned.values[full])
    assert not torch.equal(stored.keys[full], turned.keys[full])


def test_context_is_what_is_asked_for_and_what_the_cache_holds(folder, caplog):
    (shorter,) = load(str(folder), "--kv-memory", "1M", "--max-model-len", "100")
    assert shorter.served.max_context == 100
    assert caplog.text == ""
    (small,) = load(str(folder), "--kv-memory", "64K", "--dtype", "float32")
    held = (65536 // (480 * 16) - 1) * 16
    assert small.served.max_context == held + 1
    assert "raise --kv-memory" in caplog.text
    # What the context allows, the cache can hold.
    assert len(generated(small, [1] * held, max_tokens=1)) == 1


def test_frequencies_are_those_of_the_context_that_is_served(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    folder = save(random_model(llama(rope_scaling=scaling)), tmp_path)
    flags = [f"m={folder}", "--kv-memory", "100K", "--dtype", "float32", "--max-model-len"]
    with pytest.raises(
        CommandError,
        match=r"holds only 193 tokens, for which RoPE.s frequencies differ.*--max-model-len 193",
    ):
        load(*flags, "1k")
    assert load(*flags, "193")[0].served.max_context == 193
    assert load(*flags, "200")[0].served.max_context == 193  # which turns by the same


def test_frequencies_of_layers_that_rotate_otherwise(folder):
    scaling = {"type": "dynamic", "factor": 2.0, "original_context": 256}
    others = {"base": 1e4, "width": 8, "layout": "half", "scaling": scaling}
    flags = [f"m={folder}", "--kv-memory", "100K", "--dtype", "float32"]
    flags += ["--encoding-option", "layers=[0]", "--encoding-option"]
    with pytest.raises(CommandError, match="for which RoPE's frequencies differ"):
        load(*flags, f"elsewhere={json.dumps(others)}", "--max-model-len", "1k")


def test_far_keys_may_be_rotated_as_if_they_were_nearer(folder):
    """Longer contexts than trained, by the fast path; answers are others once keys are far."""
    flags = [f"m={folder}", "--kv-memory", "1M", "--dtype", "float32", "--max-model-len", "1k"]
    (far,) = load(*flags, "--encoding-option", "near=8", "--encoding-option", "group=6")
    (usual,) = load(*flags)
    assert (far.facts.key_storage, far.facts.attention) == ("raw", "cpu")
    assert generated(far, [1, 2, 3], max_tokens=5) == generated(usual, [1, 2, 3], max_tokens=5)
    prompt = random.Random(0).choices(range(3, 250), k=600)
    assert generated(far, prompt) != generated(usual, prompt)


@pytest.mark.parametrize(("flag", "slots"), [("0", 0), ("77K", 10), (None, 135)])
def test_memory_of_blocks_that_make_room(flag, slots, folder):
    flags = [] if flag is None else ["--kv-spill", flag]
    (loaded,) = load(f"a={folder}", "--kv-memory", "1M", "--dtype", "float32", *flags)
    assert loaded.engine.view().spill.free == slots


def test_too_little_memory_for_them_is_one_sentence(folder):
    with pytest.raises(CommandError, match=r"not enough host memory .* --kv-spill 0"):
        load(f"a={folder}", "--kv-memory", "1M", "--kv-spill", "1000000T", "--dtype", "float32")


def test_two_models_share_the_memory(folder):
    one, two = load(f"a={folder}", f"b={folder}", "--kv-memory", "1M", "--dtype", "float32")
    assert one.facts.blocks == two.facts.blocks == (1 << 19) // (480 * 16) - 1
    assert generated(one, [7, 8]) == generated(two, [7, 8])


@pytest.mark.parametrize(("names", "first"), [("a", 16), ("ab", 8)])
def test_a_lone_request_takes_larger_steps_where_there_is_no_other_model(folder, names, first):
    flags = ("--kv-memory", "1M", "--max-step-tokens", "8", "--max-seqs", "4")
    loaded, *_ = load(*(f"{name}={folder}" for name in names), *flags)
    loaded.engine.submit(make_request("long", [1] * 20))
    assert loaded.engine.step().stats.computed_prompt_tokens == first


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--encoding", "t6"], "There is no encoding 't6'"),
        (["--encoding", "rope", "--kv-memory", "1K"], "raise --kv-memory"),
        (["--encoding", "t5"], "t5 has trained weights"),
        (["--encoding-option", "form=table"], "the encoding rope, which takes only base, width"),
        (["--encoding", "nope", "--encoding-option", "form=window"], "has the encoding nope"),
        (
            ["--encoding", "nope", "--encoding-option", "storage=raw"],
            "has the encoding nope, which takes no options; leave the option out",
        ),
        (["--encoding-option", "storage=sideways"], "storage"),
        (["--encoding-option", "base=ten"], "--encoding-option base=ten: rope cannot be made with"),
        (["--kv-memory", "4000000G"], "lower --kv-memory"),
        (["--dtype", "float16", "--attention", "cpu"], "it computes float32, float64 and bfloat16"),
    ],
)
def test_refusals(folder, flags, words):
    with pytest.raises(CommandError) as refused:
        load(str(folder), *flags)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_memory_is_shared_out_once_all_weights_are_there(folder, monkeypatch):
    """What is free is only known then; before, the weights themselves would be given away."""
    order = []
    free, loading = hardware.free_memory, load_model.load_program
    monkeypatch.setattr(hardware, "free_memory", lambda d: order.append("free") or free(d))
    monkeypatch.setattr(
        load_model,
        "load_program",
        lambda *of, **more: order.append("weights") or loading(*of, **more),
    )
    load(f"a={folder}", f"b={folder}")
    assert order == ["weights", "weights", "free"]


def test_threads_that_loading_needed_end_when_all_is_warm(folder, monkeypatch):
    order = []
    end, warm_up = build.end_idle_threads, build.warm_up
    monkeypatch.setattr(build, "end_idle_threads", lambda: order.append("end") or end())
    monkeypatch.setattr(build, "warm_up", lambda *of: order.append("warm") or warm_up(*of))
    load(f"a={folder}", f"b={folder}")
    assert order == ["warm", "warm", "end"]


def test_numbers_that_are_not_finite_are_found_at_the_start(folder, monkeypatch):
    nan = torch.full((1, 4), torch.nan)
    monkeypatch.setattr(Decoder, "__call__", lambda self, batch, kv, watch=None: nan)
    with pytest.raises(CommandError, match="not finite; try --dtype float32"):
        load(str(folder), "--kv-memory", "1M")


def test_an_encoding_that_cannot_tell_its_work_is_found_at_the_start(folder, monkeypatch):
    """It would end the engine at its first step."""
    for work, said in (
        (lambda *given: 1 / 0, r"fails \(.*: ZeroDiv"),
        (lambda *given: 1, "returns int"),
    ):
        monkeypatch.setattr(RoPE, "work", work)
        with pytest.raises(CommandError, match=f"RoPE: work {said}"):
            load(str(folder), *SMALL)


def test_no_folder(tmp_path):
    with pytest.raises(CommandError) as refused:
        load(str(tmp_path / "nothing"))
    assert "\n" not in str(refused.value)


def test_programs_that_read_the_log_are_shown_no_banner(capsys, caplog):
    caplog.set_level("INFO")
    build._announce(configured("a", "--log-format", "json"), [FACTS], "http://here")
    assert capsys.readouterr().out == ""
    assert caplog.messages == ["serving smollm2 at http://here"]
    build._announce(configured("a"), [FACTS], "http://here")
    assert "http://here/v1/completions" in capsys.readouterr().out
    assert len(caplog.messages) == 1
