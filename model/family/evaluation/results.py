"""The results of an evaluation as one JSON file: everything that a report is made from."""

import json
import math
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.evaluation.curves import Curve
from ropewalk.model.family.evaluation.losses import HeldOut, Losses
from ropewalk.model.family.evaluation.recalled import Recalls
from ropewalk.model.family.evaluation.samples import Sample
from ropewalk.model.family.evaluation.served import ServedLoss
from ropewalk.model.family.evaluation.shortened import Divergence
from ropewalk.model.family.files import replacing

SCHEMA = 5  # raise it when the meaning of a field changes
DIGITS = 8  # significant digits of stored numbers


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Lengths and distances in tokens."""

    context: int = 4096
    windows: int = 1 << 20  # of the trained length: an upper limit, beyond all there are
    texts: int = 32  # for loss by position
    short_texts: int = 16  # for cache operations
    served_texts: int = 4
    trials: int = 50  # of each kind in a cell of recall
    lengths: tuple[int, ...] = (512, 1024, 2048)
    distances: tuple[int, ...] = (32, 128, 256, 384, 768, 1536)


QUICK = Sizes(
    context=640,
    windows=16,
    texts=4,
    short_texts=2,
    served_texts=2,
    trials=2,
    lengths=(512, 640),
    distances=(32, 384),
)


@dataclass(frozen=True, slots=True)
class Packed:
    """The cost of shipping in 8 bits: nats per token over the later half of trained positions."""

    size: int  # bytes of the packed weights
    trained: float  # with the weights as trained
    packed: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One model. A part not measured is None; `made_from` has a digest for each other part."""

    name: str
    label: str
    seed: int | None
    digest: str
    encoding: str
    parameters: int
    config: dict[str, Any]
    made_from: dict[str, str] = field(default_factory=dict)
    curve: Curve | None = None
    held_out: HeldOut | None = None
    losses: Losses | None = None
    recalls: Recalls | None = None
    divergences: tuple[Divergence, ...] | None = None
    served: tuple[ServedLoss, ...] | None = None
    samples: tuple[Sample, ...] | None = None
    packed: Packed | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of all models in one folder. `corpus`: the corpus file's fingerprint."""

    schema: int
    corpus: str
    sizes: Sizes
    members: tuple[Measured, ...]


def write(evaluation: Evaluation, path: Path) -> None:
    """Written in full or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(asdict(evaluation)), indent=1, allow_nan=False)
    with replacing(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> Evaluation | None:
    """None when there is none yet. Raises FamilyError when it cannot be used."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["schema"] != SCHEMA:
            raise FamilyError(
                f"{path} has schema {stored['schema']}, not {SCHEMA}; move it away and run "
                "ropewalk family evaluate"
            )
        found = _as(Evaluation, stored)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise FamilyError(
            f"{path} is damaged ({error}); move it away and run ropewalk family evaluate"
        ) from error
    assert isinstance(found, Evaluation)
    return found


def beside(own: Evaluation, bundled: Evaluation | None) -> Evaluation:
    """Own results after those of the bundled models that are not among them.

    Only own ones if texts or sizes differ. Labels that occur in both are made distinct.
    """
    if bundled is None or (bundled.corpus, bundled.sizes) != (own.corpus, own.sizes):
        return own
    names = {one.name for one in own.members}
    others = [one for one in bundled.members if one.name not in names]
    taken = {one.label for one in others if one.seed is None}
    twice = {one.label for one in own.members if one.seed is None and one.label in taken}
    mine = [
        replace(one, label=f"own {one.label}") if one.label in twice else one for one in own.members
    ]
    return replace(own, members=(*others, *mine))


def _rounded(value: Any) -> Any:
    """JSON has no infinity: what is not finite becomes null, which `_as` reads as NaN."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _as(kind: Any, value: Any) -> Any:
    """JSON → dataclasses, by their annotations. Raises TypeError, KeyError, ValueError."""
    if isinstance(kind, UnionType):  # of a type and None
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
        return None if value is None else _as(kind, value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)  # what older files have besides is ignored
        return kind(**{name: _as(hint, value[name]) for name, hint in hints.items()})
    if get_origin(kind) is tuple:
        return tuple(_as(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict:
        return dict(value)
    if kind is float:
        return math.nan if value is None else float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
