"""Telemetry: what a recorded step did to each parameter, in numbers and in plain English.

Nothing is measured unless `record_metrics` asked for it. A recorded step measures while it runs,
over all entries of a tensor, and leaves its sums on the device. They are read when a value is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import torch

from maxfactor.checks import check_count

if TYPE_CHECKING:
    from torch import Tensor

    from maxfactor.backends.step_io import Measured, StepRecord
    from maxfactor.settings import TensorRule

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

# What stands out in a report.
UNUSUAL = 10.0  # times the median of the kind, or a tenth of it
VANISHING = 1e-4  # of the kind's median RMS of gradients
DOMINATING = 0.8  # share of the squared norm of all gradients
MOSTLY_LOST = 0.5  # share of the entries
FEWEST = 3  # parameters of a kind whose median says something


# ----------------------------------------------------------------------- which steps are recorded


@dataclass
class Recording:
    """Which steps are recorded, and the records of the last one that was."""

    records: list[StepRecord] = field(default_factory=list)
    _every: int | None = None
    _wait: int | None = None  # steps before the next recorded one; None: there is none
    _step: int = 0  # steps taken
    _recorded: int = -1  # the step that `records` are of
    _is_put_off: bool = False  # the present step is not taken

    def schedule(self, every: int | None) -> None:
        """Record the next step, then every `every`-th; None for the next alone, 0 for none."""
        if every is not None:
            every = check_count("every", every, 0)
        self._every, self._wait = every, None if every == 0 else 0

    @property
    def is_due(self) -> bool:
        """Whether the present step is recorded."""
        return self._wait == 0

    @property
    def age(self) -> int:
        """How many steps were taken since the recorded one."""
        return self._step - self._recorded - 1

    def add(self, record: StepRecord | None) -> None:
        """Keep the record of the present step, or of one of its windows."""
        if record is None:
            return
        if self._recorded != self._step:
            self.records, self._recorded = [], self._step
        self.records.append(record)

    def put_off(self) -> None:
        """Record the next step, if it was to be the present one, which is not taken."""
        self._is_put_off = self.is_due

    def advance(self) -> None:
        """Count a step."""
        self._step += 1
        if self._is_put_off:
            self._is_put_off = False
            return
        if self._wait == 0:
            self._wait = self._every
        if self._wait is not None:
            self._wait -= 1


# --------------------------------------------------------------------------------- the metrics


@dataclass(frozen=True)
class ParameterMetrics:
    """What the recorded step did to one parameter.

    Attributes:
        name: Its name.
        kind: Its group's kind, or "group_0" and so on without kinds.
        numel: Its number of entries.
        step_size: The effective rate, alpha of (3).
        weight_rms: RMS(W) after the step.
        update_rms: RMS of the change of W, as it was written.
        grad_rms: RMS(G); inf or NaN if G is not finite, or its squares overflow.
        beta: The memory in (12), for FAM the mean over bands; None without momentum.
        beta_bounds: FAM's `beta_min` and `beta_max`; None without FAM.
        clip: What bounds divided the update by, at least 1: s of (10), s of (8), the clip of the
            norm, or their product. 1 if the rule has none.
        lost: The share of entries whose change rounding to nearest would drop: it is not zero, but
            W stays as it is. None for parameters that do not have 16 bits.
        is_stochastic: Whether it is written with stochastic rounding, which keeps such changes on
            average.
        skipped: Whether the step was skipped. Then only `grad_rms` was measured.
        least_size: Of a vector: eps2 of (3), at least which it counts as in the report. Else 0.
    """

    name: str
    kind: str
    numel: int
    step_size: float
    weight_rms: float
    update_rms: float
    grad_rms: float
    beta: float | None
    beta_bounds: tuple[float, float] | None
    clip: float
    lost: float | None
    is_stochastic: bool
    skipped: bool
    least_size: float

    @property
    def update_ratio(self) -> float:
        """RMS of the change of W, divided by RMS(W); 0 if W is 0."""
        return self.update_rms / self.weight_rms if self.weight_rms else 0.0

    @property
    def relative_change(self) -> float:
        """The `update_ratio`, but of the size by which (3) scales the step of a small vector.

        A bias that begins at zero then compares with the other vectors.
        """
        size = max(self.weight_rms, self.least_size)
        return self.update_rms / size if size else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether the gradient, and the sum of its squares, was finite."""
        return math.isfinite(self.grad_rms)


class Known(NamedTuple):
    """What an optimizer knows of a parameter."""

    name: str
    kind: str
    rule: TensorRule


