"""AdaptiveSchedule: linear warm-up and cosine decay of the learning rate.

References:
    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016: the cosine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from maxfactor.checks import check_number, check_positive, check_whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

WARMUP_FLOOR = 0.001  # fraction of the base rate at the first step


class AdaptiveSchedule(LRScheduler):
    r"""Linear warm-up and cosine decay of `lr`, the cap on the relative step.

    `lr` rises linearly from 0.001 of the base rate to the base rate over `warmup_steps`, then falls
    along a cosine to `decay_factor` times the base rate at `total_steps` and stays there. It
    depends only on the step count, not on the step sizes of the optimizer.

    Args:
        optimizer: Any torch optimizer.
        initial_lr: The base rate; None takes each group's own `lr`.
        warmup_steps: Steps until the base rate is reached.
        decay_factor: Fraction of the base rate at the end, in (0, 1].
        total_steps: The step at which `decay_factor` is reached, warm-up included. None: no decay.
        last_epoch: Index of the last step when a run is resumed by hand.

    Example:
        >>> import torch, maxfactor
        >>> optimizer = maxfactor.MaxFactor([torch.nn.Parameter(torch.ones(3, 2))], lr=0.01)
        >>> schedule = maxfactor.AdaptiveSchedule(optimizer, warmup_steps=500, total_steps=10_000)
        >>> schedule.get_last_lr()
        [1e-05]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        initial_lr: float | None = None,
        warmup_steps: int = 0,
        decay_factor: float = 0.1,
        total_steps: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.initial_lr = None if initial_lr is None else check_positive("initial_lr", initial_lr)
        self.warmup_steps = _check_steps("warmup_steps", warmup_steps)
        self.decay_factor = _check_decay_factor(decay_factor)
        self.total_steps = None if total_steps is None else _check_steps("total_steps", total_steps)
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps must be more than warmup_steps={warmup_steps}, got {total_steps}"
            )
        _check_rates(optimizer)
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """The fraction of the base rate at a step."""
        if step < self.warmup_steps:
            return WARMUP_FLOOR + (1.0 - WARMUP_FLOOR) * step / self.warmup_steps
        if self.total_steps is None:
            return 1.0
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return self.decay_factor + (1.0 - self.decay_factor) * cosine

    def get_lr(self) -> list[Any]:
        """The learning rates of the present step, from the base rates."""
        self._follow_groups()
        factor = self.factor(self.last_epoch)
        return [factor * base for base in self._bases()]

    def effective_lr(self) -> list[float]:
        """The step size that each group used in the last step.

        The mean over the group's parameters, or `lr` if the optimizer has no `effective_lr()`.
        """
        own = getattr(self.optimizer, "effective_lr", None)
        if own is not None:
            return list(own())
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _follow_groups(self) -> None:
        """Forget groups that were removed; add new ones, whose own `lr` is the base rate."""
        groups = self.optimizer.param_groups
        known = [group["initial_lr"] for group in groups if "initial_lr" in group]
        if len(known) == len(groups) == len(self.base_lrs):
            return
        if len(known) == len(self.base_lrs):  # none was removed, and base_lrs may be a user's own
            known = self.base_lrs
        bases = iter(known)
        self.base_lrs = []
        for group in groups:
            lr = group["lr"]
            is_new = "initial_lr" not in group
            group.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr)
            self.base_lrs.append(group["initial_lr"] if is_new else next(bases))

    def _bases(self) -> list[float | Tensor]:
        bases: list[Any] = self.base_lrs
        return bases if self.initial_lr is None else [self.initial_lr] * len(bases)


def _check_steps(name: str, value: object) -> int:
    steps = check_whole(name, value)
    if steps < 0:
        raise ValueError(f"{name} must not be negative, got {steps}")
    return steps


def _check_decay_factor(value: object) -> float:
    number = check_number("decay_factor", value)
    if not 0.0 < number <= 1.0:
        raise ValueError(f"decay_factor must lie in (0, 1], got {number}")
    return number


def _check_rates(optimizer: Optimizer) -> None:
    """Refuse lr=None of Adafactor, which leaves nothing to scale."""
    groups = getattr(optimizer, "param_groups", [])
    if any(group["lr"] is None for group in groups):
        raise ValueError(
            "the optimizer has a group with lr=None, which leaves nothing to schedule; "
            "for Adafactor give lr=0.01, relative_step=True, which starts from the same rate"
        )
