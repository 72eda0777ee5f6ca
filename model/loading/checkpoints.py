"""Opens checkpoints and loads their weights into decoders.

Everything that can be known before reading weights is checked on opening: config, tokenizer, and
the name and shape of every tensor. Knows formats, no requests.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ropewalk.model.architectures.base import Architecture, by_gguf_name, by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.stored import Parameters, Stored
from ropewalk.model.chat.template import (
    WITH_TOOLS,
    ChatTemplate,
    ChatTemplateError,
    chat_template_from_directory,
    chat_template_from_gguf,
)
from ropewalk.model.config import USUAL, Embedding, EncoderDecoderConfig, ModelConfig
from ropewalk.model.encodings.base import PositionalEncoding, freeze_all
from ropewalk.model.loading.embedding import embedding_from_directory, embedding_from_gguf
from ropewalk.model.program import Program, encoding_parameters
from ropewalk.model.recipes import allocate, program
from ropewalk.model.tokenizers.base import MAX_FILE, Tokenizer, TokenizerError
from ropewalk.model.tokenizers.loading import tokenizer_from_directory, vocabulary_file
from ropewalk.model.weights.base import (
    GGUF,
    MAX_CONFIG,
    PICKLE_SUFFIXES,
    CheckpointError,
    WeightFile,
    advise_conversion,
    open_regular,
    read_json,
    refuse_large,
    refuse_mistaken,
    shown,
)
from ropewalk.model.weights.safetensors_dir import SafetensorsDirectory

__all__ = ["Checkpoint", "CheckpointError", "load_encoding", "load_program", "open_checkpoint"]

RANDOM = "shape:"  # begins the source of a checkpoint that is made up (random_weights.py)
# What a folder's tokenizer and chat template are read from, besides the vocabulary.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    WITH_TOOLS,
)
MAX_MORE = 8 << 20  # bytes of each of them
MAX_EXPERTS = 50_000  # of all layers: each has two tensors or more


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose weights are not read yet, checked as far as possible without them.

    On disk, or randomly generated (model/loading/random_weights.py); messages name its `path`.
    """

    path: Path
    architecture: str  # model_type, as in config.json; "random" when generated
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    stop_ids: frozenset[int]  # tokens that end an answer
    weights: WeightFile
    parameters: Parameters
    copies: Mapping[str, str]  # stored tensors that must equal another one: {copy: original}
    embedding: Embedding = USUAL


@dataclass(frozen=True, slots=True)
class InUse:
    """A checkpoint, and how whoever computes with it holds its weights and what these lead to."""

    checkpoint: Checkpoint
    context: int  # positions that the encoding is made for
    dtype: torch.dtype
    kv_dtype: torch.dtype
    bits: Literal[8, 4] | None  # of rounded weights
    block_size: int
    # As `files_of` had them when it was loaded.
    files: frozenset[tuple[str, int, int]] = frozenset()


