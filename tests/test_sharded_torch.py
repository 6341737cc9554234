"""Torch's own ways to shard a model, and to save what was sharded."""

from __future__ import annotations

import hashlib
from collections import Counter
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
from maxfactor import Adafactor, MaxFactor
from maxfactor.distributed.placement import local, moved, shards_of
from ranks import Ranks
from ranks import mesh_of as mesh_named

SETTINGS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "fast": {"momentum": {"warmup": 2, "theta": 0.8}, "scale": "initial"},
}


ORTHOGONAL: dict[str, Any] = {
    "direction": "orthogonal",
    "momentum": 0.9,
    "nesterov": True,
    "momentum_dtype": "fp32",
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


def give_gradients(net: nn.Module, t: int, leave_out: tuple[str, ...] = ()) -> None:
    for index, (name, param) in enumerate(net.named_parameters()):
        if name in leave_out:
            continue
        grad = problem(tuple(param.shape), dtype=param.dtype, steps=12, seed=index).grads[t]
        param.grad = moved(grad, param)


def mesh_of(*shape: int) -> DeviceMesh | None:
    return mesh_named(*shape, names=("dp", "tp")[: len(shape)])


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


Values = list[dict[str, Tensor]]  # of each parameter: itself and its state


def values_of(net: nn.Module, optimizer: MaxFactor) -> Values:
    return [{"parameter": p.detach(), **optimizer.state[p]} for p in net.parameters()]


def same_as_plain(
    net: nn.Module,
    optimizer: MaxFactor,
    single: nn.Module,
    other: MaxFactor,
    noise: float = 1e-6,
) -> None:
    same_values(net, optimizer, values_of(single, other), noise)


def same_values(net: nn.Module, optimizer: MaxFactor, plain: Values, noise: float = 1e-6) -> None:
    names = [name for name, _ in net.named_parameters()]
    for name, ours, theirs in zip(names, values_of(net, optimizer), plain, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            what, a, b = f"{key} of {name}", ours[key], theirs[key]
            assert a.shape == b.shape, what
            assert a.dtype == b.dtype, what
            part = local(moved(b, a))
            if a.dtype == torch.int8:
                assert int((local(a).int() - part.int()).abs().sum()) <= 2, what
                continue
            if torch.equal(local(a), part):  # as they mostly are, and faster to see
                continue
            size = max(1.0 if "momentum" in what else 0.0, float(b.abs().max()))
            torch.testing.assert_close(local(a), part, rtol=2 * noise, atol=noise * size, msg=what)


STEPS = 5
KNOWN: dict[str, list[Values]] = {}  # one for all ways to shard


def steps_of_plain(settings: dict[str, Any]) -> list[Values]:
    """What a net that is not sharded has after each step."""
    key = repr(settings)
    if key not in KNOWN:
        single = sharded("plain")
        assert single is not None
        optimizer = MaxFactor(single.named_parameters(), **settings)
        KNOWN[key] = []
        for t in range(STEPS):
            give_gradients(single, t)
            optimizer.step()
            found = values_of(single, optimizer)
            KNOWN[key].append([{k: v.clone() for k, v in each.items()} for each in found])
    return KNOWN[key]


def equals_plain(way: str, settings: dict[str, Any], noise: float = 1e-6) -> None:
    net = sharded(way)
    if net is None:
        return
    optimizer = MaxFactor(net.named_parameters(), **settings)
    for t, plain in enumerate(steps_of_plain(settings)):
        give_gradients(net, t)
        optimizer.step()
        same_values(net, optimizer, plain, noise)


WAYS = ["fsdp 2", "fsdp 3", "columns 2", "tp 2", "fsdp+tp 2x2", "hsdp 2x2"]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_torch_shards(four: Ranks, way: str, name: str) -> None:
    settings = SETTINGS[name]
    if way == "columns 2" and "momentum" in settings:  # eight columns share one scale
        settings = settings | {"momentum_dtype": "fp32"}
    four.run(equals_plain, way, settings)


@pytest.mark.parametrize("way", ["fsdp 3", "columns 2", "fsdp+tp 2x2", "hsdp 2x2"])
def test_orthogonal_shards(four: Ranks, way: str) -> None:
    """The iteration makes the last digits of the sums larger."""
    four.run(equals_plain, way, ORTHOGONAL, 1e-5)


def equals_plain_uneven() -> None:
    """FSDP over tensor parallel cuts one dimension twice, here in parts that differ."""
    mesh = mesh_of(2, 2)
    assert mesh is not None
    net, single = (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)) for _ in range(2))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = MaxFactor(filled(net).parameters(), **ORTHOGONAL)
    other = MaxFactor(filled(single).parameters(), **ORTHOGONAL)
    for t in range(4):
        give_gradients(net, t)
        give_gradients(single, t)
        optimizer.step()
        other.step()
    same_as_plain(net, optimizer, single, other, 1e-5)


