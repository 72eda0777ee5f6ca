"""RoPE's frequencies, and the published ways to scale them for longer contexts.

Each way is a frozen set of parameters with one formula, in float32 as published models compute
it. Knows only numbers: no positions, no config file, no cache.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ropewalk.model.encodings.base import EncodingError


def frequencies(base: float, width: int) -> Tensor:
    """[width / 2] radians per position: base^(-2i / width) (arXiv 2104.09864, section 3.2.2)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    return 1.0 / base**exponents


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1: YaRN's factor on q and k (arXiv 2309.00071, section 3.4).

    The weight is DeepSeek's addition (`mscale` in its config.json), 1 in the paper.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_magnitude(factor: float, original_context: int) -> float:
    """sqrt(1 + ln(factor) / ln(original context)), as Phi-3 was published (arXiv 2404.14219)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


class Scaling(ABC):
    """One way to scale RoPE's frequencies."""

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        """[width / 2] for sequences of `length` positions. Raises EncodingError."""

    def norm_factor(self) -> float:
        """The factor on queries and keys besides the rotation."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Linear(Scaling):
    """Positions divided by a factor (arXiv 2306.15595, section 2.3)."""

    kind = "linear"
    factor: float

    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        return frequencies(base, width) / self.factor


@dataclass(frozen=True, slots=True)
class Dynamic(Scaling):
    """The base grows with the length past the original context ("dynamic NTK").

    base · (factor · n / original - (factor - 1))^(width / (width - 2)) for n positions: the
    NTK-aware base of arXiv 2309.00071, section 3.1, made to depend on the length as in 3.3.
    """

    kind = "dynamic"
    factor: float
    original_context: int

    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        if width <= 2:
            raise EncodingError(f"rope's dynamic scaling needs a width above 2, but got {width}.")
        ratio = max(length, self.original_context) / self.original_context
        stretch = self.factor * ratio - (self.factor - 1)
        return frequencies(base * stretch ** (width / (width - 2)), width)


@dataclass(frozen=True, slots=True)
class Yarn(Scaling):
    """Fast pairs unchanged, slow ones divided, a ramp between (arXiv 2309.00071, section 3.2).

    A pair is fast when it makes `beta_fast` rotations or more within the original context, slow
    when it makes `beta_slow` or fewer. The paper's ramp is linear in the number of rotations; this
    one, as in the code that the models were trained with, is linear in the pair's index. truncate:
    it begins and ends at whole pairs.
    """

    kind = "yarn"
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float | None = None  # None: 0.1 ln(factor) + 1

    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        if base <= 1:
            raise EncodingError(f"rope's yarn scaling needs a base above 1, but got {base}.")
        first = self._pair_that_turns(self.beta_fast, base, width)
        last = self._pair_that_turns(self.beta_slow, base, width)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The upper bound counts coordinates, not pairs: that is how the models were trained.
        first, last = max(first, 0), min(last, width - 1)
        span = last - first or 0.001
        ramp = ((torch.arange(width // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
        plain = frequencies(base, width)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def norm_factor(self) -> float:
        return yarn_magnitude(self.factor) if self.magnitude is None else self.magnitude

    def _pair_that_turns(self, times: float, base: float, width: int) -> float:
        """Fractional index of a pair that makes `times` rotations within the original context."""
        slowdown = self.original_context / (2 * math.pi * times)
        return width * math.log(slowdown) / (2 * math.log(base))


@dataclass(frozen=True, slots=True)
class LongRoPE(Scaling):
    """A divisor for each pair: one list within the original context and another beyond it.

    arXiv 2402.13753, section 3. The magnitude is the same in both cases.
    """

    kind = "longrope"
    short_factors: Sequence[float]  # [width / 2]
    long_factors: Sequence[float]
    original_context: int
    magnitude: float

    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        long = length > self.original_context
        return _divided(base, width, self.long_factors if long else self.short_factors)

    def norm_factor(self) -> float:
        return self.magnitude


@dataclass(frozen=True, slots=True)
class Llama3(Scaling):
    """Slow pairs divided, fast ones unchanged, a blend between, as Llama 3.1 was trained.

    A pair is slow when it makes at most `low_freq_factor` rotations within the original context,
    fast when it makes at least `high_freq_factor`.
    """

    kind = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low >= high:
            raise EncodingError(
                f"rope's llama3 scaling needs a high_freq_factor above {low}, but got {high}."
            )
        plain = frequencies(base, width)
        turns = self.original_context * plain / (2 * math.pi)
        fast = ((turns - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * (1 - fast) + plain * fast


@dataclass(frozen=True, slots=True)
class Proportional(Scaling):
    """The slowest pairs do not rotate; the others' frequencies are divided by `factor`.

    p-RoPE (arXiv 2410.06205). `share`: the fraction of all pairs that rotate.
    """

    kind = "proportional"
    share: float
    factor: float = 1.0

    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        found = frequencies(base, width) / self.factor
        found[int(self.share * width // 2) :] = 0
        return found


@dataclass(frozen=True, slots=True)
class Factors(Scaling):
    """A divisor for each pair at every length: how GGUF files store Llama 3's scaling."""

    kind = "factors"
    factors: Sequence[float]  # [width / 2]

    def frequencies(self, base: float, width: int, length: int) -> Tensor:
        return _divided(base, width, self.factors)


SCALINGS: Mapping[str, type[Scaling]] = {
    scaling.kind: scaling
    for scaling in (Linear, Dynamic, Yarn, LongRoPE, Llama3, Proportional, Factors)
}


def scaling_from(options: Mapping[str, Any]) -> Scaling:
    """From the mapping {"type": ..., parameters}. Raises EncodingError."""
    if not isinstance(options, Mapping):
        raise EncodingError(
            f"rope's scaling must be an object with type and its parameters, but is {options!r}."
        )
    given = dict(options)
    kind = given.pop("type", None)
    if kind not in SCALINGS:
        raise EncodingError(
            f"rope's scaling type must be one of {', '.join(sorted(SCALINGS))}, but is {kind!r}."
        )
    parameters = inspect.signature(SCALINGS[kind]).parameters
    required = {name for name, one in parameters.items() if one.default is one.empty}
    if not required <= given.keys() <= parameters.keys():
        optional = sorted(parameters.keys() - required)
        raise EncodingError(
            f"rope's {kind} scaling takes {', '.join(sorted(required))}"
            + (f", and optionally {', '.join(optional)}" if optional else "")
            + f", but got {sorted(given)}."
        )
    for name, value in given.items():
        if not _fits(name, value, parameters[name].default):
            raise EncodingError(f"rope's {kind} scaling cannot use {name} = {value!r}.")
    return SCALINGS[kind](**given)


def _fits(name: str, value: object, default: object) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    if name.endswith("factors"):
        return isinstance(value, list) and all(_positive(item) for item in value)
    return _positive(value) or (value is None and default is None)


def _positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf


def _divided(base: float, width: int, factors: Sequence[float]) -> Tensor:
    if len(factors) != width // 2:
        raise EncodingError(
            f"rope needs a factor for each of {width // 2} pairs, but got {len(factors)}."
        )
    return frequencies(base, width) / torch.tensor(factors, dtype=torch.float32)
