"""The torch backend: sorts parameters into batches and runs the rounds of each batch.

It runs on the CPU, on devices without Triton, and on shards. `batch.py` has the equations.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maxfactor.backends.dispatch import has_compiled_passes
from maxfactor.backends.guard import NOT_FINITE, OVERFLOWS, bad_gradients
from maxfactor.backends.step_io import StepResult
from maxfactor.backends.torch.batch import SMALL, Batch
from maxfactor.backends.torch.blocks import Scratch
from maxfactor.backends.torch.record import BatchRecord, TorchRecord
from maxfactor.distributed.gradients import local_gradients
from maxfactor.distributed.owner_exchange import orthogonalize_by_owners_
from maxfactor.distributed.placement import is_sharded
from maxfactor.distributed.reductions import Reduction, process_groups, reduce_all
from maxfactor.rule.newton_schulz import orthogonal
from maxfactor.rule.reference import Scalar, host_scalar
from maxfactor.state import factoring

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup

    from maxfactor.backends.step_io import StepInput
    from maxfactor.backends.torch.batch import Rounds
    from maxfactor.backends.torch.weight_sums import WeightSums

CPU_BLOCK = 1 << 19  # elements: two float32 buffers of this size fit into the cache
DEVICE_BLOCK = 1 << 24  # elements: small compared with the memory of a device
ROUNDS = 3


def step(
    inputs: Sequence[StepInput],
    *,
    check: bool,
    foreach: bool = False,
    compiled: WeightSums | None = None,
    records: bool = False,
) -> StepResult:
    """Take one step for each parameter; with `check`, skip all if a gradient is not finite.

    Args:
        inputs: The parameters. They and their states are updated in place.
        check: Whether to check that all gradients are finite, before anything is written.
        foreach: Whether to batch all tensors of one shape, not only those of `is_batched`.
        compiled: What compiled passes over matrices found in the last step; None for torch
            operations alone, which also take a step that is measured.
        records: Whether to measure the step; not for sharded parameters.
    """
    groups = process_groups(each.param for each in inputs)
    grads = [each.grad for each in inputs]
    if any(is_sharded(each.param) for each in inputs):
        grads = local_gradients(inputs)
    sums = None if records else compiled
    batches = sort_into_batches(inputs, grads, sums, foreach=foreach, shared=not groups)
    if groups:
        result = run_on_all(list(batches), inputs, groups, check=check)
    elif records:
        result = run_recorded(list(batches), inputs, check=check)
    elif sums is not None:
        result = run_compiled(batches, inputs, sums, check=check)
    else:
        result = run_alone(batches, inputs, check=check)
    for each in [] if result.bad else inputs:
        if each.param.numel() == 0:  # in no batch
            each.state["step"].add_(1)
    return result


def run_recorded(measured: list[Batch], inputs: Sequence[StepInput], *, check: bool) -> StepResult:
    """Run the rounds in one process, and measure what they do."""
    for batch in measured:
        batch.record = BatchRecord(len(batch.inputs))
    result = run_alone(iter(measured), inputs, check=check)
    pairs = [(batch.inputs, batch.record) for batch in measured if batch.record is not None]
    result.record = TorchRecord(inputs, result.step_sizes, pairs)
    return result


def run_compiled(
    batches: Iterator[Batch], inputs: Sequence[StepInput], sums: WeightSums, *, check: bool
) -> StepResult:
    """Run the rounds in one process, with compiled passes. Imported here, as it needs Numba."""
    from maxfactor.backends.torch.compiled.batch import threads_of_torch

    sums.begin()
    with threads_of_torch():
        return run_alone(batches, inputs, check=check)


# ------------------------------------------------------------------------------------- batches


def sort_into_batches(
    inputs: Sequence[StepInput],
    grads: Sequence[Tensor],
    sums: WeightSums | None,
    *,
    foreach: bool,
    shared: bool,
) -> Iterator[Batch]:
    """Sort parameters into batches of one shape, which share scratch buffers if `shared`."""
    scratch = Scratch()
    is_compiled = set[int]()
    if sums is not None:
        is_compiled = {i for i, each in enumerate(inputs) if has_compiled_passes(each)}
    alike: dict[tuple[Any, object], list[int]] = {}
    for index, each in enumerate(inputs):
        if each.param.numel() == 0:
            continue
        count = host_scalar(each.state["step"])
        key: tuple[object, ...] = (
            each.param.shape, each.group, each.window, each.param.dtype, grads[index].dtype,
            each.param.device,
        )  # fmt: skip
        is_alone = is_sharded(each.param) or is_batch_of_matrices(each)
        if index in is_compiled:
            # Each matrix by itself, so a batch may cross windows, and still leaves the same bits.
            key = ("compiled", each.param.shape, each.group)
        elif is_alone or not (foreach or is_batched(each)):
            key = (index,)
        when = "device" if isinstance(count, Tensor) else count
        alike.setdefault((when, key), []).append(index)
    for (count, _), indices in alike.items():
        if sums is not None and indices[0] in is_compiled:
            from maxfactor.backends.torch.compiled.batch import CompiledBatch

            members = [inputs[i] for i in indices]
            yield CompiledBatch(members, [grads[i] for i in indices], count + 1, scratch, sums)
            continue
        block = block_size(inputs[indices[0]].param.device, foreach=foreach)
        for chunk in chunks(indices, block // inputs[indices[0]].param.numel()):
            members = [inputs[i] for i in chunk]
            t = device_count(members) if count == "device" else count
            buffers = scratch if shared else Scratch()
            yield Batch(members, [grads[i] for i in chunk], t + 1, block, buffers)


def is_batch_of_matrices(each: StepInput) -> bool:
    """Whether a tensor fills a batch by itself: with factor="last" it is many matrices."""
    layout = factoring(tuple(each.param.shape), each.rule.factor)
    return layout is not None and len(layout.matrix) > 2


def is_batched(each: StepInput) -> bool:
    """Whether a tensor is stepped together with others of its shape."""
    param = each.param
    if param.device.type != "cpu" or each.rule.is_filtered:
        return True
    return param.dim() < 2 or param.numel() <= SMALL


def block_size(device: torch.device, *, foreach: bool) -> int:
    """Elements of a block."""
    return CPU_BLOCK if device.type == "cpu" and not foreach else DEVICE_BLOCK


def chunks(indices: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Split a list into chunks of at most `most` entries, and of at least one."""
    size = max(1, most)
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def device_count(members: Sequence[StepInput]) -> Tensor:
    """Steps taken so far, from counters on the device, (k, 1, 1)."""
    return torch.stack([each.state["step"] for each in members]).view(-1, 1, 1)


