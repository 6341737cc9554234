"""Torch's own ways to shard a model, and to save what was sharded."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from cases import problem
from maxfactor import MaxFactor
from maxfactor.placement import local, moved
from ranks import Ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "fam": {"momentum": {"warmup": 2, "theta": 0.8}, "scale": "initial"},
}


class Net(nn.Module):
    """Uneven and tiny parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 128)
        self.down = nn.Linear(128, 8)
        self.odd = nn.Parameter(torch.zeros(5, 2, 3, 3))
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x)))
        return out


def filled(net: nn.Module) -> nn.Module:
    """The same weights in every process, whatever the shards."""
    for index, (_, param) in enumerate(net.named_parameters()):
        weight = problem(tuple(param.shape), seed=index).weight
        with torch.no_grad():
            local(param).copy_(local(moved(weight, param)))
    return net


def give_gradients(net: nn.Module, t: int) -> None:
    for index, (_, param) in enumerate(net.named_parameters()):
        grad = problem(tuple(param.shape), steps=12, seed=index).grads[t]
        param.grad = moved(grad, param)


@cache
def mesh_of(*shape: int) -> DeviceMesh | None:
    names = ("dp", "tp")[: len(shape)]
    mesh = DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape), mesh_dim_names=names)
    return None if mesh.get_coordinate() is None else mesh


def sharded(way: str) -> nn.Module | None:
    """A net that was sharded by torch; None on a rank that has no part in it."""
    net = Net()
    kind, _, size = way.partition(" ")
    mesh = mesh_of(*map(int, size.split("x"))) if size else None
    if kind == "plain":
        return filled(net)
    if mesh is None:
        return None
    if kind in ("tp", "fsdp+tp"):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}
        parallelize_module(net, mesh["tp"] if mesh.ndim > 1 else mesh, plan)
        mesh = mesh["dp"] if mesh.ndim > 1 else None
    if kind == "columns":
        fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(1 if p.dim() > 1 else 0))
    elif mesh is not None:
        fully_shard(net, mesh=mesh)
    return filled(net)


def same_as_plain(
    net: nn.Module, optimizer: MaxFactor, single: nn.Module, other: MaxFactor
) -> None:
    for (name, param), plain in zip(net.named_parameters(), single.parameters(), strict=True):
        pairs = [(name, param.detach(), plain.detach())]
        ours, theirs = optimizer.state[param], other.state[plain]
        assert ours.keys() == theirs.keys()
        pairs += [(f"{key} of {name}", ours[key], theirs[key]) for key in ours]
        for what, a, b in pairs:
            assert a.shape == b.shape, what
            assert a.dtype == b.dtype, what
            part = local(moved(b, a))
            if a.dtype == torch.int8:
                assert int((local(a).int() - part.int()).abs().sum()) <= 2, what
                continue
            size = max(1.0 if "momentum" in what else 0.0, float(b.abs().max()))
            torch.testing.assert_close(local(a), part, rtol=2e-6, atol=1e-6 * size, msg=what)


def equals_plain(way: str, settings: dict[str, Any]) -> None:
    net, single = sharded(way), sharded("plain")
    assert single is not None
    if net is None:
        return
    optimizer = MaxFactor(net.named_parameters(), **settings)
    other = MaxFactor(single.named_parameters(), **settings)
    for t in range(5):
        give_gradients(net, t)
        give_gradients(single, t)
        optimizer.step()
        other.step()
        same_as_plain(net, optimizer, single, other)


WAYS = ["fsdp 2", "fsdp 3", "columns 2", "tp 2", "fsdp+tp 2x2", "hsdp 2x2"]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_torch_shards(four: Ranks, way: str, name: str) -> None:
    settings = SETTINGS[name]
    if way == "columns 2" and "momentum" in settings:  # eight columns share one scale
        settings = settings | {"momentum_dtype": "fp32"}
    four.run(equals_plain, way, settings)
