"""The memory that a fused step borrows, from a plan on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from maxfactor.backends.triton.buffers import Buffers
from maxfactor.backends.triton.local_parameters import local_parameter
from maxfactor.backends.triton.orthogonal import OrthogonalBatches, in_batches
from maxfactor.backends.triton.plan import LaunchPlan, keys_of, launch_order
from maxfactor.backends.triton.status import StepStatus
from maxfactor.backends.triton.workspace import ON_DEVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import StepInput


class Borrowed(NamedTuple):
    """Bytes of a plan."""

    kept: int  # between steps
    workspace: int  # in which orthogonal matrices are iterated
    signs: int  # for the time of a step


def borrowed_bytes(inputs: Sequence[StepInput]) -> Borrowed:
    """The bytes of a plan.

    Args:
        inputs: The parameters of the plan, on the meta device.
    """
    params = [local_parameter(each) for each in inputs]
    keys = keys_of(params)
    order = in_batches(launch_order(params, keys), params, keys, ON_DEVICE)
    params, keys = [params[i] for i in order], [keys[i] for i in order]
    plan = LaunchPlan(params, keys, [0] * (1 + max(each.group for each in params)))
    status = StepStatus([each.name for each in inputs], params[0].param.device)
    orthogonal = OrthogonalBatches(params, keys, plan, ON_DEVICE)
    buffers = Buffers(plan, status, orthogonal.most_tiles, orthogonal.most_blocks)
    kept = sum(tensor.nbytes for tensor in (*buffers.partials, *buffers.results))
    tables = 8 * sum(map(len, plan.matrices)) + 12 * len(plan.tasks)  # int64, three int32
    tables += 4 * (plan.tile_count + sum(group.block_count for group in plan.groups))
    return Borrowed(kept + tables, orthogonal.workspace.nbytes, buffers.sign_bytes)
