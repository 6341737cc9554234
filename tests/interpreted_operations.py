"""Operations of Triton's interpreter that work out the type of a result once for each kind.

Triton derives types, shapes and constants anew for every operation, which takes ten times as long
as the operation itself. Types alone decide them. So the first operation of each kind goes Triton's
way, through all of its checks. The others take their type from what came of it, and their values
from the same function of NumPy. A kind is the types of the operands; of a number, its Python type.
A kind is remembered only if the short way gave the same bits for its first operation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter as memory  # type: ignore[import-untyped]
from triton.language.core import constexpr, tensor  # type: ignore[import-untyped]
from triton.runtime.interpreter import TensorHandle  # type: ignore[import-untyped]

Function = Callable[..., Any]

FLOATS, INTEGERS = {"fp32", "fp64"}, {"int32", "uint32", "int64", "uint64"}
ARITHMETIC = FLOATS | INTEGERS
SIGNED = {"int32", "int64"}  # NumPy widens one beside the other as Triton does
CAST = ARITHMETIC | {"int1", "int8", "uint8"}  # between these a cast is `astype`
STORED = CAST | {"fp16", "bf16"}  # what loads and stores move as it is
NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "uint16", "int1": "bool"}
INT32, UINT32 = range(-(2**31), 2**31), range(2**32)
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127

# What NumPy has for an operator, and the scalars that it takes.
BINARY: dict[str, tuple[Function, set[str]]] = {
    "add": (np.add, ARITHMETIC),
    "sub": (np.subtract, ARITHMETIC),
    "mul": (np.multiply, ARITHMETIC),
    "truediv": (np.divide, FLOATS),
    "floordiv": (lambda x, y: (x - np.fmod(x, y)) // y, SIGNED),
    "mod": (np.fmod, SIGNED),
    "lt": (np.less, ARITHMETIC),
    "le": (np.less_equal, ARITHMETIC),
    "gt": (np.greater, ARITHMETIC),
    "ge": (np.greater_equal, ARITHMETIC),
    "eq": (np.equal, ARITHMETIC),
    "ne": (np.not_equal, ARITHMETIC),
    "and": (np.bitwise_and, INTEGERS | {"int1"}),
    "or": (np.bitwise_or, INTEGERS | {"int1"}),
    "xor": (np.bitwise_xor, INTEGERS),
    "lshift": (np.left_shift, INTEGERS),
    "rshift": (np.right_shift, INTEGERS),
}
REFLECTED = ("add", "sub", "mul", "truediv")


def quick_form(owner: Any, name: str, slow: Function) -> Function:
    """The quick form of a function of Triton's language, or `slow` if it has none."""
    forms: dict[str, Callable[[Function], Function]] = {}
    if owner is tensor:
        forms = {"__getitem__": _index, "to": _cast}
        for operator, (function, scalars) in BINARY.items():
            forms[f"__{operator}__"] = functools.partial(_binary, function, scalars)
            if operator in REFLECTED:
                turned = functools.partial(_turned, function)
                forms[f"__r{operator}__"] = functools.partial(_binary, turned, scalars)
    elif inspect.ismodule(owner):  # descriptors have other loads and stores
        forms = {"load": _load, "store": _store, "arange": _arange, "full": _full}
        forms["where"] = _where
        forms["minimum"] = functools.partial(_binary, np.minimum, ARITHMETIC)
        forms["maximum"] = functools.partial(_binary, np.maximum, ARITHMETIC)
    if name not in forms:
        return slow
    quick = forms[name](slow)
    vars(quick)["slow"] = slow
    return quick


def _turned(function: Function, x: Any, y: Any) -> Any:
    return function(y, x)


