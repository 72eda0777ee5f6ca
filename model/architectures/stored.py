"""From the decoder's parameters to the tensors a checkpoint stores, by name, shape and order.

Knows both formats' names for the usual gated decoder; opens no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.config import ModelConfig


class Order(Protocol):
    """How the numbers of a stored tensor lie, if not as the decoder wants them."""

    def undo(self, tensor: Tensor) -> Tensor:
        """The same numbers as the decoder has them; the first dimension is that of its rows."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor that becomes consecutive rows of a parameter."""

    name: str
    shape: tuple[int, ...]  # as stored
    order: Order | None = None

    @property
    def result(self) -> tuple[int, ...]:
        """The shape it has in the parameter."""
        if self.order is None:
            return self.shape
        return tuple(self.order.undo(torch.empty(self.shape, device="meta")).shape)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Row order of stored queries or keys: coordinates 2i and 2i + 1 of a head turn together.

    The decoder's half-split layout wants them at i and width/2 + i.
    """

    heads: int
    width: int  # leading coordinates of each head that turn

    def undo(self, tensor: Tensor) -> Tensor:
        """[heads · head_dim, ...] in stored order → the same in half-split order."""
        rows = tensor.reshape(self.heads, -1, *tensor.shape[1:]).clone()
        turning = rows[:, : self.width]
        pairs = turning.reshape(self.heads, self.width // 2, 2, *tensor.shape[1:])
        rows[:, : self.width] = pairs.transpose(1, 2).reshape(turning.shape)
        return rows.reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Stored [inputs, outputs], as GPT-2's linear layers are."""

    def undo(self, tensor: Tensor) -> Tensor:
        return tensor.t()


@dataclass(frozen=True, slots=True)
class FusedByHead:
    """Rows of q, k and v lie side by side for each head in turn: [heads, 3, head_dim, ...]."""

    heads: int

    def undo(self, tensor: Tensor) -> Tensor:
        """The same rows as all of q, all of k, all of v."""
        rows = tensor.reshape(self.heads, 3, -1, *tensor.shape[1:])
        return rows.transpose(0, 1).reshape(tensor.shape)


Parameters = Mapping[str, tuple[Stored, ...]]  # parameter of the Decoder → its rows, in order


@dataclass(frozen=True, slots=True)
class Names:
    """What a format calls the tensors of a gated decoder, without .weight and .bias."""

    embed: str
    norm: str
    head: str
    layer: str  # with {} for its index
    attention_norm: str
    q: str
    k: str
    v: str
    out: str
    q_norm: str
    k_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str


