"""Tiny random decoders, and encodings that exist only to exercise the hooks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ropewalk.model.attention.base import AttentionBackend
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import (
    LinearBias,
    PairBias,
    PositionalEncoding,
    TableBias,
    create,
    freeze_all,
)
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.kernels.triton.executor import TritonExecutor
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.program import Attend, Program, Rotate, encoding_parameters, quantized
from ropewalk.model.recipes import allocate, program

CPU = torch.device("cpu")
CONTEXT = 256
ROPE = {"base": 10000.0, "width": 8, "layout": "half"}
YARN = {"type": "yarn", "factor": 4.0, "original_context": 64}
BY_LAYER = {
    "layers": [1],
    "elsewhere": {"base": 90.0, "width": 6, "layout": "interleaved", "scaling": YARN},
}
T5 = {"buckets": 32, "max_distance": 128}

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    norm_eps=1e-5,
    trained_context=CONTEXT,
    encoding=EncodingSpec("rope", ROPE),
    windows=(None, None, None),
)


class Linear(PositionalEncoding):
    """A score bias by slope."""

    @classmethod
    def create(cls, options, config, context, device):
        made = cls()
        made.slopes = 2.0 ** -torch.arange(1, config.num_heads + 1, dtype=torch.float32)
        return made

    def score_bias(self):
        return LinearBias(self.slopes)


class Table(PositionalEncoding):
    """A score bias by table, shorter than the context."""

    @classmethod
    def create(cls, options, config, context, device):
        made = cls()
        generator = torch.Generator().manual_seed(7)
        made.table = torch.randn(config.num_heads, 37, generator=generator)
        return made

    def score_bias(self):
        return TableBias(self.table, zero=3)


class Fire(PositionalEncoding):
    """A score bias of distance and position, as in FIRE (arXiv 2310.04418): no table."""

    @classmethod
    def create(cls, options, config, context, device):
        made, wide = cls(), {"dtype": torch.float64, "device": device}
        made.inner, made.outer = (torch.tensor(options[of], **wide) for of in ("inner", "outer"))
        made.threshold = options["threshold"]
        return made

    def score_bias(self):
        return PairBias(self.between)

    def between(self, queries, keys):
        """Computed in float64 and rounded once, however many keys are computed together."""
        queries, keys = queries[..., :, None].double(), keys[..., None, :].double()
        near = torch.log1p((queries - keys).clamp(min=0)) / torch.log1p(
            queries.clamp(min=self.threshold)
        )
        units = torch.relu(near[..., None] * self.inner.view(-1, *[1] * near.dim(), 5) + 0.1)
        return torch.einsum("h...n,hn->h...", units, self.outer).float()


class Sharper(PositionalEncoding):
    """Scores that grow with the number of keys (scalable softmax, arXiv 2501.19399)."""

    @classmethod
    def create(cls, options, config, context, device):
        made, keys = cls(), torch.arange(1, context + 1, device=device)
        by_head = torch.tensor(options["by_head"], device=device)
        made.scales = keys.log()[:, None] * by_head
        return made

    def fixed_tensors(self):
        return {"scales": self.scales}

    def query_scales(self):
        return self.scales


class WideRoPE(RoPE):
    """With exact angles and tables, so that two rotations equal one over the whole distance."""

    def tables(self, context):
        angles = torch.arange(context)[:, None] * self.frequencies.double()
        return angles.cos(), angles.sin()


class Several(WideRoPE):
    """Angles, a bias, and gates that no kernel looks into."""

    @classmethod
    def create(cls, options, config, context, device):
        made = super().create(options, config, context, device)
        made.slopes = 0.1 * 2.0 ** -torch.arange(config.num_heads, device=device)
        return made

    def fixed_tensors(self):
        return super().fixed_tensors() | {"slopes": self.slopes}

    def score_bias(self):
        return LinearBias(self.slopes)

    def gates(self, x):
        """log(1 - sigmoid(y)) of numbers of x itself."""
        return -F.softplus(x[:, : CONFIG.num_heads].to(torch.promote_types(x.dtype, torch.float32)))


class Shaw(PositionalEncoding):
    """Relative keys, clipped: each query meets one for each distance (arXiv 1803.02155)."""

    @classmethod
    def create(cls, options, config, context, device):
        made = cls()
        size = (config.num_layers, options["clip"] + 1, config.head_dim)
        generator = torch.Generator().manual_seed(9)
        made.keys = torch.randn(size, generator=generator).to(device)
        made.layers = torch.nn.ModuleList(OfLayer(keys, config.head_dim) for keys in made.keys)
        return made

    def for_layer(self, layer):
        return self.layers[layer]


class OfLayer(PositionalEncoding):
    def __init__(self, keys, dim):
        super().__init__()
        self.keys, self.scale = keys, dim**-0.5

    def fixed_tensors(self):
        return {"keys": self.keys}

    def query_bias(self, x, q):
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.to(wide) @ self.keys.to(wide).T * self.scale


class XPos(PositionalEncoding):
    """Rotated products that also decay, pair by pair, with distance (arXiv 2212.10554).

    As what must be added to the products of stored keys, which are not rotated.
    """

    def fixed_tensors(self):
        return {"frequencies": self.frequencies, "log_decays": self.log_decays}

    @classmethod
    def create(cls, options, config, context, device):
        made, pairs = cls(), torch.arange(config.head_dim // 2, dtype=torch.float64, device=device)
        made.frequencies = options["base"] ** (-2 * pairs / config.head_dim)
        made.log_decays = ((2 * pairs / config.head_dim + 0.4) / 1.4).log() / options["reach"]
        made.scale = config.head_dim**-0.5
        return made

    def content_bias(self, seen):
        distance = seen.positions[..., :, None] - seen.key_positions[..., None, :]
        distance = distance.unsqueeze(-3).double()  # [..., 1, Q, K]
        keys = seen.keys_by_head()
        (a, b), (c, d) = (each.double().chunk(2, dim=-1) for each in (seen.q, keys))
        rotated = 0.0
        for pair, (speed, decay) in enumerate(zip(self.frequencies, self.log_decays, strict=True)):
            (ai, bi), (ci, di) = ((x[..., pair], y[..., pair]) for x, y in ((a, b), (c, d)))
            along = ai[..., None] * ci[..., None, :] + bi[..., None] * di[..., None, :]
            across = ai[..., None] * di[..., None, :] - bi[..., None] * ci[..., None, :]
            angle, weight = distance * speed, (distance.clamp(min=0) * decay).exp()
            rotated = rotated + weight * (along * angle.cos() + across * angle.sin())
        return rotated * self.scale - seen.q.double() @ keys.double().mT * self.scale


WIDE_ROPE = f"{__name__}:WideRoPE"
# Of each head, five units inside its function.
FIRE = {
    "threshold": 20,
    "inner": [[0.3 * unit - 0.2 * head for unit in range(5)] for head in range(CONFIG.num_heads)],
    "outer": [
        [(unit - 2) * 0.4 + 0.1 * head for unit in range(5)] for head in range(CONFIG.num_heads)
    ],
}
ENCODINGS = {
    "nope": EncodingSpec("nope", {}),
    "rope": EncodingSpec("rope", ROPE),
    "rope-interleaved": EncodingSpec("rope", ROPE | {"layout": "interleaved"}),
    "rope-partial": EncodingSpec("rope", ROPE | {"width": 4}),
    "rope-scaled": EncodingSpec("rope", ROPE | {"scaling": YARN, "layers": [0, 2]}),
    "rope-slowed": EncodingSpec("rope", ROPE | {"scaling": {"type": "linear", "factor": 4.0}}),
    "rope-by-layer": EncodingSpec("rope", ROPE | BY_LAYER),
    "rope-sharper": EncodingSpec(
        "rope", ROPE | {"layers": [0, 2], "query_scale": {"beta": 0.4, "original_context": 9}}
    ),
    "rope-raw": EncodingSpec("rope", ROPE | {"storage": "raw"}),
    "rope-raw-scaled": EncodingSpec(
        "rope",
        ROPE | {"storage": "raw", "scaling": YARN, "layers": [0, 2], "layout": "interleaved"},
    ),
    "rope-raw-by-layer": EncodingSpec("rope", ROPE | BY_LAYER | {"storage": "raw"}),
    "rope-far": EncodingSpec("rope", ROPE | {"near": 7, "group": 3}),
    "rope-far-alike": EncodingSpec("rope", ROPE | BY_LAYER | {"near": 3}),
    "rope-block": EncodingSpec(WIDE_ROPE, ROPE | {"storage": "block"}),
    "rope-block-partial": EncodingSpec(
        WIDE_ROPE, ROPE | {"storage": "block", "width": 4, "layout": "interleaved"}
    ),
    "rope-block-scaled": EncodingSpec(
        WIDE_ROPE, ROPE | {"storage": "block", "scaling": YARN, "layers": [0, 2]}
    ),
    "t5": EncodingSpec("t5", T5),
    "t5-per-layer": EncodingSpec("t5", {"buckets": 12, "max_distance": 20, "per_layer": True}),
    "t5-table": EncodingSpec("t5", T5 | {"form": "table"}),
    "t5-materialised": EncodingSpec("t5", T5 | {"form": "materialised"}),
    "t5-materialised-per-layer": EncodingSpec(
        "t5", {"buckets": 12, "max_distance": 20, "per_layer": True, "form": "materialised"}
    ),
    "alibi": EncodingSpec("alibi", {}),
    "alibi-rounded": EncodingSpec("alibi", {"bias_max": 6, "scaled": True, "hf_exact": True}),
    "learned": EncodingSpec("learned", {"positions": CONTEXT, "offset": 2}),
    "sinusoidal": EncodingSpec("sinusoidal", {"layout": "interleaved"}),
    "sinusoidal-split": EncodingSpec(
        "sinusoidal", {"layout": "split", "slowest": "last", "offset": 2}
    ),
    "forgetting": EncodingSpec("forgetting", {}),
    "cope": EncodingSpec("cope", {"positions": 6}),
    "xpos": EncodingSpec(f"{__name__}:XPos", {"base": 100.0, "reach": 60}),
    "shaw": EncodingSpec(f"{__name__}:Shaw", {"clip": 11}),
    "sharper": EncodingSpec(
        f"{__name__}:Sharper", {"by_head": [0.2 * head + 0.1 for head in range(CONFIG.num_heads)]}
    ),
    "several": EncodingSpec(f"{__name__}:Several", ROPE | {"storage": "raw"}),
    "table": EncodingSpec(f"{__name__}:Table", {}),
    "fire": EncodingSpec(f"{__name__}:Fire", FIRE),
}
IN_KERNELS = [name for name in ENCODINGS if name not in ("cope", "xpos")]
ABSOLUTE = {"learned", "sinusoidal", "sinusoidal-split"}  # a constant added to positions matters
# What models of these encodings have besides.
SHAPES = {"t5": {"attention_scale": 1.0}}


def tiny(
    encoding: str = "rope",
    backend: AttentionBackend = ReferenceAttention,
    dtype: torch.dtype = torch.float64,
    *,
    options: Mapping[str, Any] | None = None,
    device: torch.device = CPU,
    **changes: Any,
) -> Decoder:
    """A decoder in torch with the same weights for every dtype, up to rounding, and every backend.

    options: added to the encoding's own, or replacing them. changes: to CONFIG.
    """
    spec = EncodingSpec(
        ENCODINGS[encoding].name, {**ENCODINGS[encoding].options, **(options or {})}
    )
    config = replace(CONFIG, encoding=spec, **SHAPES.get(spec.name, {}) | changes)
    made = create(config.encoding, config, CONTEXT, device)
    weights = allocate(config, made, dtype=dtype, device=device)
    parameters = dict(encoding_parameters(made)) | weights
    if config.tied_embeddings:
        del parameters["head.weight"]
    generator = torch.Generator().manual_seed(0)
    for name, parameter in parameters.items():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(_of_use(name, values, config))
    freeze_all(made)  # as after loading: tables are built from the encoding's parameters
    return in_torch(program(config, weights, made), backend)


def in_torch(program: Program, backend: AttentionBackend = ReferenceAttention) -> Decoder:
    return Decoder(program, TorchExecutor(program, backend))


def program_of(decoder: Decoder) -> Program:
    """What a decoder in torch computes, to be given to another executor."""
    assert isinstance(decoder.executor, TorchExecutor)
    return decoder.executor.program


def parameters_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Of a decoder in torch, by name."""
    return dict(program_of(decoder).named_parameters())