def test_uneven_strided_shards(four: Ranks) -> None:
    four.run(equals_plain_uneven)


# ------------------------------------------------------------------------------ bits of copies


def digest(x: Tensor) -> str:
    """The same for the same bits."""
    flat = local(x).detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def cut_by(x: Tensor, mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of the mesh dimensions whose ranks have different parts of a tensor."""
    if not isinstance(x, DTensor):
        return ()
    names = x.device_mesh.mesh_dim_names
    assert names is not None
    assert set(names) <= set(mesh.mesh_dim_names or ())
    return tuple(names[i] for i, _ in shards_of(x))


def bits(net: nn.Module, optimizer: MaxFactor, mesh: DeviceMesh) -> dict[Any, str]:
    """A digest of all that this rank has, by name and by place among the parts."""
    found = {}
    for name, param in net.named_parameters():
        for key, value in {"parameter": param, **optimizer.state[param]}.items():
            place = (mesh.get_local_rank(dim) for dim in cut_by(value, mesh))
            where = (name, key, *place)
            found[where] = digest(value)
    return found


def trained_copies(way: str, settings: dict[str, Any], dtype: torch.dtype) -> dict[Any, str]:
    net = sharded(way)
    assert net is not None
    net = filled(net.to(dtype))
    torch.manual_seed(torch.distributed.get_rank())  # of no importance
    optimizer = MaxFactor(net.named_parameters(), **settings)
    for t in range(5):
        give_gradients(net, t)
        optimizer.step()
    mesh = mesh_of(*map(int, way.partition(" ")[2].split("x")))
    assert mesh is not None
    return bits(net, optimizer, mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["hsdp 2x2", "fsdp+tp 2x2"])
def test_copies_have_the_same_bits(four: Ranks, way: str, dtype: torch.dtype) -> None:
    for settings in [*SETTINGS.values(), ORTHOGONAL]:
        ranks = four.run(trained_copies, way, settings, dtype)
        owners = Counter(key for found in ranks for key in found)
        copied = {key for key, count in owners.items() if count > 1}
        assert {key[0] for key in copied} >= {"norm.weight", "odd", "gain"}
        for key in copied:
            assert len({found[key] for found in ranks if key in found}) == 1, key


# --------------------------------------------------------------------------- partial gradients


class Sequence(nn.Module):
    """Normalisations along a sequence, and what is parallel between them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = x + layer["down"](layer["up"](layer["norm"](x)).relu())
        return x


def sequence_parallel(layers: int, mesh: DeviceMesh) -> nn.Module:
    """Each rank has a part of the sequence between the blocks, all of it within."""
    net = Sequence(layers)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in net.layers:
        parallelize_module(layer, mesh, plan)
    return filled(net)


def steps_sequence_parallel(layers: int) -> int | None:
    """Real backward passes; returns the messages of the last step."""
    mesh, single = mesh_of(2), filled(Sequence(layers))
    if mesh is None:
        return None
    net = sequence_parallel(layers, mesh)
    optimizer, other = MaxFactor(net.parameters()), MaxFactor(single.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(3, 6, 8, generator=generator)
        net(x.chunk(2, dim=1)[mesh.get_rank()]).square().sum().backward()
        single(x).square().sum().backward()
        for (name, param), plain in zip(net.named_parameters(), single.parameters(), strict=True):
            assert isinstance(param.grad, DTensor)
            assert param.grad.placements[0].is_partial() == ("norm" in name)
            full = param.grad.full_tensor()
            assert plain.grad is not None
            torch.testing.assert_close(full, plain.grad, rtol=1e-4, atol=1e-4)
            plain.grad = full  # the same last digits: a sign would make much of them
        with CommDebugMode() as counted:
            optimizer.step()
        other.step()
        same_as_plain(net, optimizer, single, other)
        optimizer.zero_grad()
        other.zero_grad()
    return int(counted.get_total_counts())


def test_sequence_parallel(four: Ranks) -> None:
    """The sums that torch leaves to us are one message, however many there are."""
    assert [four.run(steps_sequence_parallel, layers)[0] for layers in (1, 3)] == [4, 4]


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


def save_all(net: torch.nn.Module, optimizer: MaxFactor, way: str, folder: str) -> None:
    model, state = get_state_dict(net, optimizer)
    group, alone = group_of(way)
    content: dict[str, Any] = {"model": model, "optimizer": state}
    save(content, checkpoint_id=folder, process_group=group, no_dist=alone)


def load_all(net: torch.nn.Module, optimizer: MaxFactor, way: str, folder: str) -> None:
    model, state = get_state_dict(net, optimizer)
    group, alone = group_of(way)
    content: dict[str, Any] = {"model": model, "optimizer": state}
    load(content, checkpoint_id=folder, process_group=group, no_dist=alone)
    set_state_dict(
        net, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )


def saved(way: str, settings: dict[str, Any], folder: str) -> None:
    """Two steps, then a checkpoint."""
    net = sharded(way)
    if net is None or (way == "plain" and torch.distributed.get_rank() > 0):
        return
    optimizer = MaxFactor(net.named_parameters(), **settings)
    for t in range(2):
        give_gradients(net, t)
        optimizer.step()
    save_all(net, optimizer, way, folder)


def loaded(way: str, settings: dict[str, Any], folder: str) -> None:
    """A fresh model and optimizer from the checkpoint; three more steps are those of one run."""
    net = sharded(way)
    if net is None or (way == "plain" and torch.distributed.get_rank() > 0):
        return
    optimizer = MaxFactor(net.named_parameters(), **settings)
    load_all(net, optimizer, way, folder)
    for t, plain in enumerate(steps_of_plain(settings)):
        if t > 1:
            give_gradients(net, t)
            optimizer.step()
        if t in (1, STEPS - 1):  # loaded, and at the end
            same_values(net, optimizer, plain)


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
        for key, value in values.items():
            assert key == "initial_rms" or not local(value).any()


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


def more_ranks_than_parameters() -> int:
    """ZeRO-1 where half of the ranks have nothing to step; returns how many this one has."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    settings: dict[str, Any] = {"lr": 0.02, "momentum": {"warmup": 2}}
    net, single = filled(nn.Linear(8, 3)), filled(nn.Linear(8, 3))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), MaxFactor, **settings)
    other = MaxFactor(single.parameters(), **settings)
    for t in range(4):
        give_gradients(net, t)
        give_gradients(single, t)
        optimizer.step()
        other.step()
    for ours, theirs in zip(net.parameters(), single.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    optimizer.consolidate_state_dict(to=1)
    if torch.distributed.get_rank() == 1:
        plain = MaxFactor(net.parameters(), **settings)
        plain.load_state_dict(optimizer.state_dict())
        for t in range(4, 7):
            give_gradients(net, t)
            give_gradients(single, t)
            plain.step()
            other.step()
        same_as_plain(net, plain, single, other)
    return len(optimizer.optim.state)


def test_ranks_without_parameters(four: Ranks) -> None:
    assert sorted(four.run(more_ranks_than_parameters)) == [0, 0, 1, 1]


def data_parallel(settings: dict[str, Any], dtype: torch.dtype) -> dict[Any, str]:
    """Copies with torch's own averaging; our step sends nothing."""
    net = filled(Net().to(dtype))
    wrapped = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    rank, mesh = torch.distributed.get_rank(), mesh_of(4)
    torch.manual_seed(rank)  # copies are rounded alike all the same
    optimizer = MaxFactor(net.parameters(), **settings)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        batch = torch.randn(4, 8, generator=generator).to(dtype)
        wrapped(batch).square().mean().backward()
        with CommDebugMode() as counted:
            optimizer.step()
        assert counted.get_total_counts() == 0
    assert mesh is not None
    return bits(net, optimizer, mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_parallel(four: Ranks, dtype: torch.dtype) -> None:
    """All bits of parameters and state, after four steps."""
    for settings in [*SETTINGS.values(), ORTHOGONAL]:
        first, *others = four.run(data_parallel, settings, dtype)
        assert len(first) > 12
        assert others == [first] * 3


def seed_of_a_group() -> list[int]:
    torch.manual_seed(torch.distributed.get_rank())
    weight = nn.Parameter(torch.ones(2))
    optimizers = MaxFactor([weight]), MaxFactor([weight], seed=7), Adafactor([weight])
    return [optimizer.param_groups[0]["seed"] for optimizer in optimizers]


def test_the_seed_of_several_processes(four: Ranks) -> None:
    assert four.run(seed_of_a_group) == [[0, 7, 0]] * 4


@pytest.mark.usefixtures("one_rank")
def test_the_seed_of_one_process_among_several() -> None:
    assert MaxFactor([nn.Parameter(torch.ones(2))]).param_groups[0]["seed"] == 0


# ------------------------------------------------------------------------------ unused parameters


def saves_unused(way: str, settings: dict[str, Any], folder: str) -> None:
    """A checkpoint of a run in which two parameters never had a gradient."""
    net = sharded(way)
    if net is None or (way == "plain" and torch.distributed.get_rank() > 0):
        return
    optimizer = MaxFactor(net.named_parameters(), **settings)
    for t in range(3):
        give_gradients(net, t, leave_out=("odd", "gain"))
        optimizer.step()
    assert len(optimizer.state) == 6
    save_all(net, optimizer, way, folder)


def loads_unused(way: str, settings: dict[str, Any], folder: str) -> None:
    """And goes on where they have one."""
    net, single = sharded(way), sharded("plain")
    if net is None or (way == "plain" and torch.distributed.get_rank() > 0):
        return
    assert single is not None
    optimizer = MaxFactor(net.named_parameters(), **settings)
    other = MaxFactor(single.named_parameters(), **settings)
    load_all(net, optimizer, way, folder)
    for key, value in optimizer.state[net.get_parameter("odd")].items():
        assert key == "initial_rms" or not local(value).any()
    for t in range(3):
        give_gradients(single, t, leave_out=("odd", "gain"))
        other.step()
    for t in range(3, 6):
        give_gradients(net, t)
        give_gradients(single, t)
        optimizer.step()
        other.step()
        same_as_plain(net, optimizer, single, other)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("first", "then"), [("fsdp 2", ["fsdp 3", "plain"]), ("plain", ["fsdp 2"])]
)
def test_unused_parameters(
    four: Ranks, tmp_path: Path, first: str, then: list[str], name: str
) -> None:
    four.run(saves_unused, first, SETTINGS[name], str(tmp_path))
    for way in then:
        four.run(loads_unused, way, SETTINGS[name], str(tmp_path))


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