# -------------------------------------------------------------------------------------- rounds


def run_alone(batches: Iterator[Batch], inputs: Sequence[StepInput], *, check: bool) -> StepResult:
    """Run the rounds in one process: with `check`, round 1 of all batches first, then the rest."""
    sizes: dict[int, Scalar] = {}
    if not check:  # finish each batch while its gradient is still in the cache
        for batch in batches:
            rounds = batch.rounds()
            _finish_alone(batch, rounds, next(rounds), sizes)
        return StepResult(sizes_in_order(sizes, inputs))
    started = [(batch, rounds := batch.rounds(), next(rounds)) for batch in batches]
    if bad := nonfinite([(batch, first[0].value) for batch, _, first in started]):
        for batch, _, first in started:
            if batch.record is not None:
                batch.record.begin(first[0].value, batch.rule)
        marks = marks_of((batch for batch, *_ in started), bad)
        return StepResult(bad=bad_gradients((each.name, marks[id(each)]) for each in inputs))
    for batch, rounds, first in started:
        _finish_alone(batch, rounds, first, sizes)
    return StepResult(sizes_in_order(sizes, inputs))


def _finish_alone(
    batch: Batch, rounds: Rounds, reductions: list[Reduction], sizes: dict[int, Scalar]
) -> None:
    for _ in range(ROUNDS - 1):
        reductions = rounds.send(reduce_all(reductions, ()))
    found = finish(rounds, reduce_all(reductions, ()))
    sizes.update(zip(map(id, batch.inputs), found, strict=True))


