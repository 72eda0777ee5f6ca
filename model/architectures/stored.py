"""Maps the decoder's parameters to the tensors of a checkpoint: name, shape and order.

Knows both formats' names for the usual decoders; opens no files.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ropewalk.model.config import ModelConfig


class Order(ABC):
    """How the elements of a stored tensor are ordered, if not as in the decoder."""

    __slots__ = ()

    @abstractmethod
    def undo(self, tensor: Tensor) -> Tensor:
        """The tensor in the decoder's order; its first dimension is the parameter's rows."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of what `undo` returns for a tensor of the shape `stored`."""
        return stored


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor that becomes consecutive rows of a parameter."""

    name: str
    shape: tuple[int, ...]  # as stored
    order: Order | None = None
    expert: int | None = None  # whose part of a tensor [experts, ...] it is; None: all of it

    @property
    def result(self) -> tuple[int, ...]:
        """Its shape as part of the parameter."""
        shape = self.shape if self.expert is None else self.shape[1:]
        return shape if self.order is None else self.order.shape(shape)


@dataclass(frozen=True, slots=True)
class Pairs(Order):
    """Row order of stored queries or keys where coordinates 2i and 2i + 1 of a head form a pair.

    The decoder's half layout has them at i and width/2 + i.
    """

    num_heads: int
    width: int  # leading coordinates of each head that are rotated

    def undo(self, tensor: Tensor) -> Tensor:
        """[heads · head_dim, ...] in stored order → the same in half layout."""
        rows = tensor.reshape(self.num_heads, -1, *tensor.shape[1:]).clone()
        rotated = rows[:, : self.width]
        pairs = rotated.reshape(self.num_heads, self.width // 2, 2, *tensor.shape[1:])
        rows[:, : self.width] = pairs.transpose(1, 2).reshape(rotated.shape)
        return rows.reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class Transposed(Order):
    """Stored as [inputs, outputs], like GPT-2's linear layers."""

    def undo(self, tensor: Tensor) -> Tensor:
        return tensor.t()

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[::-1]


@dataclass(frozen=True, slots=True)
class LessOne(Order):
    """Stored as the difference from 1, like the norms of Gemma."""

    def undo(self, tensor: Tensor) -> Tensor:
        return 1 + tensor.float()  # rounded once, when it is copied to the decoder


@dataclass(frozen=True, slots=True)
class FusedByHead(Order):
    """Rows of q, k and v alternate head by head: [heads, 3, head_dim, ...]."""

    num_heads: int

    def undo(self, tensor: Tensor) -> Tensor:
        """The same rows as all of q, then all of k, then all of v."""
        rows = tensor.reshape(self.num_heads, 3, -1, *tensor.shape[1:])
        return rows.transpose(0, 1).reshape(tensor.shape)


Parameters = Mapping[str, tuple[Stored, ...]]  # parameter of the Decoder → its rows, in order


@dataclass(frozen=True, slots=True)
class Names:
    """A family's names for the tensors of a decoder, without .weight and .bias.

    Of experts, `gate`, `up` and `down` have {} for their index, or name one tensor of all.
    """

    embed: str
    norm: str
    head: str
    layer: str  # with {} for its index
    attention_norm: str
    qkv: tuple[str, ...]  # one name when fused, else q, k and v
    out: str
    mlp_norm: str | None  # None: the MLP shares the attention's norm
    up: str
    down: str
    gate: str | None = None  # None in a gated MLP: `up` starts with the gate's rows
    router: str | None = None  # of experts
    q_norm: str | None = None
    k_norm: str | None = None
    attention_post_norm: str | None = None  # of what attention found, before it is added
    mlp_post_norm: str | None = None
    embed_norm: str | None = None
    positions: str | None = None  # the learned encoding's table
    project_in: str | None = None
    project_out: str | None = None


