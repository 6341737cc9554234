"""The quick forms of operations in Triton's interpreter do what Triton does, bit for bit."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from interpreter import KNOWN

if torch.cuda.is_available() or find_spec("triton") is None or version("triton") != KNOWN:
    pytest.skip("the interpreter runs as it is", allow_module_level=True)

import triton.language as tl  # type: ignore[import-untyped]
from triton.runtime import interpreter  # type: ignore[import-untyped]

from interpreted_operations import BINARY, REFLECTED, quick_form
from maxfactor.backends.triton.kernels.tiles import inverse_root

SCALARS = {
    "float32": tl.float32,
    "float64": tl.float64,
    "float16": tl.float16,
    "int32": tl.int32,
    "int64": tl.int64,
    "uint32": tl.uint32,
    "int8": tl.int8,
    "bool": tl.int1,
}
SHAPES = [(), (4,), (4, 1), (1, 8), (4, 8)]
OTHERS = [(), (4, 1)]
NUMBERS = [0, 3, -2, 2**31, 2**33, 0.0, -0.0, 0.1, 1e-40, 1e300, float("inf"), True]
OPERATORS = [f"__{name}__" for name in BINARY] + [f"__r{name}__" for name in REFLECTED]


def tensor(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor of the interpreter; one without a shape has one value."""
    values = random.integers(1, 100, shape or (1,)) * (1 if "u" in dtype else -1) % 120
    data = (values / 7 if "float" in dtype else values % 2 if dtype == "bool" else values).astype(
        dtype
    )
    scalar = SCALARS[dtype]
    type_ = tl.block_type(scalar, list(shape)) if shape else scalar
    return tl.core.tensor(interpreter.TensorHandle(data, scalar), type_)


def pair(owner: Any, name: str) -> tuple[Any, Any]:
    """A function as Triton has it, and a new quick form of it."""
    interpreter._patch_lang(inverse_root.fn)  # any function of ours
    slow = getattr(owner, name).slow
    return slow, quick_form(owner, name, slow)


def outcome(function: Any, *args: Any) -> Any:
    """What it returns, in plain values, or what it raises."""
    try:
        result = function(*args)
    except Exception as error:
        return type(error), str(error)
    data = result.handle.data
    return str(result.type), str(result.handle.dtype), data.dtype, data.shape, data.tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    """Several values of each kind: the first goes Triton's way."""
    slow, quick = pair(tl.core.tensor, name)
    random = np.random.default_rng(0)
    # Every type beside every type, in two shapes; every shape beside every shape, of one type.
    of_types = [((a, (4, 8)), (b, shape)) for a, b in product(SCALARS, SCALARS) for shape in OTHERS]
    of_shapes = [(("int32", a), ("int32", b)) for a, b in product(SHAPES, SHAPES)]
    for one, other in of_types + of_shapes:
        for _ in range(2):
            x, y = tensor(random, *one), tensor(random, *other)
            assert outcome(quick, x, y) == outcome(slow, x, y), (one, other)
    for dtype, number in product(SCALARS, NUMBERS):
        for _ in range(2):
            x = tensor(random, dtype, (4, 8))
            assert outcome(quick, x, number) == outcome(slow, x, number), (dtype, number)


@pytest.mark.parametrize("dtype", SCALARS)
@pytest.mark.parametrize("target", SCALARS)
def test_casts(dtype: str, target: str) -> None:
    slow, quick = pair(tl.core.tensor, "to")
    random = np.random.default_rng(0)
    for shape in SHAPES:
        for _ in range(2):
            x = tensor(random, dtype, shape)
            assert outcome(quick, x, SCALARS[target]) == outcome(slow, x, SCALARS[target])


def test_choices_and_places() -> None:
    """`where` of tensors and numbers, and `x[:, None]`."""
    slow, quick = pair(tl, "where")
    random = np.random.default_rng(0)
    for one, other, (first, second) in product(
        SHAPES, SHAPES, [("float32", "float32"), ("int32", "int64")]
    ):
        for _ in range(2):
            chosen, x = tensor(random, "bool", one), tensor(random, first, other)
            for y in (tensor(random, second, one), *NUMBERS):
                assert outcome(quick, chosen, x, y) == outcome(slow, chosen, x, y)
                assert outcome(quick, chosen, y, x) == outcome(slow, chosen, y, x)
    slow, quick = pair(tl.core.tensor, "__getitem__")
    for shape, places in product(SHAPES, [(slice(None), None), (None, slice(None)), (None,), (0,)]):
        for _ in range(2):
            x = tensor(random, "float32", shape)
            assert outcome(quick, x, places) == outcome(slow, x, places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("shape", [(), (8,), (4, 8)])
def test_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Loads and stores, with a mask or without."""
    (load, quick_load), (store, quick_store) = pair(tl, "load"), pair(tl, "store")
    random = np.random.default_rng(0)
    for _ in range(2):
        source = torch.from_numpy(random.integers(0, 99, shape or (1,))).to(dtype)
        pointer = interpreter._implicit_cvt(source)
        if shape:
            offsets = tensor(random, "int32", shape)
            offsets.handle.data = np.arange(source.numel(), dtype=np.int32).reshape(shape)
            pointer = pointer + offsets
        mask = tensor(random, "bool", shape)
        for options in ((), (mask, 0), (mask, 0.0), (mask, 1.5), (mask, None)):
            found = outcome(quick_load, pointer, *options)
            assert found == outcome(load, pointer, *options), options
        value = load(pointer)
        value.handle.data = value.handle.data[::-1].copy()
        for masked in ((), (mask,)):
            results = []
            for function in (quick_store, store):
                target = source.clone()
                places = interpreter._implicit_cvt(target)
                function(places + offsets if shape else places, value, *masked)
                results.append(target)
            assert torch.equal(*results)
