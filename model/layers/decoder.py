"""One decoder for every model and encoding: a packed ragged batch in, logits out.

Knows no requests and no sampling. The positional encoding enters through its hooks, attention
through a backend passed in. Faster layers may replace these modules after loading.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.cache.kv import KVCache, PagedKV
from ropewalk.model.attention.base import AttentionBackend, spec_for
from ropewalk.model.attention.bias import StepBias, step_biases
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import Activation, BlockKind, ModelConfig
from ropewalk.model.encodings.base import EncodingError, PositionalEncoding
from ropewalk.model.layers.linear import Linear
from ropewalk.model.weights.fixed import fixed_of


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32 or wider (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(width, dtype=dtype, device=device), requires_grad=False
        )
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / deviation · weight + bias over the last dimension (arXiv 1607.06450)."""

    def __init__(
        self, width: int, eps: float, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(width, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Gate(nn.Module):
    """x [T, 2 · width] = gate, up → activation(gate) · up (arXiv 2002.05202)."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate) * up


class Activate(nn.Module):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](x)


# (queries, keys, positions, offsets) → (queries, keys), as in PositionalEncoding.rotate.
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# (queries, keys, values, batch, cache) → queries, as in Attention.stored.
Store = Callable[[Tensor, Tensor, Tensor, ForwardBatch, PagedKV], Tensor]


class Attention(nn.Module):
    """Project, rotate, store, attend, project back."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        encoding: PositionalEncoding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        self.sizes = [heads, kv_heads, kv_heads]
        self.head_dim = head_dim
        self.qkv = Linear(
            config.width,
            (heads + 2 * kv_heads) * head_dim,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(
            heads * head_dim, config.width, bias=config.out_bias, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.norm_eps, dtype, device)
            self.k_norm = RMSNorm(head_dim, config.norm_eps, dtype, device)
        self.clip = config.qkv_clip
        self.encoding = encoding.for_layer(layer)
        # Faster equivalents of the encoding's `rotate`, and of `stored`. Set after loading.
        self.kernel_rotate: Rotate | None = None
        self.kernel_store: Store | None = None
        self.attend = backend(
            spec_for(config, dtype, device, window=config.windows[layer], causal=causal)
        )

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Those of the faster equivalents, which are no modules: see model/weights/fixed.py."""
        return fixed_of(kernel_rotate=self.kernel_rotate, kernel_store=self.kernel_store)

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[T, outputs of `qkv`] → q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
        return torch.split(qkv.view(len(qkv), -1, self.head_dim), self.sizes, dim=1)

    def attended(
        self, qkv: Tensor, batch: ForwardBatch, kv: PagedKV, bias: StepBias | None
    ) -> Tensor:
        """[T, outputs of `qkv`] → [T, inputs of `out`]. Stores the key and value of every row."""
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        q, k, v = self.parts(qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = self.stored(q, k, v, batch, kv)
        return self.attend(q, kv, batch, bias, self.encoding.rotation()).flatten(1)

    def stored(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Rotate queries and keys, and store keys and values. Returns the queries."""
        if self.kernel_store is not None:
            return self.kernel_store(q, k, v, batch, kv)
        q, k = self.rotated(q, k, batch)
        kv.write(k, v, batch.slots)
        return q

    def rotated(self, q: Tensor, k: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Apply the encoding. Raises EncodingError if it changes a dtype or shape."""
        rotate = self.kernel_rotate or self.encoding.rotate
        rotated = tuple(rotate(q, k, batch.positions, batch.offsets))
        for before, after in zip((q, k), rotated, strict=True):
            if (after.dtype, after.shape) != (before.dtype, before.shape):
                raise EncodingError(
                    f"rotate of {type(self.encoding).__name__} returns {after.dtype} "
                    f"{list(after.shape)} for {before.dtype} {list(before.shape)}; it must keep "
                    "dtype and shape"
                )
        q, k = rotated
        return q, k

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: PagedKV,
        bias: StepBias | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """[T, width] → [S, width] of `rows`, or all. Stores the key and value of every row."""
        y = self.attended(self.qkv(x), batch, kv, bias)
        projected: Tensor = self.out(kept(y, rows))
        return projected


def kept(x: Tensor, rows: Tensor | None) -> Tensor:
    """The selected rows of x, or all of them."""
    return x if rows is None else x[rows]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_up: nn.Module = Linear(
            config.width, 2 * config.ffn_width, bias=config.mlp_bias, dtype=dtype, device=device
        )
        self.gate: nn.Module = Gate(config.activation)
        self.down = Linear(
            config.ffn_width, config.width, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate(self.gate_up(x)))
        return y


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.up: nn.Module = Linear(
            config.width, config.ffn_width, bias=config.mlp_bias, dtype=dtype, device=device
        )
        self.activate: nn.Module = Activate(config.activation)
        self.down = Linear(
            config.ffn_width, config.width, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activate(self.up(x)))
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    `rows` selects the rows to return: in the last block the others need no output or MLP.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        encoding: PositionalEncoding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, dtype, device)
        self.attention = Attention(config, layer, encoding, backend, dtype, device, causal=causal)
        self.mlp_norm = make_norm(config, dtype, device)
        self.mlp = (GatedMLP if config.gated else PlainMLP)(config, dtype, device)

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: PagedKV,
        bias: StepBias | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        x = kept(x, rows) + self.attention(self.attention_norm(x), batch, kv, bias, rows)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: PagedKV,
        bias: StepBias | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        x = self.attention_norm(kept(x, rows) + self.attention(x, batch, kv, bias, rows))
        y: Tensor = self.mlp_norm(x + self.mlp(x))
        return y


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(another norm(x))."""

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: PagedKV,
        bias: StepBias | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        attended = self.attention(self.attention_norm(x), batch, kv, bias, rows)
        x = kept(x, rows)
        y: Tensor = x + attended + self.mlp(self.mlp_norm(x))
        return y


class ParallelOneNormBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), the same norm."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        encoding: PositionalEncoding,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, dtype, device)
        self.attention = Attention(config, layer, encoding, backend, dtype, device)
        self.mlp = (GatedMLP if config.gated else PlainMLP)(config, dtype, device)

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: PagedKV,
        bias: StepBias | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        normed = self.attention_norm(x)
        attended = self.attention(normed, batch, kv, bias, rows)
        y: Tensor = kept(x, rows) + attended + self.mlp(kept(normed, rows))
        return y


class Layers(nn.ModuleList):
    """Blocks, one after another; the last one returns only `rows`, or all."""

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: KVCache,
        biases: Iterable[StepBias | None],
        rows: Tensor | None = None,
    ) -> Tensor:
        last = len(self) - 1
        for index, (block, bias) in enumerate(zip(self, biases, strict=True)):
            x = block(x, batch, kv.layer(index), bias, rows if index == last else None)
        return x


BLOCKS: dict[BlockKind, type[Block] | type[ParallelOneNormBlock]] = {
    "pre_norm": Block,
    "post_norm": PostNormBlock,
    "parallel": ParallelBlock,
    "parallel_one_norm": ParallelOneNormBlock,
}


def make_norm(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RMSNorm | LayerNorm:
    """The config's kind of norm, over the residual's width."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps, dtype, device)
    return LayerNorm(config.width, config.norm_eps, config.norm_bias, dtype, device)


class Decoder(nn.Module):
    """Embed, L blocks, norm, head. Parameters are allocated uninitialised: load them next."""

    def __init__(
        self,
        config: ModelConfig,
        encoding: PositionalEncoding,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoding = encoding
        width = config.embed_width or config.width
        self.embed = nn.Embedding(
            config.vocab_size,
            width,
            _weight=torch.empty(config.vocab_size, width, dtype=dtype, device=device),
            _freeze=True,
        )
        self.project_in = self.project_out = None
        if config.embed_width is not None:
            self.project_in = Linear(width, config.width, dtype=dtype, device=device)
            self.project_out = Linear(config.width, width, dtype=dtype, device=device)
        self.embed_norm = make_norm(config, dtype, device) if config.embed_norm else None
        self.layers = Layers(
            BLOCKS[config.block](config, layer, encoding, backend, dtype, device)
            for layer in range(config.layers)
        )
        self.norm = None if config.block == "post_norm" else make_norm(config, dtype, device)
        self.head = Linear(
            width, config.vocab_size, bias=config.head_bias, dtype=dtype, device=device
        )
        if config.tied_embeddings:
            self.embed.weight = self.head.weight
        # A faster equivalent of `by_parts`, in a single call. Set after loading.
        self.one_call: Callable[[Decoder, ForwardBatch, KVCache], Tensor] | None = None

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Those of the faster equivalent, which is no module: see model/weights/fixed.py."""
        return fixed_of(one_call=self.one_call)

    def bind_encoding(self) -> None:
        """Ask `for_layer` again: once its weights are loaded, it may return other encodings."""
        for layer, block in enumerate(self.layers):
            assert isinstance(block, Block | ParallelOneNormBlock)
            block.attention.encoding = self.encoding.for_layer(layer)

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits [S, vocab] of `batch.output_rows`; keys and values of all rows are stored.

        The batch may still be in host memory.
        """
        if self.one_call is None:
            return self.by_parts(batch, kv)
        return self.one_call(self, batch, kv)

    @torch.inference_mode()
    def by_parts(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """`forward` module by module."""
        return self.compute(batch.to(kv.device), kv)

    def compute(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """The computation of `by_parts`; training calls it directly, to keep gradients."""
        x = self.embedded(batch)
        x = self.layers(x, batch, kv, self.biases(batch, kv), batch.output_rows)
        if self.norm is not None:
            x = self.norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        logits: Tensor = self.head(x)
        return logits

    def biases(self, batch: ForwardBatch, kv: KVCache) -> Iterator[StepBias | None]:
        """What each layer in turn adds to its attention scores."""
        return step_biases(self.encoding, len(self.layers), batch, kv.block_size)

    def embedded(self, batch: ForwardBatch) -> Tensor:
        """[T, width], contiguous: the input of the first layer. Raises EncodingError."""
        x: Tensor = self.embed(batch.tokens)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.project_in is not None:
            x = self.project_in(x)
        embedded = self.encoding.embed(x, batch.positions)
        if embedded.dtype is not x.dtype:
            raise EncodingError(
                f"embed of {type(self.encoding).__name__} returns {embedded.dtype} for {x.dtype}; "
                "end it with .to(x.dtype)"
            )
        x = embedded if self.embed_norm is None else self.embed_norm(embedded)
        return x.contiguous()  # as kernels read it, and an encoding may leave it otherwise
