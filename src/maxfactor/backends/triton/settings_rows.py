"""What the fused backend asks of the settings, as numbers, bits and dtypes for the kernels.

All code of this backend that looks at settings is in this file.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from maxfactor.backends.triton.kernels.layout import Flag, Setting
from maxfactor.rule.reference import ADAFACTOR_MAX_STEP
from maxfactor.rule.rounding import as_int32, is_stochastic, seed_key
from maxfactor.settings import FLOAT32_TINY, AdafactorHyper, Hyper, MaxFactorHyper
from maxfactor.state import Factoring, factoring

Shape = tuple[int, ...]

# ------------------------------------------------------------------------------- of a group


def settings_row(hyper: Hyper) -> list[float]:
    """A group's row of the table of settings."""
    row = {Setting.BETA2_DECAY: hyper.beta2_decay, Setting.WEIGHT_DECAY: hyper.weight_decay}
    row |= {Setting.EPS1: hyper.eps1, Setting.EPS2: hyper.eps2}
    row |= {Setting.KAPPA_HIGH: 1.0, Setting.D: 1.0}
    if isinstance(hyper, MaxFactorHyper):
        low, high = hyper.kappa_bounds
        row |= {Setting.FLOOR: hyper.floor, Setting.VARIANCE_FLOOR: hyper.variance_floor}
        row |= {Setting.GAMMA: hyper.gamma, Setting.ONE_MINUS_GAMMA: 1.0 - hyper.gamma}
        row |= {Setting.MIN_LR: hyper.min_lr, Setting.COUNT_EPS: hyper.count_eps}
        row |= {Setting.KAPPA_LOW: low, Setting.KAPPA_HIGH: high, Setting.D: hyper.d}
        row |= {Setting.CLIP: hyper.clip_threshold, Setting.BOOST: hyper.scalar_boost or 0.0}
        row |= momentum_settings(hyper)
    elif isinstance(hyper, AdafactorHyper):
        row |= {Setting.FLOOR: FLOAT32_TINY, Setting.VARIANCE_FLOOR: FLOAT32_TINY}
        row |= {Setting.OFFSET: hyper.eps1, Setting.CLIP: hyper.clip_threshold}
    return [row.get(setting, 0.0) for setting in Setting]


def momentum_settings(hyper: MaxFactorHyper) -> dict[Setting, float]:
    """The settings of the momentum. Without one, (13) returns its input."""
    if hyper.momentum is None:
        return {Setting.MIX: 1.0, Setting.LOG_BETA: -math.inf}
    beta = hyper.fixed_beta
    row = {Setting.FIXED_BETA: beta, Setting.MIX: hyper.mix}
    row[Setting.LOG_BETA] = math.log(beta) if beta else -math.inf
    if (fam := hyper.fam) is not None:
        row |= {Setting.BETA_MIN: fam.beta_min, Setting.BETA_MAX: fam.beta_max}
        row |= {Setting.THETA: fam.theta, Setting.WARMUP: fam.warmup}
    return row


def seed_of(hyper: Hyper) -> int:
    """The key of a group's rounding noise, as an int32."""
    return int(as_int32(seed_key(hyper.seed or 0)))


def rate_of(hyper: Hyper) -> float | Tensor:
    """The learning rate; Adafactor without one has the paper's cap."""
    assert isinstance(hyper, (MaxFactorHyper, AdafactorHyper))
    return ADAFACTOR_MAX_STEP if hyper.lr is None else hyper.lr


def rate_address(hyper: Hyper) -> int:
    """The address of a learning rate on the device; 0 if the host knows it."""
    rate = rate_of(hyper)
    return rate.data_ptr() if isinstance(rate, Tensor) and rate.device.type != "cpu" else 0


def rate_value(hyper: Hyper) -> float:
    """The learning rate if the host knows it; 0 if it is on the device."""
    rate = rate_of(hyper)
    return 0.0 if isinstance(rate, Tensor) and rate.device.type != "cpu" else float(rate)


