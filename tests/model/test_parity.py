"""The same weights here and in transformers: every family, stored and run in every way."""

import copy
from dataclasses import replace

import gguf
import pytest
import torch
import transformers

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.model import checkpoints, plain
from tests.model.checkpoints import llama, loaded, qwen3
from tests.model.families import FAMILIES
from tests.model.running import Running, make_batch, new_cache
from tests.model.tiny import on_kernels, parameters_of
from tests.smollm2 import smollm2_path

BLOCK = 16
# Rows of whole blocks, so that every matrix is quantised.
BLOCKED = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 32}


def prompts(vocab_size, *lengths):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def ragged_logits(decoder, sequences, *, hidden=False):
    """All sequences in one packed batch → logits of each, or what the head would read."""
    running, first = [], 1
    for tokens in sequences:
        count = -(-len(tokens) // BLOCK)
        running.append(Running(tokens, list(range(first, first + count))))
        first += count
    batch = make_batch([(each, len(each.tokens)) for each in running], BLOCK)
    logits = decoder(replace(batch, hidden=hidden), new_cache(decoder, first, BLOCK))
    return logits.split([len(tokens) for tokens in sequences])


def greedy(decoder, prompt, count):
    """The next tokens, from the cache, one step each."""
    blocks = -(-(len(prompt) + count) // BLOCK)
    sequence = Running(list(prompt), list(range(1, blocks + 1)))
    kv = new_cache(decoder, blocks + 1, BLOCK)
    while len(sequence.tokens) < len(prompt) + count:
        new = len(sequence.tokens) - sequence.computed
        logits = decoder(make_batch([(sequence, new)], BLOCK), kv)
        sequence.computed = len(sequence.tokens)
        sequence.tokens.append(int(logits[-1].argmax()))
    return sequence.tokens[len(prompt) :]


@torch.no_grad()
def reference_greedy(model, prompt, count):
    tokens, new, past = list(prompt), list(prompt), None
    while len(tokens) < len(prompt) + count:
        output = model(torch.tensor([new]), past_key_values=past, use_cache=True)
        past, new = output.past_key_values, [int(output.logits[0, -1].argmax())]
        tokens += new
    return tokens[len(prompt) :]


@torch.no_grad()
def check_greedy(decoder, model, prompt, count):
    """Each token is the one that transformers finds most likely after those before it.

    One pass without a cache, in which that is seen of all tokens at once.
    """
    answer = greedy(decoder, prompt, count)
    theirs = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    assert answer == theirs.argmax(dim=-1).tolist()


@torch.no_grad()
def logits_of(model, tokens, *, hidden=False):
    """From a model that has seen no other sequence: frequencies remember the longest one."""
    unused = getattr(model.base_model, "rotary_emb", None)
    model.base_model.rotary_emb = copy.deepcopy(unused)
    ids = torch.tensor([tokens])
    found = model.base_model(ids).last_hidden_state if hidden else model(ids).logits
    model.base_model.rotary_emb = unused
    return found[0]


def difference(decoder, model, *lengths, hidden=False):
    """The largest of any logit or hidden state, over a ragged batch of prompts."""
    sequences = prompts(model.config.vocab_size, *lengths)
    found = []
    results = ragged_logits(decoder, sequences, hidden=hidden)
    for ours, tokens in zip(results, sequences, strict=True):
        theirs = logits_of(model, tokens, hidden=hidden)
        assert theirs.std() > 0.3  # flat logits would agree whatever the weights
        found.append((ours - theirs).abs().max())
    return torch.stack(found).max()


def drawn(config):
    """A random model of transformers, which changes the config that it is given."""
    draw = checkpoints.random_model if hasattr(config, "rms_norm_eps") else plain.random_model
    return draw(copy.deepcopy(config))


def stretched(model, context):
    """The same weights in transformers, which has tables of its own for the trained length."""
    if model.config.model_type == "mpt":
        model.config.max_seq_len = max(context or 0, model.config.max_seq_len)
    if model.config.model_type != "gptj":
        return model
    config = copy.deepcopy(model.config)
    config.n_positions = max(context or 0, config.n_positions)
    longer = transformers.GPTJForCausalLM(config).eval()
    longer.load_state_dict(model.state_dict())
    return longer


def in_safetensors(model, folder):
    return open_checkpoint(checkpoints.save(model, folder))


def in_gguf(model, folder):
    return open_checkpoint(checkpoints.write_gguf(folder / "tiny.gguf", model))


def in_one_call(checkpoint, context, kernels):
    decoder = on_kernels(loaded(checkpoint, context=context), kernels)
    assert len(decoder.executor._answers.stages) == 1
    return decoder


# How a model is stored, and what runs it: (checkpoint, positions, kernels) → decoder.
def on(backend=lambda kernels: SdpaAttention):
    return lambda checkpoint, context, kernels: loaded(
        checkpoint, context=context, backend=backend(kernels)
    )


WAYS = {
    "safetensors": (in_safetensors, on()),
    "gguf": (in_gguf, on()),
    "reference": (in_safetensors, on(lambda kernels: ReferenceAttention)),
    "cpu": (in_safetensors, on(CpuBackend)),
    "one call": (in_safetensors, in_one_call),
}


def check(decoder, model, row, answer=8):
    """Logits, hidden states, and tokens of a greedy answer from the cache.

    Of the weights the logits tell all.
    """
    model = stretched(model, row.context)
    assert difference(decoder, model, *row.lengths) <= row.tolerance
    assert difference(decoder, model, *row.lengths, hidden=True) <= row.tolerance
    check_greedy(decoder, model, prompts(model.config.vocab_size, row.prompt)[0], answer)


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, row in FAMILIES.items() for way in row.ways]
)
def test_family(name, way, tmp_path, kernels):
    row, (store, run) = FAMILIES[name], WAYS[way]
    model = drawn(row.config)
    checkpoint = store(model, tmp_path)
    assert row.trained in (None, checkpoint.config.trained_context)
    assert checkpoint.config.tied_embeddings is model.config.tie_word_embeddings
    decoder = run(checkpoint, row.context, kernels)
    check(decoder, model, row, row.answer if way == "safetensors" else min(row.answer, 12))


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_shards(name, tmp_path):
    row = FAMILIES[name]
    model = drawn(row.config)
    checkpoints.save(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(loaded(open_checkpoint(tmp_path)), model, row)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("config", [llama(**BLOCKED), qwen3(**BLOCKED)], ids=lambda c: c.model_type)
def test_quantised_gguf(config, kind, tmp_path):
    model = drawn(config)
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", model, kind)
    rounded = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                packed = gguf.quants.quantize(parameter.numpy(), gguf.GGMLQuantizationType[kind])
                values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
                parameter.copy_(torch.from_numpy(values))
                rounded += 1
    assert rounded == 2 + 7 * config.num_hidden_layers
    check(loaded(open_checkpoint(path)), model, FAMILIES["llama"])


def test_bfloat16_holds_the_rounded_weights(tmp_path):
    model = checkpoints.random_model(llama())
    decoder = loaded(open_checkpoint(checkpoints.save(model, tmp_path)), torch.bfloat16)
    ours, theirs = parameters_of(decoder)["embed.weight"], model.model.embed_tokens.weight
    assert ours.dtype is torch.bfloat16
    assert torch.equal(ours, theirs.to(torch.bfloat16))


ENGLISH = """
The harbour at Wickham lies in the shelter of a long grey headland, and for most of the year the
water inside is as still as a pond. The old people say that the town was built there because of a
mistake. A merchant captain, driven off his course by three days of fog, dropped his anchor in the
bay believing that he had reached the mouth of the river, forty miles to the south. When the sky
cleared in the morning he saw the headland, the meadows running down to the shore, and a stream of
clear water falling over the rocks, and he decided that a man could do worse than to be lost in
such a place. He sent half of his crew ashore to cut timber. By the end of the summer there were
six houses and a jetty, and by the end of the second summer there was an inn.

Nobody can prove that any of this happened. The parish records begin a hundred years later, and
they are mostly concerned with the price of rope. For rope was what made the town rich. Hemp came
in by sea from the east, and in a long low building beside the shore, nearly a quarter of a mile
from one end to the other, men walked backwards all day with the fibres wound about their waists,
paying them out through their fingers while a boy turned the wheel at the far end. A good spinner
could walk eighteen miles in a day without ever leaving the building. In winter the doors were
kept shut against the wind, and the only light came from small windows set high in the wall, so
that the men seemed to appear and vanish as they passed from one bright patch to the next.

My grandfather was the last of them. He had started as the boy at the wheel when he was nine years
old, and he finished as the master of the walk, with a key on his belt and a brass whistle that he
blew at noon. When I was small he used to take me there on Sundays, after the machines had already
been sold, and we would walk together from the door to the far wall. He counted the steps under his
breath. He told me that a rope is nothing but a great many weak things which have been persuaded to
hold on to one another, and that the whole art lies in the twisting: each strand is turned one way
and the strands together are turned the other, so that every part of it is trying to come undone,
and no part can, because all the others are in the way.
"""


# As published with the model, not as the file says.
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def smollm2(smollm2_reader):
    """The checkpoint, 512 tokens of English, and the model in transformers."""
    checkpoint = open_checkpoint(smollm2_path())
    with pytest.MonkeyPatch.context() as patch:  # seconds of random numbers, replaced below
        for drawn in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(drawn, "reset_parameters", lambda module: None)
        patch.setattr(transformers.PreTrainedModel, "_init_weights", lambda model, module: None)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2)).eval()
    checkpoints.fill_from_gguf(model, smollm2_reader)
    tokens = checkpoint.tokenizer.encode(ENGLISH, bos=False)[:512]
    return checkpoint, tokens, model


# With torch alone the tiny models above are as right as this one, and this one takes long.
@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.full), "kernels"])
def decoder(request, smollm2):
    """As any machine can run it, and as the server runs it on a CPU."""
    checkpoint = smollm2[0]
    if request.param == "torch":
        return loaded(checkpoint, context=1024)
    kernels = request.getfixturevalue("kernels")
    return on_kernels(loaded(checkpoint, context=1024), kernels)


@pytest.mark.smollm2
def test_smollm2_logits(decoder, smollm2):
    _, tokens, model = smollm2
    assert len(tokens) == 512
    (ours,) = ragged_logits(decoder, [tokens])
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() <= 1e-3
    # Both could be wrong together: the model must also find the text likely.
    loss = torch.nn.functional.cross_entropy(ours[:-1], torch.tensor(tokens[1:]))
    assert loss < 3.5


@pytest.mark.smollm2
def test_smollm2_greedy(decoder, smollm2):
    _, tokens, model = smollm2
    check_greedy(decoder, model, tokens[:100], 64)
