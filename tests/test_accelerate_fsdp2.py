"""Accelerate's FSDP2, which replaces the parameters after the optimizer was built.

A file of its own, as the processes import it: it must not import more than it needs.
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import maxfactor
from ranks import Ranks

accelerate = pytest.importorskip("accelerate")
RECIPES = ("quality", "fast")


def whole(recipe: Any) -> tuple[Any, maxfactor.MaxFactor]:
    """A model whose first layer is frozen for now, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    return model, maxfactor.for_model(model, recipe)


def advance(model: nn.Module, optimizer: Any, steps: int) -> None:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_accelerator() -> Any:
    """Accelerate chooses FSDP only for GPUs: its state is set by hand, all the rest is its own."""
    os.environ |= {
        "RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    for state in (accelerate.PartialState(), accelerator.state):
        state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10
    )
    return accelerator


def full(model: nn.Module) -> list[Tensor]:
    params: Any = model.parameters()
    return [param.full_tensor().detach() for param in params]


def train(recipe: Any, folder: str) -> tuple[list[bool], list[Tensor]]:
    """Prepare, train, save and resume; return which old parameters are alive, and the weights."""
    accelerator = make_accelerator()
    model, optimizer = whole(recipe)
    old = [weakref.ref(param) for param in model.parameters()]
    model, wrapped = accelerator.prepare(model, optimizer)
    gc.collect()
    alive = [each() is not None for each in old]
    optimizer.add_module(model[0].requires_grad_(True))  # finds the new parameters
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert trained == set(map(id, model.parameters()))
    advance(model, wrapped, 3)
    accelerator.save_state(folder)
    advance(model, wrapped, 2)
    expected = full(model)
    accelerator.load_state(folder)
    advance(model, wrapped, 2)
    assert all(map(torch.equal, expected, full(model)))
    return alive, expected


def test_parameters_may_be_swapped_for_shards(tmp_path: Path) -> None:
    """Shards step as the whole model does, resume bit for bit, and the old ones are freed."""
    two = Ranks(2)
    try:
        answers = {recipe: two.run(train, recipe, str(tmp_path / recipe)) for recipe in RECIPES}
    finally:
        two.stop()
    for recipe, ranks in answers.items():
        model, optimizer = whole(recipe)
        optimizer.add_module(model[0].requires_grad_(True))
        advance(model, optimizer, 5)
        for alive, found in ranks:
            assert alive == [False] * 4
            for one, other in zip(found, model.parameters(), strict=True):
                torch.testing.assert_close(one, other, atol=2e-6, rtol=0.0)