def run_on_all(
    batches: list[Batch],
    inputs: Sequence[StepInput],
    groups: Sequence[ProcessGroup],
    *,
    check: bool,
) -> StepResult:
    """Run each round on all batches and ranks, with one all-reduce per process group."""
    rounds = [batch.rounds() for batch in batches]
    reductions = [next(each) for each in rounds]
    device = inputs[0].param.device
    bad = [~own[0].value.isfinite().reshape(-1).to(device) for own in reductions]
    flags = Reduction(torch.cat(bad).to(torch.float32), groups)  # all ranks skip, or none
    *got, flagged = reduce_all([*(r for own in reductions for r in own), flags], groups)
    answers = split_like(got, reductions)
    if check:
        overflown = torch.cat([~own[0].isfinite().reshape(-1).to(device) for own in answers])
        # The only host sync of a step: nothing may be written before this is known.
        failed = ((flagged > 0) | overflown).tolist()
        members = [each for batch in batches for each in batch.inputs]
        names = {id(each) for each, is_bad in zip(members, failed, strict=True) if is_bad}
        if names:
            marks = marks_of(batches, names)
            found = torch.tensor([marks[id(each)] for each in inputs], device=device)
            # On the way to a skipped step.
            worst = reduce_all([Reduction(found, groups, is_sum=False)], groups)[0].tolist()
            each_name = (each.name for each in inputs)
            return StepResult(bad=bad_gradients(zip(each_name, worst, strict=True)))
    for _ in range(ROUNDS - 1):
        reductions = [each.send(own) for each, own in zip(rounds, answers, strict=True)]
        answers = split_like(reduce_all([r for own in reductions for r in own], groups), reductions)
    orthogonalize_by_owners_([b.exchanged for b in batches if b.exchanged is not None], orthogonal)
    sizes: dict[int, Scalar] = {}
    for batch, each, own in zip(batches, rounds, answers, strict=True):
        sizes.update(zip(map(id, batch.inputs), finish(each, own), strict=True))
    return StepResult(sizes_in_order(sizes, inputs))


def marks_of(batches: Iterable[Batch], bad: set[int]) -> dict[int, float]:
    """The mark of each input by its id: what is wrong with its gradient, if its id is in `bad`.

    Waits for the device, on the way to a skipped step.
    """
    marks: dict[int, float] = defaultdict(float)
    for batch in batches:
        for each, grad in zip(batch.inputs, batch.grads, strict=True):
            if id(each) in bad:
                marks[id(each)] = float(OVERFLOWS if grad.isfinite().all() else NOT_FINITE)
    return marks


def nonfinite(sums: Sequence[tuple[Batch, Tensor]]) -> set[int]:
    """The ids of the inputs whose gradient has a nonfinite sum of squares.

    The squares of a finite gradient may overflow, too, and would spoil its statistics for good:
    `marks_of` tells these from the others.
    """
    if not sums:
        return set()
    device = sums[0][1].device
    finite = torch.cat([total.reshape(-1).to(device) for _, total in sums]).isfinite()
    members = [each for batch, _ in sums for each in batch.inputs]
    # The only host sync of a step: nothing may be written before this is known.
    return {id(each) for each, good in zip(members, finite.tolist(), strict=True) if not good}


def split_like(values: list[Tensor], reductions: list[list[Reduction]]) -> list[list[Tensor]]:
    """The reduced values, as one list for each batch."""
    rest = iter(values)
    return [[next(rest) for _ in own] for own in reductions]


def finish(rounds: Rounds, answer: list[Tensor]) -> list[Scalar]:
    """Finish the step of a batch; return its step sizes."""
    try:
        rounds.send(answer)
    except StopIteration as end:
        sizes: list[Scalar] = end.value
        return sizes
    raise AssertionError("a step has three rounds")


def sizes_in_order(sizes: dict[int, Scalar], inputs: Sequence[StepInput]) -> list[Scalar]:
    """The step sizes in the order of the inputs; 0 for an empty parameter."""
    return [sizes.get(id(each), 0.0) for each in inputs]