class Metrics(Mapping[str, ParameterMetrics]):
    """The metrics of a recorded step, by the parameter's name.

    It has the parameters that had a gradient. The first value that is read waits for the device.

    Args:
        records: The records of the step.
        known: The optimizer's parameters.
        age: How many steps were taken since.
    """

    def __init__(
        self, records: Sequence[StepRecord], known: Mapping[Tensor, Known], age: int
    ) -> None:
        self._records, self._known, self.age = list(records), dict(known), age

    @cached_property
    def _rows(self) -> dict[str, ParameterMetrics]:
        """The metrics of all parameters, in the optimizer's order."""
        found: dict[Tensor, tuple[bool, Measured]] = {}
        for record in self._records:
            skipped, measured = record.read()
            found |= {param: (skipped, each) for param, each in measured.items()}
        return {
            known.name: _parameter_metrics(known, param, *found[param])
            for param, known in self._known.items()
            if param in found
        }

    def __getitem__(self, name: str) -> ParameterMetrics:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped; with released gradients, that of any window."""
        return any(each.skipped for each in self.values())

    def summary(self) -> dict[str, float]:
        """A few numbers for each kind, as a flat dict for a logger.

        "hidden/update_ratio" and "hidden/grad_rms" are over all entries of a kind, "hidden/lost"
        is their share, "hidden/step_size", "hidden/beta" and "hidden/clip" are means over
        parameters. "grad_norm" is the norm of all gradients, "skipped" is 1 for a skipped step.
        What a kind does not have, and what is not finite, is left out.
        """
        rows = sorted(self.values(), key=lambda each: each.kind)
        found = {"grad_norm": math.sqrt(sum(map(_gradient_squares, rows)))} if rows else {}
        for kind, members in groupby(rows, key=lambda each: each.kind):
            own = _summary_of(list(members))
            found |= {f"{kind}/{key}": value for key, value in own.items()}
        found["skipped"] = float(self.skipped)
        return {key: value for key, value in found.items() if math.isfinite(value)}


def _parameter_metrics(
    known: Known, param: Tensor, skipped: bool, measured: Measured
) -> ParameterMetrics:
    count, rule = param.numel(), known.rule
    fam = rule.fam if measured.beta is not None and param.dim() > 1 else None
    lost = measured.lost / count if count and param.dtype in SIXTEEN_BITS and not skipped else None
    return ParameterMetrics(
        name=known.name,
        kind=known.kind,
        numel=count,
        step_size=0.0 if skipped else measured.step_size,
        weight_rms=_rms(measured.weight_squares, count),
        update_rms=_rms(measured.change_squares, count),
        grad_rms=_rms(measured.gradient_squares, count),
        beta=None if skipped else measured.beta,
        beta_bounds=None if skipped or fam is None else (fam.beta_min, fam.beta_max),
        clip=1.0 if skipped else max(1.0, measured.clip),  # below 1 nothing was bounded
        lost=lost,
        is_stochastic=rule.is_stochastic(param.dtype),
        skipped=skipped,
        least_size=rule.eps2 if param.dim() < 2 else 0.0,
    )


def _rms(squares: float, count: int) -> float:
    return math.sqrt(squares / count) if count else 0.0


def _gradient_squares(each: ParameterMetrics) -> float:
    return each.grad_rms**2 * each.numel


def _summary_of(rows: Sequence[ParameterMetrics]) -> dict[str, float]:
    """The summary of the parameters of one kind; only gradients if the step was skipped."""
    count = sum(each.numel for each in rows)
    found = {"grad_rms": _rms(sum(map(_gradient_squares, rows)), count)}
    taken = [each for each in rows if not each.skipped]
    if not taken:
        return found
    weights = math.sqrt(sum(each.weight_rms**2 * each.numel for each in taken))
    changes = math.sqrt(sum(each.update_rms**2 * each.numel for each in taken))
    found["update_ratio"] = changes / weights if weights else 0.0
    found["step_size"] = fmean(each.step_size for each in taken)
    found["clip"] = fmean(each.clip for each in taken)
    if betas := [each.beta for each in taken if each.beta is not None]:
        found["beta"] = fmean(betas)
    if known := [(each.lost, each.numel) for each in taken if each.lost is not None]:
        found["lost"] = sum(lost * n for lost, n in known) / sum(n for _, n in known)
    return found


# ----------------------------------------------------------------------------------- the report


class Report(list[str]):
    """Lines that name the parameters that stand out; prints as these lines."""

    def __str__(self) -> str:
        return "\n".join(self)


def report_of(metrics: Metrics, k: int = 5) -> Report:
    """Name the parameters that stand out, at most `k` for each reason."""
    k = check_count("k", k, 1)
    rows = list(metrics.values())
    if metrics.skipped:
        return Report(_skipped_lines(rows, k))
    lines = [
        *_nonfinite_lines(rows, k),
        *_gradient_lines(rows, k),
        *_ratio_lines(rows, k),
        *_memory_lines(rows, k),
        *_lost_lines(rows, k),
    ]
    return Report(lines or [f"Nothing stands out among {len(rows)} parameters."])


def _skipped_lines(rows: Sequence[ParameterMetrics], k: int) -> list[str]:
    skipped = sum(each.skipped for each in rows)
    line = f"The step was skipped for {skipped} of {len(rows)} parameters."
    return [line, *_nonfinite_lines(rows, k)]


def _nonfinite_lines(rows: Sequence[ParameterMetrics], k: int) -> list[str]:
    bad = [each for each in rows if not each.is_finite]
    lines = [
        f"{each.name}: the gradient is not finite, or its squares overflow." for each in bad[:k]
    ]
    return [*lines, *_more(bad, k, "also have gradients that are not finite")]


def _gradient_lines(rows: Sequence[ParameterMetrics], k: int) -> list[str]:
    """Gradients that are zero, vanish, or dominate."""
    zero = [each for each in rows if each.grad_rms == 0.0 and each.numel]
    lines = [f"{each.name}: the gradient is zero." for each in zero[:k]]
    lines += _more(zero, k, "also have a zero gradient")
    typical = _medians(rows, lambda each: each.grad_rms)
    faint = [
        each
        for each in rows
        if 0.0 < each.grad_rms < VANISHING * typical.get(each.kind, 0.0) and each.is_finite
    ]
    for each in sorted(faint, key=lambda each: each.grad_rms)[:k]:
        lines.append(
            f"{each.name}: the gradient vanishes; its RMS is {each.grad_rms:.1e}, the median of "
            f"{each.kind} is {typical[each.kind]:.1e}."
        )
    total = sum(map(_gradient_squares, rows))
    for each in rows:
        share = _gradient_squares(each) / total if 0.0 < total < math.inf else 0.0
        if share > DOMINATING and len(rows) >= FEWEST:
            lines.append(
                f"{each.name}: the gradient dominates, with {share:.0%} of the squared norm of "
                f"all {len(rows)} parameters."
            )
    return lines


def _ratio_lines(rows: Sequence[ParameterMetrics], k: int) -> list[str]:
    """Parameters that change much more, or much less, than others of their kind."""
    typical = _medians(rows, lambda each: each.relative_change)
    known = [
        (each.relative_change / typical[each.kind], each)
        for each in rows
        if each.relative_change > 0.0 and typical.get(each.kind, 0.0) > 0.0
    ]
    known.sort(key=lambda pair: pair[0])
    high = [pair for pair in reversed(known) if pair[0] > UNUSUAL][:k]
    low = [pair for pair in known if pair[0] < 1.0 / UNUSUAL][:k]
    return [
        f"{each.name}: the step changes it by {each.relative_change:.1e} of its size, "
        f"{times:.2g} times the median of {each.kind} ({typical[each.kind]:.1e})."
        for times, each in [*high, *low]
    ]


def _memory_lines(rows: Sequence[ParameterMetrics], k: int) -> list[str]:
    """FAM's beta at one of its bounds."""
    found = []
    for side, meaning in ((1, "upper bound, as for noise"), (0, "lower bound, as for a trend")):
        held = [each for each in rows if _is_at_bound(each, side)]
        if held:
            names = ", ".join(each.name for each in held[:k])
            rest = f" and {len(held) - k} more" if len(held) > k else ""
            matrices = sum(each.beta_bounds is not None for each in rows)
            found.append(
                f"FAM's memory is at its {meaning}, in {len(held)} of {matrices} matrices: "
                f"{names}{rest}."
            )
    return found


