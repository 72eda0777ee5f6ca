"""No positional encoding, the control: order reaches the model through the causal mask alone."""

from ropewalk.model.encodings.base import PositionalEncoding


class NoPE(PositionalEncoding):
    """Does nothing: all hooks are inherited."""

    BEYOND_TRAINED = "computes as before; answers degrade with no fixed limit"
