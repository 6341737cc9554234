"""The fused backend: a fixed number of Triton launches per step, and no wait for the device.

`FusedStep` plans the launches once for a list of tensors. A step uploads addresses and learning
rates if they changed, and launches, or replays the launches as a CUDA graph.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from maxfactor.backends.step_io import StepResult
from maxfactor.backends.triton.buffers import Buffers
from maxfactor.backends.triton.group_tables import GroupTables
from maxfactor.backends.triton.inputs import Inputs, split_addresses
from maxfactor.backends.triton.kernels.descriptors import Tables
from maxfactor.backends.triton.kernels.layout import Scalar
from maxfactor.backends.triton.lanes import forked
from maxfactor.backends.triton.launches import GroupLaunches, LocalTotals, Scaling
from maxfactor.backends.triton.local_parameters import local_parameter
from maxfactor.backends.triton.orthogonal import OrthogonalBatches, formats_on, in_batches
from maxfactor.backends.triton.plan import LaunchPlan, keys_of, launch_order, repeat_values
from maxfactor.backends.triton.rank_totals import RankTotals
from maxfactor.backends.triton.record import Recorder
from maxfactor.backends.triton.replay import LaunchArguments, Replay
from maxfactor.backends.triton.rounds import OrthogonalRounds, exchanges_of
from maxfactor.backends.triton.status import StepStatus
from maxfactor.backends.triton.uploads import Uploads, is_capturing, on_device
from maxfactor.distributed.reductions import process_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from maxfactor.backends.step_io import GroupStep, StepInput
    from maxfactor.backends.triton.inputs import Gathered, Seen
    from maxfactor.backends.triton.orthogonal import Batch
    from maxfactor.backends.triton.sharing import Sharing


class FusedStep:
    """Runs steps for one list of tensors, for as long as `fits` says so.

    Args:
        step_io: What the optimizer collected; their states' `step` moves to the device.
        flat: All parameters of all groups, those without a gradient included.
        groups: The rules and rates of all groups.
        status: The status of a predecessor, whose counters are carried on.
        idle: The optimizer's other parameters. They choose the kernels together with those that
            are stepped, so that the result does not depend on who is stepped together.
        sharing: What the plan of a window shares with those of others.
    """

    def __init__(
        self,
        step_io: Sequence[StepInput],
        flat: Sequence[Tensor],
        groups: Sequence[GroupStep],
        status: StepStatus | None = None,
        idle: Sequence[StepInput] = (),
        sharing: Sharing | None = None,
    ) -> None:
        self._device = step_io[0].param.device
        for each in step_io:
            count = each.state["step"]
            each.state["step"] = count.to(self._device, torch.int64, non_blocking=True)
        params = [local_parameter(each) for each in step_io]
        others = [local_parameter(each) for each in idle]
        all_keys = keys_of([*params, *others])
        keys, idle_keys = all_keys[: len(params)], all_keys[len(params) :]
        exchanges = exchanges_of(step_io)
        round_of = {i: number for number, each in enumerate(exchanges) for i, _ in each.starts}
        order = launch_order(params, keys, round_of)
        order = in_batches(order, params, keys, formats_on(self._device))
        params, keys = [params[i] for i in order], [keys[i] for i in order]
        ordered = [step_io[i] for i in order]
        ranks = process_groups(each.param for each in step_io)
        self._uploads = uploads = Uploads(self._device)
        self._sharing, make_tables = sharing, partial(GroupTables, groups, uploads)
        self._group_tables = sharing.tables_of(groups, make_tables) if sharing else make_tables()
        plan = LaunchPlan(
            params,
            keys,
            self._group_tables.rate_addresses,
            list(zip(idle_keys, others, strict=True)),
        )
        self._inputs = Inputs(ordered, params, keys, flat)
        self.owners = self._inputs.owners  # the optimizer's parameters, in the kernels' order
        self._rules = [each.rule for each in ordered]
        self._recorder: Recorder | None = None
        names = [each.name for each in ordered]
        self.status = StepStatus(names, self._device, status, waits=bool(ranks))
        self._orthogonal = OrthogonalBatches(params, keys, plan)
        self._orthogonal.workspace.sharing = sharing
        formats = self._orthogonal.formats
        self._rounds = OrthogonalRounds(exchanges, order, keys, plan, formats, self._device)
        most_tiles = max(self._orthogonal.most_tiles, self._rounds.most_tiles)
        most_blocks = self._orthogonal.most_blocks
        self._buffers = buffers = Buffers(plan, self.status, most_tiles, most_blocks)
        self._totals: LocalTotals | RankTotals = LocalTotals(plan, buffers)
        if ranks:
            self._totals = RankTotals(step_io, order, plan, buffers, uploads, ranks)
        self._addresses = torch.zeros_like(self._inputs.addresses, device=self._device)
        self._is_outdated = True  # they are not those of `_inputs`
        self._tables = self._upload(plan)
        results = self._totals.results
        self._launches = [
            GroupLaunches(group, formats, buffers.partials, results, uploads)
            for group in plan.groups
        ]
        # Without GradScaler, and copies of its tensors, which are new ones in every step.
        zero = torch.zeros(1, dtype=torch.float32, device=self._device)
        self._unscaled = Scaling(is_scaled=False, grad_scale=zero + 1.0, found_inf=zero)
        self._scaled = Scaling(is_scaled=True, grad_scale=zero + 1.0, found_inf=zero.clone())
        self._step_sizes = buffers.results.scalars[:, Scalar.ALPHA]
        self.replay = Replay(self._device)
        self.replay.is_deferred = sharing is not None
        if ranks:
            self.replay.enabled = False  # no collectives in a graph

    def _upload(self, plan: LaunchPlan) -> Tables:
        """Upload the plan; the addresses of W, G and O follow with the first step."""
        to_device = self._uploads.to_device
        return Tables(
            **split_addresses(self._addresses),
            matrices=to_device(self._totals.matrices, torch.int64),
            settings=self._group_tables.settings,
            seed_keys=self._group_tables.seed_keys,
            tile_matrix=to_device(repeat_values(plan.tiles), torch.int32),
            first_matrix=to_device(plan.first_matrix, torch.int32),
            tasks=to_device(plan.tasks, torch.int32),
        )

    @property
    def borrowed_bytes(self) -> int:
        """What a step borrows from torch's allocator and returns: directions and sign bits."""
        orthogonal = self._orthogonal.workspace.nbytes + self._rounds.borrowed_bytes
        return orthogonal + self._buffers.sign_bytes

    @property
    def skipped(self) -> int:
        """How many steps were skipped; reading it waits for the device."""
        return self.status.skipped

    def check_skipped(self) -> None:
        """Raise after too many skipped steps in a row; waits for the device."""
        self.status.check_skipped()

    def fits(
        self, flat: Sequence[Tensor], groups: Sequence[GroupStep], states: Mapping[Tensor, object]
    ) -> Seen | None:
        """What is there for `step`, if it is all that of the plan, else None; changes nothing."""
        return self._inputs.fit(flat, states) if self._group_tables.fit(groups) else None

    def step(
        self,
        groups: Sequence[GroupStep],
        *,
        nonfinite: str,
        seen: Seen | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        records: bool = False,
    ) -> StepResult:
        """Launch one step, which does nothing if a gradient is not finite or `found_inf` is set.

        `seen` is the answer of `fits`, if it was asked. With `records` the step is measured.
        """
        capturing = is_capturing(self._device)
        if not capturing:  # a capture may not ask whether an event has passed
            self.status.raise_if_given_up()
            if self._sharing is not None:
                self._sharing.follow(self._device)
        self._group_tables.update_rates(groups)
        orthogonal = self._rounds.allocate(self._orthogonal.allocate())
        signs = self._buffers.sign_bits()
        gathered = self._inputs.gather(seen or self._inputs.look(), signs.data_ptr(), orthogonal)
        tables = self._with_addresses(gathered, capturing=capturing)
        scaling = self._scaling(grad_scale, found_inf)
        # A graph is replayed without a look at the versions: measure the weights in each replay.
        measure = capturing or not gathered.are_unchanged
        check = nonfinite != "ignore"
        recorder = self._begin_record() if records else None
        launches = self._launches if recorder is None else recorder.launches
        workspace_at = self._orthogonal.workspace.address

        def launch() -> None:
            self._launch(launches, tables, scaling, check=check, measure=measure)

        with on_device(self._device):
            if capturing or records:
                launch()
            else:
                arguments = LaunchArguments(workspace_at, check, measure, scaling.is_scaled)
                self.replay.run(arguments, launch)
        record = None if recorder is None else recorder.finish(self.owners)
        self._inputs.write_back(gathered.params)
        del gathered, seen, signs  # not before the launches that use them
        self._orthogonal.workspace.release()
        self._rounds.release()
        if nonfinite == "raise" and found_inf is None:
            self.status.raise_if_skipped()
        elif check:
            self.status.request_report()
        return StepResult(self._step_sizes, record=record)

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self._device

    @property
    def workspace_bytes(self) -> int:
        """What orthogonal matrices are iterated in."""
        return self._orthogonal.workspace.nbytes

    def capture_pending(self) -> None:
        """Capture the launches that `replay` waits for; nothing is run."""
        if (due := self.replay.take_pending()) is None:
            return
        scaling = self._scaled if due.is_scaled else self._unscaled

        def launch() -> None:
            self._launch(
                self._launches, self._tables, scaling, check=due.check, measure=due.measure
            )

        self._orthogonal.allocate()
        if self._orthogonal.workspace.address == due.workspace_at:  # else it has moved since
            with on_device(self._device):
                self.replay.capture(due, launch)
        self._orthogonal.workspace.release()

    def _scaling(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> Scaling:
        """What GradScaler handed over, in memory of the plan."""
        if grad_scale is None and found_inf is None:
            return self._unscaled
        scaled, unscaled = self._scaled, self._unscaled
        scaled.grad_scale.copy_(unscaled.grad_scale if grad_scale is None else grad_scale)
        scaled.found_inf.copy_(unscaled.found_inf if found_inf is None else found_inf)
        return scaled

    def _begin_record(self) -> Recorder:
        """The recorder, made at the first recorded step."""
        if self._recorder is None:
            self._recorder = Recorder(self._tables, self._buffers, self._launches, self._rules)
        self._recorder.begin()
        return self._recorder

    def _with_addresses(self, gathered: Gathered, *, capturing: bool) -> Tables:
        """The tables, with the addresses of W, G and O."""
        if capturing:  # what a graph reads must stay as it is, whatever later steps find
            self._is_outdated = self._is_outdated or gathered.have_moved
            addresses = self._uploads.to_device(self._inputs.addresses, torch.int64)
            return self._tables._replace(**split_addresses(addresses))
        if gathered.have_moved or self._is_outdated:
            self._uploads.write(self._addresses, self._inputs.addresses)
            self._is_outdated = False
        return self._tables

    def _launch(
        self,
        launches: Sequence[GroupLaunches],
        tables: Tables,
        scaling: Scaling,
        *,
        check: bool,
        measure: bool,
    ) -> None:
        """The launches of one step, in their order. Nothing here may allocate memory."""
        self.status.nonfinite_marks.zero_()  # a skipped step leaves its own
        by_key = {each.group.key: each for each in launches}
        # Groups with tensors whose direction is not orthogonal; the batches have the others.
        some = [group for group in launches if group.group.other_tiles.number]
        if measure:
            for group in some:
                group.measure(tables, scaling)
            for key, tiles in (*self._orthogonal.tiles, *self._rounds.tiles):
                by_key[key].measure_batch(tables, scaling, tiles)
        for group in launches:
            group.statistics(tables, scaling, check=check)
        self._totals.finalize(tables, scaling)
        # A few steps later the launches are replayed: not worth streams, with workspaces of cuBLAS.
        lanes = 1 if self.replay.may_replay else self._orthogonal.lanes
        with forked(self._device, lanes) as lane:
            for batch in self._orthogonal.batches:
                with lane(batch.lane):
                    self._launch_batch(by_key[batch.key], tables, scaling, batch)
        for each in self._rounds.rounds:
            for segment in each.segments:
                by_key[segment.key].begin_shards(tables, scaling, segment)
            self._rounds.orthogonalize(each, self._buffers.results.counters)
            for segment in each.segments:
                by_key[segment.key].end_shards(tables, scaling, segment)
        for group in some:
            group.direction(tables, scaling)
        self._totals.rescale(tables)
        for group in some:
            if not group.group.key.direct:
                group.apply(tables, scaling)

    def _launch_batch(
        self, group: GroupLaunches, tables: Tables, scaling: Scaling, batch: Batch
    ) -> None:
        """The launches of a batch of orthogonal matrices, in the memory of its lane."""
        workspace = self._orthogonal.workspace
        memory = workspace.memory_of(batch.layout, batch.lane)
        group.begin_batch(tables, scaling, batch, memory)
        workspace.iterate(batch.layout, batch.lane)
        group.end_batch(tables, scaling, batch, memory)


def make_step(
    step_io: Sequence[StepInput],
    flat: Sequence[Tensor],
    groups: Sequence[GroupStep],
    previous: FusedStep | None = None,
    idle: Sequence[StepInput] = (),
    sharing: Sharing | None = None,
) -> FusedStep:
    """Plan the steps of a list of tensors; the counters of a `previous` plan are carried on."""
    status = None if previous is None else previous.status
    return FusedStep(step_io, flat, groups, status, idle, sharing)
