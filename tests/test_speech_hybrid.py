"""`maxfactor train --shard hsdp`: shards within groups of processes, copies between the groups."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed.tensor import DTensor

from maxfactor_speech.training.parallel import MultiProcess
from noise import prepared
from ranks import Ranks
from test_speech_parallel import BASE, as_torchrun, assert_alike, trained


def test_four_processes_train_like_one(four: Ranks, tmp_path: Path) -> None:
    trained(BASE, tmp_path / "one", None)
    assert four.run(in_groups, tmp_path / "four") == [BASE.steps] * 4
    assert_alike(tmp_path / "one", tmp_path / "four")


def in_groups(out: Path) -> int:
    with patch.dict(os.environ):  # the processes serve other tests, too
        return trained(BASE, out, "hsdp")


@pytest.mark.parametrize(("on_a_machine", "shape"), [(4, (2, 2)), (2, (2, 2)), (1, (4, 1))])
def test_groups_are_machines(four: Ranks, on_a_machine: int, shape: tuple[int, int]) -> None:
    """One machine alone is cut in half."""
    assert four.run(shape_of_mesh, on_a_machine) == [shape] * 4


def shape_of_mesh(on_a_machine: int) -> tuple[int, ...]:
    model = prepared(16).model
    with patch.dict(os.environ):
        as_torchrun()
        os.environ["LOCAL_WORLD_SIZE"] = str(on_a_machine)
        MultiProcess("hsdp", "cpu").distribute(model)
    weight = model.model.encoder.layers[0].fc1.weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh.mesh_dim_names == ("replicate", "shard")
    return tuple(weight.device_mesh.shape)
