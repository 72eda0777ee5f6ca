"""One decoder for every model and encoding: a packed ragged batch in, logits out.

Knows no request and no sampling. The positional encoding enters through its three hooks, the
kernels through one attention backend and one linear layer; both are handed in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache.kv import KVCache, LayerKV
from model.attention.base import AttentionBackend, AttentionSpec
from model.batch import ForwardBatch
from model.config import ModelConfig
from model.encodings.base import PositionalEncoding
from model.linear import Linear


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


class SiluGate(nn.Module):
    """x [T, 2 · width] = gate, up → silu(gate) · up (arXiv 2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Attention(nn.Module):
    """Project, rotate, write, attend, project back."""

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
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        self.sizes = (heads, kv_heads, kv_heads)
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
        self.encoding = encoding.for_layer(layer)
        self.attend = backend(
            AttentionSpec(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                dtype=dtype,
                device=device,
                window=config.windows[layer],
            )
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, width] → q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split(self.sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(self, x: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.encoding.rotate(q, k, batch.positions)
        kv.write(k, v, batch.slots)
        y = self.attend(q, kv, batch, self.encoding.score_bias())
        projected: Tensor = self.out(y.flatten(1))
        return projected


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_up = Linear(
            config.width, 2 * config.ffn_width, bias=config.mlp_bias, dtype=dtype, device=device
        )
        self.gate = SiluGate()
        self.down = Linear(
            config.ffn_width, config.width, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate(self.gate_up(x)))
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

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
        self.attention_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        self.attention = Attention(config, layer, encoding, backend, dtype, device)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(self, x: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch, kv)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


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
        self.embed = nn.Embedding(
            config.vocab_size,
            config.width,
            _weight=torch.empty(config.vocab_size, config.width, dtype=dtype, device=device),
            _freeze=True,
        )
        self.layers = nn.ModuleList(
            Block(config, layer, encoding, backend, dtype, device) for layer in range(config.layers)
        )
        self.norm = RMSNorm(config.width, config.norm_eps, dtype, device)
        self.head = Linear(config.width, config.vocab_size, dtype=dtype, device=device)
        if config.tied_embeddings:
            self.embed.weight = self.head.weight

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits [S, vocab] of `batch.output_rows`; keys and values of all rows are stored."""
        x = self.encoding.embed(self.embed(batch.tokens), batch.positions)
        for index, block in enumerate(self.layers):
            x = block(x, batch, kv.layer(index))
        x = self.norm(x[batch.output_rows])
        logits: Tensor = self.head(x)
        return logits
