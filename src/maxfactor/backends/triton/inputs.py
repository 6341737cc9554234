"""The tensors that a step reads and writes: where they are, and what keeps them alive."""

from __future__ import annotations

import operator
from array import array
from functools import reduce
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maxfactor.backends.step_io import increment_version
from maxfactor.backends.triton.kernels.layout import Address
from maxfactor.distributed.placement import is_sharded, local_as, local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.triton.local_parameters import LocalParameter
    from maxfactor.backends.triton.plan import LaunchKey

# Asked of every tensor in every step; `map` with these is several times faster than a loop.
GRAD, DTYPE, LAYOUT, VERSION = map(operator.attrgetter, ("grad", "dtype", "layout", "_version"))
AT = Tensor.data_ptr
RUN = 128  # parameters
BEFORE_POINTERS = 2  # entries of the table of addresses, so that pointers begin on 16 bytes
STRIDED = {torch.strided}


class Seen(NamedTuple):
    """The local tensors of one step as `fit` found them, and where they are."""

    params: list[Tensor]
    grads: list[Tensor]  # placed as they are
    params_at: list[int]
    grads_at: list[int]
    params_moved: bool  # since the last step
    grads_moved: bool
    versions: int  # the sum of autograd's versions of parameters
    contiguous: bool  # all gradients are known to be


class Run(NamedTuple):
    """Parameters that are looked at in turn, few enough to stay in the processor's cache."""

    params: list[Tensor]
    guard: Any  # of their gradients, see `guard_of`


