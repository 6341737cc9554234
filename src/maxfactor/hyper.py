"""Hyper-parameters: checked once, named as in the parameter groups, and nothing else.

An optimizer's group is a plain dict, as torch wants it. Before it is used it becomes one of the
frozen dataclasses below, so the maths and the backends never see a value that was not checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

FLOAT32_EPS = torch.finfo(torch.float32).eps
FLOAT32_TINY = torch.finfo(torch.float32).tiny

FACTORINGS = ("auto", "last")
STEP_RULES = ("relative", "ramp")
DECAY_RULES = ("lr", "step_size")
VECTOR_DIRECTIONS = ("sign_max", "update")
ROUNDINGS = ("stochastic", "nearest")
NONFINITE = ("skip", "raise", "ignore")


def check_number(name: str, value: object) -> float:
    """Return `value` as a float, or say what is wrong with its type."""
    if isinstance(value, bool) or not isinstance(value, Real):
        remedy = "; convert it with float() first" if isinstance(value, str) else ""
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}){remedy}")
    return float(value)


def check_not_negative(name: str, value: object) -> float:
    """Return `value` as a finite float of at least 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"{name} must be finite and not negative, got {number}")
    return number


def check_positive(name: str, value: object) -> float:
    """Return `value` as a finite float above 0."""
    number = check_number(name, value)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{name} must be finite and positive, got {number}")
    return number


def check_choice(name: str, value: object, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


def check_flag(name: str, value: object) -> bool:
    """Return `value` if it is True or False; 0, 1 and "no" are more often mistakes."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def check_lr(value: object) -> float | Tensor:
    """Return the learning rate: a float, or a one-element tensor that is kept as it is."""
    if not isinstance(value, Tensor):
        return check_not_negative("lr", value)
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            "lr as a tensor must be a 0-dimensional floating-point tensor, "
            f"got shape {tuple(value.shape)} and {value.dtype}"
        )
    if value.device.type == "cpu":  # reading it elsewhere would stall the device every step
        check_not_negative("lr", value.item())
    return value


def check_pair(name: str, value: object) -> tuple[Any, Any]:
    """Return the two entries of a tuple or list (configuration files give lists)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be a pair such as (1e-10, 1e-3), got {value!r}")
    return value[0], value[1]


def check_eps(value: object) -> tuple[float | None, float]:
    """Return (eps1, eps2); eps1 may be None, which means float32's machine epsilon."""
    eps1, eps2 = check_pair("eps", value)
    first = None if eps1 is None else check_not_negative("eps[0]", eps1)
    return first, check_not_negative("eps[1]", eps2)


def check_beta2_decay(value: object) -> float:
    """Return the exponent of equation (1), which must not make the weight grow with time."""
    number = check_number("beta2_decay", value)
    if not (math.isfinite(number) and number <= 0.0):
        raise ValueError(f"beta2_decay must be finite and not positive, got {number}")
    return number


def check_gamma(value: object) -> float:
    """Return the memory of equation (5'), which must forget something."""
    number = check_number("gamma", value)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"gamma must lie in [0, 1), got {number}")
    return number


def check_bounds(value: object) -> tuple[float, float]:
    """Return the bounds of equation (1)'s weight: 0 <= low <= high <= 1."""
    low, high = (check_number("kappa_bounds", bound) for bound in check_pair("kappa_bounds", value))
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"kappa_bounds must satisfy 0 <= low <= high <= 1, got ({low}, {high})")
    return low, high


def check_seed(value: object) -> int:
    """Return the seed of the rounding noise; None takes torch's own."""
    if value is None:
        return torch.initial_seed()
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"seed must be a whole number, got {value!r} ({type(value).__name__})")
    return value


