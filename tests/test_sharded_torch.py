"""Torch's own ways to shard a model, and to save what was sharded."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode
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
        grad = problem(tuple(param.shape), dtype=param.dtype, steps=12, seed=index).grads[t]
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


def steps_partial_gradients() -> None:
    mesh = mesh_of(2)
    if mesh is None:
        return
    net, single = sharded("tp 2"), sharded("plain")
    assert net is not None
    assert single is not None
    optimizer, other = MaxFactor(net.parameters()), MaxFactor(single.parameters())
    for t in range(4):
        give_gradients(net, t)
        give_gradients(single, t)
        for param in net.get_submodule("norm").parameters():
            assert param.grad is not None
            share = local(param.grad) * (0.25 if mesh.get_rank() == 0 else 0.75)
            assert isinstance(param.grad, DTensor)
            param.grad = DTensor.from_local(share, param.grad.device_mesh, [Partial()])
        optimizer.step()
        other.step()
        same_as_plain(net, optimizer, single, other)
        for param in net.get_submodule("norm").parameters():
            assert isinstance(param.grad, DTensor)
            assert param.grad.placements[0].is_partial(), "the gradient is the user's"


def test_partial_gradients(four: Ranks) -> None:
    four.run(steps_partial_gradients)


def rounds_strided_shards() -> None:
    net, single = sharded("fsdp+tp 2x2"), sharded("plain")
    assert net is not None
    assert single is not None
    net, single = filled(net.bfloat16()), filled(single.bfloat16())
    optimizer, other = MaxFactor(net.parameters(), seed=1), MaxFactor(single.parameters(), seed=1)
    for t in range(3):
        give_gradients(net, t)
        give_gradients(single, t)
        optimizer.step()
        other.step()
    for (name, param), plain in zip(net.named_parameters(), single.parameters(), strict=True):
        tipped = local(param) != local(moved(plain, param))
        assert int(tipped.sum()) <= 1, name  # on the edge of the noise


def test_rounding_of_strided_shards(four: Ranks) -> None:
    four.run(rounds_strided_shards)


# -------------------------------------------------------------------------------- checkpoints


def group_of(way: str) -> tuple[ProcessGroup | None, bool]:
    """Who takes part in saving and loading, and whether it is one process alone."""
    kind, _, size = way.partition(" ")
    mesh = None if kind == "plain" or "x" in size else mesh_of(int(size))
    return (None if mesh is None else mesh.get_group()), kind == "plain"


def saved(way: str, settings: dict[str, Any], folder: str) -> None:
    """Three steps, then a checkpoint."""
    net = sharded(way)
    if net is None or (way == "plain" and torch.distributed.get_rank() > 0):
        return
    optimizer = MaxFactor(net.named_parameters(), **settings)
    for t in range(3):
        give_gradients(net, t)
        optimizer.step()
    model, state = get_state_dict(net, optimizer)
    group, alone = group_of(way)
    content: dict[str, Any] = {"model": model, "optimizer": state}
    save(content, checkpoint_id=folder, process_group=group, no_dist=alone)


def loaded(way: str, settings: dict[str, Any], folder: str) -> None:
    """A fresh model and optimizer from the checkpoint; three more steps are those of one run."""
    net, single = sharded(way), sharded("plain")
    if net is None:
        return
    assert single is not None
    optimizer = MaxFactor(net.named_parameters(), **settings)
    other = MaxFactor(single.named_parameters(), **settings)
    model, state = get_state_dict(net, optimizer)
    group, alone = group_of(way)
    content: dict[str, Any] = {"model": model, "optimizer": state}
    load(content, checkpoint_id=folder, process_group=group, no_dist=alone)
    set_state_dict(
        net, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )
    for t in range(6):
        give_gradients(single, t)
        other.step()
        if t > 2:
            give_gradients(net, t)
            optimizer.step()
        if t >= 2:
            same_as_plain(net, optimizer, single, other)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("fsdp 2", ["plain", "fsdp 1", "fsdp 2", "fsdp 3", "tp 2"]),
        ("tp 2", ["plain", "fsdp 2"]),
        ("plain", ["fsdp 2", "tp 2"]),
        ("fsdp+tp 2x2", ["plain", "hsdp 2x2"]),
    ],
)
def test_checkpoints(four: Ranks, tmp_path: Path, first: str, then: list[str], name: str) -> None:
    four.run(saved, first, SETTINGS[name], str(tmp_path))
    for way in then:
        four.run(loaded, way, SETTINGS[name], str(tmp_path))


def leaves_a_fresh_one_alone(settings: dict[str, Any]) -> None:
    net = sharded("fsdp 2")
    if net is None:
        return
    optimizer = MaxFactor(net.named_parameters(), **settings)
    before = [local(param).clone() for param in net.parameters()]
    state: Any = get_optimizer_state_dict(net, optimizer)["state"]
    for param, weight in zip(net.parameters(), before, strict=True):
        assert torch.equal(local(param), weight)
    for values in state.values():
        for value in values.values():
            assert not local(value).any()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_fresh_optimizer_is_left_alone(four: Ranks, name: str) -> None:
    """Torch learns the state's layout by a step without rate and gradient."""
    four.run(leaves_a_fresh_one_alone, SETTINGS[name])


