"""Triton's interpreter, in which the kernels run where there is no GPU.

It spends nearly all its time on bookkeeping: types, shapes and constants that are made anew for
every operation. What follows does the same bookkeeping once, or not at all where nobody looks at
it. No result changes, and no check that Triton makes in this mode is lost.
"""

from __future__ import annotations

import functools
import inspect
import operator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

KNOWN = "3.7.1"  # the Triton whose functions are replaced here; another one runs as it is


def speed_up_interpreter() -> None:
    """Make Triton's interpreter nine times as fast, without a change of what it computes."""
    if torch.cuda.is_available() or find_spec("triton") is None or version("triton") != KNOWN:
        return
    _patch_the_language_once()
    _look_up_dtypes()
    _share_types()
    _skip_what_nobody_reads()


def _patch_the_language_once() -> None:
    """Triton patches its language for every launch, takes that back, and looks at every call."""
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    from interpreted_operations import quick_constants, quick_form

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    semantic = interpreter.interpreter_semantic
    is_builtin = tl.core.is_builtin

    patch_once = functools.cache(patch)  # for good: nothing else runs Triton's language here

    def patch_if_needed(function: Any) -> Any:
        patch_once(function)
        return scope()  # which has nothing to take back

    def with_semantic(member: Any) -> Any:
        """The builtin itself, not the wrapper that asks whether there is a `_semantic`."""
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    @functools.cache
    def builtins_of(package: Any) -> dict[str, Any]:
        """The functions of Triton's language as the interpreter calls them."""
        found = {}
        for name, member in inspect.getmembers(package, is_builtin):
            found[name] = quick_form(package, name, with_semantic(member))
        return found

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, function in builtins_of(package).items():
            scope.set_attr(package, name, function)

    interpreter._patch_lang = patch_if_needed
    interpreter._patch_builtin = patch_builtin
    semantic.to_tensor = quick_constants(semantic.to_tensor)


def _look_up_dtypes() -> None:
    """Triton makes a table of dtypes, or a list of names, whenever it asks for one."""
    import triton.language as tl
    from triton.runtime import interpreter

    look_up, found = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return look_up(dtype)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    integers = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
    equal = tl.dtype.__eq__

    interpreter._get_np_dtype = np_dtype
    tl.dtype.is_int = lambda self: self.name in integers
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _share_types() -> None:
    """Equal types are one object, and a tensor takes from its type what follows from it."""
    import triton.language as tl

    core = tl.core
    blocks: dict[Any, Any] = {}
    pointers: dict[Any, Any] = {}
    fill_block, fill_tensor = core.block_type.__init__, core.tensor.__init__

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (element_ty.name, *map(operator.index, shape))
        return blocks.get(key) or blocks.setdefault(key, object.__new__(cls))

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):  # which is set last, when the shape has passed all checks
            fill_block(self, element_ty, shape)

    def new_pointer(cls: Any, element_ty: Any, address_space: int = 1, const: bool = False) -> Any:
        key = (getattr(element_ty, "value", element_ty).name, address_space, const)
        return pointers.get(key) or pointers.setdefault(key, object.__new__(cls))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002, Triton's name
        known = vars(type).get("of_its_tensors")
        if known is None:
            fill_tensor(self, handle, type)
            type.of_its_tensors = {k: v for k, v in vars(self).items() if k != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    core.block_type.__new__ = new_block
    core.pointer_type.__new__ = new_pointer
    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _skip_what_nobody_reads() -> None:
    """Skip the overflow check of integers, which only a debug build reads."""
    from triton.language.semantic import TritonSemantic  # type: ignore[import-untyped]

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:  # `device_assert` drops its condition otherwise
            check(self, lhs, rhs, operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