@dataclass(frozen=True)
class Execution:
    """How steps are run. The same for all groups of an optimizer."""

    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool = False
    nonfinite: str = "skip"

    def __post_init__(self) -> None:
        for name in ("foreach", "fused"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        check_flag("capturable", self.capturable)
        check_choice("nonfinite", self.nonfinite, NONFINITE)
        if self.foreach and self.fused:
            raise ValueError("foreach=True and fused=True exclude each other; set one of them")

    @classmethod
    def names(cls) -> list[str]:
        """The settings' names, which are keys of a parameter group."""
        return [f.name for f in fields(cls)]


H = TypeVar("H", bound="Hyper")


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What every factored rule has. Field names are the keys of the parameter groups."""

    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (1e-10, 1e-3)
    weight_decay: float = 0.0
    maximize: bool = False
    factor: str = "auto"
    rounding: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.rounding is not None:
            check_choice("rounding", self.rounding, ROUNDINGS)
        self._set(
            seed=check_seed(self.seed),
            beta2_decay=check_beta2_decay(self.beta2_decay),
            eps=check_eps(self.eps),
            weight_decay=check_not_negative("weight_decay", self.weight_decay),
            maximize=check_flag("maximize", self.maximize),
            factor=check_choice("factor", self.factor, FACTORINGS),
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # frozen for everybody but __post_init__

    @classmethod
    def from_group(cls: type[H], group: Mapping[str, Any]) -> H:
        """Check the settings of a parameter group; a missing one takes its default."""
        return cls(**{name: group[name] for name in cls.names() if name in group})

    @classmethod
    def names(cls) -> list[str]:
        """The settings' names, which are keys of a parameter group."""
        return [f.name for f in fields(cls)]

    def as_group(self) -> dict[str, Any]:
        """The settings as a group holds them; a tensor `lr` stays the caller's own tensor."""
        return {name: getattr(self, name) for name in self.names()}

    @property
    def eps1(self) -> float:
        """eps1, with None resolved to float32's epsilon for every parameter alike."""
        return FLOAT32_EPS if self.eps[0] is None else self.eps[0]

    @property
    def eps2(self) -> float:
        """The smallest RMS(W) that equation (3) will scale by."""
        return self.eps[1]

    def keeps_dense_variance(self, numel: int) -> bool:  # noqa: ARG002
        """Whether a tensor that could be factored keeps a full second moment all the same."""
        return False


@dataclass(frozen=True, kw_only=True)
class MaxFactorHyper(Hyper):
    """MaxFactor's settings: the arguments of the class, the columns of the table of versions."""

    lr: float | Tensor = 0.01
    d: float = 1.0
    weight_decay: float = 0.01
    gamma: float = 0.99
    max_norm: bool = True
    min_lr: float = 0.0
    scalar_boost: float | None = None
    eps_rms: float | None = None
    mean_eps: float | None = 1e-8
    full_matrix: bool = False
    clip_threshold: float = 0.0
    kappa_bounds: tuple[float, float] = (0.0, 1.0)
    step_rule: str = "relative"
    decay_by: str = "lr"
    vector_direction: str = "sign_max"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            lr=check_lr(self.lr),
            d=check_positive("d", self.d),
            gamma=check_gamma(self.gamma),
            max_norm=check_flag("max_norm", self.max_norm),
            min_lr=check_not_negative("min_lr", self.min_lr),
            full_matrix=check_flag("full_matrix", self.full_matrix),
            clip_threshold=check_not_negative("clip_threshold", self.clip_threshold),
            kappa_bounds=check_bounds(self.kappa_bounds),
            step_rule=check_choice("step_rule", self.step_rule, STEP_RULES),
            decay_by=check_choice("decay_by", self.decay_by, DECAY_RULES),
            vector_direction=check_choice(
                "vector_direction", self.vector_direction, VECTOR_DIRECTIONS
            ),
        )
        if self.scalar_boost is not None:
            self._set(scalar_boost=check_positive("scalar_boost", self.scalar_boost))
        for name in ("eps_rms", "mean_eps"):
            if getattr(self, name) is not None:
                self._set(**{name: check_not_negative(name, getattr(self, name))})
        if self.step_rule == "ramp" and self.min_lr > 0.0:
            raise ValueError(
                f"min_lr={self.min_lr} has no meaning with step_rule='ramp'; set min_lr=0"
            )

    @property
    def floor(self) -> float:
        """The smallest divisor of equations (6) and (7)."""
        return max(self.eps1 + (self.eps_rms or 0.0), FLOAT32_TINY)

    @property
    def variance_floor(self) -> float:
        """The smallest V of equation (6), kept above float32's underflow."""
        return max(self.eps1 * self.eps1, FLOAT32_TINY)

    @property
    def count_eps(self) -> float:
        """What the means of equation (5) add to the count they divide by."""
        if self.eps_rms is not None:
            return self.eps_rms
        return self.eps1 if self.mean_eps is None else self.mean_eps

    def keeps_dense_variance(self, numel: int) -> bool:
        """Dense on request (0.2), and for single values where they have a rule of their own."""
        return self.full_matrix or self.is_boosted_scalar(numel)

    def is_boosted_scalar(self, numel: int) -> bool:
        """Whether version 0.3's rule for single values applies."""
        return self.scalar_boost is not None and numel == 1


@dataclass(frozen=True, kw_only=True)
class AdafactorHyper(Hyper):
    """Adafactor's settings; `relative_step` is True or False once the object exists."""

    lr: float | Tensor | None = None
    eps: tuple[float | None, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    relative_step: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        relative = self.lr is None if self.relative_step is None else self.relative_step
        self._set(
            lr=None if self.lr is None else check_lr(self.lr),
            clip_threshold=check_positive("clip_threshold", self.clip_threshold),
            relative_step=check_flag("relative_step", relative),
        )
        if self.lr is None and not self.relative_step:
            raise ValueError("relative_step=False needs a learning rate: give lr, such as lr=1e-3")
