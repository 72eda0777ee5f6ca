"""Triton's interpreter for tests: computes and refuses what it always does, in half the time.

Most of that time it describes tensors, and searches its own language.
"""

import math
import os
from dataclasses import replace
from functools import cache
from importlib.util import find_spec


def quicken(patch):
    """Until `patch` is undone; nothing where Triton is not there, or compiles for a GPU."""
    if not find_spec("triton") or os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.language import core
    from triton.runtime import interpreter

    def call(function, *given, **named):
        """What it finds in its language it replaces until the kernel ends: the first call does."""
        if function.fn not in function.rewritten_fn:
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*given, **named)

    def make_tensor(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = described(*(type.shape if type.is_block() else ()))

    @cache
    def described(*sizes):
        return core.tuple(list(map(core.constexpr, sizes))), core.constexpr(math.prod(sizes))

    def make_type(block, element, shape):
        block.shape, block.numel, named = checked(*map(core._unwrap_if_constexpr, shape))
        block.element_ty, block.name = element, f"<{named}, {element}>"

    @cache
    def checked(*sizes):
        block = core.block_type.__new__(core.block_type)
        check(block, core.int1, list(sizes))
        return block.shape, block.numel, str(block.shape)

    check = core.block_type.__init__
    patch.setattr(core.block_type, "__init__", make_type)
    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
    # It would look for overflows, at some length, and without `debug` tell nobody.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
