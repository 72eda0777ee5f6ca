"""The cost of positions: counted, not timed. No torch."""

from dataclasses import dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class PositionalWork:
    """The work that tokens cause because of their positions, over all layers.

    Only the encoding's own arithmetic and memory traffic; storing keys costs the same for all.
    """

    rotations: int = 0  # each of one head's query or key
    bias_values: int = 0  # scores that get a bias added
    bias_built: int = 0  # bias values computed for one step and stored until it ends
    flops: int = 0
    # Tables and weights read, each counted once however many layers use it; and what is built for
    # the step, counted once when written and once for every layer that reads it.
    bytes: int = 0
    bias_bytes: int = 0  # the part of `bytes` that is for biases

    @property
    def values(self) -> tuple[int, ...]:
        """In the order of the fields. Used in every step, for which `astuple` is too slow."""
        return (
            self.rotations,
            self.bias_values,
            self.bias_built,
            self.flops,
            self.bytes,
            self.bias_bytes,
        )

    def __add__(self, other: "PositionalWork") -> "PositionalWork":
        return PositionalWork(*map(add, self.values, other.values))

    def __mul__(self, factor: int) -> "PositionalWork":
        return PositionalWork(*(factor * each for each in self.values))


NO_WORK = PositionalWork()
