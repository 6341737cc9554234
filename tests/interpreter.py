"""Triton's interpreter, in which the kernels run where there is no GPU."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch


def speed_up_interpreter() -> None:
    """Save Triton's interpreter a third of its time, without a change of what it computes.

    It patches its language at every call of a function, although what is patched already is no
    builtin any more, and makes a table of dtypes whenever it looks one up.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    names = ("_patch_lang", "_LangPatchScope", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in names):  # another version of Triton
        return
    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope

    @functools.cache
    def languages_of(function: Any) -> list[Any]:
        return [each for each in function.__globals__.values() if each is tl or each is tl.core]

    def patch_if_needed(function: Any) -> Any:
        languages = languages_of(function)
        if languages and not any(tl.core.is_builtin(each.load) for each in languages):
            return scope()
        return patch(function)

    look_up, found = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return look_up(dtype)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    interpreter._patch_lang = patch_if_needed
    interpreter._get_np_dtype = np_dtype