def fixed_settings(hyper: Hyper) -> tuple[object, ...]:
    """Everything that a plan depends on: all settings but the value of the learning rate."""
    group = hyper.as_group()
    rate = group.pop("lr")
    on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"
    return (type(hyper), *group.items(), rate is None, id(rate) if on_device else 0)


# --------------------------------------------------------- of a parameter of a whole `shape`


def factoring_of(hyper: Hyper, shape: Shape) -> Factoring | None:
    """How a parameter is factored; None for vectors and scalars."""
    return factoring(shape, hyper.factor)


def rounds_stochastically(hyper: Hyper, dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype is written with stochastic rounding."""
    return is_stochastic(dtype, hyper)


def flags_of(hyper: Hyper, shape: Shape, dtype: torch.dtype) -> Flag:
    """What a parameter's rule does differently."""
    vector, numel = len(shape) < 2, math.prod(shape)
    bits = {Flag.VECTOR: vector, Flag.MAXIMIZE: hyper.maximize}
    bits[Flag.DENSE] = vector or hyper.keeps_dense_variance(numel)
    bits[Flag.STOCHASTIC] = rounds_stochastically(hyper, dtype)
    if isinstance(hyper, MaxFactorHyper):
        bits[Flag.MAX_NORM] = hyper.max_norm
        bits[Flag.SIGN] = hyper.vector_direction == "sign_max" if vector else hyper.max_norm
        bits[Flag.FACTORED] = hyper.direction == "factored"
        bits[Flag.SIGN] &= not bits[Flag.FACTORED]
        bits[Flag.WITH_MOMENTUM] = hyper.is_filtered(is_vector=vector)
        bits[Flag.ORTHOGONAL] = hyper.direction == "orthogonal" and not vector
        bits[Flag.ADAPTIVE] = hyper.fam is not None and not vector
        bits[Flag.INITIAL] = hyper.keeps_initial_rms
        bits[Flag.BOOSTED] = hyper.is_boosted_scalar(numel)
        bits[Flag.RAMP] = hyper.step_rule == "ramp"
        bits[Flag.DECAY_BY_LR] = hyper.decay_by == "lr"
        bits[Flag.DECAY_BY_RHO] = hyper.decay_by == "relative_step"
    elif isinstance(hyper, AdafactorHyper):
        bits |= {Flag.ADAFACTOR: True, Flag.MAX_NORM: True}
        bits |= {Flag.ABSOLUTE: not hyper.relative_step, Flag.DECAY_BY_LR: hyper.lr is not None}
    return Flag(sum(flag for flag, is_set in bits.items() if is_set))


def is_general(hyper: Hyper, flags: int) -> bool:
    """Whether a parameter needs more than signs and row maxima."""
    if not isinstance(hyper, MaxFactorHyper):
        return True
    if flags & Flag.ORTHOGONAL:
        return False
    plain_sign = flags & Flag.SIGN and not flags & Flag.BOOSTED
    return not plain_sign or hyper.d < 1.0 or hyper.clip_threshold > 0.0


def store_of(hyper: Hyper, shape: Shape) -> str | None:
    """How the momentum is stored: "int8", "bf16" or "fp32".

    "none" if there is only an orthogonal direction, None if (10) to (13) do not apply.
    """
    vector = len(shape) < 2
    if not isinstance(hyper, MaxFactorHyper) or not hyper.is_filtered(is_vector=vector):
        return None
    return hyper.momentum_store(is_vector=vector) or "none"


def is_direct(hyper: Hyper, flags: int) -> bool:
    """Whether W moves by the y of (13) as it is, without anything of the whole tensor."""
    if not isinstance(hyper, MaxFactorHyper) or not flags & Flag.WITH_MOMENTUM:
        return False
    return hyper.direction == "factored" and math.isinf(hyper.d)
