"""Settings: checked once, resolved once.

A parameter group is a dict, as torch wants it. `MaxFactorSettings` and `AdafactorSettings` check
it. Their `rules` resolve it to a `TensorRule` for matrices, one for vectors, and one for parameters
with one element. The maths and the backends read the fields of a `TensorRule`. They never ask for
the optimizer's class or the name of a direction.

To add a setting: add a field and its check here, the `TensorRule` field it resolves to, the
argument of the optimizer class, the equation in `rule/reference.py`, and its form in each backend.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from maxfactor.checks import (
    check_above_zero,
    check_choice,
    check_count,
    check_flag,
    check_not_negative,
    check_number,
    check_pair,
    check_positive,
    check_share,
    check_whole,
)

FLOAT32_EPS = torch.finfo(torch.float32).eps
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny
LOW_RATE, HIGH_RATE = 1e-4, 1.0  # rates up to the one and above the other get a warning
ADAFACTOR_MAX_STEP = 1e-2  # the paper's cap on the relative step, for lr=None
BLOCK = 64  # values of a row that share an int8 scale, and the length of a DCT
# Gradients count alike in the momentum of an orthogonal matrix, whatever their size, down to this
# part of the usual size: those of the first steps are often much larger than later ones.
LEAST_INPUT = 0.01
# With scale="usual", a matrix that begins below this part of the usual size is small on purpose.
ON_PURPOSE = 1.0 / 3.0
SHARED_SEED = 0  # default seed of the rounding noise with several processes

FactorMode = Literal["auto", "last"]
StepRule = Literal["relative", "uncapped", "ramp"]
DecayBy = Literal["lr", "relative_step", "squared_step", "step_size"]
VectorDirection = Literal["sign_max", "update"]
Direction = Literal["sign_max", "factored", "orthogonal"]
BlockSide = Literal["rows", "columns"]
Blocks = tuple[BlockSide, int]  # such as ("rows", 64): blocks of 64 rows
Scale = Literal["current", "initial", "usual", "raised"]
MomentumDtype = Literal["int8", "bf16", "fp32"]
Rounding = Literal["stochastic", "nearest"]
Nonfinite = Literal["skip", "raise", "ignore"]

# Of the switches that published versions differ by: values that any rule may have.
NOT_OF_DRAFTS: dict[str, tuple[object, ...]] = {"step_rule": ("relative", "uncapped")}

S = TypeVar("S", bound="Settings")
C = TypeVar("C")


# ------------------------------------------------------------------- what a tensor's rule does


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """The resolved settings of one kind of tensor, without lr, which changes at every step."""

    factor: FactorMode
    maximize: bool
    rounding: Rounding | None
    seed: int
    # (1) kappa = t^beta2_decay, within bounds
    beta2_decay: float
    kappa_low: float = 0.0
    kappa_high: float = 1.0
    # (2) (3) the step size
    min_lr: float = 0.0
    is_capped: bool = True  # rho = min(lr, 1/sqrt(t)), else lr
    eps2: float
    ramps: bool = False  # version 0.2: alpha = min(lr, size * min(1e-6 t, 1/sqrt(t)))
    absolute: bool = False  # Adafactor with an lr: alpha = lr
    keeps_initial_rms: bool = False  # the size in (3) is the RMS before the first step
    raises_small: bool = False  # ... or that of He's initialisation, if it is larger
    usual_from: float = 1.0  # ... or the size from its shape, if it is at least this part of that
    transposed: bool = False  # a matrix has its inputs along the first dimension
    # (4) decay by lr, by rho, or by alpha if both are False
    weight_decay: float
    decays_by_lr: bool = False
    decays_by_rho: bool = False
    decays_by_square: bool = False  # ... times rho/lr: by the square of the step, once it is capped
    # (5) second moments
    dense: bool  # a full v instead of R and C
    gamma: float | None = None  # beta2 of a dense v; None: 1 - kappa
    count_eps: float = 0.0  # added to the counts that the means divide by
    offset: float = 0.0  # added to the squares
    # (6) V = R C / mean R, R C / max R, or R C if both are False
    divides_by_mean: bool = False
    divides_by_max: bool = False
    floor: float = FLOAT32_TINY  # smallest divisor of (6) and (7)
    variance_floor: float = FLOAT32_TINY  # smallest V
    # (7) (8)
    divides_by_peak: bool = False  # U / max|U|
    norm_clip: float = 0.0  # version 0.2: clip of ||U||; 0 for none
    rms_bound: float = math.inf  # d of (8); inf for no bound
    # (9)
    moves_by_sign: bool = False  # sign(U) * row maximum, else U
    is_orthogonal: bool = False
    # (14) the blocks of a matrix; 0: all of its rows, all of its columns
    block_rows: int = 0
    block_cols: int = 0
    boost: float | None = None  # version 0.3's rule for one element; None: not used
    eps1: float
    # (10) to (13)
    least_input: float = 1.0  # the smallest s of (10)
    has_momentum: bool = False
    momentum_dtype: MomentumDtype = "fp32"
    beta: float = 0.0  # without FAM
    mix: float = 0.0  # mu of (13)
    looks_ahead: bool = False  # Nesterov: mu = 1 - beta
    fam: FAM | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether (10) to (13) come before (7): with momentum, or the orthogonal direction."""
        return self.has_momentum or self.is_orthogonal

    @property
    def needs_norm(self) -> bool:
        """Whether ||U|| is needed."""
        return not self.is_orthogonal and (self.norm_clip > 0.0 or self.rms_bound < math.inf)

    @property
    def needs_mean(self) -> bool:
        """Whether the mean of R, or of v, is needed."""
        return self.is_filtered or (self.divides_by_mean and not self.dense)

    @property
    def bands(self) -> int:
        """The number of FAM's bands; 0 without FAM."""
        return 0 if self.fam is None else self.fam.bands

    def is_stochastic(self, dtype: torch.dtype) -> bool:
        """Whether a parameter of this dtype is written with stochastic rounding."""
        if dtype == torch.bfloat16:
            return self.rounding != "nearest"
        return dtype == torch.float16 and self.rounding == "stochastic"


