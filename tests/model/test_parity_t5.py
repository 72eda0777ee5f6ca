"""T5 and its kin here and in transformers: the same weights, the same logits, the same answers."""

import json
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, EncoderDecoderCache

from ropewalk.model.config import EncodingSpec
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.model import encoder_decoders as tiny
from tests.model.checkpoints import save
from tests.model.encoder_decoders import START, Answering, mt5, t5, t5_v11, umt5
from tests.model.kernels.test_cpu_executor import OpByOp
from tests.model.tiny import on_kernels, program_of

UNEVEN = {"relative_attention_num_buckets": 13, "relative_attention_max_distance": 50}
MODELS = {
    "t5": (t5(), False),
    "t5-uneven": (t5(d_kv=5, num_heads=7, num_decoder_layers=1, **UNEVEN), False),
    "t5-gated": (t5(feed_forward_proj="gated-silu", num_layers=3), False),
    "t5-v1.1": (t5_v11(), True),
    "t5-v1.1-tied": (t5_v11(d_model=48, num_heads=2, d_kv=9), False),
    "umt5": (umt5(), True),
    "umt5-uneven": (umt5(num_heads=1, d_kv=30, **UNEVEN), False),
    "mt5": (mt5(), True),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """(the checkpoint, the model of transformers)."""
    config, own_head = MODELS[request.param]
    model = tiny.random_model(config, own_head=own_head)
    folder = save(model, tmp_path_factory.mktemp("model"))
    return open_checkpoint(folder), model


def sequences(generator, lengths):
    return [torch.randint(0, 260, (length,), generator=generator).tolist() for length in lengths]


def questions():
    """(prompt, answer) of all lengths, long past the last bucket."""
    generator = torch.Generator().manual_seed(2)
    prompts = sequences(generator, [5, 300, 1, 33])
    answers = [[START, *rest] for rest in sequences(generator, [20, 7, 290, 0])]
    return list(zip(prompts, answers, strict=True))


def ragged(decoder):
    """All answers' logits, of one step."""
    take = tiny.allocator(torch.Generator().manual_seed(5))
    requests = [Answering(*both, take) for both in questions()]
    work = [(request, len(request.answer.tokens)) for request in requests]
    return tiny.step(decoder, work, tiny.new_cache(decoder))


@lru_cache(maxsize=1)
@torch.no_grad()
def of_transformers(model):
    """The same, of one question after the other."""
    return [
        model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([answer])).logits[0]
        for prompt, answer in questions()
    ]


def check_logits(decoder, model, tolerance=2e-4):
    for ours, theirs in zip(ragged(decoder), of_transformers(model), strict=True):
        assert theirs.std() > 0.3  # flat logits would agree whatever the weights
        assert (ours - theirs).abs().max() <= tolerance


def greedy(decoder, prompt, count=32):
    """From the cache, one step for each token."""
    request = Answering(prompt, [START], tiny.allocator(torch.Generator().manual_seed(3)))
    kv = tiny.new_cache(decoder)
    for _ in range(count):
        (logits,) = tiny.step(decoder, [(request, 1)], kv)
        request.answer.tokens.append(int(logits[-1].argmax()))
    return request.answer.tokens[1:]


@torch.no_grad()
def reference_greedy(model, prompt, count=32):
    # Its own `generate` makes caches for as many layers as the encoder has.
    past = EncoderDecoderCache(DynamicCache(), DynamicCache())
    encoded, new, tokens = model.encoder(torch.tensor([prompt])), START, []
    for _ in range(count):
        output = model(
            encoder_outputs=encoded, decoder_input_ids=torch.tensor([[new]]), past_key_values=past
        )
        new = int(output.logits[0, -1].argmax())
        tokens.append(new)
    return tokens


def test_logits(pair):
    checkpoint, model = pair
    check_logits(tiny.loaded(checkpoint), model)


def test_greedy_answers(pair):
    checkpoint, model = pair
    decoder = tiny.loaded(checkpoint)
    prompts = sequences(torch.Generator().manual_seed(4), [1, 50])
    for prompt, count in zip(prompts, (8, 32), strict=True):
        answer = greedy(decoder, prompt, count)
        with torch.no_grad():  # one pass, in which each token is seen after those before it
            theirs = model(
                input_ids=torch.tensor([prompt]),
                decoder_input_ids=torch.tensor([[START, *answer[:-1]]]),
            )
        assert answer == theirs.logits[0].argmax(dim=-1).tolist()


@pytest.mark.parametrize("sides", ["decoder", "both"])
@pytest.mark.parametrize("form", ["table", "materialised"])
def test_every_form_of_the_bias(pair, form, sides, kernels):
    checkpoint, model = pair
    config = in_form(checkpoint.config, form)
    if sides == "both":
        config = replace(config, encoder=in_form(config.encoder, form))
    decoder = tiny.loaded(replace(checkpoint, config=config), backend=CpuBackend(kernels))
    check_logits(decoder, model)


def in_form(config, form):
    spec = config.encoding
    return replace(config, encoding=EncodingSpec(spec.name, {**spec.options, "form": form}))


def test_the_cpu_kernels_agree(pair, kernels):
    checkpoint, model = pair
    decoder = on_kernels(tiny.loaded(checkpoint), kernels)
    assert len(decoder.executor._answers.stages) == len(decoder.executor._prompts.stages) == 1
    check_logits(decoder, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["window", "materialised"])
def test_one_call_gives_what_its_ops_give(pair, form, dtype, kernels):
    """Bit by bit, of prompts, of some rows of answers, and of single tokens."""
    checkpoint, _ = pair
    config = in_form(checkpoint.config, form)
    program = program_of(tiny.loaded(replace(checkpoint, config=config), dtype))
    found = []
    for executor in (CpuExecutor, OpByOp):
        decoder = Decoder(program, executor(program, kernels))
        take = tiny.allocator(torch.Generator().manual_seed(5))
        requests = [Answering(*both, take) for both in questions()]
        kv, logits = tiny.new_cache(decoder), []
        for counts in ((1, 1, 200, 1), (15, 2, 60, 0), (1, 1, 1, 0)):
            batch = tiny.step_batch(list(zip(requests, counts, strict=True)))
            if sum(counts) > len(counts):
                batch = replace(batch, output_rows=batch.output_rows[1::3].contiguous())
            logits.append(decoder(batch, kv))
        found.append(torch.cat(logits))
    assert torch.equal(*found)


def published_umt5():
    """Unscaled, as its config.json says; transformers 5 no longer reads that key."""
    model = tiny.random_model(umt5(), own_head=True)
    model.config.tie_word_embeddings = False
    model.decoder.final_layer_norm.weight.data *= model.config.d_model**-0.5
    return model


def test_umt5_as_published(tmp_path):
    model = published_umt5()
    checkpoint = open_checkpoint(save(model, tmp_path))
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    check_logits(tiny.loaded(checkpoint), model)


def test_an_unused_bias_of_old_files_is_left_unread(tmp_path):
    model = tiny.random_model(t5())
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[name] = torch.full((32, 3), 1e3)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    check_logits(tiny.loaded(open_checkpoint(tmp_path)), model)


@pytest.mark.parametrize("name", ["t5", "t5-v1.1", "umt5"])
def test_gguf(name, tmp_path):
    config, own_head = MODELS[name]
    model = published_umt5() if name == "umt5" else tiny.random_model(config, own_head=own_head)
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "tiny.gguf", model))
    check_logits(tiny.loaded(checkpoint), model)
