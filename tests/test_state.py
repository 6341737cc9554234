"""State tensors: their shapes in one process and on shards, and the values that they may hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from maxfactor import FAM
from maxfactor.settings import FLOAT32_MAX, MaxFactorSettings, Switches, TensorRule
from maxfactor.state import (
    Bounds,
    as_float,
    block_shape,
    blocks_of,
    bounds_of,
    factoring,
    init_state,
    size_from_shape,
    state_dtypes,
    state_shapes,
)

Shape = tuple[int, ...]
WITH_MOMENTUM: dict[str, Any] = {"momentum": FAM(bands=3), "scale": "initial"}


def rule_of(shape: Shape, factor: Any = "auto", **given: Any) -> TensorRule:
    return MaxFactorSettings(switches=Switches(factor=factor), **given).rules.of(shape)


@pytest.fixture
def four_ranks() -> Iterator[Any]:
    """A mesh of four ranks of which only the first exists; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "factor", "dim", "row", "col", "scale"),
    [
        ((128, 256), "auto", 0, (32, 1), (1, 256), (32, 4)),
        ((128, 256), "auto", 1, (128, 1), (1, 64), (128, 1)),
        ((16, 8, 16), "auto", 0, (4, 1, 1), (1, 8, 16), (4, 2, 1)),  # alone it were (32, 16)
        ((16, 8, 16), "auto", 1, (16, 1, 1), (1, 2, 16), (16, 1, 1)),
        ((4, 8, 256), "last", 0, (1, 8, 1), (1, 1, 256), ()),
        ((4, 8, 256), "last", 1, (4, 2, 1), (4, 1, 256), ()),
        ((4, 8, 256), "last", 2, (4, 8, 1), (4, 1, 64), ()),
        ((64,), "auto", 0, (), (), ()),
    ],
)
def test_shards_of_the_state(
    shape: Shape, factor: str, dim: int, row: Shape, col: Shape, scale: Shape, four_ranks: Any
) -> None:
    """Sharded as the parameter where a tensor has the dimension, and else whole."""
    part = tuple(n // 4 if i == dim else n for i, n in enumerate(shape))
    param = DTensor.from_local(torch.zeros(part), four_ranks, [Shard(dim)], run_check=False)
    rule = rule_of(shape, factor, **(WITH_MOMENTUM if factor == "auto" else {}))
    state = init_state(param, rule)
    expected: dict[str, Shape] = {"row_var": row, "col_var": col, "momentum_scale": scale}
    expected |= {"momentum": part, "variance": part, "initial_rms": (), "band_sums": (3, 3)}
    assert type(state.pop("step")) is torch.Tensor
    for key, value in state.items():
        assert isinstance(value, DTensor)
        whole, own = state_shapes(shape, rule)[key], tuple(value.to_local().shape)
        assert (tuple(value.shape), own) == (whole, expected[key]), key
        assert value.placements == ((Replicate(),) if own == whole else (Shard(dim),))


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Bounds(-FLOAT32_MAX), "finite values"),
        (Bounds(0.0), "finite values of at least 0"),
        (Bounds(0.0, is_whole=True), "whole numbers of at least 0"),
        (Bounds(-127.0, 127.0), "finite values from -127 to 127"),
    ],
)
def test_bounds_in_words(bounds: Bounds, text: str) -> None:
    assert str(bounds) == text


def test_bounds_of_keys() -> None:
    everything, no_less = (-FLOAT32_MAX, FLOAT32_MAX, False), (0.0, FLOAT32_MAX, False)
    assert bounds_of("momentum", torch.float32) == (everything,)
    assert bounds_of("momentum", torch.int8) == ((-127.0, 127.0, False),)
    assert bounds_of("step", torch.int64) == ((0.0, FLOAT32_MAX, True),)
    assert bounds_of("row_var", torch.float32) == (no_less,)
    correction = (0.0, 1.00001, False)  # c, but for rounding
    assert bounds_of("band_sums", torch.float32) == (everything, no_less, correction)


def test_dimensions_of_the_factors() -> None:
    auto, last = factoring((5, 2, 3, 3), "auto"), factoring((5, 2, 3, 130), "last")
    assert auto is not None
    assert last is not None
    assert (auto.row_dims, auto.col_dims, auto.scale) == ((0, 1), (2, 3), (5, 2, 1, 1))
    assert (last.row_dims, last.col_dims, last.scale) == ((0, 1, 2), (0, 1, 3), (5, 2, 3, 3))
    assert factoring((3, 4), "last") == factoring((3, 4), "auto")
    assert [blocks_of(n) for n in (0, 1, 64, 65, 128, 129)] == [0, 1, 1, 2, 2, 3]


