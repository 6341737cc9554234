"""The fused kernels on what a rank holds of sharded parameters, against plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from cases import no_host_sync
from maxfactor import Adafactor, MaxFactor, recipe
from maxfactor.placement import local

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RUNS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "1.0": (MaxFactor, {}),
    "0.2": (MaxFactor, recipe("0.2")),
    "adafactor": (Adafactor, {}),
    "fam": (MaxFactor, {"momentum": {"warmup": 2, "theta": 0.8}, "scale": "initial"}),
    "orthogonal": (MaxFactor, {"momentum": 0.9, "nesterov": True, "direction": "orthogonal"}),
}
# The interpreter is slow: there a few of them, and a small net.
PAIRS = [(name, dtype) for name in RUNS for dtype in (torch.float32, torch.bfloat16)]
WIDTH = 300  # no whole rows of 16 bytes: the same instructions wherever the shards begin
if DEVICE == "cpu":
    PAIRS = [("1.0", torch.bfloat16), ("fam", torch.float32), ("orthogonal", torch.float32)]
    WIDTH = 6


class Net(nn.Module):
    """Matrices, a convolution, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.up(x).transpose(1, 2))
        return out


# ---------------------------------------------------------------------- where nothing is cut


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank: NCCL on a GPU, else gloo; over loopback and bounded in time."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)  # or the mesh warns that nobody has
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, limit)  # type: ignore[attr-defined]
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    yield DeviceMesh(DEVICE, torch.arange(1))
    dist.destroy_process_group()


def same(sharded: nn.Module, plain: nn.Module, ours: Any, theirs: Any) -> None:
    """Equal in every bit: parameters and state."""
    for (name, shard), param in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(shard.detach()), param.detach()), name
        assert ours.state[shard].keys() == theirs.state[param].keys()
        for key, value in ours.state[shard].items():
            assert torch.equal(local(value), theirs.state[param][key]), f"{key} of {name}"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_one_rank_of_fsdp(mesh: DeviceMesh, name: str, dtype: torch.dtype) -> None:
    cls, settings = RUNS[name]
    torch.manual_seed(0)
    plain = Net().to(DEVICE, dtype)
    sharded = Net().to(DEVICE, dtype)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh)
    theirs = cls(plain.parameters(), seed=1, fused=True, **settings)
    # On a GPU the kernels are the default.
    ours = cls(sharded.parameters(), seed=1, fused=None if DEVICE == "cuda" else True, **settings)
    for t in range(3):
        x = torch.randn(4, 7, 3, device=DEVICE, dtype=dtype)
        sharded(x).square().mean().backward()
        if t == 1:  # somebody else writes, by the DTensor
            with torch.no_grad():
                for shard, param in zip(sharded.parameters(), plain.parameters(), strict=True):
                    shard.mul_(1.5)
                    param.mul_(1.5)
        for shard, param in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert shard.grad is not None
            param.grad = local(shard.grad).clone()
        theirs.step()
        quiet = no_host_sync() if DEVICE == "cuda" and t > 0 else nullcontext()
        with quiet, CommDebugMode() as counted:
            ours.step()
        assert counted.get_total_counts() == 0
        ours.zero_grad()
    assert ours._fused is not None
    same(sharded, plain, ours, theirs)
    assert ours.effective_lr() == theirs.effective_lr()
    assert ours.skipped == theirs.skipped == 0


@pytest.mark.gpu
def test_placements_of_gradients(mesh: DeviceMesh) -> None:
    """A gradient that is placed otherwise is placed as its parameter, step by step."""
    weight, grad = torch.randn(6, 9, device=DEVICE), torch.randn(6, 9, device=DEVICE)
    shard = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Shard(0)]))
    param = nn.Parameter(weight.clone())
    ours, theirs = MaxFactor([shard], fused=True), MaxFactor([param], fused=True)
    for placement in (Shard(0), Partial(), Shard(1)):
        param.grad = grad.clone()
        shard.grad = DTensor.from_local(grad.clone(), mesh, [placement])
        ours.step()
        theirs.step()
        assert torch.equal(local(shard.detach()), param.detach())
        assert torch.equal(local(shard.grad), grad), "the gradient belongs to the user"


@pytest.mark.gpu
def test_a_nan_skips_the_step(mesh: DeviceMesh) -> None:
    shard = nn.Parameter(distribute_tensor(torch.ones(6, 9, device=DEVICE), mesh, [Shard(0)]))
    optimizer = MaxFactor([shard], fused=True)
    for value in (1.0, float("nan"), 1.0):
        before = local(shard.detach()).clone()
        grad = torch.ones(6, 9, device=DEVICE)
        grad[2, 3] = value
        shard.grad = distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
        assert torch.equal(local(shard.detach()), before) == (value != 1.0)
    assert optimizer.skipped == 1
    assert float(optimizer.state[shard]["step"]) == 2.0
