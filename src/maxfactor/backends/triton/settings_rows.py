"""Rules as the kernels read them: numbers of a group, bits and dtypes of a parameter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from maxfactor.backends.triton.kernels.layout import Flag, Setting
from maxfactor.rule.rounding import as_int32, seed_key

if TYPE_CHECKING:
    import torch

    from maxfactor.backends.step_io import GroupStep
    from maxfactor.settings import TensorRule

Shape = tuple[int, ...]

# ------------------------------------------------------------------------------- of a group


def settings_row(group: GroupStep) -> list[float]:
    """A group's row of the table of settings."""
    rule, vector, single = group.rules.matrix, group.rules.vector, group.rules.single
    gamma = 0.0 if rule.gamma is None else rule.gamma
    row = {
        Setting.BETA2_DECAY: rule.beta2_decay,
        Setting.KAPPA_LOW: rule.kappa_low,
        Setting.KAPPA_HIGH: rule.kappa_high,
        Setting.MIN_LR: rule.min_lr,
        Setting.EPS1: rule.eps1,
        Setting.EPS2: rule.eps2,
        Setting.WEIGHT_DECAY: rule.weight_decay,
        Setting.GAMMA: gamma,
        Setting.ONE_MINUS_GAMMA: 1.0 - gamma,
        Setting.COUNT_EPS: rule.count_eps,
        Setting.OFFSET: rule.offset,
        Setting.FLOOR: rule.floor,
        Setting.VARIANCE_FLOOR: rule.variance_floor,
        Setting.CLIP: vector.rms_bound if rule.gamma is None else rule.norm_clip,
        Setting.D: vector.rms_bound,  # that of an orthogonal matrix is not used
        Setting.BOOST: 0.0 if single is None else single.boost or 0.0,
        Setting.LEAST_INPUT: rule.least_input,
        Setting.USUAL_FROM: rule.usual_from,
        **momentum_settings(rule),
    }
    return [row.get(setting, 0.0) for setting in Setting]


def momentum_settings(rule: TensorRule) -> dict[Setting, float]:
    """The settings of the momentum. Without one, (13) returns its input."""
    if not rule.has_momentum:
        return {Setting.MIX: 1.0, Setting.LOG_BETA: -math.inf}
    row = {Setting.FIXED_BETA: rule.beta, Setting.MIX: rule.mix}
    row[Setting.LOG_BETA] = math.log(rule.beta) if rule.beta else -math.inf
    if (fam := rule.fam) is not None:
        row |= {Setting.BETA_MIN: fam.beta_min, Setting.BETA_MAX: fam.beta_max}
        row |= {Setting.THETA: fam.theta, Setting.WARMUP: fam.warmup}
    return row


def seed_of(group: GroupStep) -> int:
    """The key of a group's rounding noise, as an int32."""
    return int(as_int32(seed_key(group.rules.matrix.seed)))


def rate_address(group: GroupStep) -> int:
    """The address of a learning rate on the device; 0 if the host knows it."""
    rate = group.lr
    return rate.data_ptr() if isinstance(rate, Tensor) and rate.device.type != "cpu" else 0


def rate_value(group: GroupStep) -> float:
    """The learning rate if the host knows it; 0 if it is on the device."""
    rate = group.lr
    return 0.0 if isinstance(rate, Tensor) and rate.device.type != "cpu" else float(rate)


def fixed_settings(group: GroupStep) -> tuple[object, ...]:
    """Everything that a plan depends on: the rules, and where a rate on the device is."""
    return group.rules, rate_address(group)


# ------------------------------------------------------------------------- of a parameter


def flags_of(rule: TensorRule, shape: Shape, dtype: torch.dtype) -> Flag:
    """What a parameter's rule does differently."""
    is_adafactor = rule.gamma is None
    by_rms = not (rule.divides_by_peak or rule.is_orthogonal or is_adafactor)
    bits = {
        Flag.VECTOR: len(shape) < 2,
        Flag.MAXIMIZE: rule.maximize,
        Flag.STOCHASTIC: rule.is_stochastic(dtype),
        Flag.DENSE: rule.dense,
        Flag.MAX_NORM: rule.divides_by_max or rule.divides_by_mean,
        Flag.SIGN: rule.moves_by_sign or rule.is_orthogonal,
        Flag.FACTORED: by_rms,
        Flag.WITH_MOMENTUM: rule.is_filtered,
        Flag.ORTHOGONAL: rule.is_orthogonal,
        Flag.ADAPTIVE: rule.fam is not None,
        Flag.INITIAL: rule.keeps_initial_rms,
        Flag.RAISED: rule.raises_small,
        Flag.BOOSTED: rule.boost is not None,
        Flag.RAMP: rule.ramps,
        Flag.UNCAPPED: not rule.is_capped,
        Flag.DECAY_BY_LR: rule.decays_by_lr,
        Flag.DECAY_BY_RHO: rule.decays_by_rho,
        Flag.DECAY_BY_SQUARE: rule.decays_by_square,
        Flag.ADAFACTOR: is_adafactor,
        Flag.ABSOLUTE: rule.absolute,
    }
    return Flag(sum(flag for flag, is_set in bits.items() if is_set))


def is_general(rule: TensorRule) -> bool:
    """Whether a parameter needs more than signs and row maxima."""
    if rule.is_orthogonal:
        return False
    return not rule.moves_by_sign or rule.boost is not None or rule.needs_norm


def store_of(rule: TensorRule) -> str | None:
    """How the momentum is stored: "int8", "bf16" or "fp32".

    "none" if there is only an orthogonal direction, None if (10) to (13) do not apply.
    """
    if not rule.is_filtered:
        return None
    return rule.momentum_dtype if rule.has_momentum else "none"


def is_direct(rule: TensorRule) -> bool:
    """Whether W moves by the y of (13) as it is, without anything of the whole tensor."""
    return rule.has_momentum and not (rule.is_orthogonal or rule.divides_by_peak or rule.needs_norm)