def files_of(path: Path) -> frozenset[tuple[str, int, int]]:
    """Name, size and time of change of a checkpoint's files of weights; none of made-up ones."""
    found = path.glob("*.safetensors") if path.is_dir() else [path] if path.is_file() else []
    return frozenset((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in found)


def open_checkpoint(
    path: Path, trusted: Collection[str] = (), template: Path | None = None
) -> Checkpoint:
    """A Hugging Face directory or GGUF file. Raises CheckpointError with one sentence.

    trusted: encodings outside this project, as "package.module:Class", whose code a checkpoint may
    have imported. Only whoever starts the program can know that it may run.
    template: a file with the chat template to use instead of the checkpoint's.
    """
    try:
        if path.is_dir():
            return _open_directory(path, trusted, template)
        return _open_gguf(path, template)
    except (TokenizerError, ChatTemplateError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def load_program(
    checkpoint: Checkpoint,
    encoding: PositionalEncoding,
    encoder_encoding: PositionalEncoding | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Program:
    """The checkpoint's program with its weights, also those of the encodings, which are frozen.

    `progress` is called with the number of parameters done and the total. Raises CheckpointError
    when the program's parameters are not the checkpoint's, or a weight is not finite.
    """
    config, sides = checkpoint.config, (encoding, encoder_encoding)
    weights = allocate(config, *sides, dtype=dtype, device=device)
    targets = dict(encoding_parameters(*sides)) | weights
    if config.tied_embeddings:
        del targets["head.weight"]
    _check_shapes(checkpoint, targets)
    with torch.inference_mode():
        for done, (name, target) in enumerate(targets.items(), start=1):
            _fill(checkpoint, target, checkpoint.parameters[name])
            if progress is not None:
                progress(done, len(targets))
        _check_copies(checkpoint)
        for side in sides:
            if side is not None:
                freeze_all(side)
    return program(config, weights, *sides)


def _check_shapes(checkpoint: Checkpoint, targets: Mapping[str, Tensor]) -> None:
    expected = {name: _joined_shape(pieces) for name, pieces in checkpoint.parameters.items()}
    for name in sorted(targets.keys() | expected.keys()):
        wanted = tuple(targets[name].shape) if name in targets else None
        if wanted != expected.get(name):
            raise CheckpointError(
                f"{checkpoint.path}: parameter {name} of the decoder has the shape {wanted}, "
                f"but the checkpoint gives {expected.get(name)}."
            )


def load_encoding(checkpoint: Checkpoint, encoding: PositionalEncoding, *, side: str = "") -> None:
    """Load only the weights of an encoding, and freeze it. Raises CheckpointError.

    side: "encoder." for that of the encoder.
    """
    with torch.inference_mode():
        for name, target in encoding.named_parameters():
            _fill(checkpoint, target, checkpoint.parameters[f"{side}encoding.{name}"])
        freeze_all(encoding)


def read_parameter(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """One of the parameters, as `load_program` loads it on a CPU. Raises CheckpointError."""
    pieces = checkpoint.parameters[name]
    target = torch.empty(_joined_shape(pieces), dtype=dtype)
    with torch.inference_mode():
        _fill(checkpoint, target, pieces)
    return target


def _fill(checkpoint: Checkpoint, target: Tensor, pieces: tuple[Stored, ...]) -> None:
    joined = len(pieces) > 1
    parts = torch.split(target, [piece.result[0] for piece in pieces]) if joined else (target,)
    for piece, rows in zip(pieces, parts, strict=True):
        tensor = checkpoint.weights.read(piece.name, piece.expert)
        if piece.order is not None:
            tensor = piece.order.undo(tensor)
        rows.copy_(tensor)
        # Checked after the copy: conversion to float16 may also make a weight infinite.
        if not all(bound.isfinite() for bound in rows.aminmax()):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {piece.name} holds weights that are not finite "
                f"in {target.dtype}."
            )


def _check_copies(checkpoint: Checkpoint) -> None:
    for copy, original in checkpoint.copies.items():
        if copy in checkpoint.weights.names() and not torch.equal(
            checkpoint.weights.read(copy), checkpoint.weights.read(original)
        ):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {copy} should be tied to {original}, but differs."
            )


def _joined_shape(pieces: tuple[Stored, ...]) -> tuple[int, ...]:
    shapes = [piece.result for piece in pieces]
    if len(shapes) == 1:
        return shapes[0]  # with any number of dimensions
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _open_directory(folder: Path, trusted: Collection[str], template: Path | None) -> Checkpoint:
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a Hugging Face model; "
            "to serve a GGUF file, name the file itself."
        )
    where = str(folder / "config.json")
    fields = Fields(where, read_json(folder / "config.json", MAX_CONFIG))
    architecture = by_model_type(fields.text("model_type"), where)
    weights = SafetensorsDirectory(folder)
    config = architecture.config_from_hf(fields, weights)
    _refuse_many_experts(where, config)
    _refuse_foreign_code(where, config.encoding.name, trusted)
    parameters = architecture.parameters_in_hf(config, weights.names())
    _check_tensors(folder, weights, parameters, architecture, config)
    stop_ids = fields.token_ids("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists():
        defaults = Fields(str(generation), read_json(generation, MAX_CONFIG))
        stop_ids |= defaults.token_ids("eos_token_id")
        config = _started_with(config, defaults)
    shared = architecture.shares_tokenizer
    for name in TOKENIZER_FILES:
        refuse_mistaken(folder / name)
        refuse_large(folder / name, MAX_MORE)
    if (vocabulary := vocabulary_file(folder, shared=shared)) is not None:
        refuse_mistaken(vocabulary)
        refuse_large(vocabulary, MAX_FILE)
    tokenizer = tokenizer_from_directory(folder, shared=shared)
    return Checkpoint(
        path=folder,
        architecture=architecture.model_type,
        config=config,
        tokenizer=tokenizer,
        chat_template=chat_template_from_directory(folder, template),
        stop_ids=_stop_ids(config, tokenizer, stop_ids),
        weights=weights,
        parameters=parameters,
        copies=architecture.copies(config, weights.names()),
        embedding=embedding_from_directory(folder),
    )


def _refuse_many_experts(where: str, config: ModelConfig) -> None:
    """Before a list of their parameters is made."""
    count = 0 if config.experts is None else config.experts.count * config.num_layers
    if count > MAX_EXPERTS:
        raise CheckpointError(
            f"{where} tells of {count} experts in all layers, more than the {MAX_EXPERTS} allowed."
        )


def _refuse_foreign_code(where: str, encoding: str, trusted: Collection[str]) -> None:
    if ":" in encoding and encoding not in trusted:
        raise CheckpointError(
            f"{where} names the encoding {encoding}, which is code outside Ropewalk; if you trust "
            f"that code, add --trust-encoding {encoding}."
        )


def _open_gguf(path: Path, template: Path | None) -> Checkpoint:
    # What reads this format, and the library that it takes, are imported only for it.
    from ropewalk.model.tokenizers.gguf_vocab import tokenizer_from_gguf
    from ropewalk.model.weights.gguf_file import GGUFFile

    _refuse_other_files(path)
    weights = GGUFFile(path)
    fields = Fields(str(path), weights.metadata)
    architecture = by_gguf_name(weights.metadata.get("general.architecture"), str(path))
    config = architecture.config_from_gguf(fields, weights)
    _refuse_many_experts(str(path), config)
    parameters = architecture.parameters_in_gguf(config)
    _check_tensors(path, weights, parameters, architecture, config)
    tokenizer = tokenizer_from_gguf(weights.metadata)
    return Checkpoint(
        path=path,
        architecture=architecture.model_type,
        config=config,
        tokenizer=tokenizer,
        chat_template=chat_template_from_gguf(weights.metadata, template),
        stop_ids=_stop_ids(config, tokenizer, frozenset()),
        weights=weights,
        parameters=parameters,
        copies={},
        embedding=embedding_from_gguf(weights.metadata),
    )


def _refuse_other_files(path: Path) -> None:
    with open_regular(path) as file:
        start = file.read(len(GGUF))
    if start == GGUF:
        return
    refuse_mistaken(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} holds only weights; name its folder, with config.json and a tokenizer."
        )
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path} looks like a pickle, which could run code, "
            f"so {advise_conversion(path.parent)}."
        )
    raise CheckpointError(f"{path} is neither a GGUF file nor a Hugging Face directory.")