def broadcasts(settings: dict[str, Any]) -> None:
    """A whole state dictionary that only the first rank has."""
    net, single = sharded("fsdp 4"), sharded("plain")
    assert net is not None
    assert single is not None
    other = MaxFactor(single.named_parameters(), **settings)
    for t in range(3):
        give_gradients(single, t)
        other.step()
    model, state = get_state_dict(single, other)
    if torch.distributed.get_rank() > 0:
        model, state = {}, {}
    optimizer = MaxFactor(net.named_parameters(), **settings)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, model, options=options)
    set_optimizer_state_dict(net, optimizer, state, options=options)
    same_as_plain(net, optimizer, single, other)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_whole_state_from_the_first_rank(four: Ranks, name: str) -> None:
    four.run(broadcasts, SETTINGS[name])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_are_refused(use_orig_params: bool) -> None:
    flat = FullyShardedDataParallel(
        nn.Linear(2, 2),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    with pytest.raises(TypeError, match=r"flat parameter of .*fully_shard instead"):
        MaxFactor(flat.parameters())


# ------------------------------------------------------------------- what needs no messages


def zero_redundancy() -> None:
    """ZeRO-1: each rank steps its own parameters; the whole state loads into a plain run."""
    # Here, because importing it warns of something in torch that is deprecated.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net, single = sharded("plain"), sharded("plain")
    assert net is not None
    assert single is not None
    optimizer = ZeroRedundancyOptimizer(net.parameters(), MaxFactor, lr=0.02)
    other = MaxFactor(single.parameters(), lr=0.02)
    for t in range(4):
        give_gradients(net, t)
        give_gradients(single, t)
        optimizer.step()
        other.step()
    for ours, theirs in zip(net.parameters(), single.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    optimizer.consolidate_state_dict(to=0)
    if torch.distributed.get_rank() == 0:
        again = MaxFactor(net.parameters(), lr=0.02)
        again.load_state_dict(optimizer.state_dict())
        for ours, theirs in zip(net.parameters(), single.parameters(), strict=True):
            for key, value in other.state[theirs].items():
                assert torch.equal(again.state[ours][key], value)


def test_zero_redundancy(four: Ranks) -> None:
    four.run(zero_redundancy)


def data_parallel() -> list[float]:
    """Copies with torch's own averaging; our step sends nothing."""
    net = Net()
    filled(net)
    wrapped = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = MaxFactor(net.parameters(), momentum={"warmup": 5})
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(20):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8, generator=generator)).square().mean().backward()
        with CommDebugMode() as counted:
            optimizer.step()
        assert counted.get_total_counts() == 0
    return [float(param.detach().double().sum()) for param in net.parameters()]


def test_data_parallel(four: Ranks) -> None:
    first, *others = four.run(data_parallel)
    assert others == [first] * 3


# ------------------------------------------------------------------------- late materialisation


def materialised_late(when: str) -> None:
    """Built on the meta device, sharded, then given memory; the optimizer before or after."""
    mesh, single = mesh_of(2), sharded("plain")
    if mesh is None:
        return
    assert single is not None
    with torch.device("meta"):
        net = Net()
    fully_shard(net, mesh=mesh)
    early = MaxFactor(net.named_parameters()) if when == "before" else None
    net.to_empty(device="cpu")
    filled(net)
    optimizer = early or MaxFactor(net.named_parameters())
    other = MaxFactor(single.named_parameters())
    for t in range(3):
        give_gradients(net, t)
        give_gradients(single, t)
        optimizer.step()
        other.step()
    same_as_plain(net, optimizer, single, other)


@pytest.mark.parametrize("when", ["before", "after"])
def test_meta_device(four: Ranks, when: str) -> None:
    four.run(materialised_late, when)


def keeps_bits(folder: str) -> None:
    """Float32 statistics and int8 momentum of bfloat16 parameters through a checkpoint."""
    settings: dict[str, Any] = {"momentum": {"warmup": 2}, "seed": 1}
    net, again = sharded("fsdp 4"), sharded("fsdp 4")
    assert net is not None
    assert again is not None
    net, again = net.bfloat16(), again.bfloat16()
    optimizer = MaxFactor(net.named_parameters(), **settings)
    for t in range(3):
        give_gradients(net, t)
        optimizer.step()
    model, state = get_state_dict(net, optimizer)
    save({"model": model, "optimizer": state}, checkpoint_id=folder)
    fresh = MaxFactor(again.named_parameters(), **settings)
    model, state = get_state_dict(again, fresh)
    content: dict[str, Any] = {"model": model, "optimizer": state}
    load(content, checkpoint_id=folder)
    set_state_dict(
        again, fresh, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )
    for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(local(ours), local(theirs))
        for key, value in optimizer.state[theirs].items():
            mine = fresh.state[ours][key]
            assert mine.dtype == value.dtype
            assert torch.equal(local(mine), local(value)), key


def test_bfloat16_checkpoints(four: Ranks, tmp_path: Path) -> None:
    four.run(keeps_bits, str(tmp_path))
