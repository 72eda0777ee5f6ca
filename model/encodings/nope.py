"""No positional encoding, the control: order reaches the model through the causal mask alone."""

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.encodings.common.cost import NO_WORK, PositionalWork


class NoPE(PositionalEncoding):
    """Does nothing: all hooks are inherited."""

    BEYOND_TRAINED = "computes as before; answers degrade with no fixed limit"

    def work(self, config: ModelConfig, context: int, block_size: int) -> PositionalWork:
        return NO_WORK