HUGGING_FACE = Names(
    embed="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    out="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
GGUF = Names(
    embed="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    out="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


def gated_decoder(config: ModelConfig, names: Names, paired_width: int | None) -> Parameters:
    """Every parameter of a Decoder of this shape.

    paired_width: leading coordinates of each head whose q and k rows are stored in pairs, or
    None when they are stored in halves.
    """
    vocabulary = (config.vocab_size, config.width)
    found: dict[str, tuple[Stored, ...]] = {
        "embed.weight": (Stored(f"{names.embed}.weight", vocabulary),),
        "norm.weight": (Stored(f"{names.norm}.weight", (config.width,)),),
    }
    if not config.tied_embeddings:
        found["head.weight"] = (Stored(f"{names.head}.weight", vocabulary),)
    for layer in range(config.layers):
        stored = names.layer.format(layer)
        for name, rows in _layer(config, names, paired_width).items():
            found[f"layers.{layer}.{name}"] = tuple(
                Stored(stored + row.name, row.shape, row.order) for row in rows
            )
    return found


def _layer(config: ModelConfig, names: Names, paired_width: int | None) -> Parameters:
    """One layer's parameters, both sides named without the layer."""
    width, ffn_width, head_dim = config.width, config.ffn_width, config.head_dim
    q_rows, kv_rows = config.heads * head_dim, config.kv_heads * head_dim
    q_pairs = k_pairs = None
    if paired_width is not None:
        q_pairs = Pairs(config.heads, paired_width)
        k_pairs = Pairs(config.kv_heads, paired_width)
    linears = {  # parameter: has a bias, columns, (stored name, rows, order) of each piece
        "attention.qkv": (
            config.qkv_bias,
            width,
            ((names.q, q_rows, q_pairs), (names.k, kv_rows, k_pairs), (names.v, kv_rows, None)),
        ),
        "attention.out": (config.out_bias, q_rows, ((names.out, width, None),)),
        "mlp.gate_up": (
            config.mlp_bias,
            width,
            ((names.gate, ffn_width, None), (names.up, ffn_width, None)),
        ),
        "mlp.down": (config.mlp_bias, ffn_width, ((names.down, width, None),)),
    }
    found: dict[str, tuple[Stored, ...]] = {
        "attention_norm.weight": (Stored(f"{names.attention_norm}.weight", (width,)),),
        "mlp_norm.weight": (Stored(f"{names.mlp_norm}.weight", (width,)),),
    }
    if config.qk_norm:
        found["attention.q_norm.weight"] = (Stored(f"{names.q_norm}.weight", (head_dim,)),)
        found["attention.k_norm.weight"] = (Stored(f"{names.k_norm}.weight", (head_dim,)),)
    for name, (bias, columns, pieces) in linears.items():
        found[f"{name}.weight"] = tuple(
            Stored(f"{piece}.weight", (rows, columns), pairs) for piece, rows, pairs in pieces
        )
        if bias:
            found[f"{name}.bias"] = tuple(
                Stored(f"{piece}.bias", (rows,), pairs) for piece, rows, pairs in pieces
            )
    return found


@dataclass(frozen=True, slots=True)
class PlainNames:
    """What a family calls the tensors of a decoder without gates, without .weight and .bias."""

    embed: str
    norm: str
    head: str
    layer: str  # with {} for its index
    attention_norm: str
    qkv: tuple[str, ...]  # one name when fused, else q, k and v
    out: str
    mlp_norm: str | None  # None: the MLP reads the attention's norm
    up: str
    down: str
    embed_norm: str | None = None
    positions: str | None = None  # the learned encoding's table
    project_in: str | None = None
    project_out: str | None = None


PLAIN_GGUF = PlainNames(
    embed="token_embd",
    embed_norm="token_embd_norm",
    positions="position_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    qkv=("attn_qkv",),
    out="attn_output",
    mlp_norm="ffn_norm",
    up="ffn_up",
    down="ffn_down",
)


def plain_decoder(
    config: ModelConfig,
    names: PlainNames,
    *,
    qkv_order: Order | None = None,
    transposed: bool = False,
) -> Parameters:
    """Every parameter of a decoder with plain feed-forwards.

    qkv_order: of the rows of a fused q, k, v, weights and biases alike.
    transposed: the layers' matrices are stored [inputs, outputs].
    """
    embedded = config.embed_width or config.width
    vocabulary = (config.vocab_size, embedded)
    found: dict[str, tuple[Stored, ...]] = {
        "embed.weight": (Stored(f"{names.embed}.weight", vocabulary),)
    }
    if config.encoding.name == "learned":
        options = config.encoding.options
        table = (options["positions"] + options["offset"], config.width)
        found["encoding.table"] = (Stored(f"{names.positions}.weight", table),)
    if config.embed_width is not None:
        found["project_in.weight"] = (
            Stored(f"{names.project_in}.weight", (config.width, embedded)),
        )
        found["project_out.weight"] = (
            Stored(f"{names.project_out}.weight", (embedded, config.width)),
        )
    for layer in range(config.layers):
        own = names.layer.format(layer)
        for name, (bias, columns, pieces) in _plain_linears(config, names).items():
            order = qkv_order if name == "attention.qkv" else None
            found[f"layers.{layer}.{name}.weight"] = tuple(
                Stored(f"{own}{piece}.weight", (columns, rows), Transposed())
                if transposed
                else Stored(f"{own}{piece}.weight", (rows, columns), order)
                for piece, rows in pieces
            )
            if bias:
                found[f"layers.{layer}.{name}.bias"] = tuple(
                    Stored(f"{own}{piece}.bias", (rows,), order) for piece, rows in pieces
                )
    for name, stored_name in _plain_norms(config, names).items():
        found[f"{name}.weight"] = (Stored(f"{stored_name}.weight", (config.width,)),)
        if config.norm_bias:
            found[f"{name}.bias"] = (Stored(f"{stored_name}.bias", (config.width,)),)
    if not config.tied_embeddings:
        found["head.weight"] = (Stored(f"{names.head}.weight", vocabulary),)
    if config.head_bias:
        found["head.bias"] = (Stored(f"{names.head}.bias", (config.vocab_size,)),)
    return found


def _plain_norms(config: ModelConfig, names: PlainNames) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    if config.embed_norm:
        found["embed_norm"] = names.embed_norm
    if config.block != "post_norm":
        found["norm"] = names.norm
    for layer in range(config.layers):
        own = names.layer.format(layer)
        found[f"layers.{layer}.attention_norm"] = own + names.attention_norm
        if names.mlp_norm is not None:
            found[f"layers.{layer}.mlp_norm"] = own + names.mlp_norm
    return found


def _plain_linears(
    config: ModelConfig, names: PlainNames
) -> dict[str, tuple[bool, int, tuple[tuple[str, int], ...]]]:
    """Parameter → has a bias, columns, (stored name, rows) of each piece."""
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = (q_rows + 2 * kv_rows,) if len(names.qkv) == 1 else (q_rows, kv_rows, kv_rows)
    return {
        "attention.qkv": (config.qkv_bias, config.width, tuple(zip(names.qkv, rows, strict=True))),
        "attention.out": (config.out_bias, q_rows, ((names.out, config.width),)),
        "mlp.up": (config.mlp_bias, config.width, ((names.up, config.ffn_width),)),
        "mlp.down": (config.mlp_bias, config.ffn_width, ((names.down, config.width),)),
    }
