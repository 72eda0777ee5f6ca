"""The state of a training run in one file: weights, optimiser states, step.

The file is written in full or not at all, so that training may be interrupted at any moment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.files import replacing

_KEY = "ropewalk"  # key in the file's metadata, whose values are strings


@dataclass(frozen=True, slots=True)
class State:
    """After `step` of `steps`. To resume, `facts` must be equal: recipe, texts, shape."""

    step: int
    steps: int
    level: bool  # the learning rate had not begun to fall, so `steps` may still change
    seconds: float  # of training so far
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, object]


_ABOUT = ("step", "steps", "level", "seconds", "facts")  # all but the tensors


def save(state: State, path: Path) -> None:
    """Atomically replaces an earlier state. Raises OSError."""
    about = {name: getattr(state, name) for name in _ABOUT}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={_KEY: json.dumps(about)})


def load(path: Path) -> State | None:
    """None when there is no file. Raises FamilyError when it cannot be read."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - cannot be iterated itself
        return State(tensors=tensors, **{name: about[name] for name in _ABOUT})
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise FamilyError(f"{path} is damaged ({error}); delete it to start over") from error
