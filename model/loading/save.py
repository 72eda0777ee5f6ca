"""Writes Ropewalk's own checkpoints: config.json, model.safetensors and a tokenizer's files.

A checkpoint appears complete or not at all, and what appears can be opened. Knows nothing of how
the weights were obtained.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ropewalk.model.architectures.ropewalk import Ropewalk
from ropewalk.model.config import ModelConfig
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.weights.base import CheckpointError, shown
from ropewalk.model.weights.safetensors_dir import SINGLE, WEIGHT_DTYPES

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def save_checkpoint(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer: Sequence[Path],
    stop_ids: Collection[int] = (),
) -> None:
    """Write a new folder for `open_checkpoint`. Raises CheckpointError and leaves nothing behind.

    state: the program's parameters by name, stored in their own dtypes.
    tokenizer: tokenizer.json or tokenizer.model, and any of TOKENIZER_FILES that go with it.
    stop_ids: tokens that end an answer, besides those that the tokenizer declares.
    """
    if type(config) is not ModelConfig:
        raise CheckpointError(
            f"{folder}: a checkpoint of this kind holds a decoder alone, without an encoder."
        )
    description = _description(config, stop_ids, folder)
    tensors = _to_store(state, config, folder)
    with _appearing(folder) as partial:
        (partial / "config.json").write_text(description, encoding="utf-8")
        save_file(tensors, partial / SINGLE, metadata={"format": "pt"})
        # safetensors makes the file unreadable for others, whatever the umask.
        (partial / SINGLE).chmod(stat.S_IMODE((partial / "config.json").stat().st_mode))
        for source in tokenizer:
            if source.name not in TOKENIZER_FILES or not source.is_file():
                raise CheckpointError(
                    f"{source} is not a tokenizer file; use some of {', '.join(TOKENIZER_FILES)}."
                )
            shutil.copyfile(source, partial / source.name)
        written = open_checkpoint(partial, {config.encoding.name})
        if written.tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"{folder}: the tokenizer has {written.tokenizer.vocab_size} tokens, but the model "
                f"embeds only {config.vocab_size}; use the tokenizer that it was trained with."
            )
        if written.config != config:
            raise CheckpointError(
                f"{folder}: the config would change when read back; "
                "use lists instead of tuples, and strings as keys, in the encoding's options."
            )


def _description(config: ModelConfig, stop_ids: Collection[int], folder: Path) -> str:
    values = {"model_type": Ropewalk.model_type, **asdict(config)}
    if stop_ids:
        values["eos_token_id"] = sorted(stop_ids)
    try:
        return json.dumps(values, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the config cannot be written as JSON: {error}."
        ) from error


def _to_store(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Every parameter once; other names in the state must be duplicates of parameters."""
    copy, original = "head.weight", "embed.weight"
    tied = config.tied_embeddings and {copy, original} <= state.keys()
    if tied and not torch.equal(state[copy], state[original]):
        raise CheckpointError(f"{folder}: {copy} should be tied to {original}, but differs.")
    tensors: dict[str, Tensor] = {}
    stored = set()
    for name, tensor in state.items():
        if tied and name == copy:
            continue
        if tensor.dtype not in WEIGHT_DTYPES.values():
            raise CheckpointError(f"{folder}: {shown(name)} cannot be stored as {tensor.dtype}.")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{folder}: {shown(name)} holds weights that are not finite.")
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, though on disk each is separate.
        tensors[name] = tensor.clone() if memory in stored else tensor
        stored.add(memory)
    return tensors


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, renamed to it at the end, or removed on failure."""
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; name another folder or remove it first.")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            flush(file)
        flush(partial)
        partial.rename(folder)
        flush(folder.parent)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(partial.name, folder.name)) from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush to disk, so that after a power failure the name does not exist without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
