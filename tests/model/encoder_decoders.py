"""Tiny random encoder-decoders as transformers writes them, and how their decoders are run."""

from dataclasses import replace

import gguf
import numpy as np
import torch
import transformers

from ropewalk.cache.kv import KVCache
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.batch import Cross
from ropewalk.model.encodings.base import create
from ropewalk.model.loading.checkpoints import load_program
from tests.model.checkpoints import CPU, END, TOKENS, finish
from tests.model.running import Running, make_batch
from tests.model.tiny import in_torch

BLOCK = 16
START, STOP = 0, TOKENS.index(END)
COMMON = {
    "vocab_size": 260,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "d_ff": 40,
    "pad_token_id": START,
    "decoder_start_token_id": START,
    "eos_token_id": STOP,
    "bos_token_id": None,
}
GATED = {"feed_forward_proj": "gated-gelu"}


def t5(**changes):
    """v1.0: heads together narrower than the model."""
    shape = {"d_model": 32, "d_kv": 7, "num_heads": 3}
    return transformers.T5Config(**COMMON | shape | changes)


def t5_v11(**changes):
    """v1.1 and Flan: heads together wider than the model, an output matrix of its own."""
    shape = {"d_model": 24, "d_kv": 12, "num_heads": 5, "tie_word_embeddings": False}
    return transformers.T5Config(**COMMON | GATED | shape | changes)


def umt5(**changes):
    shape = {"d_model": 24, "d_kv": 8, "num_heads": 4}
    return transformers.UMT5Config(**COMMON | GATED | shape | changes)


def mt5(**changes):
    shape = {"d_model": 24, "d_kv": 8, "num_heads": 3}
    return transformers.MT5Config(**COMMON | GATED | shape | changes)


def random_model(config, *, own_head=False):
    """Every weight matters: norms off one, biases between positions as large as the scores."""
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "layer_norm" in name:
                values = 1 + 0.2 * values
            elif "relative_attention_bias" not in name:
                values = 0.25 * values
            if name.endswith(".q.weight"):
                values = values * config.d_kv**-0.5  # nothing else keeps the scores small
            parameter.copy_(values)
        # A tied head would find every token's own embedding again, did the layers not outweigh it;
        # and logits must differ, whatever they are scaled by.
        model.shared.weight *= 0.2
        model.decoder.final_layer_norm.weight *= 1.0 if own_head else 5.0
        model.decoder.final_layer_norm.weight *= config.d_model**0.5 if scales(model) else 1.0
    return model


def scales(model):
    """Whether transformers scales the decoder's output."""
    config = model.config
    umt5 = config.model_type == "umt5" and config.tie_word_embeddings
    return umt5 or getattr(config, "scale_decoder_outputs", False)


def loaded(checkpoint, dtype=torch.float32, backend=SdpaAttention, context=512, device=CPU):
    config = checkpoint.config
    program = load_program(
        checkpoint,
        create(config.encoding, config, context, device),
        create(config.encoder.encoding, config.encoder, context, device),
        dtype=dtype,
        device=device,
    )
    return in_torch(program, backend)


class Answering:
    """A prompt and its answer as the model sees them, each in its own blocks."""

    def __init__(self, prompt, tokens, take):
        """take: a number of blocks → their ids. `tokens` starts with the start token."""
        self.prompt = Running(list(prompt), take(-(-len(prompt) // BLOCK)))
        self.answer = Running(list(tokens), take(-(-(len(tokens) + 40) // BLOCK)))


def allocator(generator):
    """Blocks in a random order, none twice, none of them 0."""
    ids = (1 + torch.randperm(200, generator=generator)).tolist()
    return lambda count: [ids.pop() for _ in range(count)]


def new_cache(decoder, blocks=201, block_size=BLOCK):
    config = decoder.config
    kv = KVCache(
        config, blocks=blocks, block_size=block_size, dtype=decoder.dtype, device=decoder.device
    )
    kv._keys.fill_(torch.nan)
    kv._values.fill_(torch.nan)
    return kv


def step(decoder, work, kv):
    """Logits of the next `count` tokens of each answer."""
    logits = decoder(step_batch(work), kv)
    return logits.split([count for _, count in work])


def step_batch(work):
    """A batch of these tokens, and of the prompts that are not encoded yet."""
    batch = make_batch([(each.answer, count) for each, count in work], BLOCK)
    new = [(each.prompt, len(each.prompt.tokens)) for each, _ in work if not each.prompt.computed]
    prompts = make_batch(new, BLOCK) if new else None
    for prompt, count in new:
        prompt.computed = count
    encoded = make_batch([(each.prompt, 0) for each, _ in work], BLOCK)
    seen = replace(
        batch,
        context_lens=encoded.context_lens,
        block_tables=encoded.block_tables,
        block_bases=encoded.block_bases,
        max_context=encoded.max_context,
    )
    for each, count in work:
        each.answer.computed += count
    return replace(batch, cross=Cross(prompts, seen))


def write_gguf(path, model):
    """As converters write it: per-layer biases only where the model has them."""
    config = model.config
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(64)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_decoder_block_count(config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_decoder_start_token_id(START)
    writer.add_tokenizer_model("t5")
    pieces = ["<pad>", "</s>", "<unk>", *(f"▁{chr(0x4E00 + i)}" for i in range(257))]
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 3 + [-1.0 - i / 100 for i in range(257)])
    writer.add_token_types([3, 3, 2] + [1] * 257)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 8)
    tied = model.lm_head.weight is model.shared.weight
    for name, tensor in model.state_dict().items():
        if "embed_tokens" in name or (tied and name == "lm_head.weight"):
            continue
        stored = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    return finish(writer, path)
