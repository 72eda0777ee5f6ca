"""The same weights here and in transformers: every family, stored and run in every way."""

import copy
from dataclasses import replace
from functools import cached_property, lru_cache

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
def outputs_of(model, tokens):
    """Logits, and what the head reads.

    From a model that has seen no other sequence: frequencies remember the longest one.
    """
    unused, read = getattr(model.base_model, "rotary_emb", None), []
    model.base_model.rotary_emb = copy.deepcopy(unused)
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda head, inputs: read.extend(inputs[0])
    )
    logits = model(torch.tensor([tokens])).logits[0]
    hook.remove()
    model.base_model.rotary_emb = unused
    return logits, *read


def difference(decoder, model, *lengths):
    """The largest of any logit, over a ragged batch of prompts."""
    sequences = prompts(model.config.vocab_size, *lengths)
    return farthest(decoder, sequences, [outputs_of(model, tokens)[0] for tokens in sequences])


def farthest(decoder, sequences, expected, *, hidden=False):
    """The largest difference of any logit or hidden state from those expected of a sequence."""
    found = []
    results = ragged_logits(decoder, sequences, hidden=hidden)
    for ours, theirs in zip(results, expected, strict=True):
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
        model = copy.deepcopy(model)
        model.config.max_seq_len = max(context or 0, model.config.max_seq_len)
    if model.config.model_type != "gptj":
        return model
    config = copy.deepcopy(model.config)
    config.n_positions = max(context or 0, config.n_positions)
    longer = transformers.GPTJForCausalLM(config).eval()
    longer.load_state_dict(model.state_dict())
    return longer


def in_one_call(checkpoint, context, kernels):
    decoder = on_kernels(loaded(checkpoint, context=context), kernels)
    assert len(decoder.executor._answers.stages) == 1
    return decoder


# What runs a model: (checkpoint, positions, kernels) → decoder.
def on(backend=lambda kernels: SdpaAttention):
    return lambda checkpoint, context, kernels: loaded(
        checkpoint, context=context, backend=backend(kernels)
    )


WAYS = {
    "safetensors": on(),
    "gguf": on(),
    "reference": on(lambda kernels: ReferenceAttention),
    "cpu": on(CpuBackend),
    "one call": in_one_call,
}


class Family:
    """A row's model, what transformers finds of its prompts, and the model as it is stored."""

    def __init__(self, row, folder):
        self.row, self.folder, self.model = row, folder, drawn(row.config)
        self.theirs = stretched(self.model, row.context)
        self.prompts = prompts(self.model.config.vocab_size, *row.lengths)
        outputs = [outputs_of(self.theirs, tokens) for tokens in self.prompts]
        self.logits, self.hidden = zip(*outputs, strict=True)

    @cached_property
    def safetensors(self):
        return open_checkpoint(checkpoints.save(self.model, self.folder))

    @cached_property
    def gguf(self):
        return open_checkpoint(checkpoints.write_gguf(self.folder / "tiny.gguf", self.model))


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    """A row's family by its name; its ways are tested one after another."""
    return lru_cache(1)(lambda name: Family(FAMILIES[name], tmp_path_factory.mktemp("family")))


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, row in FAMILIES.items() for way in row.ways]
)
def test_family(name, way, family_of, kernels):
    family = family_of(name)
    row, stored = family.row, family.gguf if way == "gguf" else family.safetensors
    assert row.trained in (None, stored.config.trained_context)
    assert stored.config.tied_embeddings is family.model.config.tie_word_embeddings
    decoder = WAYS[way](stored, row.context, kernels)
    # Of weights that are stored in another way the logits tell all.
    assert farthest(decoder, family.prompts, family.logits) <= row.tolerance
    if way in ("safetensors", "one call"):
        assert farthest(decoder, family.prompts, family.hidden, hidden=True) <= row.tolerance
    if way != "gguf":
        prompt = prompts(family.model.config.vocab_size, row.prompt)[0]
        answer = row.answer if way == "safetensors" else min(row.answer, 12)
        check_greedy(decoder, family.theirs, prompt, answer)


def check(decoder, model, row):
    """Of the weights the logits tell all."""
    assert difference(decoder, stretched(model, row.context), *row.lengths) <= row.tolerance


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
    """The checkpoint, 256 tokens of English, and the model in transformers."""
    checkpoint = open_checkpoint(smollm2_path())
    with pytest.MonkeyPatch.context() as patch:  # seconds of random numbers, replaced below
        for drawn in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(drawn, "reset_parameters", lambda module: None)
        patch.setattr(transformers.PreTrainedModel, "_init_weights", lambda model, module: None)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2)).eval()
    checkpoints.fill_from_gguf(model, smollm2_reader)
    tokens = checkpoint.tokenizer.encode(ENGLISH, bos=False)[:256]
    return checkpoint, tokens, model


# With torch alone the tiny models above are as right as this one, and this one takes long.
@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.full), "kernels"])
def decoder(request, smollm2):
    """As any machine can run it, and as the server runs it on a CPU."""
    checkpoint = smollm2[0]
    if request.param == "torch":
        return loaded(checkpoint, context=512)
    kernels = request.getfixturevalue("kernels")
    return on_kernels(loaded(checkpoint, context=512), kernels)


@pytest.mark.smollm2
def test_smollm2_logits(decoder, smollm2):
    _, tokens, model = smollm2
    assert len(tokens) == 256
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
    check_greedy(decoder, model, tokens[:100], 24)
