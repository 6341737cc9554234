"""Hyper-parameters: checked once, named as in the parameter groups, and nothing else.

An optimizer's group is a plain dict, as torch wants it. Before it is used it becomes one of the
frozen dataclasses below, so the maths and the backends never see a value that was not checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from maxfactor.checks import (
    check_above_zero,
    check_choice,
    check_flag,
    check_not_negative,
    check_number,
    check_pair,
    check_positive,
    check_share,
    check_whole,
)
from maxfactor.rule.fam import FAM, as_setting

FLOAT32_EPS = torch.finfo(torch.float32).eps
FLOAT32_TINY = torch.finfo(torch.float32).tiny

FACTORINGS = ("auto", "last")
STEP_RULES = ("relative", "ramp")
DECAY_RULES = ("lr", "step_size", "relative_step")
VECTOR_DIRECTIONS = ("sign_max", "update")
DIRECTIONS = ("sign_max", "factored", "orthogonal")
SCALES = ("current", "initial")
MOMENTUM_DTYPES = ("int8", "bf16", "fp32")
ROUNDINGS = ("stochastic", "nearest")
NONFINITE = ("skip", "raise", "ignore")
SHARED_SEED = 0  # of the rounding noise where there are several processes


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


def check_momentum(value: object) -> float | FAM | None:
    """Return a fixed memory in [0, 1), FAM's settings, or None for no momentum."""
    if value is None or isinstance(value, FAM):
        return value
    if isinstance(value, Mapping):  # a group, a checkpoint or a configuration file
        return FAM.from_mapping(value)
    if isinstance(value, (str, type)):
        raise TypeError(
            f"momentum must be None, a number such as 0.95 or maxfactor.FAM(), got {value!r}"
        )
    return check_share("momentum", value)


def check_bounds(value: object) -> tuple[float, float]:
    """Return the bounds of equation (1)'s weight: 0 <= low <= high <= 1."""
    low, high = (check_number("kappa_bounds", bound) for bound in check_pair("kappa_bounds", value))
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"kappa_bounds must satisfy 0 <= low <= high <= 1, got ({low}, {high})")
    return low, high


def check_seed(value: object) -> int:
    """Return the seed of the rounding noise; None takes torch's own.

    Not among several processes: their seeds may differ, and copies of a parameter must be rounded
    alike on all of them without a message about it.
    """
    if value is None:
        return SHARED_SEED if is_distributed() else torch.initial_seed()
    return check_whole("seed", value)


def is_distributed() -> bool:
    """Whether this process is one of several, as far as torch knows."""
    from torch import distributed as dist

    if not dist.is_available():
        return False
    return dist.is_initialized() or dist.is_torchelastic_launched()


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
        return {name: as_setting(getattr(self, name)) for name in self.names()}

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

    def momentum_store(self, *, is_vector: bool) -> str | None:  # noqa: ARG002
        """How a tensor's momentum is kept: "int8", "bf16" or "fp32"; None without one."""
        return None

    def is_filtered(self, *, is_vector: bool) -> bool:  # noqa: ARG002
        """Whether equations (10) to (13) and what follows them decide on a tensor's move."""
        return False

    @property
    def bands(self) -> int:
        """How many bands FAM adapts in a matrix; 0 without FAM."""
        return 0

    @property
    def keeps_initial_rms(self) -> bool:
        """Whether (3) uses the RMS that a parameter had before its first step."""
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
    momentum: float | FAM | Mapping[str, Any] | None = None
    nesterov: bool = False
    momentum_dtype: str | None = None
    direction: str = "sign_max"
    scale: str = "current"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            lr=check_lr(self.lr),
            d=check_above_zero("d", self.d),
            gamma=check_share("gamma", self.gamma),
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
            momentum=check_momentum(self.momentum),
            nesterov=check_flag("nesterov", self.nesterov),
            direction=check_choice("direction", self.direction, DIRECTIONS),
            scale=check_choice("scale", self.scale, SCALES),
        )
        self._check_store()
        if self.scalar_boost is not None:
            self._set(scalar_boost=check_positive("scalar_boost", self.scalar_boost))
        for name in ("eps_rms", "mean_eps"):
            if getattr(self, name) is not None:
                self._set(**{name: check_not_negative(name, getattr(self, name))})
        if self.step_rule == "ramp" and self.min_lr > 0.0:
            raise ValueError(
                f"min_lr={self.min_lr} has no meaning with step_rule='ramp'; set min_lr=0"
            )
        self._check_look_ahead()
        self._check_published_switches()

    def _check_store(self) -> None:
        if self.momentum_dtype is None:
            return
        check_choice("momentum_dtype", self.momentum_dtype, MOMENTUM_DTYPES)
        if self.momentum is None:
            raise ValueError(
                f"momentum_dtype={self.momentum_dtype!r} needs a momentum to store: give one, such "
                "as momentum=0.9, or leave momentum_dtype out"
            )

    def _check_look_ahead(self) -> None:
        if not self.nesterov or isinstance(self.momentum, float):
            return
        if self.momentum is None:
            raise ValueError("nesterov=True needs a momentum: give one, such as momentum=0.95")
        raise ValueError(
            "nesterov=True is for a fixed momentum such as 0.95; FAM looks ahead by its own mix, "
            "so set nesterov=False"
        )

    def _check_published_switches(self) -> None:
        """What belongs to a published version has no meaning in what was built on the last."""
        if self.momentum is None and self.direction == "sign_max":
            return
        newer = f"momentum={self.momentum}"
        if self.momentum is None:
            newer = f"direction={self.direction!r}"
        defaults = {
            "max_norm": True,
            "scalar_boost": None,
            "clip_threshold": 0.0,
            "full_matrix": False,
            "step_rule": "relative",
            "factor": "auto",
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                raise ValueError(
                    f"{name}={value!r} cannot be combined with {newer}; set {name}={default!r}, or "
                    "momentum=None and direction='sign_max' for a published version"
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

    def momentum_store(self, *, is_vector: bool) -> str | None:
        """Vectors and scalars are few, and keep float32."""
        if self.momentum is None:
            return None
        return "fp32" if is_vector else self.momentum_dtype or "int8"

    def is_filtered(self, *, is_vector: bool) -> bool:
        """With momentum, and for matrices in the orthogonal direction."""
        return self.momentum is not None or (self.direction == "orthogonal" and not is_vector)

    @property
    def fam(self) -> FAM | None:
        """FAM's settings, where the momentum is FAM."""
        return self.momentum if isinstance(self.momentum, FAM) else None

    @property
    def bands(self) -> int:
        """FAM's bands."""
        return 0 if self.fam is None else self.fam.bands

    @property
    def fixed_beta(self) -> float:
        """The memory of what FAM does not adapt: of vectors, or of everything without FAM."""
        if self.fam is not None:
            return self.fam.start
        assert isinstance(self.momentum, float)
        return self.momentum

    @property
    def mix(self) -> float:
        """The mu of (13): the share of the present input in the update."""
        if self.fam is not None:
            return self.fam.mix
        return 1.0 - self.fixed_beta if self.nesterov else 0.0

    @property
    def keeps_initial_rms(self) -> bool:
        """By `scale`."""
        return self.scale == "initial"

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

    @property
    def eps1(self) -> float:
        """eps1, with None resolved to the paper's own."""
        return 1e-30 if self.eps[0] is None else self.eps[0]

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
