"""The fused backend: a fixed number of Triton launches per step, and no wait for the device.

`FusedStep` keeps a `Plan` while the tensors stay the same, brings new addresses and settings to the
device when they change, and launches.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maxfactor.backends.guard import LIMIT, given_up, refused
from maxfactor.backends.step_io import Outcome, Work
from maxfactor.backends.triton.kernels import layout as K  # noqa: N812
from maxfactor.backends.triton.kernels.maxima import maxima, rescale
from maxfactor.backends.triton.kernels.momentum import filtered
from maxfactor.backends.triton.kernels.statistics import finalize, statistics
from maxfactor.backends.triton.kernels.weights import apply
from maxfactor.backends.triton.orthogonal import Whitening
from maxfactor.backends.triton.tables import (
    KINDS,
    Kind,
    Plan,
    fixed_settings,
    keys_of,
    part_of,
    rate_address,
    rate_value,
    repeated,
    settings_of,
)
from maxfactor.distributed.placement import held, held_as, is_sharded
from maxfactor.rule.rounding import as_int32, seed_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maxfactor.settings import Hyper

# What is asked of every tensor in every step; `map` with these is several times a loop's speed.
GRAD, DTYPE, LAYOUT, VERSION = map(operator.attrgetter, ("grad", "dtype", "layout", "_version"))
STRIDED = {torch.strided}


class FusedStep:
    """Runs steps for one set of tensors, for as long as they stay where they are.

    `owners` are the optimizer's parameters, `params` what this rank holds of them.

    Args:
        works: What the optimizer collected; their states' `step` moves to the device.
        flat: All parameters of all groups, those without a gradient included.
        hypers: The settings of all groups.
        status: The counters of a predecessor, to be carried on.
    """

    def __init__(
        self,
        works: Sequence[Work],
        flat: Sequence[Tensor],
        hypers: Sequence[Hyper],
        status: Tensor | None = None,
    ) -> None:
        self.device = works[0].param.device
        for work in works:
            work.state["step"] = work.state["step"].to(self.device, non_blocking=True)
        parts = [part_of(work) for work in works]
        kinds = sorted(zip(map(str, keys_of(parts)), range(len(works)), strict=True))
        self.order = [index for _, index in kinds]  # tensors of a kind side by side
        works, parts = [works[i] for i in self.order], [parts[i] for i in self.order]
        self.keys = keys_of(parts)
        self.names = [work.name for work in works]
        self.owners = [work.param for work in works]
        self.params = [part.param for part in parts]
        self.states = [work.state for work in works]
        self.has_shards = any(map(is_sharded, self.owners))
        self.grad_types = [type(work.grad) for work in works]
        self.tensors = list(chain.from_iterable(map(dict.values, self.states)))
        self.grad_dtypes = [key.grad_dtype for key in self.keys]
        self.flat = list(flat)
        active = {id(param) for param in self.owners}
        self.idle = [param for param in flat if id(param) not in active]
        self.fixed = [fixed_settings(hyper) for hyper in hypers]
        group_of = {id(hyper): index for index, hyper in enumerate(hypers)}
        self.plan = Plan(parts, self.keys, [group_of[id(part.hyper)] for part in parts])
        self.layouts = layouts(self.params)
        self.whitening = Whitening(parts)
        self.stand_ins = {
            i: torch.empty_like(param, memory_format=torch.contiguous_format)
            for i, param in enumerate(self.params)
            if not param.is_contiguous()
        }
        self.kept: list[Tensor] = []  # host memory that a captured graph reads at every replay
        self.grads: list[Any] = []  # of this step, gathered by `fits`
        self.found: list[int] = []  # where W and G were in the last step
        self.addresses: list[int] = []  # the same for the kernels, copies in place of strided ones
        self.versions: list[int] = []  # of the parameters whose squares are known
        self._allocate(status)
        self._upload(hypers)

    # Tables and work space -------------------------------------------------------------

    def _allocate(self, status: Tensor | None) -> None:
        plan, device = self.plan, self.device
        kinds = list(plan.kinds.values())
        tensors = len(self.params)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tasks = self._to_device(plan.tasks, torch.int32)
        self.tile_matrix = self._to_device(repeated(plan.tiles), torch.int32)
        self.blocks = [self._to_device(repeated(kind.blocks), torch.int32) for kind in kinds]
        self.first_of = self._to_device(plan.first_of, torch.int32)
        self.row_part = zeros(plan.sizes["row_part"])
        self.row_peak = zeros(plan.sizes["row_part"], 2, dtype=torch.int32)
        self.col_part = zeros(plan.sizes["col_part"])
        self.ratios = zeros(plan.sizes["col_chunks"], 2)
        self.row_sum_var = zeros(plan.sizes["row_chunks"])
        self.row_max = zeros(plan.sizes["rows"], dtype=torch.int32)
        self.extremes = zeros(len(plan.table), 3, dtype=torch.int32)
        self.squares, self.update_squares = zeros(plan.tile_count), zeros(plan.block_count)
        self.unsigned = zeros(plan.tile_count, dtype=torch.int8)
        tiles = plan.tile_count if any(kind.filters for kind in kinds) else 0
        self.tile_sums, self.filter_sums = (zeros(tiles, K.SUMS.value) for _ in range(2))
        self.scalars = zeros(tensors, K.SCALARS.value)
        self.update_max, self.bad = (zeros(tensors, dtype=torch.int32) for _ in range(2))
        self.status = zeros(K.STATUS.value, dtype=torch.int32) if status is None else status
        self.zero, self.one = zeros(1), zeros(1) + 1.0  # where GradScaler has given no tensors
        self.report = torch.zeros(K.STATUS.value, dtype=torch.int32, device="cpu")
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.report = self.report.pin_memory()

    def _upload(self, hypers: Sequence[Hyper]) -> None:
        self.settings = self._to_device([settings_of(hyper) for hyper in hypers], torch.float32)
        keys = [as_int32(seed_key(hyper.seed or 0)) for hyper in hypers]
        self.seed_keys = self._to_device(keys, torch.int32)
        self.rates = torch.zeros(len(hypers), dtype=torch.float32, device=self.device)
        self.rate_values: list[float] = []
        places = [rate_address(hyper) for hyper in hypers]
        for entry in self.plan.table:
            group = entry[K.GROUP.value]
            entry[K.LR.value] = places[group] or self.rates.data_ptr() + 4 * group
        self.table = self._to_device(self.plan.table, torch.int64)

    def _to_device(self, values: object, dtype: torch.dtype) -> Tensor:
        """Bring a table to the device without waiting for it."""
        host = torch.as_tensor(values, dtype=dtype, device="cpu")
        if self.device.type != "cuda" or host.numel() == 0:
            return host.to(self.device)
        host = host.pin_memory()
        if is_capturing(self.device):
            self.kept.append(host)
        return host.to(self.device, non_blocking=True)

    # One step --------------------------------------------------------------------------

    def fits(
        self, flat: Sequence[Tensor], hypers: Sequence[Hyper], states: Mapping[Tensor, object]
    ) -> bool:
        """Whether the tensors, their states and settings are those that the plan was made for.

        This and `step` run over every tensor in every step: `map`, and no calls of our own.
        """
        tensors = chain.from_iterable(map(dict.values, self.states))
        if (
            len(flat) != len(self.flat)
            or not all(map(operator.is_, flat, self.flat))
            or not all(map(operator.is_, map(states.get, self.owners), self.states))
            or not all(map(operator.is_, tensors, self.tensors))
            or any(param.grad is not None for param in self.idle)
            or [fixed_settings(hyper) for hyper in hypers] != self.fixed
        ):
            return False
        grads: list[Any] = list(map(GRAD, self.owners))
        if any(map(operator.is_, grads, repeat(None))) or set(map(LAYOUT, grads)) != STRIDED:
            return False
        if list(map(DTYPE, grads)) != self.grad_dtypes:
            return False
        here = grads
        if self.has_shards:
            if list(map(type, grads)) != self.grad_types:
                return False
            self.params, here = list(map(held, self.owners)), list(map(held, grads))
        found = list(map(Tensor.data_ptr, chain(self.params, here)))
        if found != self.found and not self._may_move(found):
            return False
        self.grads, self.found = grads, found
        return True

    def _may_move(self, addresses: list[int]) -> bool:
        """Whether tensors that are elsewhere now are still laid out as the plan wants them."""
        aligned = [key.aligned for key in self.keys]
        if any(fit and at & 15 for fit, at in zip(aligned * 2, addresses, strict=True)):
            return False
        return layouts(self.params) == self.layouts

    def step(
        self,
        hypers: Sequence[Hyper],
        *,
        nonfinite: str,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Outcome:
        """Launch one step, which does nothing if a gradient is not finite or `found_inf` is set."""
        if not is_capturing(self.device):  # a graph may not ask whether an event has passed
            self._raise_if_given_up()
        rates = [rate_value(hyper) for hyper in hypers]
        if rates != self.rate_values:
            self.rates.copy_(self._to_device(rates, torch.float32), non_blocking=True)
            self.rate_values = rates
        borrowed = self._bring_addresses()
        # In-place operations on a DTensor do not show in the version of what this rank holds.
        versions = list(map(VERSION, chain(self.params, self.owners if self.has_shards else [])))
        with on_device(self.device):
            self._launch(
                check=nonfinite != "ignore",
                # A graph is replayed when nobody looks at the versions: take the squares anew.
                stale=versions != self.versions or is_capturing(self.device),
                scaled=found_inf is not None or grad_scale is not None,
                grad_scale=grad_scale if grad_scale is not None else self.one,
                found_inf=found_inf if found_inf is not None else self.zero,
            )
        for i, stand_in in self.stand_ins.items():
            self.params[i].copy_(stand_in)
        written = self.params
        if self.stand_ins:
            written = [p for i, p in enumerate(written) if i not in self.stand_ins]
        if self.has_shards:
            written = [*written, *filter(is_sharded, self.owners)]
        increment_version(written)
        self.versions = [version + 1 for version in versions]
        del borrowed  # not before the launches that read them
        self.whitening.release()
        if nonfinite == "raise" and found_inf is None:
            self._raise_if_skipped()
        elif nonfinite != "ignore":
            self._bring_report()
        return Outcome(self.scalars[:, K.ALPHA.value])

    def _bring_addresses(self) -> list[Tensor]:
        """Upload the addresses of W and G if one of them has moved; return what they belong to."""
        grads, self.grads = self.grads or list(map(GRAD, self.owners)), []
        params = self.params
        if self.has_shards:
            grads = self._held_as_owners(grads)
        if not all(map(Tensor.is_contiguous, grads)):
            grads = [grad.contiguous() for grad in grads]
        if self.stand_ins:
            params = list(params)
            for i, stand_in in self.stand_ins.items():
                params[i] = stand_in.copy_(params[i])
        addresses = [0] * (3 * len(params))
        addresses[::3] = map(Tensor.data_ptr, params)
        addresses[1::3] = map(Tensor.data_ptr, grads)
        addresses[2::3] = self.whitening.addresses(len(params))
        if addresses != self.addresses:
            self.pointers = self._to_device(addresses, torch.int64)
            self.addresses = addresses
        return grads

    def _held_as_owners(self, grads: list[Tensor]) -> list[Tensor]:
        """What this rank holds of the gradients, each placed as its parameter."""
        found = list(map(held_as, grads, self.owners))
        for i, (grad, key) in enumerate(zip(found, self.keys, strict=True)):
            if key.aligned and grad.data_ptr() & 15:  # one that `fits` has not seen in its place
                found[i] = grad.clone()
        return found

    def _launch(
        self, *, check: bool, stale: bool, scaled: bool, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        kinds = list(self.plan.kinds.values())
        options = [launch_options(kind) for kind in kinds]
        # One bit for each element, only for the time of a step.
        words = K.PIECE_ROWS * K.COLUMNS if any(kind.signed for kind in kinds) else 0
        signs = torch.empty(self.plan.tile_count, words, dtype=torch.int32, device=self.device)
        for kind, option in zip(kinds, options, strict=True):
            if stale:
                self._apply(kind, signs, grad_scale, scaled=scaled, measure=True)
            statistics[(kind.tiles,)](
                self.pointers, self.table, self.tile_matrix, self.row_part, self.row_peak,
                self.col_part, self.extremes, signs, self.unsigned, self.tile_sums, self.settings,
                self.bad, self.status, grad_scale, kind.first_tile, CHECK=check, SCALED=scaled,
                SIGNED=kind.signed and not kind.filters, FILTERS=kind.filters,
                VARIANCES=kind.filters and kind.dense,
                G_KIND=KINDS[kind.key.grad_dtype], BUNDLE_=K.BUNDLE, TILE=K.TILE_ROWS,
                **K.STATISTICS.options, **option,
            )  # fmt: skip
        self._finalize(found_inf, scaled=scaled)
        for kind, blocks in zip(kinds, self.blocks, strict=True):
            if kind.filters:
                self._filter(kind, signs, grad_scale, scaled=scaled)
            else:
                self._maxima(kind, blocks, grad_scale, scaled=scaled)
        self._rescale()
        self.whitening.run()
        for kind in kinds:
            if not kind.key.direct:
                self._apply(kind, signs, grad_scale, scaled=scaled, measure=False)

    def _finalize(self, found_inf: Tensor, *, scaled: bool) -> None:
        finalize[(len(self.tasks),)](
            self.table, self.settings, self.tasks, self.row_part, self.col_part,
            self.extremes, self.row_sum_var, self.squares, self.scalars, self.update_max,
            self.ratios, self.row_max, self.bad, self.status, found_inf,
            SCALED=scaled, CHUNK_=K.CHUNK, PARTS_=K.PARTS_AT_ONCE, num_warps=K.FINALIZE_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip

    def _rescale(self) -> None:
        if any(kind.general or kind.filters for kind in self.plan.kinds.values()):
            rescale[(len(self.params),)](
                self.table, self.settings, self.first_of, self.update_max, self.update_squares,
                self.filter_sums, self.scalars, self.status, enable_fp_fusion=True,
            )  # fmt: skip

    def _maxima(self, kind: Kind, blocks: Tensor, grad_scale: Tensor, *, scaled: bool) -> None:
        maxima[(len(blocks),)](
            self.pointers, self.table, self.settings, blocks, self.row_peak, self.ratios,
            self.extremes, self.row_sum_var, self.row_max, self.update_max,
            self.update_squares, self.scalars, self.status, grad_scale, SCALED=scaled,
            G_KIND=KINDS[kind.key.grad_dtype], GENERAL=kind.general, BUNDLE_=K.BUNDLE,
            STRIPS_=K.STRIPS_AT_ONCE, WIDTH_=K.COLUMNS if kind.general else K.MAXIMA_WIDTH,
            **kind.maxima.options, **launch_options(kind),
        )  # fmt: skip

    def _filter(self, kind: Kind, signs: Tensor, grad_scale: Tensor, *, scaled: bool) -> None:
        filtered[(kind.tiles,)](
            self.pointers, self.table, self.settings, self.tile_matrix, self.row_sum_var,
            self.row_max, self.update_max, self.tile_sums, self.filter_sums, self.squares,
            self.scalars, signs, self.unsigned, self.status, grad_scale, self.seed_keys,
            kind.first_tile, SCALED=scaled, SIGNED=kind.signed, GENERAL=kind.general, **kind.has,
            PEAKS=kind.peaks, DIRECT=kind.key.direct, **kind.memory, O_KIND=self.whitening.kind,
            P_KIND=KINDS[kind.key.param_dtype], G_KIND=KINDS[kind.key.grad_dtype],
            TILE=K.TILE_ROWS, **K.FILTERED_SHAPE.options, **launch_options(kind),
        )  # fmt: skip

    def _apply(
        self, kind: Kind, signs: Tensor, grad_scale: Tensor, *, scaled: bool, measure: bool
    ) -> None:
        """Write the weights, or only measure them."""
        apply[(kind.tiles,)](
            self.pointers, self.table, self.settings, self.tile_matrix, self.extremes,
            self.row_sum_var, self.row_max, self.update_max, self.squares, self.scalars, signs,
            self.unsigned, self.status, grad_scale, self.seed_keys, kind.first_tile, int(measure),
            SCALED=scaled, SIGNED=kind.signed, FILTERS=kind.filters, **kind.has, **kind.memory,
            O_KIND=self.whitening.kind, P_KIND=KINDS[kind.key.param_dtype],
            G_KIND=KINDS[kind.key.grad_dtype], TILE=K.TILE_ROWS, GENERAL=kind.general,
            **kind.apply.options, **launch_options(kind),
        )  # fmt: skip

    # The guard -------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """Steps that were skipped; reading it waits for the device."""
        return int(self.status[K.SKIPPED.value].item())  # asked for by the user

    def check_skipped(self) -> None:
        """Raise after too many skipped steps in a row; waits for the device."""
        self.report.copy_(self.status)  # asked for by the user
        self.event = None
        self._raise_if_given_up()

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradient was not finite; reading it waits."""
        marks = self.bad.tolist()  # asked for by the user, or on the way to an error
        return [name for name, mark in zip(self.names, marks, strict=True) if mark]

    def _raise_if_skipped(self) -> None:
        if names := self.nonfinite():  # waits for the device: that is what "raise" asks for
            raise refused(names)

    def _bring_report(self) -> None:
        """Start copying the counters to the host; the next step looks whether they have come."""
        if is_capturing(self.device):
            return
        self.report.copy_(self.status, non_blocking=True)
        if self.device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self._raise_if_given_up()

    def _raise_if_given_up(self) -> None:
        if self.event is not None and not self.event.query():
            return
        in_a_row = int(self.report[K.IN_A_ROW.value])
        if in_a_row >= LIMIT:
            names = self.nonfinite()
            self.report.zero_()
            self.status[K.IN_A_ROW.value] = 0
            raise given_up(in_a_row, names)


def launch_options(kind: Kind) -> dict[str, Any]:
    """What the kernels that touch W or G are compiled for."""
    # Fusing a product and a sum into one rounding is Triton's own default; newer ones ask for it.
    return {"COLS_": K.COLUMNS, "ALIGNED": kind.key.aligned, "enable_fp_fusion": True}


def layouts(params: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """What a plan takes for granted of each parameter, besides its address."""
    return [(p.shape, p.dtype, p.device, p.is_contiguous()) for p in params]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def increment_version(params: list[Tensor]) -> None:
    """Tell autograd that the kernels wrote the parameters, as an in-place operation would."""
    try:
        torch.autograd.graph.increment_version(params)
    except (AttributeError, TypeError, RuntimeError):  # an older torch takes one at a time
        for param in params:
            torch.autograd.graph.increment_version(param)
