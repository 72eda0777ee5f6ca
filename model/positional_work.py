"""What positions cost: counted, not timed. No torch."""

from dataclasses import dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class PositionalWork:
    """What tokens cost because of their positions, over all layers.

    Only the encoding's own arithmetic and memory traffic; storing a key is the same for all.
    """

    rotations: int = 0  # of one head's query or key
    bias_values: int = 0  # scores that get a bias added
    bias_built: int = 0  # bias values made for this step alone and stored until it ends
    flops: int = 0
    # Read of tables and weights, each once however many layers use it; and what is built for
    # the step, written once and read by every layer that adds it.
    bytes: int = 0
    bias_bytes: int = 0  # how many of the bytes are for biases

    @property
    def values(self) -> tuple[int, ...]:
        """In the order of the fields. Asked in every step, which `astuple` is too slow for."""
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