HUGGING_FACE = Names(
    embed="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
BLOOM = Names(
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",  # Falcon has none
    norm="transformer.ln_f",
    head="lm_head",
    layer="transformer.h.{}.",
    attention_norm="input_layernorm",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
GGUF = Names(
    embed="token_embd",
    embed_norm="token_embd_norm",
    positions="position_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    out="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)
GGUF_FUSED = replace(GGUF, qkv=("attn_qkv",), gate=None)

Piece = tuple[str, int, Order | None]  # stored name, rows


def decoder(
    config: ModelConfig,
    names: Names,
    *,
    qkv_orders: Sequence[Order | None] = (),
    norm_order: Order | None = None,
    transposed: bool = False,
) -> Parameters:
    """Every parameter of a Decoder of this shape.

    qkv_orders: row orders for each of `names.qkv`, for weights and biases alike. norm_order: that
    of all norms' weights. transposed: the layers' matrices are stored as [inputs, outputs].
    """
    found: dict[str, tuple[Stored, ...]] = {}

    def add(parameter: str, stored: str, *shape: int, order: Order | None = None) -> None:
        found[parameter] = (Stored(stored, shape, order),)

    width, embedded = config.hidden_size, config.embed_width or config.hidden_size
    add("embed.weight", f"{names.embed}.weight", config.vocab_size, embedded)
    if config.encoding.name == "learned":
        options = config.encoding.options
        rows = options["positions"] + options["offset"]
        add("encoding.table", f"{names.positions}.weight", rows, width)
    if config.embed_width is not None:
        add("project_in.weight", f"{names.project_in}.weight", width, embedded)
        add("project_out.weight", f"{names.project_out}.weight", embedded, width)
    for layer in range(config.num_layers):
        own = names.layer.format(layer)
        if config.experts is not None:
            at, count = f"layers.{layer}.mlp.experts.", config.experts.count
            add(f"{at}router.weight", f"{own}{names.router}.weight", count, width)
            for expert in range(count):
                for name, (_, columns, pieces) in _of_mlp(config, names).items():
                    found[f"{at}{expert}.{name}.weight"] = tuple(
                        _of_expert(f"{own}{piece}.weight", count, expert, rows, columns)
                        for piece, rows, _ in pieces
                    )
        for name, (bias, columns, pieces) in _linears(config, names, qkv_orders).items():
            found[f"layers.{layer}.{name}.weight"] = tuple(
                Stored(f"{own}{piece}.weight", (columns, rows), Transposed())
                if transposed
                else Stored(f"{own}{piece}.weight", (rows, columns), order)
                for piece, rows, order in pieces
            )
            if bias:
                found[f"layers.{layer}.{name}.bias"] = tuple(
                    Stored(f"{own}{piece}.bias", (rows,), order) for piece, rows, order in pieces
                )
        if config.qk_norm:
            at, (of_q, of_k) = f"layers.{layer}.attention.", config.qk_norm_widths
            add(f"{at}q_norm.weight", f"{own}{names.q_norm}.weight", of_q, order=norm_order)
            add(f"{at}k_norm.weight", f"{own}{names.k_norm}.weight", of_k, order=norm_order)
    for name, stored_name in _norms(config, names).items():
        add(f"{name}.weight", f"{stored_name}.weight", width, order=norm_order)
        if config.norm_bias:
            add(f"{name}.bias", f"{stored_name}.bias", width)
    if not config.tied_embeddings:
        add("head.weight", f"{names.head}.weight", config.vocab_size, embedded)
    if config.head_bias:
        add("head.bias", f"{names.head}.bias", config.vocab_size)
    return found


def _norms(config: ModelConfig, names: Names) -> dict[str, str | None]:
    """The norms over the whole width; those of queries and keys are narrower."""
    found: dict[str, str | None] = {}
    if config.embed_norm:
        found["embed_norm"] = names.embed_norm
    if config.block != "post_norm":
        found["norm"] = names.norm
    for layer in range(config.num_layers):
        own = names.layer.format(layer)
        of_layer = {
            "attention_norm": names.attention_norm,
            "attention_post_norm": names.attention_post_norm,
            "mlp_norm": names.mlp_norm,
            "mlp_post_norm": names.mlp_post_norm,
        }
        for name, stored_name in of_layer.items():
            if stored_name is not None:
                found[f"layers.{layer}.{name}"] = own + stored_name
    return found


def _linears(
    config: ModelConfig, names: Names, qkv_orders: Sequence[Order | None]
) -> dict[str, tuple[bool, int, tuple[Piece, ...]]]:
    """Parameter → (whether it has a bias, columns, pieces)."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = config.hidden_size
    found = {
        "attention.qkv": (
            config.qkv_bias,
            width,
            _pieces(names.qkv, (q_rows, kv_rows, kv_rows), qkv_orders),
        ),
        "attention.out": (config.out_bias, q_rows, ((names.out, width, None),)),
    }
    if config.experts is None:
        found |= {f"mlp.{name}": linear for name, linear in _of_mlp(config, names).items()}
    return found


def _of_mlp(config: ModelConfig, names: Names) -> dict[str, tuple[bool, int, tuple[Piece, ...]]]:
    """The same for an MLP, or for one expert."""
    width, inside, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    up = (names.up,) if names.gate is None or not config.gated else (names.gate, names.up)
    rows = (inside, inside) if config.gated else (inside,)
    return {
        "gate_up" if config.gated else "up": (bias, width, _pieces(up, rows)),
        "down": (bias, inside, ((names.down, width, None),)),
    }


def _of_expert(name: str, experts: int, expert: int, rows: int, columns: int) -> Stored:
    if "{}" in name:
        return Stored(name.format(expert), (rows, columns))
    return Stored(name, (experts, rows, columns), expert=expert)


def _pieces(
    names: Sequence[str], rows: Sequence[int], orders: Sequence[Order | None] = ()
) -> tuple[Piece, ...]:
    """One piece for each of `rows`, or a single one for all of them."""
    counts = [sum(rows)] if len(names) == 1 else rows
    return tuple(zip(names, counts, orders or [None] * len(names), strict=True))
