"""Sharded parameters against a single process: parameters and every state tensor, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cases import problem
from maxfactor import Adafactor, MaxFactor, recipe
from ranks import Ranks

Layout = tuple[int | None, ...]  # the cut dimension for each mesh dimension, None for copies

STEPS = 6  # one of them has a gradient of zeros
SHAPES = [
    (8, 4),
    (7, 5),
    (1, 6),
    (6, 1),
    (9,),
    (1,),
    (),
    (3, 4, 5),
    (1, 4, 5),
    (5, 2, 3, 3),
    (0, 3),
]
WIDE = [(3, 256), (5, 128), (6, 128, 2)]  # rows that two ranks share in whole blocks of 64

SETTINGS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "0.1": recipe("0.1"),
    "0.2": recipe("0.2"),
    "0.3": recipe("0.3"),
    "no max_norm": {"max_norm": False},
    "dense": {"full_matrix": True},
    "last": {"factor": "last"},
    "small d": {"d": 0.2, "scale": "initial"},
    "factored": {"direction": "factored"},
    "factored last": {"direction": "factored", "maximize": True},
    "floors": {"eps": (0.05, 0.5)},
}
MOMENTA: dict[str, dict[str, Any]] = {
    "ema fp32": {"momentum": 0.9, "momentum_dtype": "fp32"},
    "nesterov factored": {
        "momentum": 0.8,
        "nesterov": True,
        "momentum_dtype": "fp32",
        "direction": "factored",
    },
    "fam fp32": {"momentum": {"warmup": 2, "theta": 0.8}, "momentum_dtype": "fp32"},
}
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "ema int8": {"momentum": 0.9},
    "fam int8": {"momentum": {"warmup": 2, "theta": 0.8}, "scale": "initial"},
    # A sign would make much of what two transforms leave of a zero.
    "bands fp32": {
        "momentum": {"warmup": 2, "bands": 4},
        "momentum_dtype": "fp32",
        "direction": "factored",
    },
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


# ------------------------------------------------------------------------------- what is run


def placed(x: Tensor, mesh: Any, layout: Layout) -> DTensor:
    """A tensor that every rank has, as a DTensor; a dimension that it lacks is not cut."""
    cuts = [None if cut is None or cut >= x.dim() else cut for cut in layout]
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def mesh_for(layout: Layout) -> Any:
    """All ranks in one dimension, or two by two."""
    shape = (dist.get_world_size(),) if len(layout) == 1 else (2, 2)
    return init_device_mesh("cpu", shape)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Equal to 1e-6, on this rank, to what a single process has of the whole tensor."""
    assert ours.dtype == theirs.dtype, what
    assert ours.shape == theirs.shape, what
    # What the momentum averages is of the order of 1, and may cancel.
    size = 1.0 if "momentum" in what else 0.0
    size = max(size, float(theirs.abs().max()) if theirs.numel() else 0.0)
    if isinstance(ours, DTensor):
        assert not any(placement.is_partial() for placement in ours.placements), what
        mesh, placements = ours.device_mesh, ours.placements
        theirs = distribute_tensor(theirs, mesh, placements, src_data_rank=None).to_local()
        ours = ours.to_local()
        assert ours.shape == theirs.shape, what
    if ours.dtype == torch.int8:
        assert int((ours.int() - theirs.int()).abs().sum()) <= 2, what  # on the edge of a code
        return
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6 * size, msg=lambda m: what + m)


def same_state(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    assert ours.keys() == theirs.keys(), what
    for key, value in ours.items():
        assert isinstance(value, DTensor) or key == "step"
        same(value, theirs[key], f"{key} of {what}: ")


def optimizer_for(rule: str, params: list[Tensor], settings: dict[str, Any]) -> Any:
    return (Adafactor if rule == "adafactor" else MaxFactor)(params, **settings)


def equals_one_process(
    rule: str, settings: dict[str, Any], layout: Layout, shapes: list[tuple[int, ...]]
) -> None:
    """All shapes in one optimizer, next to the same without shards."""
    mesh = mesh_for(layout)
    cases = [problem(shape, steps=STEPS, seed=i) for i, shape in enumerate(shapes)]
    params = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    shards = [torch.nn.Parameter(placed(case.weight, mesh, layout)) for case in cases]
    single = optimizer_for(rule, list(params), {**settings, "foreach": False})
    sharded = optimizer_for(rule, list(shards), settings)
    for t in range(STEPS):
        for case, param, shard in zip(cases, params, shards, strict=True):
            param.grad = case.grads[t].clone()
            shard.grad = placed(case.grads[t], mesh, layout)
        single.step()
        sharded.step()
        for case, param, shard in zip(cases, params, shards, strict=True):
            what = f"{tuple(param.shape)} at {t}"
            same(shard.detach(), param.detach(), f"parameter {what}: ")
            same_state(sharded.state[shard], single.state[param], what)
            assert shard.grad is not None
            same(shard.grad, case.grads[t], "the gradient is the user's: ")
    assert sharded.effective_lr() == pytest.approx(single.effective_lr(), rel=1e-6)


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("layout", [(0,), (1,), (2,), (None,)], ids=str)
def test_maxfactor(two: Ranks, name: str, layout: Layout) -> None:
    two.run(equals_one_process, "maxfactor", SETTINGS[name], layout, SHAPES)


@pytest.mark.parametrize("layout", [(0,), (1,)], ids=str)
def test_more_ranks_than_rows(three: Ranks, layout: Layout) -> None:
    for settings in ({}, {"direction": "factored"}, MOMENTA["fam fp32"]):
        three.run(equals_one_process, "maxfactor", settings, layout, SHAPES)
    three.run(equals_one_process, "adafactor", {}, layout, SHAPES)


@pytest.mark.parametrize("layout", [(0,), (1,), (2,)], ids=str)
def test_adafactor(two: Ranks, layout: Layout) -> None:
    two.run(equals_one_process, "adafactor", {}, layout, SHAPES)
    absolute = {"lr": 0.03, "weight_decay": 0.2, "clip_threshold": 0.4, "factor": "last"}
    two.run(equals_one_process, "adafactor", absolute, layout, SHAPES)


@pytest.mark.parametrize("layout", [(0, 1), (0, 0), (None, 0), (1, 0), (2, None)], ids=str)
def test_two_by_two(four: Ranks, layout: Layout) -> None:
    for settings in ({}, recipe("0.2"), {"direction": "factored"}, MOMENTA["fam fp32"]):
        four.run(equals_one_process, "maxfactor", settings, layout, SHAPES)
    four.run(equals_one_process, "adafactor", {}, layout, SHAPES)


@pytest.mark.parametrize("name", MOMENTA)
@pytest.mark.parametrize("layout", [(0,), (1,), (2,)], ids=str)
def test_momentum(two: Ranks, name: str, layout: Layout) -> None:
    two.run(equals_one_process, "maxfactor", MOMENTA[name], layout, SHAPES)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_momentum_in_blocks(two: Ranks, name: str) -> None:
    two.run(equals_one_process, "maxfactor", IN_BLOCKS[name], (0,), SHAPES + WIDE)
    two.run(equals_one_process, "maxfactor", IN_BLOCKS[name], (1,), WIDE)