class Gathered(NamedTuple):
    """The local tensors of one step. They stay alive until the kernels are launched."""

    params: list[Tensor]
    grads: list[Tensor]  # contiguous
    have_moved: bool  # `Inputs.addresses` is not that of the last step
    are_unchanged: bool  # nobody wrote the parameters since the last step


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
        # Views, which show what the states hold at any later time.
        self._in_states = [state.values() for state in self.states]
        self._state_tensors = list(chain.from_iterable(self._in_states))
        self._flat = list(flat)
        state_of = {id(each.param): each.state for each in step_io}
        self._idle = [param for param in flat if id(param) not in state_of]
        # The optimizer's dict of states as it usually is: in the order of the parameters.
        self._stepped = [param for param in flat if id(param) in state_of]
        self._states_in_order = [state_of[id(param)] for param in self._stepped]
        self._sharded = list(filter(is_sharded, self.owners))
        self._has_shards = bool(self._sharded)
        self._grad_types = [type(each.grad) for each in step_io]
        self._grad_dtypes = [key.grad_dtype for key in keys]
        self._runs = list(self._cut(step_io))
        self._param_guard = None if self._has_shards else guard_of(self.owners)
        self._aligned = [key.aligned for key in keys]
        local = [each.param for each in params]
        self._layouts = layouts(local)
        # The kernels write these in place of parameters that are not contiguous.
        self._stand_ins = {
            i: torch.empty_like(param, memory_format=torch.contiguous_format)
            for i, param in enumerate(local)
            if not param.is_contiguous()
        }
        # Where W, G, the signs and the directions were in the last step, and the table of them on
        # the host, see `split_addresses`; it is written as an array, which is faster than a tensor.
        self._params_at: list[int] = []
        self._grads_at: list[int] = []
        self._borrowed: tuple[int, array[int]] = (0, array("q"))
        size = BEFORE_POINTERS + len(local) * len(Address)
        self._table = array("q", bytes(8 * size))
        self.addresses = torch.frombuffer(self._table, dtype=torch.int64)
        self._has_copies = False  # the table has addresses of copies
        self._versions = -1  # the sum of autograd's versions after the last step

    def _cut(self, step_io: Sequence[StepInput]) -> Iterator[Run]:
        """Cut the parameters into runs."""
        for first in range(0, len(step_io), RUN):
            grads = [each.grad for each in step_io[first : first + RUN]]
            is_plain = not self._has_shards and all(map(Tensor.is_contiguous, grads))
            yield Run(self.owners[first : first + RUN], guard_of(grads) if is_plain else None)

    def fit(self, flat: Sequence[Tensor], states: Mapping[Tensor, object]) -> Seen | None:
        """What is there, if tensors and states are those of the plan; changes nothing."""
        tensors = chain.from_iterable(self._in_states)
        if (
            len(flat) != len(self._flat)
            or not all(map(operator.is_, flat, self._flat))
            or not self._states_fit(states)
            or not all(map(operator.is_, tensors, self._state_tensors))
            or any(map(operator.is_not, map(GRAD, self._idle), repeat(None)))
        ):
            return None
        return self._grads_fit()

    def _states_fit(self, states: Mapping[Tensor, object]) -> bool:
        """Whether each parameter has its own state."""
        is_usual = (
            len(states) == len(self._stepped)
            and all(map(operator.is_, states.values(), self._states_in_order))
            and all(map(operator.is_, states, self._stepped))
        )
        # Not looked up at first, because the hash of a tensor is slow.
        return is_usual or all(map(operator.is_, map(states.get, self.owners), self.states))

    def _grads_fit(self) -> Seen | None:
        """What is there, if gradients have the plan's dtypes and all addresses its alignment."""
        if (seen := self._look_quickly()) is None:
            grads = list(map(GRAD, self.owners))
            if not self._grads_may_be_used(grads):
                return None
            seen = self.look(grads)
        if not (seen.params_moved or seen.grads_moved):
            return seen
        # Tensors moved: they must still be laid out as the plan expects.
        for places in (seen.params_at if seen.params_moved else [], seen.grads_at):
            if reduce(operator.or_, compress(places, self._aligned), 0) & 15:
                return None
        as_planned = self._param_guard is not None and self._param_guard.check(*seen.params)
        return seen if as_planned or layouts(seen.params) == self._layouts else None

    def _grads_may_be_used(self, grads: list[Any]) -> bool:
        """Whether gradients have the plan's dtypes and types, wherever their elements are."""
        if any(map(operator.is_, grads, repeat(None))) or set(map(LAYOUT, grads)) != STRIDED:
            return False
        if list(map(DTYPE, grads)) != self._grad_dtypes:
            return False
        return not self._has_shards or list(map(type, grads)) == self._grad_types

    def look(self, grads: list[Tensor] | None = None) -> Seen:
        """Find the local tensors and where they are."""
        params = self._local(self.owners)
        here = self._local(list(map(GRAD, self.owners)) if grads is None else grads)
        at, grads_at = list(map(AT, params)), list(map(AT, here))
        moved = at != self._params_at, grads_at != self._grads_at
        # In-place operations on a DTensor do not change the version of its local tensor.
        versions = sum(map(VERSION, chain(params, self._sharded)))
        return Seen(params, here, at, grads_at, *moved, versions, contiguous=False)

    def _look_quickly(self) -> Seen | None:
        """As `look`, if all gradients are like those of the plan; else None."""
        grads: list[Tensor] = []
        params_at: list[int] = []
        grads_at: list[int] = []
        versions = 0
        for params, guard in self._runs:
            here = list(map(GRAD, params))
            if guard is None or not guard.check(*here):
                return None
            grads += here
            params_at += map(AT, params)
            grads_at += map(AT, here)
            versions += sum(map(VERSION, params))
        moved = params_at != self._params_at, grads_at != self._grads_at
        return Seen(self.owners, grads, params_at, grads_at, *moved, versions, contiguous=True)

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this rank holds."""
        return list(map(local_tensor, tensors)) if self._has_shards else tensors

    def gather(self, seen: Seen, signs_at: int, orthogonal: array[int]) -> Gathered:
        """Collect the tensors and their addresses; `orthogonal` are those of directions."""
        params, grads, grads_at = seen.params, seen.grads, seen.grads_at
        borrowed = signs_at, orthogonal
        have_moved = seen.params_moved or seen.grads_moved or borrowed != self._borrowed
        self._params_at, self._grads_at = seen.params_at, seen.grads_at
        self._borrowed = borrowed
        if self._has_shards:
            grads = self._placed_as_owners(list(map(GRAD, self.owners)), grads)
        if not seen.contiguous and not all(map(Tensor.is_contiguous, grads)):
            grads = [grad.contiguous() for grad in grads]
        has_copies = grads is not seen.grads  # which are elsewhere
        if has_copies:
            grads_at = list(map(AT, grads))
        for i, stand_in in self._stand_ins.items():
            stand_in.copy_(params[i])
        have_moved = have_moved or has_copies or self._has_copies
        if have_moved:
            self._tabulate(seen.params_at if seen.params_moved else None, grads_at)
        self._has_copies = has_copies
        # Versions only grow, so their sum shows a write to any parameter.
        are_unchanged = seen.versions == self._versions and not seen.params_moved
        self._versions = seen.versions + len(params) + len(self._sharded)  # see `write_back`
        return Gathered(params, grads, have_moved, are_unchanged)

    def _tabulate(self, params_at: list[int] | None, grads_at: list[int]) -> None:
        """Write the table of addresses; those of parameters only if they moved."""
        table, (signs_at, orthogonal) = self._table, self._borrowed
        table[0] = signs_at
        table[column_of(Address.GRAD)] = array("q", grads_at)
        table[column_of(Address.ORTHOGONAL)] = orthogonal
        if params_at is not None:
            weights_at = array("q", params_at)
            for i, stand_in in self._stand_ins.items():
                weights_at[i] = stand_in.data_ptr()
            table[column_of(Address.WEIGHT)] = weights_at

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

    def write_back(self, params: list[Tensor]) -> None:
        """Finish the parameters after the launches, and tell autograd that they were written."""
        for i, stand_in in self._stand_ins.items():
            params[i].copy_(stand_in)
        written = params
        if self._stand_ins:
            written = [p for i, p in enumerate(params) if i not in self._stand_ins]
        if self._has_shards:
            written = [*written, *self._sharded]
        increment_version(written)


def guard_of(tensors: Sequence[Tensor]) -> Any:
    """What compares tensors with these: by type, dtype, layout, device, sizes and strides.

    It compares all of them in one call, several times faster than `map` with attributes. It is of
    torch.compile and not public: None if torch has none, and other ways are taken.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (ImportError, TypeError):
        return None


def split_addresses(table: Tensor) -> dict[str, Tensor]:
    """What a table of addresses has, by the names in `Tables`. It is uploaded in one piece."""
    pointers = table[BEFORE_POINTERS:].view(-1, len(Address))
    return {"signs_at": table[:1], "pointers": pointers}


def column_of(kind: Address) -> slice:
    """Where the addresses of one kind are in the table."""
    return slice(BEFORE_POINTERS + kind, None, len(Address))


def layouts(params: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """What a plan takes for granted of each parameter, besides its address."""
    return [(p.shape, p.dtype, p.device, p.is_contiguous()) for p in params]
