"""Serves language models with any positional encoding from a paged KV cache.

`load` gives a model in this process:

    with ropewalk.load("ropewalk-rope") as model:
        print(model.generate("Once upon a time", max_tokens=40, temperature=0))

`Model` generates, streams and shows its cache; `CommandError` and `ServeError` say why loading or
asking failed. Everything else is what `ropewalk serve` is made of.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.server.library import Answer, CommandError, Model, ServeError, load

__all__ = ["Answer", "CommandError", "Model", "ServeError", "load"]


def __getattr__(name: str) -> object:
    """The interface, once it is used: `ropewalk --help` imports this too, and torch takes long."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ropewalk.server import library

    return getattr(library, name)
