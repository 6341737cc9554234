"""Sharded tensors: the local shard of a DTensor, and DTensors from local shards.

torch.distributed is imported only for DTensors, so it is already loaded then.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Shape = tuple[int, ...]


def is_sharded(x: object) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor, with any placements."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """The local shard of `x`, which shares its storage."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        return x.to_local()


def overlaps(x: Tensor) -> bool:
    """Whether elements may share a place in memory: one stride does not exceed what is below it."""
    if x.is_contiguous() or x.numel() == 0:
        return False
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def local_tensor(x: Tensor) -> Tensor:
    """Like `local`, but creates no view: faster, for loops over all tensors in every step."""
    return getattr(x, "_local_tensor", x)


def local_as(x: Tensor, like: Tensor) -> Tensor:
    """The local shard of a gradient, redistributed to the placements of its parameter `like`."""
    found = local_tensor(x)
    if found is x:  # neither it nor its parameter is a DTensor
        return x
    own, wanted = cast("DTensor", x), cast("DTensor", like)
    if own.placements != wanted.placements or own.device_mesh != wanted.device_mesh:
        found = local_tensor(moved(x, like))
    # The result of a pending collective has no address yet.
    return found if type(found) is Tensor or not hasattr(found, "wait") else found.wait()


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement shards; None if it shards none."""
    # Strided shards (FSDP over tensor parallel) do not subclass Shard, but have a `dim` too.
    return getattr(placement, "dim", None)


def is_strided(placement: Placement) -> bool:
    """Whether this shards what later mesh dimensions have sharded before, as FSDP over TP does."""
    return getattr(placement, "split_factor", None) is not None


def shards_of(x: Tensor) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) for each mesh dimension that shards `x`."""
    if not is_sharded(x):
        return []
    dims = [sharded_dim(placement) for placement in x.placements]
    return [(i, dim) for i, dim in enumerate(dims) if dim is not None and x.device_mesh.size(i) > 1]


def kept_on(placements: Sequence[Placement], dims: Sequence[int]) -> tuple[Placement, ...]:
    """The placements of a state tensor: shards of `dims` as its parameter, the rest Replicate."""
    from torch.distributed.tensor import Replicate

    return tuple(p if sharded_dim(p) in dims else Replicate() for p in placements)


def from_local(part: Tensor, mesh: DeviceMesh, placements: Any, shape: Shape) -> Tensor:
    """A DTensor of the global `shape` from the local shard, without communication."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def moved(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the placements of `like`. A plain tensor must be whole and the same on all ranks."""
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
    """The flat position of each local element in the whole tensor: int64, in the local shape."""
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    stride = 1
    for dim in reversed(range(x.dim())):
        index = _local_index(x, dim)
        found = index.reshape(-1, *(1,) * (x.dim() - 1 - dim)) * stride + found
        stride *= x.shape[dim]
    return found


def first_index(x: Tensor) -> Shape:
    """The global index of this rank's first element; 0 along an empty dimension."""
    found = [_local_index(x, dim)[:1] for dim in range(x.dim())]
    # Waits for the device; called when a plan is made, not in every step.
    return tuple(sum(index.tolist()) for index in found)


def _local_index(x: Tensor, dim: int) -> Tensor:
    """The global indices of this rank along one dimension."""
    index = torch.arange(x.shape[dim], device=x.device)
    if not is_sharded(x):
        return index
    from torch.distributed.tensor import DTensor, Replicate

    copies = [Replicate()] * x.device_mesh.ndim
    cuts = [_as_first(p) if sharded_dim(p) == dim else Replicate() for p in x.placements]
    whole = DTensor.from_local(index, x.device_mesh, copies, run_check=False)
    return local(whole.redistribute(placements=cuts))  # needs no communication


def _as_first(placement: Placement) -> Placement:
    """The same placement for a tensor that has only this dimension."""
    from torch.distributed.tensor import Shard

    factor = getattr(placement, "split_factor", None)
    if factor is None:
        return Shard(0)
    strided: Placement = type(placement)(0, split_factor=factor)  # type: ignore[call-arg]
    return strided
