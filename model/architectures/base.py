"""What an architecture defines: its config, read from either format, and where its weights are.

Each file in this folder that defines an `Architecture` with a model_type, by which the file is
named, adds one; the folder is scanned, so nothing else needs an edit. Knows descriptions and names,
never a weight's value.
"""

import importlib
import inspect
import pkgutil
import re
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import ClassVar

from ropewalk.model.architectures.fields import Absent, Fields, prefixed
from ropewalk.model.architectures.stored import Parameters
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import CheckpointError, WeightFile, shown


class Architecture(ABC):
    """One family of checkpoints. All methods raise CheckpointError for what they cannot support."""

    model_type: str  # of config.json
    gguf_name: str | None = None  # general.architecture; None when GGUF does not have the family
    # What it means that a required key is absent: of config.json, and of GGUF metadata without the
    # architecture's prefix. What nobody defines, or not all alike, is refused.
    absent: ClassVar[Absent] = {}
    absent_in_gguf: ClassVar[Absent] = {}
    # Names of stored tensors that follow from the config, and so may be ignored.
    derived: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    # Whether the tokenizer.model of the folder above will do, where a model's own has none.
    shares_tokenizer: ClassVar[bool] = False

    def described_by_hf(self, fields: Fields) -> Fields:
        """A config.json, to be read with this family's defaults."""
        return fields.with_absent(self.absent)

    def described_by_gguf(self, fields: Fields) -> Fields:
        """GGUF metadata, to be read with this family's defaults."""
        return fields.with_absent(prefixed(self.absent_in_gguf, f"{self.gguf_name}."))

    @abstractmethod
    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        """Read a config.json."""

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        """Read GGUF metadata. Never called for families without a gguf_name."""
        raise NotImplementedError

    @abstractmethod
    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> Parameters:
        """Where the safetensors files hold the decoder's parameters.

        names: those of the stored tensors, for families published under two prefixes.
        """

    def parameters_in_gguf(self, config: ModelConfig) -> Parameters:
        """Where GGUF holds the decoder's parameters. Never called without a gguf_name."""
        raise NotImplementedError

    def copies(self, config: ModelConfig, names: frozenset[str]) -> dict[str, str]:
        """Tensors that may be stored if they equal another: {copy: original}.

        names: those of the stored tensors.
        """
        return {}


@cache
def architectures() -> tuple[Architecture, ...]:
    """Every architecture of this folder."""
    return tuple(found for name in _files() for found in _defined_in(name))


@cache
def _files() -> tuple[str, ...]:
    return tuple(sorted(file.name for file in pkgutil.iter_modules([str(Path(__file__).parent)])))


@cache
def _defined_in(file: str) -> tuple[Architecture, ...]:
    name = f"{__package__}.{file}"
    return tuple(
        value()
        for value in vars(importlib.import_module(name)).values()
        if inspect.isclass(value)
        and issubclass(value, Architecture)
        and "model_type" in vars(value)
        and value.__module__ == name
    )


def by_model_type(name: str | None, where: str) -> Architecture:
    """The architecture of a config.json's model_type. Raises CheckpointError.

    Its file has the same name, so that no other file needs to be imported.
    """
    found = _defined_in(name) if name in _files() else ()
    known = {architecture.model_type: architecture for architecture in found or architectures()}
    return _pick(known, name, f"{where}: model_type")


def by_gguf_name(name: object, where: str) -> Architecture:
    """The architecture of a GGUF file's general.architecture. Raises CheckpointError."""
    known = {
        architecture.gguf_name: architecture
        for architecture in architectures()
        if architecture.gguf_name is not None
    }
    return _pick(known, name, f"{where}: general.architecture")


def _pick(known: dict[str, Architecture], name: object, what: str) -> Architecture:
    found = known.get(name) if isinstance(name, str) else None
    if found is None:
        said = shown(name) if isinstance(name, str) else "missing"
        raise CheckpointError(f"{what} is {said}; supported are {', '.join(sorted(known))}.")
    return found