def _check_tensors(
    path: Path,
    weights: WeightFile,
    parameters: Parameters,
    architecture: Architecture,
    config: ModelConfig,
) -> None:
    """Require exactly the tensors that the decoder needs, in the shapes the config implies."""
    needed = {piece.name: piece.shape for pieces in parameters.values() for piece in pieces}
    names = weights.names()
    if missing := sorted(needed.keys() - names):
        raise CheckpointError(
            f"{path} lacks {_counted(missing)}, which its configuration requires."
        )
    unused = sorted(
        name
        for name in names - needed.keys() - architecture.copies(config, names).keys()
        if not architecture.derived.fullmatch(name)
    )
    if unused:
        raise CheckpointError(
            f"{path} holds {_counted(unused)}, which its configuration does not account for, "
            "and leaving out weights would change the answers."
        )
    for name, shape in needed.items():
        if weights.shape(name) != shape:
            raise CheckpointError(
                f"{path}: tensor {name} should have the shape {list(shape)}, "
                f"but has {list(weights.shape(name))}."
            )


def _counted(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {shown(names[0])}{more}"


def _started_with(config: ModelConfig, defaults: Fields) -> ModelConfig:
    """Use the start token of an encoder-decoder's generation defaults, if they name one."""
    declared = defaults.token_ids("decoder_start_token_id")
    if not isinstance(config, EncoderDecoderConfig) or not declared:
        return config
    token = min(declared)
    if len(declared) > 1 or not 0 <= token < config.vocab_size:
        raise defaults.error("decoder_start_token_id must be one token of the vocabulary")
    return replace(config, start_token=token)


def _stop_ids(
    config: ModelConfig, tokenizer: Tokenizer, declared: frozenset[int]
) -> frozenset[int]:
    """Every id declared by any source to end an answer, and that the model can produce.

    A tokenizer may have more tokens than the model embeds: prompts with those are refused.
    """
    return frozenset(id for id in declared | tokenizer.eos if 0 <= id < config.vocab_size)