def test_what_a_parameter_keeps() -> None:
    """A vector has no scales and no bands; only scale="initial" keeps a size."""
    given: dict[str, Any] = {"momentum": FAM(bands=2)}
    matrix, vector = rule_of((4, 6), **given), rule_of((6,), **given)
    assert list(state_shapes((4, 6), matrix)) == [
        *("step", "row_var", "col_var", "momentum", "momentum_scale", "band_sums")
    ]
    assert list(state_shapes((6,), vector)) == ["step", "variance", "momentum"]
    assert state_dtypes((6,), vector)["momentum"] == torch.float32
    assert state_dtypes((4, 6), matrix)["momentum"] == torch.int8
    wide = rule_of((4, 6), momentum=0.9, momentum_dtype="bf16")
    assert list(state_shapes((4, 6), wide)) == ["step", "row_var", "col_var", "momentum"]
    assert list(state_shapes((4, 6), rule_of((4, 6)))) == ["step", "row_var", "col_var"]
    dense = MaxFactorSettings(switches=Switches(full_matrix=True)).rules.of((4, 6))
    assert state_shapes((4, 6), dense) == {"step": (), "variance": (4, 6)}


def test_a_size_from_a_shape() -> None:
    """That of torch.nn.Linear, whose weights are uniform; raised, that of He's initialisation."""
    scales = ("initial", "usual", "raised")
    initial, usual, raised = (rule_of((4, 6), scale=scale) for scale in scales)
    assert size_from_shape((400, 300), usual) == size_from_shape((400, 300), initial)
    linear = torch.nn.Linear(300, 400).weight.detach()
    assert size_from_shape((400, 300), initial) == pytest.approx(
        float(linear.square().mean().sqrt()), rel=0.01
    )
    transposed = rule_of((300, 400), scale="usual", transposed=True)
    assert size_from_shape((300, 400), transposed) == size_from_shape((400, 300), usual)
    assert size_from_shape((4, 3, 5), initial) == 1.0 / math.sqrt(45.0)
    assert size_from_shape((2, 1), initial) == 1.0 / math.sqrt(3.0)
    he = torch.nn.init.kaiming_normal_(torch.empty(400, 800), nonlinearity="relu")
    assert size_from_shape((400, 800), raised) == pytest.approx(
        float(he.square().mean().sqrt()), rel=0.01
    )
    assert size_from_shape((400, 2, 100), raised) == pytest.approx(0.1)
    assert size_from_shape((400, 199), raised) == size_from_shape((400, 1), raised) == 0.1
    state = init_state(torch.ones(4, 3, 5), rule_of((4, 3, 5), scale="initial"))
    assert float(state["initial_rms"]) == pytest.approx(1.0 / math.sqrt(45.0))
    for rule in (initial, usual, raised):
        sizes = [size_from_shape(shape, rule) for shape in ((9,), (), (0, 3))]
        assert sizes == [0.0, 0.0, 0.0]


def test_steps_are_counted_in_float32() -> None:
    """Whatever torch's default is."""
    assert as_float(torch.tensor(3)).dtype == torch.float32  # type: ignore[union-attr]
    assert as_float(7) == 7


def test_where_the_counter_is() -> None:
    """On the CPU, or with the parameter; an int64, and nothing else on the parameter's device."""
    param = torch.empty(4, 6, device="meta")
    for on_device, device in ((False, "cpu"), (True, "meta")):
        state = init_state(param, rule_of((4, 6)), step_on_device=on_device)
        assert state["step"].device.type == device
        assert state["step"].dtype == torch.int64
        assert state["row_var"].device.type == "meta"
    assert init_state(param, rule_of((4, 6)))["step"].device.type == "cpu"


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [(("rows", 2), (2, 6)), (("columns", 3), (4, 3)), (("rows", 4), None), (("columns", 6), None)],
)
def test_blocks(blocks: tuple[str, int], expected: tuple[int, int] | None) -> None:
    given: dict[str, Any] = {"direction": "orthogonal", "blocks": blocks}
    assert block_shape((4, 6), rule_of((4, 6), **given)) == expected
    assert block_shape((6,), rule_of((6,), **given)) is None
    with pytest.raises(ValueError, match=r"of a parameter \(5, 7\) as a matrix 5 x 7"):
        block_shape((5, 7), rule_of((5, 7), **given))
