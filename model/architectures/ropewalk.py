"""Ropewalk's own checkpoints: a decoder of any shape with any positional encoding.

config.json has the fields of ModelConfig under their own names, and the weights have the names of
the decoder's parameters. Knows this correspondence, no particular encoding and no family.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, get_args

import torch

from ropewalk.model.architectures.base import Architecture
from ropewalk.model.architectures.common import Most
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.stored import Parameters, Stored
from ropewalk.model.config import (
    Activation,
    BlockKind,
    EncodingSpec,
    Experts,
    ModelConfig,
    NormKind,
)
from ropewalk.model.encodings.base import create
from ropewalk.model.program import encoding_parameters
from ropewalk.model.recipes import allocate
from ropewalk.model.weights.base import CheckpointError, WeightFile, shown

META = torch.device("meta")
# What a field was called in files of version 0.1.
FORMER = {
    "hidden_size": "width",
    "num_layers": "layers",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "intermediate_size": "ffn_width",
}
ENCODING_NAME = re.compile(r"\w+|\w+(\.\w+)*:\w+")  # a file, or package.module:Class
# What an encoding may raise for options of a wrong type: it only checks their values.
MISFITS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Ropewalk(Architecture):
    """A field with a default in ModelConfig may be omitted, so fields can be added later."""

    model_type = "ropewalk"
    shares_tokenizer = True

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        values: dict[str, Any] = {}
        for field in dataclasses.fields(ModelConfig):
            stated = fields.get(field.name) is not None
            key = field.name if stated else FORMER.get(field.name, field.name)
            value = READERS[field.name](fields, key)
            if value is not None:
                values[field.name] = value
            elif field.default is dataclasses.MISSING:
                raise fields.missing(field.name)
        fields.finish(lambda key: key in ("model_type", "eos_token_id"))
        config = ModelConfig(**values)
        if config.num_heads % config.num_kv_heads:
            raise fields.error(
                f"num_kv_heads {config.num_kv_heads} does not divide num_heads {config.num_heads}"
            )
        if len(config.windows) != config.num_layers:
            raise fields.error(
                f"windows has {len(config.windows)} entries, but num_layers is {config.num_layers}"
            )
        if config.experts is not None and (config.mlp_bias or not config.gated):
            raise fields.error("experts are gated and have no biases")
        if config.norm_bias and config.norm == "rms":
            raise fields.error("norm_bias has no effect where norm is rms")
        return config

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> Parameters:
        return {name: (Stored(name, shape),) for name, shape in shapes(config).items()}


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Those of the decoder's parameters, by name. Raises CheckpointError.

    Built for one position: the served context determines the length of tables, not what is stored.
    """
    spec = config.encoding
    try:
        encoding = create(spec, config, 1, META)
    except MISFITS as error:
        # torch adds lines of its own, and what options hold may be long.
        reason = str(error).partition("\n")[0].removesuffix(".")[:200]
        raise CheckpointError(
            f"Encoding {shown(spec.name)} cannot be made with the options "
            f"{shown(str(spec.options))}: {reason}."
        ) from error
    weights = allocate(config, encoding, dtype=torch.float32, device=META)
    if config.tied_embeddings:
        del weights["head.weight"]
    parameters = dict(encoding_parameters(encoding)) | weights
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


Reader = Callable[[Fields, str], Any]  # None where the field is null or absent


def _integer(limit: int) -> Reader:
    return lambda fields, key: fields.optional_integer(key, limit)


def _one_of(choices: tuple[str, ...]) -> Reader:
    def read(fields: Fields, key: str) -> str | None:
        value = fields.text(key)
        if value is not None and value not in choices:
            raise fields.error(f"{key} must be one of {', '.join(choices)}, not {shown(value)}")
        return value

    return read


def _windows(fields: Fields, key: str) -> tuple[int | None, ...] | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(
        window is None or (type(window) is int and 1 <= window <= Most.CONTEXT) for window in value
    ):
        raise fields.error(f"{key} must be a list of null and integers from 1 to {Most.CONTEXT}")
    return tuple(value)


def _encoding(fields: Fields, key: str) -> EncodingSpec | None:
    section = fields.section(key)
    if section is None:
        return None
    name, options = section.text("name"), section.get("options")
    section.finish()
    if name is None:
        raise section.missing("name")
    if ENCODING_NAME.fullmatch(name) is None:
        raise section.error(f"name must be an encoding or package.module:Class, not {shown(name)}")
    if not isinstance(options, dict):
        raise section.error("options must be an object")
    return EncodingSpec(name, options)


def _experts(fields: Fields, key: str) -> Experts | None:
    section = fields.section(key)
    if section is None:
        return None
    count, used = (section.integer(name, Most.EXPERTS) for name in ("count", "used"))
    normalized = section.flag("normalized")
    section.finish()
    if normalized is None:
        raise section.missing("normalized")
    if used > count:
        raise section.error(f"used {used} is more than count {count}")
    return Experts(count, used, normalized)


READERS: dict[str, Reader] = {
    "vocab_size": _integer(Most.VOCAB),
    "hidden_size": _integer(Most.WIDTH),
    "num_layers": _integer(Most.LAYERS),
    "num_heads": _integer(Most.HEADS),
    "num_kv_heads": _integer(Most.HEADS),
    "head_dim": _integer(Most.HEAD_DIM),
    "intermediate_size": _integer(Most.FFN_WIDTH),
    "experts": _experts,
    "norm_eps": Fields.optional_number,
    "trained_context": _integer(Most.CONTEXT),
    "encoding": _encoding,
    "windows": _windows,
    "tied_embeddings": Fields.flag,
    "qkv_bias": Fields.flag,
    "out_bias": Fields.flag,
    "mlp_bias": Fields.flag,
    "head_bias": Fields.flag,
    "qk_norm": Fields.flag,
    "qk_norm_whole": Fields.flag,
    "norm": _one_of(get_args(NormKind)),
    "norm_bias": Fields.flag,
    "activation": _one_of(get_args(Activation)),
    "gated": Fields.flag,
    "block": _one_of(get_args(BlockKind)),
    "embed_scale": Fields.optional_number,
    "embed_norm": Fields.flag,
    "embed_width": _integer(Most.WIDTH),
    "attention_scale": Fields.optional_number,
    "qkv_clip": Fields.optional_number,
    "score_cap": Fields.optional_number,
    "logit_scale": Fields.optional_number,
    "logit_cap": Fields.optional_number,
}