def _binary(function: Function, scalars: set[str], slow: Function) -> Function:
    """An operation on two tensors, or on a tensor and a number."""
    known: dict[tuple[Any, ...], Any] = {}

    warns = function in (np.left_shift, np.right_shift)  # if a constexpr has too many bits

    def operate(x: Any, y: Any, *more: Any, **options: Any) -> Any:
        if type(x) is not tensor or more or options or (warns and type(y) is constexpr):
            return slow(x, y, *more, **options)
        if type(y) is constexpr:
            y = y.value
        mine = x.handle
        if type(y) is tensor:
            theirs = y.handle
            data = theirs.data
            key: tuple[Any, ...] = (id(x.type), id(mine.dtype), id(y.type), id(theirs.dtype))
        else:
            data = constant_beside(y, x.dtype)
            if data is None:
                return slow(x, y)
            key = (id(x.type), id(mine.dtype), type(y))
        found = known.get(key)
        if found:
            return _made(found[1](mine.data, data), *found[0])
        result = slow(x, y)
        if found is None:
            short = _short_way(function, scalars, x.type, getattr(y, "type", None))
            if not short or not _is_same(short(mine.data, data), result.handle.data):
                known[key] = ()
            else:
                known[key] = (_kind_of(result), short, _kind_of(x), y)
        return result

    return operate


