"""Sharded tensors: what a DTensor holds on this rank, and how to make one from local parts.

torch.distributed is imported only where a DTensor is at hand, and then it is loaded already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Shape = tuple[int, ...]


def is_sharded(x: object) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor, however it is placed."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """What this rank holds of `x`; the storage is shared."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        return x.to_local()


def local_tensor(x: Tensor) -> Tensor:
    """`local` without a view of its own, for what runs over every tensor in every step."""
    return getattr(x, "_local_tensor", x)


def local_as(x: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a gradient once it is placed as `like`, its parameter."""
    found = local_tensor(x)
    if found is x:  # no DTensor, and neither is its parameter
        return x
    assert is_sharded(x)
    assert is_sharded(like)
    if x.placements != like.placements or x.device_mesh != like.device_mesh:
        found = local_tensor(moved(x, like))
    # The result of a collective that is still under way has no address yet.
    return found if type(found) is Tensor or not hasattr(found, "wait") else found.wait()


def sharded_dim(placement: Placement) -> int | None:
    """The dimension that a placement cuts; None for a copy."""
    # Strided shards (FSDP over tensor parallel) are no subclass of Shard, but have its dimension.
    return getattr(placement, "dim", None)


def is_strided(placement: Placement) -> bool:
    """Whether a cut was made after those of later mesh dimensions, as FSDP cuts over TP."""
    return getattr(placement, "split_factor", None) is not None


def shards_of(x: Tensor) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) for each way in which `x` is cut."""
    if not is_sharded(x):
        return []
    dims = [sharded_dim(placement) for placement in x.placements]
    return [(i, dim) for i, dim in enumerate(dims) if dim is not None and x.device_mesh.size(i) > 1]


def kept_on(placements: Sequence[Placement], dims: Sequence[int]) -> tuple[Placement, ...]:
    """The placements of a tensor that has only `dims` of a parameter's: the rest is replicated."""
    from torch.distributed.tensor import Replicate

    return tuple(p if sharded_dim(p) in dims else Replicate() for p in placements)


def from_local(part: Tensor, mesh: DeviceMesh, placements: Any, shape: Shape) -> Tensor:
    """A DTensor of the global `shape` from what this rank holds; nothing is sent."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def moved(x: Tensor, like: Tensor) -> Tensor:
    """`x` placed as `like`; a plain tensor is taken for the whole of it, the same on all ranks."""
    if not is_sharded(like):
        return x.full_tensor() if is_sharded(x) else x
    if not is_sharded(x):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = like.device_mesh
        x = DTensor.from_local(x.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    if x.device_mesh != like.device_mesh:
        return moved(x.full_tensor(), like)
    return x.redistribute(placements=like.placements)


def positions(x: Tensor) -> Tensor:
    """The position of each local element in the whole tensor, as int64 in the local shape."""
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    stride = 1
    for dim in reversed(range(x.dim())):
        index = _local_index(x, dim)
        found = index.reshape(-1, *(1,) * (x.dim() - 1 - dim)) * stride + found
        stride *= x.shape[dim]
    return found


def first_index(x: Tensor) -> Shape:
    """The index in the whole tensor of the first element that this rank holds; 0 without one."""
    found = [_local_index(x, dim)[:1] for dim in range(x.dim())]
    # Asked for when a plan is made, not in every step.
    return tuple(sum(index.tolist()) for index in found)


def _local_index(x: Tensor, dim: int) -> Tensor:
    """Which entries of a dimension this rank holds."""
    index = torch.arange(x.shape[dim], device=x.device)
    if not is_sharded(x):
        return index
    from torch.distributed.tensor import DTensor, Replicate

    copies = [Replicate()] * x.device_mesh.ndim
    cuts = [_as_first(p) if sharded_dim(p) == dim else Replicate() for p in x.placements]
    whole = DTensor.from_local(index, x.device_mesh, copies, run_check=False)
    return local(whole.redistribute(placements=cuts))  # each rank takes its own: nothing is sent


def _as_first(placement: Placement) -> Placement:
    """The same cut of a tensor that has only this dimension."""
    from torch.distributed.tensor import Shard

    factor = getattr(placement, "split_factor", None)
    if factor is None:
        return Shard(0)
    strided: Placement = type(placement)(0, split_factor=factor)  # type: ignore[call-arg]
    return strided
