"""Triton's interpreter, of whose time half goes into what tells nothing of these kernels."""

from dataclasses import replace
from functools import cache


def quicken():
    """For functions that kernels call, Triton's language is made ready once, not at every call.

    Nor is each sum of integers made a second time in 64 bits: indices are tiny here.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    make_ready = cache(interpreter._patch_lang)

    def call(function, *given, **named):
        make_ready(function.fn)
        return function.rewrite()(*given, **named)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