@dataclass(frozen=True)
class GroupRules:
    """The rules of a group's tensors."""

    matrix: TensorRule
    vector: TensorRule
    single: TensorRule | None = None  # for parameters with one element; None: as the others

    def of(self, shape: tuple[int, ...]) -> TensorRule:
        """The rule of a parameter of this shape."""
        if self.single is not None and math.prod(shape) == 1:
            return self.single
        return self.vector if len(shape) < 2 else self.matrix


# ------------------------------------------------------------------------ settings with fields


@dataclass(frozen=True)
class FAM:
    """Settings of frequency-adaptive momentum.

    Args:
        beta_min: Smallest beta, for a band that its past predicts well.
        beta_max: Largest beta, for a band of noise.
        start: Beta during the warm-up, and always for vectors and scalars.
        warmup: Steps before beta is adapted.
        theta: Decay rate of the averages A and P.
        mix: Weight mu of the present input in (13), in [0, 1]. It damps oscillations.
        bands: Number of bands along a row, each with its own beta, 1 to 64.

    Example:
        >>> import torch, maxfactor
        >>> weight = torch.nn.Parameter(torch.ones(3, 2))
        >>> optimizer = maxfactor.MaxFactor([weight], momentum=maxfactor.FAM(beta_max=0.95))
    """

    beta_min: float = 0.5
    beta_max: float = 0.98
    start: float = 0.9
    warmup: int = 20
    theta: float = 0.98
    mix: float = 0.05
    bands: int = 1

    def __post_init__(self) -> None:
        for name in ("beta_min", "beta_max", "start", "theta"):
            object.__setattr__(self, name, check_share(f"FAM's {name}", getattr(self, name)))
        object.__setattr__(self, "mix", check_number("FAM's mix", self.mix))
        if not 0.0 <= self.mix <= 1.0:
            raise ValueError(f"FAM's mix must lie in [0, 1], got {self.mix}")
        if self.beta_min > self.beta_max:
            raise ValueError(
                f"FAM's beta_min must not exceed beta_max, got {self.beta_min} and {self.beta_max}"
            )
        for name, low, high in (("warmup", 0, None), ("bands", 1, BLOCK)):
            count = check_count(f"FAM's {name}", getattr(self, name), low, high)
            object.__setattr__(self, name, count)


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Differences between the published versions, and what scales the weight decay.

    The defaults are version 1.0. docs/published-versions.md has a column for each version.

    Args:
        factor: How a tensor with more than two dimensions becomes a matrix. "auto": one matrix, by
            the contiguous split with the fewest rows + columns. "last": the last two dimensions,
            the others as a batch, as published.
        max_norm: False omits max R in (6) and moves by U itself in (9). Version 0.3.
        min_lr: Lower bound on rho in (2) if lr > 0. Version 0.3.
        scalar_boost: If set, parameters with one element move by
            alpha * scalar_boost * G / (sqrt(v) + eps1). Version 0.3.
        eps_rms: If set, it is added to the counts in (5), instead of `mean_eps`, and to the floors
            of the divisors in (6) and (7). Version 0.1.
        mean_eps: Added to the counts in (5); None means eps1.
        full_matrix: True keeps a dense variance for matrices too, by (5'). Version 0.2.
        clip_threshold: Clip U to this L2 norm before (8); 0 for no clip. Version 0.2.
        kappa_bounds: Lower and upper bound on (1).
        step_rule: "relative" for (2) and (3); "uncapped" for rho = lr in (2); "ramp" for version
            0.2's alpha = min(lr, max(eps2, RMS(W)) * min(1e-6 * t, 1/sqrt(t))).
        decay_by: What scales the decay in (4): "lr" as published; "relative_step" for rho of (2),
            so that decay falls as the step does; "squared_step" for rho^2 / lr, so that the size
            at which decay and random steps are in balance stays the same; "step_size" for alpha,
            version 0.2.
        vector_direction: "sign_max" for (9), "update" to move vectors by U itself.
        usual_from: With scale="usual", a matrix below this part of 1 / sqrt(3 * fan_in) is small on
            purpose and keeps its own size. None is a third. With None, optimizers of `for_model`
            look at the weights of hidden matrices in their first step, and set it.
    """

    factor: FactorMode = "auto"
    max_norm: bool = True
    min_lr: float = 0.0
    scalar_boost: float | None = None
    eps_rms: float | None = None
    mean_eps: float | None = 1e-8
    full_matrix: bool = False
    clip_threshold: float = 0.0
    kappa_bounds: tuple[float, float] = (0.0, 1.0)
    step_rule: StepRule = "relative"
    decay_by: DecayBy = "lr"
    vector_direction: VectorDirection = "sign_max"
    usual_from: float | None = None

    def __post_init__(self) -> None:
        _set(
            self,
            factor=check_choice("factor", self.factor, get_args(FactorMode)),
            max_norm=check_flag("max_norm", self.max_norm),
            min_lr=check_not_negative("min_lr", self.min_lr),
            full_matrix=check_flag("full_matrix", self.full_matrix),
            clip_threshold=check_not_negative("clip_threshold", self.clip_threshold),
            kappa_bounds=check_bounds(self.kappa_bounds),
            step_rule=check_choice("step_rule", self.step_rule, get_args(StepRule)),
            decay_by=check_choice("decay_by", self.decay_by, get_args(DecayBy)),
            vector_direction=check_choice(
                "vector_direction", self.vector_direction, get_args(VectorDirection)
            ),
        )
        if self.usual_from is not None:
            _set(self, usual_from=check_number("usual_from", self.usual_from))
            if not 0.0 < self.usual_from <= 1.0:
                raise ValueError(f"usual_from must be None or lie in (0, 1], got {self.usual_from}")
        if self.scalar_boost is not None:
            _set(self, scalar_boost=check_positive("scalar_boost", self.scalar_boost))
        for name in ("eps_rms", "mean_eps"):
            if getattr(self, name) is not None:
                _set(self, **{name: check_not_negative(name, getattr(self, name))})
        if self.step_rule == "ramp" and self.min_lr > 0.0:
            raise ValueError(
                f"min_lr={self.min_lr} has no meaning with step_rule='ramp'; set min_lr=0"
            )


@dataclass(frozen=True)
class Execution:
    """How steps are run; the same for all groups of an optimizer."""

    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool = False
    nonfinite: Nonfinite = "skip"

    def __post_init__(self) -> None:
        for name in ("foreach", "fused"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        check_flag("capturable", self.capturable)
        check_choice("nonfinite", self.nonfinite, get_args(Nonfinite))
        if self.foreach and self.fused:
            raise ValueError("foreach=True and fused=True exclude each other; set one of them")

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        """The settings' names, which are keys of a parameter group."""
        return tuple(f.name for f in fields(cls))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every factored optimizer. Field names are the keys of the parameter groups."""

    lr: float | Tensor | None = None
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (1e-10, 1e-3)
    weight_decay: float = 0.0
    maximize: bool = False
    rounding: Rounding | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.rounding is not None:
            check_choice("rounding", self.rounding, get_args(Rounding))
        _set(
            self,
            lr=None if self.lr is None else check_lr(self.lr),
            seed=check_seed(self.seed),
            beta2_decay=check_beta2_decay(self.beta2_decay),
            eps=check_eps(self.eps),
            weight_decay=check_not_negative("weight_decay", self.weight_decay),
            maximize=check_flag("maximize", self.maximize),
        )

    @classmethod
    def from_group(cls: type[S], group: Mapping[str, Any]) -> S:
        """Check the settings of a parameter group; a missing one takes its default."""
        return cls(**{name: group[name] for name in cls.names() if name in group})

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        """The settings' names, which are keys of a parameter group."""
        return tuple(f.name for f in fields(cls))

    def as_group(self) -> dict[str, Any]:
        """The settings as a parameter group; a tensor `lr` is not copied."""
        return {name: as_setting(getattr(self, name)) for name in self.names()}

    @property
    def rate(self) -> float | Tensor:
        """The learning rate; for lr=None, Adafactor's cap."""
        return ADAFACTOR_MAX_STEP if self.lr is None else self.lr

    @cached_property
    def rules(self) -> GroupRules:
        """The resolved settings of each kind of tensor."""
        return self._resolve()

    def _resolve(self) -> GroupRules:
        raise NotImplementedError

    def _common(self) -> dict[str, Any]:
        """The `TensorRule` fields of settings that every optimizer has."""
        return {
            "maximize": self.maximize,
            "rounding": self.rounding,
            "seed": self.seed,
            "beta2_decay": self.beta2_decay,
            "eps2": self.eps[1],
            "weight_decay": self.weight_decay,
        }


@dataclass(frozen=True, kw_only=True)
class MaxFactorSettings(Settings):
    """MaxFactor's settings: the arguments of the class."""

    lr: float | Tensor | None = 0.01
    d: float = 1.0
    weight_decay: float = 0.01
    gamma: float = 0.99
    momentum: float | FAM | Mapping[str, Any] | None = None
    nesterov: bool = False
    momentum_dtype: MomentumDtype | None = None
    direction: Direction = "sign_max"
    scale: Scale = "current"
    blocks: Blocks | None = None
    transposed: bool = False
    switches: Switches | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr is None:
            raise TypeError("lr must be a number, got None (NoneType)")
        _set(
            self,
            d=check_above_zero("d", self.d),
            gamma=check_share("gamma", self.gamma),
            momentum=check_momentum(self.momentum),
            nesterov=check_flag("nesterov", self.nesterov),
            direction=check_choice("direction", self.direction, get_args(Direction)),
            scale=check_choice("scale", self.scale, get_args(Scale)),
            blocks=check_blocks(self.blocks),
            transposed=check_flag("transposed", self.transposed),
            switches=from_mapping(
                Switches, {} if self.switches is None else self.switches, "switches"
            ),
        )
        self._check_momentum_dtype()
        self._check_lookahead()
        self._check_direction_of_blocks()
        self._check_switches()

    def _check_momentum_dtype(self) -> None:
        if self.momentum_dtype is None:
            return
        check_choice("momentum_dtype", self.momentum_dtype, get_args(MomentumDtype))
        if self.momentum is None:
            raise ValueError(
                f"momentum_dtype={self.momentum_dtype!r} needs a momentum to store: give one, such "
                "as momentum=0.9, or leave momentum_dtype out"
            )

    def _check_lookahead(self) -> None:
        if not self.nesterov or (self.momentum is not None and self._fam is None):
            return
        if self.momentum is None:
            raise ValueError("nesterov=True needs a momentum: give one, such as momentum=0.95")
        raise ValueError(
            "nesterov=True is for a fixed momentum such as 0.95; FAM looks ahead by its own mix, "
            "so set nesterov=False"
        )

    def _check_direction_of_blocks(self) -> None:
        if self.blocks is not None and self.direction != "orthogonal":
            raise ValueError(
                f"blocks={self.blocks} is for direction='orthogonal', got {self.direction!r}; "
                "leave blocks out, or set that direction"
            )

    def _check_switches(self) -> None:
        """Refuse switches of published versions together with momentum or another direction."""
        if self.momentum is None and self.direction == "sign_max":
            return
        newer = f"momentum={self.momentum}"
        if self.momentum is None:
            newer = f"direction={self.direction!r}"
        for name in (
            "max_norm", "scalar_boost", "clip_threshold", "full_matrix", "step_rule", "factor"
        ):  # fmt: skip
            value, default = getattr(self.switches, name), getattr(Switches, name)
            if value not in NOT_OF_DRAFTS.get(name, (default,)):
                raise ValueError(
                    f"{name}={value!r} cannot be combined with {newer}; set {name}={default!r}, or "
                    "momentum=None and direction='sign_max' for a published version"
                )

    @property
    def _fam(self) -> FAM | None:
        return self.momentum if isinstance(self.momentum, FAM) else None

    def _resolve(self) -> GroupRules:
        matrix = self._rule(is_vector=False)
        single = None
        if self._switches.scalar_boost is not None:
            single = replace(matrix, dense=True, boost=self._switches.scalar_boost)
        return GroupRules(matrix, self._rule(is_vector=True), single)

    @property
    def _switches(self) -> Switches:
        return cast("Switches", self.switches)  # converted by __post_init__

    def _rule(self, *, is_vector: bool) -> TensorRule:
        """Resolve the settings of matrices, or of vectors."""
        switches = self._switches
        eps1 = FLOAT32_EPS if self.eps[0] is None else self.eps[0]
        is_orthogonal = self.direction == "orthogonal" and not is_vector
        is_factored = self.direction == "factored"
        by_mean = is_factored or is_orthogonal or self.momentum is not None
        as_update = switches.vector_direction == "update" if is_vector else not switches.max_norm
        mean_eps = eps1 if switches.mean_eps is None else switches.mean_eps
        low, high = switches.kappa_bounds
        # RMS(U) <= max|U| = 1, so d >= 1 has no effect in (8).
        bound = self.d if is_factored or self.d < 1.0 else math.inf
        return TensorRule(
            **self._common(),
            **self._momentum_fields(is_vector=is_vector),
            factor=switches.factor,
            kappa_low=low,
            kappa_high=high,
            min_lr=switches.min_lr,
            is_capped=switches.step_rule != "uncapped",
            ramps=switches.step_rule == "ramp",
            keeps_initial_rms=self.scale != "current",
            raises_small=self.scale == "raised",
            usual_from=self._usual_from,
            transposed=self.transposed,
            decays_by_lr=switches.decay_by == "lr",
            decays_by_rho=switches.decay_by in ("relative_step", "squared_step"),
            decays_by_square=switches.decay_by == "squared_step",
            dense=is_vector or switches.full_matrix,
            gamma=self.gamma,
            count_eps=mean_eps if switches.eps_rms is None else switches.eps_rms,
            divides_by_mean=by_mean,
            divides_by_max=switches.max_norm and not by_mean,
            floor=max(eps1 + (switches.eps_rms or 0.0), FLOAT32_TINY),
            variance_floor=max(eps1 * eps1, FLOAT32_TINY),
            divides_by_peak=not is_factored and not is_orthogonal,
            norm_clip=switches.clip_threshold,
            rms_bound=math.inf if is_orthogonal else bound,
            moves_by_sign=not (is_factored or is_orthogonal or as_update),
            is_orthogonal=is_orthogonal,
            **(self._block_fields() if is_orthogonal else {}),
            least_input=LEAST_INPUT if is_orthogonal else 1.0,
            eps1=eps1,
        )

    @property
    def _usual_from(self) -> float:
        if self.scale != "usual":
            return 1.0
        chosen = self._switches.usual_from
        return ON_PURPOSE if chosen is None else chosen

    def _block_fields(self) -> dict[str, Any]:
        if self.blocks is None:
            return {}
        side, size = self.blocks
        return {"block_rows" if side == "rows" else "block_cols": size}

    def _momentum_fields(self, *, is_vector: bool) -> dict[str, Any]:
        if self.momentum is None:
            return {}
        fam = self._fam
        beta = self.momentum if fam is None else fam.start
        assert isinstance(beta, float)
        mix = 1.0 - beta if self.nesterov else 0.0
        return {
            "has_momentum": True,
            "momentum_dtype": "fp32" if is_vector else self.momentum_dtype or "int8",
            "beta": beta,
            "mix": mix if fam is None else fam.mix,
            "looks_ahead": self.nesterov,
            "fam": None if is_vector else fam,
        }


@dataclass(frozen=True, kw_only=True)
class AdafactorSettings(Settings):
    """Adafactor's settings; a `relative_step` of None is resolved to True or False."""

    eps: tuple[float | None, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    relative_step: bool | None = None
    factor: FactorMode = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        relative = self.lr is None if self.relative_step is None else self.relative_step
        _set(
            self,
            clip_threshold=check_positive("clip_threshold", self.clip_threshold),
            relative_step=check_flag("relative_step", relative),
            factor=check_choice("factor", self.factor, get_args(FactorMode)),
        )
        if self.lr is None and not self.relative_step:
            raise ValueError("relative_step=False needs a learning rate: give lr, such as lr=1e-3")

    def _resolve(self) -> GroupRules:
        eps1 = 1e-30 if self.eps[0] is None else self.eps[0]
        matrix = TensorRule(
            **self._common(),
            factor=self.factor,
            absolute=not self.relative_step,
            # As in torch.optim.Adafactor, a given lr scales the decay.
            decays_by_lr=self.lr is not None,
            dense=False,
            offset=eps1,
            divides_by_mean=True,
            rms_bound=self.clip_threshold,
            eps1=eps1,
        )
        return GroupRules(matrix, replace(matrix, dense=True))


# --------------------------------------------------------------------------------- small pieces


def _set(owner: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(owner, name, value)  # in __post_init__ of a frozen class


def as_setting(value: object) -> object:
    """Convert to dicts and Python numbers, which torch.load accepts with weights_only=True."""
    if isinstance(value, (FAM, Switches)):
        return asdict(value)
    if isinstance(value, Mapping):  # omegaconf has its own
        return {key: as_setting(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple, list)):
        return [as_setting(entry) for entry in value]
    is_plain = type(value) in (bool, int, float)  # numpy's float64 subclasses float
    if is_plain or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def from_mapping(cls: type[C], value: C | Mapping[str, Any], name: str) -> C:
    """Return `value` if it is a `cls`; build one from a dict (group, checkpoint, config file)."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a {cls.__name__} or a dict of its settings, got {value!r}")
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    for key in value:
        if key not in known:
            raise ValueError(
                f"{cls.__name__} has no setting {key!r}; its settings are {', '.join(known)}"
            )
    return cls(**value)


def check_lr(value: object) -> float | Tensor:
    """Return the learning rate: a float, or the same one-element tensor."""
    if not isinstance(value, Tensor):
        return check_not_negative("lr", value)
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            "lr as a tensor must be a 0-dimensional floating-point tensor, "
            f"got shape {tuple(value.shape)} and {value.dtype}"
        )
    if value.device.type == "cpu":
        check_not_negative("lr", value.item())  # free on the CPU; elsewhere a host sync
    return value


def warn_of_rate(lr: float | Tensor, default: str) -> None:
    """Warn the caller's caller of rates that look like AdamW's, or that cannot work."""
    if isinstance(lr, Tensor) and lr.is_meta:
        return
    rate = float(lr)  # a host sync if it is on the device; once, when the optimizer is built
    remedy = f"leave lr out for {default}"
    if 0.0 < rate <= LOW_RATE:
        warnings.warn(
            f"lr={rate:g} looks like a rate for AdamW, but in maxfactor it is the share of each "
            f"weight's size that a step changes, and the weights would hardly move; {remedy}, or "
            f"begin with a fraction of that",
            UserWarning,
            stacklevel=3,
        )
    if rate > HIGH_RATE:
        warnings.warn(
            f"lr={rate:g} lets a step change a weight by more than its own size, which cannot "
            f"train; {remedy}",
            UserWarning,
            stacklevel=3,
        )


def check_eps(value: object) -> tuple[float | None, float]:
    """Return (eps1, eps2); eps1 may be None, for the default of each optimizer."""
    eps1, eps2 = check_pair("eps", value)
    first = None if eps1 is None else check_not_negative("eps[0]", eps1)
    return first, check_not_negative("eps[1]", eps2)


def check_beta2_decay(value: object) -> float:
    """Return the exponent of equation (1), which must be finite and not positive."""
    number = check_number("beta2_decay", value)
    if not (math.isfinite(number) and number <= 0.0):
        raise ValueError(f"beta2_decay must be finite and not positive, got {number}")
    return number


def check_momentum(value: object) -> float | FAM | None:
    """Return a fixed beta in [0, 1), FAM's settings, or None for no momentum."""
    if value is None or isinstance(value, FAM):
        return value
    if isinstance(value, Mapping):  # a group, a checkpoint or a configuration file
        return from_mapping(FAM, value, "momentum")
    if isinstance(value, (str, type)):
        raise TypeError(
            f"momentum must be None, a number such as 0.95 or maxfactor.FAM(), got {value!r}"
        )
    return check_share("momentum", value)


def check_blocks(value: object) -> Blocks | None:
    """Return the side along which matrices are cut, and the rows or columns of a block."""
    if value is None:
        return None
    is_pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    if not is_pair:
        raise ValueError(f"blocks must be None or a pair such as ('rows', 64), got {value!r}")
    side, size = cast("Sequence[object]", value)
    check_choice("the first entry of blocks", side, get_args(BlockSide))
    return cast("BlockSide", side), check_count("the second entry of blocks", size, 1)


def check_bounds(value: object) -> tuple[float, float]:
    """Return the bounds on kappa of equation (1): 0 <= low <= high <= 1."""
    low, high = (check_number("kappa_bounds", bound) for bound in check_pair("kappa_bounds", value))
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"kappa_bounds must satisfy 0 <= low <= high <= 1, got ({low}, {high})")
    return low, high


def check_seed(value: object) -> int:
    """Return the seed of the rounding noise; None takes torch's seed.

    With several processes None takes `SHARED_SEED`: torch's seeds may differ between ranks, but
    replicas of a parameter must be rounded alike.
    """
    if value is None:
        return SHARED_SEED if is_distributed() else torch.initial_seed()
    return check_whole("seed", value)


def is_distributed() -> bool:
    """Whether torch.distributed is initialized, or torchrun has launched this process."""
    from torch import distributed as dist

    if not dist.is_available():
        return False
    return dist.is_initialized() or dist.is_torchelastic_launched()
