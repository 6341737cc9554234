"""The tensors that a step reads and writes: where they are, and what keeps them alive."""

from __future__ import annotations

import operator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maxfactor.backends.triton.kernels.layout import Address
from maxfactor.distributed.placement import is_sharded, local_as, local_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.triton.local_parameters import LocalParameter
    from maxfactor.backends.triton.plan import LaunchKey

# Asked of every tensor in every step; `map` with these is several times faster than a loop.
GRAD, DTYPE, LAYOUT, VERSION = map(operator.attrgetter, ("grad", "dtype", "layout", "_version"))
AT = Tensor.data_ptr
STRIDED = {torch.strided}


class Seen(NamedTuple):
    """The local tensors of one step as `fit` found them, and where they are."""

    params: list[Tensor]
    grads: list[Tensor]  # placed as they are
    params_at: list[int]
    grads_at: list[int]


class Gathered(NamedTuple):
    """The local tensors of one step. They stay alive until the kernels are launched."""

    params: list[Tensor]
    grads: list[Tensor]  # contiguous
    addresses: list[int]  # (tensors, Address), flat


class Inputs:
    """Parameters, gradients and states of a plan.

    Args:
        step_io: What the optimizer collected, in the order of the kernels.
        params: What this rank holds of them.
        keys: Their launch keys.
        flat: All parameters of all groups, those without a gradient included.
    """

    def __init__(
        self,
        step_io: Sequence[StepInput],
        params: Sequence[LocalParameter],
        keys: Sequence[LaunchKey],
        flat: Sequence[Tensor],
    ) -> None:
        self.owners = [each.param for each in step_io]  # the optimizer's parameters
        self.states = [each.state for each in step_io]
        self._owner_ids = list(map(id, self.owners))
        self._state_tensors = list(chain.from_iterable(map(dict.values, self.states)))
        self._flat = list(flat)
        active = {id(param) for param in self.owners}
        self._idle = [param for param in flat if id(param) not in active]
        self._sharded = list(filter(is_sharded, self.owners))
        self._has_shards = bool(self._sharded)
        self._grad_types = [type(each.grad) for each in step_io]
        self._grad_dtypes = [key.grad_dtype for key in keys]
        self._aligned = [key.aligned for key in keys]
        local = [each.param for each in params]
        self._layouts = layouts(local)
        # The kernels write these in place of parameters that are not contiguous.
        self._stand_ins = {
            i: torch.empty_like(param, memory_format=torch.contiguous_format)
            for i, param in enumerate(local)
            if not param.is_contiguous()
        }
        # Where W, G and the directions were in the last step, and the table of them.
        self._found: tuple[list[int], ...] = ([], [], [])
        self._addresses: list[int] = []
        self._has_copies = False  # the table has addresses of copies
        self._versions: list[int] = []  # of parameters after the last step

    def fit(self, flat: Sequence[Tensor], states: Mapping[Tensor, object]) -> Seen | None:
        """What is there, if tensors and states are those of the plan; changes nothing."""
        tensors = chain.from_iterable(map(dict.values, self.states))
        # By the identity of parameters, because the hash of a tensor is slow.
        by_id = dict(zip(map(id, states), states.values(), strict=True))
        if (
            len(flat) != len(self._flat)
            or not all(map(operator.is_, flat, self._flat))
            or not all(map(operator.is_, map(by_id.get, self._owner_ids), self.states))
            or not all(map(operator.is_, tensors, self._state_tensors))
            or any(param.grad is not None for param in self._idle)
        ):
            return None
        return self._grads_fit(list(map(GRAD, self.owners)))

    def _grads_fit(self, grads: list[Any]) -> Seen | None:
        """What is there, if gradients have the plan's dtypes and all addresses its alignment."""
        if any(map(operator.is_, grads, repeat(None))) or set(map(LAYOUT, grads)) != STRIDED:
            return None
        if list(map(DTYPE, grads)) != self._grad_dtypes:
            return None
        if self._has_shards and list(map(type, grads)) != self._grad_types:
            return None
        seen = self.look(grads)
        if (seen.params_at, seen.grads_at) == self._found[:2]:
            return seen
        # Tensors moved: they must still be laid out as the plan expects.
        for places in (seen.params_at, seen.grads_at):
            if any(fit and at & 15 for fit, at in zip(self._aligned, places, strict=True)):
                return None
        return seen if layouts(seen.params) == self._layouts else None

    def look(self, grads: list[Tensor] | None = None) -> Seen:
        """Find the local tensors and where they are."""
        params = self._local(self.owners)
        here = self._local(list(map(GRAD, self.owners)) if grads is None else grads)
        return Seen(params, here, list(map(AT, params)), list(map(AT, here)))

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this rank holds."""
        return list(map(local_tensor, tensors)) if self._has_shards else tensors

    def gather(self, seen: Seen, orthogonal: list[int]) -> Gathered:
        """Collect the tensors and their addresses; `orthogonal` are those of directions."""
        params, grads, params_at, grads_at = seen
        have_moved = (params_at, grads_at, orthogonal) != self._found
        self._found = params_at, grads_at, orthogonal
        if self._has_shards:
            grads = self._placed_as_owners(list(map(GRAD, self.owners)), grads)
        if not all(map(Tensor.is_contiguous, grads)):
            grads = [grad.contiguous() for grad in grads]
        if grads is not seen.grads:  # copies, which are elsewhere
            grads_at, have_moved = list(map(AT, grads)), True
        for i, stand_in in self._stand_ins.items():
            stand_in.copy_(params[i])
        if have_moved or self._has_copies:
            self._addresses = self._table(params_at, grads_at, orthogonal)
        self._has_copies = grads is not seen.grads
        return Gathered(params, grads, self._addresses)

    def _table(self, params_at: list[int], grads_at: list[int], orthogonal: list[int]) -> list[int]:
        """The rows of `Tables.pointers`, flat."""
        width = len(Address)
        addresses = [0] * (width * len(params_at))
        addresses[Address.WEIGHT :: width] = params_at
        addresses[Address.GRAD :: width] = grads_at
        addresses[Address.ORTHOGONAL :: width] = orthogonal
        for i, stand_in in self._stand_ins.items():
            addresses[i * width + Address.WEIGHT] = stand_in.data_ptr()
        return addresses

    def _placed_as_owners(self, grads: list[Tensor], here: list[Tensor]) -> list[Tensor]:
        """What this rank holds of the gradients, each placed as its parameter; `here` if all are.

        `here` is what this rank holds of them as they are placed.
        """
        found = list(map(local_as, grads, self.owners))
        if all(map(operator.is_, found, here)):
            return here
        for i, (grad, aligned) in enumerate(zip(found, self._aligned, strict=True)):
            if aligned and grad.data_ptr() & 15:  # it was redistributed after `fit`
                found[i] = grad.clone()
        return found

    def versions(self, params: list[Tensor]) -> list[int]:
        """Autograd's versions, which tell who else wrote the parameters."""
        # In-place operations on a DTensor do not change the version of its local tensor.
        return list(map(VERSION, chain(params, self._sharded)))

    def is_unchanged(self, versions: list[int]) -> bool:
        """Whether nobody wrote the parameters since the last step."""
        return versions == self._versions

    def write_back(self, params: list[Tensor], versions: list[int]) -> None:
        """Finish the parameters after the launches, and tell autograd that they were written."""
        for i, stand_in in self._stand_ins.items():
            params[i].copy_(stand_in)
        written = params
        if self._stand_ins:
            written = [p for i, p in enumerate(params) if i not in self._stand_ins]
        if self._has_shards:
            written = [*written, *self._sharded]
        increment_version(written)
        self._versions = [version + 1 for version in versions]


def layouts(params: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """What a plan takes for granted of each parameter, besides its address."""
    return [(p.shape, p.dtype, p.device, p.is_contiguous()) for p in params]


def increment_version(params: list[Tensor]) -> None:
    """Tell autograd that the kernels wrote the parameters, as an in-place operation would."""
    try:
        torch.autograd.graph.increment_version(params)
    except (AttributeError, TypeError, RuntimeError):  # an older torch takes one at a time
        for param in params:
            torch.autograd.graph.increment_version(param)
