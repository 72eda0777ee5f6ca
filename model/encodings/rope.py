"""Rotary position embedding: rotates pairs of query and key coordinates by the position.

Keys are rotated once, when they are written: by their position, by their offset within the block,
or not at all. Attention applies what is left. Frequencies are fixed when the model is loaded, so
nothing that happens later invalidates stored keys.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, get_args

import torch
from torch import Tensor

from ropewalk.cache.kv import sent
from ropewalk.cache.types import Capability, KeyStorage, Op
from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    MAX_POSITIONS,
    EncodingError,
    PositionalEncoding,
    chunks,
    inherits,
    need_integer,
    need_table,
    work_of_scales,
)
from ropewalk.model.encodings.common.cost import NO_WORK, PositionalWork
from ropewalk.model.encodings.common.rope_scaling import Scaling, frequencies, scaling_from
from ropewalk.model.encodings.common.rotary import Far, Layout, Rotation, rotate_pairs

REQUIRED = frozenset({"base", "width", "layout"})


class RoPE(PositionalEncoding):
    """Su et al., RoFormer (arXiv 2104.09864), section 3.2.

    Pair i of the first `width` coordinates rotates by base^(-2i / width) radians per position,
    unless a scaling changes that. `half` pairs coordinate i with i + width/2 (Llama as published
    on Hugging Face), `interleaved` pairs 2i with 2i + 1 (GPT-J). Coordinates past `width` are
    unchanged.

    `near` and `group` serve longer contexts than a model was trained for, without training. Keys
    nearer than `near` are rotated as ever. For those farther away, positions are divided by
    `group` and rounded down, and the query's has near - near // group added, so that distances
    go on from there (Self-Extend, arXiv 2401.01325). In one group of all positions, every far key
    is as if at distance `near` (Su's ReRoPE).

    `query_scale` multiplies the query at position m by 1 + beta · log(1 + ⌊m / original_context⌋),
    in layers that are rotated by `base` (Ministral 3), so that attention stays sharp among many
    keys.

    Under `dynamic` and `longrope` the frequencies of a published model depend on the length of
    the sequence, which would invalidate keys cached earlier. Here they are those for the served
    context, whatever the sequence's length; `frequencies_at` gives them for any other length.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "base": "pair i rotates by base^(-2i / width) radians per position",
        "width": "how many coordinates of each head are rotated, an even number",
        "layout": "which coordinates form a pair: half (i and i + width/2) or interleaved (2i and "
        "2i + 1)",
        "scaling": "how frequencies are adapted to long contexts: an object with type (linear, "
        "dynamic, yarn, longrope, llama3, proportional or factors) and that type's parameters; "
        "default none",
        "layers": "indices of the layers whose queries and keys are rotated; default all",
        "elsewhere": "how the other layers are rotated: an object with base, width, layout and "
        "perhaps scaling; default not at all",
        "query_scale": "what queries are multiplied by in the layers that layers names, 1 + beta · "
        "log(1 + ⌊position / original_context⌋): an object with beta and original_context; default "
        "none",
        "near": "the distance from which on keys are rotated as group says, for contexts "
        "longer than trained; storage is raw then; default none",
        "group": "how many positions share one rotation for far keys, as in Self-Extend; default "
        "all, as in ReRoPE",
        "storage": "how stored keys are rotated: absolute (by their position), raw (not at all) or "
        "block (by their offset within the block); default absolute",
    }
    LIMIT = "the served context: angles are tabulated for its positions only"
    BEYOND_TRAINED = (
        "computes as before, but distances past the trained length rotate slow pairs by angles "
        "never seen in training, so answers degrade unless a scaling is made for them or near and "
        "group are set"
    )

    def __init__(
        self,
        *,
        base: float,
        width: int,
        layout: Layout,
        context: int,
        device: torch.device,
        scaling: Scaling | None = None,
        layers: Sequence[int] | None = None,
        elsewhere: "RoPE | None" = None,
        storage: KeyStorage = KeyStorage.ABSOLUTE,
        near: int | None = None,
        group: int | None = None,
        query_scale: tuple[float, int] | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.width = width
        self.layout = layout
        self.scaling = scaling
        self.layers = None if layers is None else frozenset(layers)
        self.key_storage = storage
        self.max_positions = context
        self.elsewhere = elsewhere or PositionalEncoding()  # that of the other layers
        self.frequencies = self.frequencies_at(context)
        # The factor on the norms of queries and keys. The tables include it, so moving a stored
        # key must not apply it again.
        self.magnitude = 1.0 if scaling is None else scaling.norm_factor()
        self.scales: Tensor | None = None
        if query_scale is not None:
            beta, original = query_scale
            passed = torch.arange(context) // original
            self.scales = (1 + beta * torch.log1p(passed.double()))[:, None].float().to(device)
        # Plain attributes, so that casting the model leaves them alone.
        tables = self.tables(context)
        cos, sin = (table.to(device) for table in tables)
        # Scaled before the move: products on "meta" make torch import modules for seconds.
        self.cos, self.sin = ((table * self.magnitude).to(device) for table in tables)
        self.left: Rotation | None = None  # what is left to attention
        if storage is KeyStorage.RAW:
            far = None if near is None else _far(near, group or context, context, device)
            self.left = Rotation(self.cos, self.sin, layout, storage, far=far)
        elif storage is KeyStorage.BLOCK:  # stored keys include the magnitude already
            self.left = Rotation(cos, sin, layout, storage, self.magnitude)

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Options: OPTIONS above; base, width and layout are required.

        `context` selects the frequencies of a scaling that depends on the length.
        """
        if not REQUIRED <= options.keys() <= cls.OPTIONS.keys():
            raise EncodingError(
                "rope takes the options base, width and layout, and optionally scaling, layers, "
                "elsewhere, query_scale, near, group and storage, but got "
                f"{sorted(options)}."
            )
        base, width, layout = options["base"], options["width"], options["layout"]
        need_table("rope", context, width // 2)
        if not base > 0:
            raise EncodingError(f"rope needs a base above 0, but got {base}.")
        if width % 2 or not 0 < width <= config.head_dim:
            raise EncodingError(
                f"rope needs an even width of at most head_dim {config.head_dim}, but got {width}."
            )
        if layout not in get_args(Layout):
            raise EncodingError(f"rope's layout must be half or interleaved, but is {layout!r}.")
        scaling, layers = options.get("scaling"), options.get("layers")
        if layers is not None and not set(layers) <= set(range(config.num_layers)):
            raise EncodingError(
                f"rope's layers must be indices from 0 to {config.num_layers - 1}, "
                f"but are {list(layers)}."
            )
        near, group = options.get("near"), options.get("group")
        for name in ("near", "group"):
            if options.get(name) is not None:
                need_integer("rope", name, options[name], 1, MAX_POSITIONS)
        if group is not None and near is None:
            raise EncodingError("rope's group says how far keys are rotated; set near as well.")
        usual = KeyStorage.ABSOLUTE if near is None else KeyStorage.RAW
        storage = options.get("storage", usual)
        if storage not in list(KeyStorage):
            raise EncodingError(
                f"rope's storage must be one of {', '.join(KeyStorage)}, but is {storage!r}."
            )
        if near is not None and storage != KeyStorage.RAW:
            raise EncodingError(
                "rope's near gives a key two rotations, so keys must be stored without any: leave "
                f"storage out, or set it to raw instead of {storage}."
            )
        elsewhere = options.get("elsewhere")
        if elsewhere is not None:
            given = elsewhere.keys() if isinstance(elsewhere, Mapping) else set()
            if layers is None or not REQUIRED <= given <= REQUIRED | {"scaling"}:
                raise EncodingError(
                    "rope's elsewhere needs layers, and has itself only base, width, layout and "
                    f"scaling, but is {elsewhere!r}."
                )
            elsewhere = cls.create({**elsewhere, "storage": storage}, config, context, device)
        return cls(
            base=base,
            width=width,
            layout=layout,
            context=context,
            device=device,
            scaling=None if scaling is None else scaling_from(scaling),
            layers=layers,
            elsewhere=elsewhere,
            storage=KeyStorage(storage),
            near=near,
            group=group,
            query_scale=_query_scale(options.get("query_scale")),
        )

    @classmethod
    def usual_options(cls, config: ModelConfig) -> dict[str, Any]:
        return {"base": 10000.0, "width": config.head_dim, "layout": "half"}

    def fixed_tensors(self) -> dict[str, Tensor]:
        tensors = {"cos": self.cos, "sin": self.sin, "frequencies": self.frequencies}
        if self.left is not None:
            tensors |= {"left.cos": self.left.cos, "left.sin": self.left.sin}
            if self.left.far is not None:
                tensors |= {"far.queries": self.left.far.queries, "far.keys": self.left.far.keys}
        if self.scales is not None:
            tensors["query_scales"] = self.scales
        others = self.elsewhere.fixed_tensors()
        return tensors | {f"elsewhere.{name}": tensor for name, tensor in others.items()}

    def frequencies_at(self, length: int) -> Tensor:
        """[width / 2] radians per position that the published model uses at this length.

        Depends on the length under `dynamic` and `longrope` only. For an audit of what following
        the length would do to cached keys.
        """
        if self.scaling is None:
            return frequencies(self.base, self.width)
        return self.scaling.frequencies(self.base, self.width, length)

    def tables(self, context: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0 .. context - 1, [context, width / 2] float32.

        float32 whatever the model's dtype: in bfloat16, neighbouring positions share an angle from
        position 256 on. Angles are rounded to float32 as in published models, except in the block
        storage: there two angles add up, and their rounded sum is not the sum of rounded angles.
        """
        exact = torch.float64 if self.key_storage is KeyStorage.BLOCK else torch.float32
        cos, sin = (torch.empty(context, self.width // 2) for _ in range(2))
        for rows in chunks(context):
            angles = rows.to(exact)[:, None] * self.frequencies
            cos[rows], sin[rows] = angles.cos().float(), angles.sin().float()
        return cos, sin

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of this layer are rotated."""
        return self.layers is None or layer in self.layers

    def query_scales(self) -> Tensor | None:
        return self.scales

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        match self.key_storage:
            case KeyStorage.ABSOLUTE:
                cos, sin = self.cos[positions], self.sin[positions]
                rotated = rotate_pairs(q, cos, sin, self.layout)
                return rotated, rotate_pairs(k, cos, sin, self.layout)
            case KeyStorage.BLOCK:
                return q, rotate_pairs(k, self.cos[offsets], self.sin[offsets], self.layout)
            case KeyStorage.RAW:
                return q, k

    def rotation(self) -> Rotation | None:
        return self.left

    def for_layer(self, layer: int) -> PositionalEncoding:
        return self if self.rotates(layer) else self.elsewhere

    def capability(self, op: Op, dtype: torch.dtype) -> Capability:
        """Moving a key that carries its position's rotation requires rotating it further."""
        if self.key_storage is not KeyStorage.ABSOLUTE or op not in (
            Op.EVICT_RENUMBER,
            Op.MOVE_SPAN,
        ):
            return Capability.FREE
        return Capability.REWRITE if dtype.itemsize >= 4 else Capability.APPROXIMATE

    def shift(self, keys: Tensor, delta: int) -> Tensor:
        """Rotate by the whole distance at once, in float32 or wider, without scaling.

        Stored keys already include a scaling's magnitude, which must not be applied twice.
        """
        # Angles in float64: a float32 product is off by 2e-3 radians at distance 32,000.
        angles = (delta * self.frequencies.double())[None]
        flat = keys.reshape(-1, *keys.shape[-2:])
        cos, sin = sent(torch.stack((angles.cos(), angles.sin())).float(), keys.device)
        return rotate_pairs(flat, cos, sin, self.layout).view(keys.shape)

    def work(self, config: ModelConfig, context: int, block_size: int) -> PositionalWork:
        """Six operations for each rotated pair, and a row of both tables for each angle.

        Absolute: the new query and key. Raw: the query and every key; the query twice where far
        keys are rotated otherwise. Block: the query once per block, and the new key; a kernel may
        rotate each block's keys instead when they are fewer than the queries that attend to them.
        """
        by_rule: dict[PositionalEncoding, list[int]] = {}
        for layer, keys in enumerate(config.seen(context)):
            by_rule.setdefault(self.for_layer(layer), []).append(keys)
        total = NO_WORK
        for own, seen in by_rule.items():
            if isinstance(own, RoPE):
                total += own._work(config, seen, block_size)
        return total

    def _work(self, config: ModelConfig, keys: Sequence[int], block_size: int) -> PositionalWork:
        """Of layers that see so many keys."""
        match self.key_storage:
            case KeyStorage.ABSOLUTE:
                queries, rotated, angles = len(keys), len(keys), 1
            case KeyStorage.RAW:
                twice = self.left is not None and self.left.far is not None
                queries, rotated, angles = len(keys) * (1 + twice), sum(keys), max(keys) + twice
            case KeyStorage.BLOCK:
                blocks = [-(-count // block_size) for count in keys]
                queries, rotated, angles = sum(blocks), len(keys), max(blocks) + 1
        heads = config.num_heads * queries + config.num_kv_heads * rotated
        rotated_by = PositionalWork(
            rotations=heads,
            flops=heads * 3 * self.width,
            bytes=angles * self.width * self.cos.element_size(),
        )
        return rotated_by + work_of_scales(self.query_scales(), config, len(keys))


def _query_scale(given: object) -> tuple[float, int] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.keys() != {"beta", "original_context"}:
        raise EncodingError(
            f"rope's query_scale must have beta and original_context, but is {given!r}."
        )
    beta = given["beta"]
    if type(beta) not in (int, float) or not 0 <= beta < math.inf:
        raise EncodingError(
            f"rope's query_scale needs a finite beta of at least 0, but got {beta!r}."
        )
    need_integer("rope", "original_context", given["original_context"], 1, MAX_POSITIONS)
    return float(beta), given["original_context"]


def _far(near: int, group: int, context: int, device: torch.device) -> Far:
    """Positions of the tables for far keys, and for queries that see them; see RoPE."""
    grouped = torch.arange(context) // group
    # Nothing is far in a context that short, but kernels may look at rows of the table.
    of_queries = (grouped + near - near // group).clamp(max=context - 1)
    return Far(near, of_queries.to(device), grouped.to(device))


def tables_of(encoding: PositionalEncoding, head_dim: int) -> RoPE | None:
    """The encoding, if it rotates exactly as RoPE does, by tables that kernels can read."""
    if not isinstance(encoding, RoPE) or not inherits("rotate", encoding, RoPE):
        return None
    cos, sin = encoding.cos, encoding.sin
    fits = (
        cos.dtype is sin.dtype is torch.float32
        and cos.shape == sin.shape
        and cos.dim() == 2
        and len(cos) >= (encoding.max_positions or math.inf)
        and 2 * cos.shape[1] <= head_dim
    )
    return encoding if fits else None