def _short_way(function: Function, scalars: set[str], mine: Any, theirs: Any) -> Function | None:
    """What NumPy does to the operands, if it is what Triton does; a number has no type."""
    scalar = mine.scalar
    other = scalar if theirs is None else theirs.scalar
    ranks = {len(each.shape) for each in (mine, theirs) if each is not None and each.is_block()}
    if len(ranks) > 1:
        return None
    if scalar.is_ptr():
        if function is not np.add or (theirs is not None and other.name not in SIGNED):
            return None
        size = max(1, scalar.element_ty.primitive_bitwidth // 8)
        return lambda x, y: x + size * y.astype(np.uint64)
    is_one = scalar.name == other.name or {scalar.name, other.name} <= SIGNED
    return function if is_one and scalar.name in scalars else None


def constant_beside(number: Any, scalar: Any) -> Any:
    """A number as an array of the type that it takes beside a tensor; None if values decide."""
    kind, name = type(number), scalar.name
    if kind is int and number in INT32:
        if name in SIGNED or name in FLOATS or (name in INTEGERS and number >= 0):
            return array_of(name, (1,), number)
        return array_of("int32", (1,), number) if scalar.is_ptr() else None
    if kind is int and name == "uint32" and number in UINT32:
        return array_of(name, (1,), number)
    # Compared with float64, a number is rounded to float32; added to it, it is not.
    if kind is float and name == "fp32" and _is_float32(number):
        return array_of(name, (1,), number)
    return None


def _is_float32(number: float) -> bool:
    """Whether Triton takes a number for a float32: any but very large or small ones."""
    size = abs(number)
    return FLOAT32_MIN <= size <= FLOAT32_MAX or size in (0.0, float("inf"))


@functools.lru_cache(4096)
def array_of(scalar: str, shape: tuple[int, ...], number: float) -> Any:
    """An array of one value, which nobody may write to."""
    array = np.full(shape, number or 0, dtype=NAMES.get(scalar, scalar))  # Triton has no -0
    array.flags.writeable = False
    return array


def _index(slow: Function) -> Function:
    """`x[:, None]` and the like."""
    known: dict[tuple[Any, ...], Any] = {}
    everything = slice(None)

    def index(x: Any, places: Any) -> Any:
        if type(places) is not tuple or any(p is not None and p != everything for p in places):
            return slow(x, places)
        handle = x.handle
        key = (id(x.type), id(handle.dtype), *(p is None for p in places))
        found = known.get(key)
        if found:
            return _made(handle.data[places], *found[0])
        result = slow(x, places)
        if found is None:
            is_short = x.type.is_block() and _is_same(handle.data[places], result.handle.data)
            known[key] = (_kind_of(result), _kind_of(x)) if is_short else ()
        return result

    return index


def _cast(slow: Function) -> Function:
    """`x.to(dtype)`, where it is that of NumPy, another view, or nothing at all."""
    known: dict[tuple[Any, ...], Any] = {}

    def cast(x: Any, dtype: Any, *more: Any, bitcast: Any = False, **options: Any) -> Any:
        if type(dtype) is constexpr:
            dtype = dtype.value
        if more or options or type(bitcast) is not bool:
            return slow(x, dtype, *more, bitcast=bitcast, **options)
        handle = x.handle
        key = (id(x.type), id(handle.dtype), id(dtype), bitcast)
        found = known.get(key)
        if found:
            return _made(found[1](handle.data), *found[0]) if found[1] else x
        result = slow(x, dtype, bitcast=bitcast)
        if found is None:
            short = _short_cast(x.type.scalar, dtype, bitcast, result.handle.data.dtype)
            if result is x:
                known[key] = (None, None, _kind_of(x), dtype)
            elif short and _is_same(short(handle.data), result.handle.data):
                known[key] = (_kind_of(result), short, _kind_of(x), dtype)
            else:
                known[key] = ()
        return result

    return cast


def _short_cast(scalar: Any, dtype: Any, bitcast: bool, target: Any) -> Function | None:
    if bitcast or (scalar.name == "int64" and dtype.is_ptr()):
        return lambda data: data.view(target)
    if scalar.name in CAST and dtype.name in CAST - {"int1"}:
        return lambda data: data.astype(target)
    return None


def _load(slow: Function) -> Function:
    """Load from an address, or from a block of addresses with a mask of its shape."""
    known: dict[tuple[Any, ...], Any] = {}

    def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        places = pointer.handle.data
        if mask is None and other is None:
            inside = array_of("int1", places.shape, True)
            key: tuple[Any, ...] = (id(pointer.type), *options.items())
        elif type(mask) is tensor and type(other) in (int, float):
            inside = mask.handle.data
            key = (id(pointer.type), id(mask.type), id(mask.handle.dtype), other, type(other))
            key += tuple(options.items())
        else:
            return slow(pointer, mask, other, **options)
        found = known.get(key)
        if found:
            return _made(memory.load(places, inside, *found[1]), *found[0])
        result = slow(pointer, mask, other, **options)
        if found is None:
            known[key] = ()
            scalar, data = pointer.type.scalar.element_ty, result.handle.data
            is_exact = other in (None, 0) or (scalar.name == "fp32" and type(other) is float)
            if scalar.name in STORED - {"int1"} and is_exact and _is_mask(inside, places):
                short = (array_of(scalar.name, places.shape, other or 0), data.dtype)
                if _is_same(memory.load(places, inside, *short), data):
                    known[key] = (_kind_of(result), short, pointer.type, mask)
        return result

    return load


def _store(slow: Function) -> Function:
    """Store a tensor or a number at an address, or at a block of them with a mask of its shape."""
    known: dict[tuple[Any, ...], Any] = {}

    def store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if type(value) is not tensor or options or (mask is not None and type(mask) is not tensor):
            return slow(pointer, value, mask, **options)
        places, data = pointer.handle.data, value.handle.data
        key: tuple[Any, ...] = (id(pointer.type), id(value.type), id(value.handle.dtype))
        inside = array_of("int1", places.shape, True)
        if mask is not None:
            inside = mask.handle.data
            key += (id(mask.type), id(mask.handle.dtype))
        found = known.get(key)
        if found:
            memory.store(places, data, inside)
            return found[0]
        result = slow(pointer, value, mask)
        if found is None:
            scalar = pointer.type.scalar.element_ty.name
            is_short = scalar == value.dtype.name and scalar in STORED - {"int1"}
            is_short = is_short and data.shape == places.shape and _is_mask(inside, places)
            known[key] = (result, pointer.type, _kind_of(value), mask) if is_short else ()
        return result

    return store


def _is_mask(inside: Any, places: Any) -> bool:
    return bool(inside.dtype == bool and inside.shape == places.shape)


def _arange(slow: Function) -> Function:
    """`arange(start, end)`."""
    made = _constants(slow)
    return lambda start, end, **options: made((_plain(start), _plain(end)), **options)


def _full(slow: Function) -> Function:
    """`full(shape, number, dtype)`."""
    made = _constants(slow)

    def full(shape: Any, value: Any, dtype: Any, **options: Any) -> Any:
        value = _plain(value)
        if type(value) is not int and type(value) is not float:
            return slow(shape, value, dtype, **options)
        return made((tuple(map(_plain, _plain(shape))), value, _plain(dtype)), **options)

    return full


def _constants(slow: Function) -> Function:
    """A function of plain values: what it returns is known by them."""
    known: dict[tuple[Any, ...], Any] = {}

    def make(values: tuple[Any, ...], **options: Any) -> Any:
        if options:
            return slow(*values, **options)
        key = (*values, *map(type, values))
        found = known.get(key)
        if found is None:
            result = slow(*values)
            result.handle.data.flags.writeable = False
            found = known[key] = (result.handle.data, *_kind_of(result))
        return _made(*found)

    return make


def _plain(value: Any) -> Any:
    return value.value if type(value) is constexpr else value


def _where(slow: Function) -> Function:
    """`where(condition, x, y)`, of which one may be a number."""
    known: dict[tuple[Any, ...], Any] = {}

    def where(condition: Any, x: Any, y: Any, **options: Any) -> Any:
        if type(x) is constexpr:
            x = x.value
        if type(y) is constexpr:
            y = y.value
        shown = x if type(x) is tensor else y
        if type(condition) is not tensor or type(shown) is not tensor or options:
            return slow(condition, x, y, **options)
        chosen = condition.handle
        key: tuple[Any, ...] = (id(condition.type), id(chosen.dtype))
        operands = []
        for each in (x, y):
            if type(each) is tensor:
                operands.append(each.handle.data)
                key += (id(each.type), id(each.handle.dtype))
            else:
                operands.append(constant_beside(each, shown.dtype))
                key += (type(each),)
        if operands[0] is None or operands[1] is None:
            return slow(condition, x, y)
        found = known.get(key)
        if found:
            return _made(np.where(chosen.data, *operands), *found[0])
        result = slow(condition, x, y)
        if found is None:
            names = [each.dtype.name for each in (x, y) if type(each) is tensor]
            is_short = condition.dtype.name == "int1" and names[0] in ARITHMETIC
            is_short = is_short and names[0] == names[-1]
            is_short = is_short and _is_same(np.where(chosen.data, *operands), result.handle.data)
            known[key] = (_kind_of(result), condition, x, y) if is_short else ()
        return result

    return where


def quick_constants(slow: Function) -> Function:
    """`to_tensor`, which Triton calls for the right side of every assignment."""

    @functools.lru_cache(4096)
    def constant(kind: Any, number: float) -> tuple[Any, ...]:
        result = slow(number)
        result.handle.data.flags.writeable = False
        return result.handle.data, *_kind_of(result)

    def to_tensor(x: Any, check_type: bool = True) -> Any:
        kind: Any = type(x)
        if kind is tensor:
            return x
        return _made(*constant(kind, x)) if kind is int or kind is float else slow(x, check_type)

    return to_tensor


def _kind_of(result: Any) -> tuple[Any, Any]:
    return result.handle.dtype, result.type


def _is_same(ours: Any, theirs: Any) -> bool:
    """Whether two arrays are the same, bit for bit."""
    is_alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return bool(is_alike and ours.tobytes() == theirs.tobytes())


def _made(data: Any, dtype: Any, type_: Any) -> Any:
    """A tensor of a known kind."""
    handle = object.__new__(TensorHandle)
    handle.data = data
    handle.dtype = dtype
    handle.attr = {}
    made = object.__new__(tensor)
    made.__dict__.update(type_.of_its_tensors)
    made.handle = handle
    return made
