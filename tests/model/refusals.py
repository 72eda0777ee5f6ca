"""What cannot be served is refused in one sentence."""

import pytest

from ropewalk.model.weights.base import CheckpointError


def refused(saying, read, *args, **options):
    """The sentence."""
    with pytest.raises(CheckpointError, match=saying) as caught:
        read(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.count(". ") == 0 and message.endswith(".")
    assert len(message) < 500
    return message
