"""An encoder, and a decoder that attends to its output, built from the same layers as Decoder.

Keys and values of encoded prompts share the paged cache with the answers', in blocks of their own.
Knows no requests: the batch says which blocks those are.
"""

import torch
from torch import Tensor, nn

from ropewalk.cache.kv import KVCache, PagedKV
from ropewalk.model.attention.base import AttentionBackend, spec_for
from ropewalk.model.attention.bias import StepBias, step_biases
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import EncoderDecoderConfig, ModelConfig
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.layers.decoder import Block, Layers, kept, make_norm
from ropewalk.model.layers.linear import Linear


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder's output; no positions."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        columns, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(config.width, columns, bias=config.qkv_bias, dtype=dtype, device=device)
        self.kv = Linear(
            config.width, 2 * kv_rows, bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.out = Linear(columns, config.width, bias=config.out_bias, dtype=dtype, device=device)
        self.attend = backend(spec_for(config, dtype, device, causal=False))

    def store(self, encoded: Tensor, slots: Tensor, kv: PagedKV) -> None:
        """Store keys and values of encoded prompts [T, width] at slots [T]."""
        k, v = self.kv(encoded).view(len(encoded), -1, self.head_dim).chunk(2, dim=1)
        kv.write(k, v, slots)

    def forward(self, x: Tensor, seen: ForwardBatch, kv: PagedKV) -> Tensor:
        """x [T, width], the rows of `seen`, each of which attends to its whole encoded prompt."""
        y: Tensor = self.out(self.attended(self.q(x), seen, kv))
        return y

    def attended(self, q: Tensor, seen: ForwardBatch, kv: PagedKV) -> Tensor:
        """[T, outputs of `q`] → [T, inputs of `out`]."""
        q = q.view(len(q), -1, self.head_dim)
        return self.attend(q, kv, seen, None, None).flatten(1)


class CrossBlock(Block):
    """x + attention(norm(x)), then x + cross(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        encoding: PositionalEncoding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, layer, encoding, backend, dtype, device)
        self.cross_norm = make_norm(config, dtype, device)
        self.cross = CrossAttention(config, backend, dtype, device)

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: PagedKV,
        bias: StepBias | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        assert batch.cross is not None, "an encoder-decoder needs encoded prompts"
        x = x + self.attention(self.attention_norm(x), batch, kv, bias)
        x = x + self.cross(self.cross_norm(x), batch.cross.seen, kv)
        x = kept(x, rows)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Encoder(nn.Module):
    """Blocks whose queries attend to every key of their prompt, and a norm."""

    def __init__(
        self,
        config: ModelConfig,
        encoding: PositionalEncoding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.layers = Layers(
            Block(config, layer, encoding, backend, dtype, device, causal=False)
            for layer in range(config.layers)
        )
        self.norm = make_norm(config, dtype, device)

    def forward(self, x: Tensor, prompts: ForwardBatch, kv: KVCache) -> Tensor:
        """x: embedded whole prompts [T, width]. Overwrites the prompts' slots of kv's layer 0."""
        x = self.encoding.embed(x, prompts.positions)
        biases = step_biases(self.encoding, len(self.layers), prompts, kv.block_size)
        x = self.layers(x, prompts, kv.first_layer_for(len(self.layers)), biases)
        y: Tensor = self.norm(x)
        return y


class EncoderDecoder(nn.Module):
    """Embed, encode, embed, L blocks over both, norm, head; one embedding for both sides.

    Called like a Decoder, with a batch whose `cross` is set. Parameters are allocated
    uninitialised: load them next.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        encoder_encoding: PositionalEncoding,
        encoding: PositionalEncoding,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoding = encoding
        shape = (config.vocab_size, config.width)
        self.embed = nn.Embedding(
            *shape, _weight=torch.empty(shape, dtype=dtype, device=device), _freeze=True
        )
        self.encoder = Encoder(config.encoder, encoder_encoding, backend, dtype, device)
        self.layers = Layers(
            CrossBlock(config, layer, encoding, backend, dtype, device)
            for layer in range(config.layers)
        )
        self.norm = make_norm(config, dtype, device)
        self.head = Linear(config.width, config.vocab_size, dtype=dtype, device=device)
        if config.tied_embeddings:
            self.embed.weight = self.head.weight

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits [S, vocab] of `batch.output_rows`; keys and values of all rows are stored.

        New prompts are encoded first, and their keys and values stored for all later steps. The
        batch may still be in host memory.
        """
        batch = batch.to(kv.device)
        assert batch.cross is not None, "an encoder-decoder needs encoded prompts"
        if batch.cross.new is not None:
            self._encode(batch.cross.new, kv)
        x = self.encoding.embed(self.embed(batch.tokens), batch.positions)
        biases = step_biases(self.encoding, len(self.layers), batch, kv.block_size)
        x = self.layers(x, batch, kv, biases, batch.output_rows)
        logits: Tensor = self.head(self.norm(x) * self.config.output_scale)
        return logits

    def _encode(self, prompts: ForwardBatch, kv: KVCache) -> None:
        # Until `store` fills them below, the prompts' blocks of the first layer hold the encoder's
        # own keys and values, one layer after another, so that no second cache is needed.
        encoded = self.encoder(self.embed(prompts.tokens), prompts, kv)
        for index, block in enumerate(self.layers):
            assert isinstance(block, CrossBlock)
            block.cross.store(encoded, prompts.slots, kv.layer(index))