def on_kernels(decoder: Decoder, kernels: Kernels, bits: int = 16) -> Decoder:
    """The same on the CPU's kernels, with weights of so many bits."""
    program = program_of(decoder)
    if bits < 16:
        program = quantized(program, bits)
    return Decoder(program, CpuExecutor(program, kernels))


def on_triton(decoder: Decoder, bits: int = 16) -> Decoder:
    """The same on Triton's kernels."""
    program = program_of(decoder)
    if bits < 16:
        program = quantized(program, bits)
    return Decoder(program, TritonExecutor(program))


class Unchanged(PositionalEncoding):
    """An encoding of one layer, to override."""

    def __init__(self, inner, config, layer):
        super().__init__()
        self.inner, self.config, self.layer = inner, config, layer

    def rotate(self, q, k, positions, offsets):
        return self.inner.rotate(q, k, positions, offsets)

    def rotation(self):
        return self.inner.rotation()

    def score_bias(self):
        return self.inner.score_bias()

    def forget_gates(self):
        return self.inner.forget_gates()


def wrapped(decoder: Decoder, wrapper: type[Unchanged]) -> Decoder:
    """The same decoder with each layer's encoding in one of that class."""
    program, made = program_of(decoder), {}

    def other(op):
        if not isinstance(op, Rotate | Attend):
            return op
        layer = len(made) if isinstance(op, Rotate) else len(made) - 1
        if layer not in made:
            made[layer] = wrapper(op.encoding, program.config, layer)
        return replace(op, encoding=made[layer])

    return in_torch(replace(program, ops=tuple(map(other, program.ops))), decoder.executor.backend)


def _of_use(name: str, values: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Standard normal values → a parameter in which each one matters and no softmax is sharp."""
    if config.encoding.name == "forgetting" and name.startswith("encoding."):
        return 3 + values if name.endswith("bias") else 0.1 * values  # gates that forget slowly
    if config.encoding.name == "cope" and name.startswith("encoding."):
        values = values * 0.4  # as products with queries are not scaled
    if name.startswith("encoding."):
        return (values * 256).round() / 256  # float32 holds their sums and differences too
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    values = values * 0.35
    if config.attention_scale == 1.0 and name.endswith("attention.qkv.weight"):
        values[: config.num_heads * config.head_dim] *= config.head_dim**-0.5
    return values
