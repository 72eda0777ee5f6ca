"""Where a training stands, in one file: the weights, what the optimisers remember, the step.

The file is there in full or not at all, so that a training may be cut off at any moment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.family.errors import FamilyError
from model.family.files import replacing

_KEY = "ropewalk"  # in the file's metadata, which holds strings


@dataclass(frozen=True, slots=True)
class State:
    """After `step` of `steps`. `facts` must be the same to go on: recipe, texts, shape."""

    step: int
    steps: int
    level: bool  # the rate had not begun to fall, so any number of steps may follow
    seconds: float  # of training so far
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, object]


def save(state: State, path: Path) -> None:
    """Replaces what was there at once. Raises OSError."""
    about = {
        "step": state.step,
        "steps": state.steps,
        "level": state.level,
        "seconds": state.seconds,
        "facts": state.facts,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={_KEY: json.dumps(about)})


def load(path: Path) -> State | None:
    """None when there is none. Raises FamilyError when it cannot be read."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - cannot be iterated itself
        return State(
            step=about["step"],
            steps=about["steps"],
            level=about["level"],
            seconds=about["seconds"],
            tensors=tensors,
            facts=about["facts"],
        )
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise FamilyError(f"{path} is damaged ({error}); delete it to begin anew") from error
