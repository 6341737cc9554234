"""Sums of squares in three parts: which part a value is in, and the root, against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.rule.squares import (
    are_usual,
    in_parts,
    is_usual,
    norm_of,
    parts_by_row,
    power_of_two,
    root_of,
    usual_parts,
)

SIZES = [
    (scale, factor)
    for scale in (1.0, 3e-30, 1e-13, 1e14, 3e30)
    for factor in (None, 1.7, 1e-6, 1e6, 1e-24, 1e24)
    if 1e-37 < scale * (factor or 1.0) < 1e37
]
LOW, HIGH = 2.0**-40, 2.0**50  # norms between them are usual
UNITS = np.array([1.0, 2.0**168, 2.0**-168])  # of the parts


def total(parts: Tensor) -> Any:
    """The sum that parts stand for; float64 holds the square of any float32."""
    return (parts.double().numpy() * UNITS).sum(axis=-1)


def test_powers_of_two() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, 3.999, 0.75, 2.0**-149, 1e-40, 3.4e38, 0.0])
    expected = [2.0 ** math.floor(math.log2(value)) for value in x[:-1].tolist()] + [0.5]
    assert power_of_two(x).tolist() == expected


@pytest.mark.parametrize(
    ("exponent", "place"), [(0, 0), (40, 0), (41, 1), (127, 1), (-40, 0), (-41, 2), (-149, 2)]
)
def test_a_square_is_in_one_part(exponent: int, place: int) -> None:
    norm = torch.tensor([[1.5, 3.0]])
    parts = in_parts(norm, torch.full((1, 2), 2.0**exponent))
    assert parts.shape == (1, 2, 3)
    assert parts.count_nonzero(dim=-1).tolist() == [[1, 1]]
    assert total(parts).tolist() == [[(1.5 * 2.0**exponent) ** 2, (3.0 * 2.0**exponent) ** 2]]
    assert parts[0, 0, place] > 0


def test_a_plain_sum_is_usual() -> None:
    assert usual_parts(torch.tensor([2.0, 5.0])).tolist() == [[2.0, 0.0, 0.0], [5.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("may_read", [True, False])
@pytest.mark.parametrize(("scale", "factor"), SIZES)
def test_rows(scale: float, factor: float | None, may_read: bool, dtype: torch.dtype) -> None:
    """Rows of one size; so of the three parts only one is used."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 4, 9, generator=generator) * scale).to(dtype)
    own = None if factor is None else torch.linspace(1.0, 1.9, 4)[:, None].expand(2, 4, 1) * factor
    parts = parts_by_row(x, own, may_read=may_read)
    assert parts.dtype == torch.float32
    assert bool(parts.isfinite().all())
    exact = (x.double().numpy() * (1.0 if own is None else own.double().numpy())) ** 2
    np.testing.assert_allclose(total(parts), exact.sum(axis=-1), rtol=2e-6, atol=0.0)


def test_usual_rows_are_the_plain_sum() -> None:
    """Bit for bit, also with a factor, and whether or not a value may be read."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    factor = torch.linspace(0.3, 3.0, 5)[:, None]
    read = parts_by_row(x, factor, may_read=True)
    assert torch.equal(read[:, 0], (vector_norm(x, dim=-1) * factor[:, 0]).square())
    for given in (None, factor):
        assert not parts_by_row(x, given, may_read=True)[:, 1:].any()
        assert not parts_by_row(x, given, may_read=False)[:, 1:].any()


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([LOW], True),
        ([LOW / 2], False),
        ([HIGH], True),
        ([HIGH * 2], False),
        ([0.0, 1.0], True),
        ([1.0, math.inf], False),
        ([1.0, math.nan], True),
        ([], True),
    ],
)
def test_the_largest_norm_decides(norms: list[float], expected: bool) -> None:
    assert is_usual(torch.tensor(norms)) is expected


@pytest.mark.parametrize(
    ("norms", "values", "expected"),
    [
        ([1.0, LOW], [1.0, LOW], True),
        ([1.0, LOW / 2], [1.0, LOW / 2], False),
        ([1.0, 0.0], [1.0, 0.0], True),  # a tensor of zeros
        ([1.0, 0.0, LOW], [1.0, 0.0, LOW], True),
        ([1.0, 0.0], [1.0, 1e-30], False),  # its square vanished
        ([1.0, 0.0, LOW / 2], [1.0, 0.0, LOW / 2], False),
        ([HIGH * 2, 1.0], [HIGH * 2, 1.0], False),
        ([math.nan, 0.0], [math.nan, 1e-30], True),
        (1.0, [1.0, 0.0], True),
        (0.0, [0.0, 0.0], False),
    ],
)
def test_each_norm_is_usual(norms: Any, values: list[float], expected: bool) -> None:
    tensors = torch.tensor(values).reshape(-1, 1, 1)
    assert are_usual(torch.tensor(norms), tensors) is expected


def test_roots() -> None:
    """Of one part, and of neighbours that are about as large, in every combination."""
    usual, large, small = [0.0, 4.0, 2.0**80], [0.0, 2.0**-86, 9.0], [0.0, 2.0**86, 9.0]
    for parts in itertools.product(usual, large, small):
        wanted = math.sqrt(parts[0] + parts[1] * 2.0**168 + parts[2] * 2.0**-168)
        factor, unit = root_of(torch.tensor(parts))
        assert float(factor) * float(unit) == pytest.approx(wanted, rel=1e-6, abs=0.0)
    near = torch.tensor([2.0**-80, 0.0, 2.0**86])  # 2^-82
    factor, unit = root_of(torch.stack([near, near * 0.0, torch.tensor([1.0, 1.0, 1.0])]))
    assert (factor * unit)[:2].tolist() == [
        pytest.approx(math.sqrt(1.25) * 2.0**-40, rel=1e-6, abs=0.0),
        0.0,
    ]
    assert factor.dtype == factor.mul(unit).dtype == torch.float32
    assert torch.equal(power_of_two(torch.as_tensor(unit)), torch.as_tensor(unit))


def test_a_usual_root_has_no_unit() -> None:
    """A float, so that nothing is computed with it."""
    factor, unit = root_of(torch.tensor([[4.0, 0.0, 0.0], [9.0, 0.0, 0.0]]))
    assert factor.tolist() == [2.0, 3.0]
    assert isinstance(unit, float)
    assert unit == 1.0


@pytest.mark.parametrize("shape", [(), (50,), (5, 10), (2, 5, 5)])
@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e-30, 1e37])
def test_norms(shape: tuple[int, ...], scale: float) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * scale + scale
    norm, unit = norm_of(x)
    expected = np.sqrt((x.double().numpy() ** 2).sum())
    assert float(norm) * float(unit) == pytest.approx(expected, rel=1e-6, abs=0.0)
    assert bool((norm * unit).isfinite())
    assert torch.equal(power_of_two(torch.as_tensor(unit)), torch.as_tensor(unit))
