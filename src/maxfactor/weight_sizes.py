"""Tells which matrices of a model are small on purpose, by the sizes of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.distributed.placement import local
from maxfactor.distributed.reductions import Reduction, groups_over, process_groups, reduce_all
from maxfactor.settings import ON_PURPOSE, Switches, as_setting
from maxfactor.state import NEAR_ZERO, fan_in

if TYPE_CHECKING:
    from collections.abc import Iterable

CLEARLY_SMALLER = 2.0 / 3.0  # of the median size of a model's hidden matrices
LEAST = 0.1  # of its usual size: a smaller matrix is small on purpose in any model
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_to_be_judged(group: Mapping[str, Any]) -> bool:
    """Whether this is a group of hidden matrices whose switch `usual_from` is not set yet."""
    # A group that was inserted by hand may lack settings.
    if group.get("kind") != "hidden" or group.get("scale") != "usual":
        return False
    switches = group.get("switches")
    if isinstance(switches, Mapping):  # it may name some of them alone
        return switches.get("usual_from") is None
    return getattr(switches, "usual_from", None) is None


def judge_sizes(groups: Iterable[dict[str, Any]], params: Mapping[Tensor, bool]) -> None:
    """Set `usual_from` in groups by the sizes of all hidden matrices of their model.

    Args:
        groups: Those of `is_to_be_judged`.
        params: The matrices, and whether they are transposed; on all ranks in one order.
    """
    sizes = relative_sizes(params)
    usual_from = ON_PURPOSE
    if usable := [size for size in sizes if NEAR_ZERO <= size < math.inf]:
        usual_from = min(max(CLEARLY_SMALLER * median(usable), LEAST), 1.0)
    for group in groups:
        group["switches"] = {**_switches_of(group), "usual_from": usual_from}


def relative_sizes(params: Mapping[Tensor, bool]) -> list[float]:
    """The RMS of each matrix in units of 1 / sqrt(3 * fan_in), the same on all ranks."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return []  # a capture may not wait for the device
    # No weights that are not there, and none of a type that stands for other values.
    seen = [
        (param, own, is_transposed)
        for param, is_transposed in params.items()
        if not (own := local(param.detach())).is_meta
        and type(own) is Tensor
        and own.dtype in READABLE
    ]
    if not seen:
        return []
    squares = [
        Reduction(
            vector_norm(own, dtype=torch.promote_types(own.dtype, torch.float32)).square(),
            groups_over(param, range(param.dim())),
        )
        for param, own, _ in seen
    ]
    totals = reduce_all(squares, process_groups(param for param, *_ in seen))
    device = totals[0].device
    # Read in one piece, once for the whole training. Some devices have no float64.
    found: list[float] = torch.stack([total.to(device, torch.float32) for total in totals]).tolist()
    return [
        math.sqrt(total * 3 * fan_in(tuple(param.shape), transposed=how) / max(1, param.numel()))
        for total, (param, _, how) in zip(found, seen, strict=True)
    ]


def _switches_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's switches, those that are not named at their defaults."""
    return {**asdict(Switches()), **cast("dict[str, Any]", as_setting(group.get("switches")) or {})}