def _is_at_bound(each: ParameterMetrics, side: int) -> bool:
    if each.beta is None or each.beta_bounds is None:
        return False
    return math.isclose(each.beta, each.beta_bounds[side], abs_tol=1e-6)


def _lost_lines(rows: Sequence[ParameterMetrics], k: int) -> list[str]:
    """16-bit parameters whose changes are too small for rounding to nearest."""
    lost = [(each.lost, each) for each in rows if each.lost is not None]
    lost = sorted((pair for pair in lost if pair[0] > MOSTLY_LOST), key=lambda pair: -pair[0])
    lines = [
        f"{each.name}: {share:.0%} of the changes are below half a unit in the last place; "
        + (
            "stochastic rounding keeps them on average."
            if each.is_stochastic
            else "rounding='nearest' loses them; use rounding='stochastic'."
        )
        for share, each in lost[:k]
    ]
    return [*lines, *_more(lost, k, "also have mostly such small changes")]


def _more(found: Sequence[object], k: int, what: str) -> list[str]:
    return [f"{len(found) - k} more parameters {what}."] if len(found) > k else []


def _medians(
    rows: Sequence[ParameterMetrics], value: Callable[[ParameterMetrics], float]
) -> dict[str, float]:
    """The median of each kind that has enough parameters with a finite gradient."""
    by_kind: dict[str, list[float]] = {}
    for each in rows:
        if each.is_finite:
            by_kind.setdefault(each.kind, []).append(value(each))
    return {kind: median(found) for kind, found in by_kind.items() if len(found) >= FEWEST}
