"""What each positional encoding is, costs and runs on, taken from the classes themselves.

Encodings describe what they do, backends what they support, `work` what it costs. Knows no server
and no commands; everything here is plain data for listings, pages and pictures.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from ropewalk.cache.types import BLOCK_SIZE, Capability, KeyStorage, Op
from ropewalk.model.attention.base import AttentionBackend, spec_for
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.dry_run import Cost, TimedTrial, Trial
from ropewalk.model.encodings.base import (
    EncodingError,
    PositionalEncoding,
    ScoreBias,
    asks_keys,
    asks_query,
    find,
    freeze_all,
    names,
)
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.encodings.common.validate import check_hooks
from ropewalk.model.formatting import where
from ropewalk.model.kernels.cpu.lowering import (
    biases_in_python,
    embeds_in_python,
    gates_in_python,
    rotates_in_python,
)

HOOKS = (
    *("embed", "gates", "query_bias", "query_scales", "rotate", "rotation", "score_bias"),
    *("content_bias", "for_layer"),
)
DATA = {"embed": "vectors", "gates": "forget_gates"}  # hooks from which these are computed
LENGTHS = (512, 4096, 32768)  # keys that the new token attends to
SHORT = 64  # context of an encoding when its length does not matter
# The smallest GPT-2: 12 layers of 12 heads of 64.
SHAPE = ModelConfig(
    vocab_size=50257,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    intermediate_size=3072,
    norm_eps=1e-5,
    trained_context=1024,
    encoding=EncodingSpec("nope", {}),
    windows=(None,) * 12,
)


@dataclass(frozen=True, slots=True)
class Support:
    """Whether an attention backend supports the encoding here; `reason` is its message if not."""

    backend: str
    takes: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether stored entries survive an operation, judged by position error alone.

    `reason` says why it is impossible, if it is. `cost` is set if it was measured.
    """

    key_storage: KeyStorage
    op: Op
    capability: Capability
    reason: str | None
    cost: Cost | None = None


@dataclass(frozen=True, slots=True)
class EncodingFacts:
    """One encoding. `unbuilt` says why it cannot be built; facts of an instance are then empty."""

    name: str
    summary: str
    hooks: tuple[str, ...]
    in_python: tuple[str, ...]  # of these, those that each step calls between the CPU's kernels
    options: Mapping[str, str]  # name: meaning
    limit: str
    beyond_trained: str
    bias: str | None  # what it adds to the scores: linear, table, key or pair
    backends: tuple[Support, ...]
    work: Mapping[int, PositionalWork]  # by number of keys attended to
    operations: tuple[Ability, ...]  # every operation, with each key storage of the encoding
    unbuilt: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where and in which dtype attention would run."""

    backends: Sequence[AttentionBackend]
    dtype: torch.dtype
    device: torch.device


def catalogue(place: Place, others: Iterable[str] = ()) -> list[EncodingFacts]:
    """Every encoding of this project, then `others`, each a "package.module:Class".

    Raises EncodingError when one of the others does not exist.
    """
    return [facts(name, place) for name in dict.fromkeys([*names(), *others])]


def facts(name: str, place: Place) -> EncodingFacts:
    """Raises EncodingError when there is no such encoding."""
    kind = find(name)
    work: dict[int, PositionalWork] = {}
    backends: tuple[Support, ...] = ()
    operations: tuple[Ability, ...] = ()
    bias: ScoreBias | None = None
    left: tuple[str, ...] = ()
    unbuilt = None
    try:
        encoding = example(kind, SHAPE, SHAPE.trained_context)
        check_hooks(encoding, SHAPE, SHAPE.trained_context, torch.device("cpu"))
        work, operations, bias, left, backends = (  # all of them or none
            {length: encoding.work(SHAPE, length, BLOCK_SIZE) for length in LENGTHS},
            abilities(kind, SHAPE, place.dtype),
            encoding.for_layer(0).score_bias(),
            tuple(in_python(encoding)),
            tuple(_support(place, encoding)),
        )
    except EncodingError as error:
        unbuilt = str(error)
    except Exception as error:  # foreign code may raise anything
        if ":" not in name:  # this project's
            raise
        unbuilt = f"{kind.__name__} fails ({where(error)})"
    return EncodingFacts(
        name=name,
        summary=summary(kind),
        hooks=hooks(kind),
        in_python=left,
        options=dict(kind.OPTIONS),
        limit=kind.LIMIT,
        beyond_trained=kind.BEYOND_TRAINED,
        bias=None if bias is None else bias_name(type(bias)),
        backends=backends,
        work=work,
        operations=operations,
        unbuilt=unbuilt,
    )


def abilities(
    kind: type[PositionalEncoding], shape: ModelConfig, dtype: torch.dtype
) -> tuple[Ability, ...]:
    """What can be done to entries stored in `dtype`, with each key storage of the encoding."""
    trial = Trial(shape, {}, block_size=BLOCK_SIZE, dtype=dtype)
    found = []
    for encoding in in_each_storage(kind, shape):
        operations = trial.operations(encoding)
        found += [
            Ability(encoding.key_storage, op, operations.capability(op), operations.why_not(op))
            for op in Op
        ]
    return tuple(found)


def measured(entry: EncodingFacts, trial: TimedTrial) -> EncodingFacts:
    """`entry` with the cost of each possible operation on a cache for SHAPE."""
    if entry.unbuilt is not None:
        return entry
    encodings = {each.key_storage: each for each in in_each_storage(find(entry.name), SHAPE)}
    timed = [
        ability
        if ability.capability is Capability.IMPOSSIBLE
        else replace(ability, cost=trial.cost(encodings[ability.key_storage], ability.op))
        for ability in entry.operations
    ]
    return replace(entry, operations=tuple(timed))


def timed_trial(place: Place) -> TimedTrial:
    """For `measured`. Holds a cache for SHAPE: 160 MB in float32."""
    return TimedTrial(SHAPE, block_size=BLOCK_SIZE, dtype=place.dtype, device=place.device)


def in_each_storage(kind: type[PositionalEncoding], shape: ModelConfig) -> list[PositionalEncoding]:
    """Examples, one for each key storage.

    For facts that do not depend on the context, so their tables are short. Raises EncodingError.
    """
    short = replace(shape, trained_context=SHORT)
    storages = (
        [{"storage": storage} for storage in KeyStorage] if "storage" in kind.OPTIONS else [{}]
    )
    return [example(kind, short, SHORT, options) for options in storages]


def example(
    kind: type[PositionalEncoding],
    config: ModelConfig,
    context: int,
    options: Mapping[str, object] | None = None,
) -> PositionalEncoding:
    """A frozen instance with the usual options, overridden by `options`, and random weights.

    Raises EncodingError when the class cannot be built with them.
    """
    given = dict(options or {})
    try:
        chosen = kind.usual_options(config) | given
        encoding = kind.create(chosen, config, context, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            for parameter in encoding.parameters():
                parameter.uniform_(0, 1, generator=generator)
            freeze_all(encoding)
    except EncodingError:
        raise
    except Exception as error:  # foreign code may raise anything, and so may a wrong option
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        package, _, file = kind.__module__.rpartition(".")
        own = package == PositionalEncoding.__module__.rpartition(".")[0]
        name = file if own else kind.__name__
        hint = "" if own else "; docs/encodings.md says what a class must keep to"
        raise EncodingError(
            f"{name} cannot be made{told and f' with {told}'} ({where(error)}){hint}."
        ) from error
    return encoding


def hooks(kind: type[PositionalEncoding]) -> tuple[str, ...]:
    """The hooks that a class overrides, in the order in which a forward pass calls them."""

    def overrides(name: str) -> bool:
        return getattr(kind, name) is not getattr(PositionalEncoding, name)

    return tuple(name for name in HOOKS if any(map(overrides, (name, DATA.get(name, name)))))


def in_python(encoding: PositionalEncoding) -> Iterator[str]:
    """The hooks that the CPU's kernels know no data for, so that each step calls them."""
    layer = encoding.for_layer(0)
    if embeds_in_python(encoding):
        yield "embed"
    if gates_in_python(layer):
        yield "gates"
    if asks_query(layer):
        yield "query_bias"
    if rotates_in_python(layer, SHAPE.head_dim):
        yield "rotate"
    if biases_in_python(layer):
        yield "score_bias"
    if asks_keys(layer):
        yield "content_bias"


def summary(kind: type[PositionalEncoding]) -> str:
    """First line of a docstring: for this project's encodings the file's, else the class's."""
    module = inspect.getmodule(kind)
    of_file = module.__doc__ if module is not None else None
    own = kind.__module__.startswith("ropewalk.model.encodings.")
    texts = (of_file, kind.__doc__) if own else (kind.__doc__, of_file)
    return next((text.strip().partition("\n")[0] for text in texts if text), "no description")


def bias_name(kind: type[ScoreBias]) -> str:
    """linear, table, key or pair."""
    return kind.__name__.removesuffix("Bias").lower()


def _support(place: Place, encoding: PositionalEncoding) -> Iterable[Support]:
    spec = spec_for(SHAPE, place.dtype, place.device, encoding)
    for backend in place.backends:
        reason = backend.why_not(spec)
        yield Support(backend.name, reason is None, reason)


def as_json(entry: EncodingFacts) -> dict[str, object]:
    """For an HTTP answer or a file: what JSON can hold."""
    return asdict(entry) | {
        "work": [{"keys": keys, **asdict(work)} for keys, work in entry.work.items()],
        "operations": [_ability_as_json(ability) for ability in entry.operations],
    }


def _ability_as_json(ability: Ability) -> dict[str, object]:
    told: dict[str, object] = {
        "key_storage": ability.key_storage.value,
        "operation": ability.op.value,
        "capability": ability.capability.value,
        "reason": ability.reason,
    }
    if ability.cost is None:
        return told
    seconds, size = ability.cost.seconds, ability.cost.bytes
    return {**told, "seconds_per_1000_tokens": seconds, "bytes_per_1000_tokens": size}


def listing(place: Place, entries: Iterable[dict[str, object]]) -> dict[str, object]:
    """Entries as JSON, with their device and dtype, and the shape that `work` refers to."""
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
    return {
        "object": "list",
        "device": place.device.type,
        "dtype": str(place.dtype).removeprefix("torch."),
        "work_of": {name: getattr(SHAPE, name) for name in names},
        "data": list(entries),
    }
