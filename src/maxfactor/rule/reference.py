"""The reference: one step of MaxFactor or Adafactor as pure functions, equation by equation.

Nothing is changed in place, and there is no host sync. `step` is also the functional API of the
package:

    >>> import torch
    >>> from maxfactor import rule
    >>> weight, grad = torch.ones(3, 2), torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 0.0]])
    >>> settings = rule.MaxFactorSettings(lr=0.01)
    >>> state = rule.init_state(weight, settings)
    >>> weight, state, step_size = rule.step(weight, grad, state, settings)

Notation: W weight, G gradient, t step, R and C row and column factors of the second moment,
U update, M momentum, RMS(x) = ||x|| / sqrt(numel). Tags such as `# (6)` are the equations of
docs/rule.md; (11) to (13), the momentum, are in `momentum.py`, and (14) in `newton_schulz.py`.

References:
    Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018: the
        factored second moment (5) (6), the relative step (2) (3), the clip of the update (8).
    Anil et al., "Memory-Efficient Adaptive Optimization" (SM3), 2019: maxima over rows.
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017: (4).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.rule.fam import band_totals
from maxfactor.rule.momentum import decode_momentum, encode_momentum, memory_of
from maxfactor.rule.newton_schulz import orthogonal
from maxfactor.rule.rounding import rounded
from maxfactor.rule.squares import norm_of
from maxfactor.settings import FLOAT32_TINY
from maxfactor.state import (
    NEAR_ZERO,
    State,
    as_float,
    block_shape,
    factoring,
    state_shapes,
)

if TYPE_CHECKING:
    from maxfactor.settings import Settings, TensorRule

Scalar = float | Tensor  # a Python number, or a 0-dim tensor on the device

RAMP_PER_STEP = 1e-6  # slope of version 0.2's linear warm-up


class Result(NamedTuple):
    """The new weight, the new state, and the step size alpha of (3)."""

    param: Tensor
    state: State
    step_size: Scalar


def init_state(param: Tensor, settings: Settings) -> State:
    """Return the state of a parameter before its first step."""
    from maxfactor.state import init_state

    return init_state(param, settings.rules.of(tuple(param.shape)))


def step(param: Tensor, grad: Tensor, state: State, settings: Settings) -> Result:
    """Take one step; does not change its arguments."""
    rule = settings.rules.of(tuple(param.shape))
    counted = dict(state, step=state["step"] + 1)
    if param.numel() == 0:
        return Result(param.clone(), counted, 0.0)
    t, lr = host_scalar(counted["step"]), host_scalar(settings.rate)
    w, g = working_copies(param, grad, rule)

    size, initial = weight_size(rms(w), state.get("initial_rms"), t, rule)
    alpha = step_size(size, t, lr, rule)  # (2) (3), W before decay
    w = w * decay_factor(alpha, t, lr, rule)  # (4)
    moments = second_moments(g, state, t, rule)  # (5)
    memories: State = {}
    if rule.is_filtered:
        block = block_shape(tuple(param.shape), rule)
        move, memories = filtered_move(g, moments, state, t, rule, block)
    else:
        move = published_move(g, moments, rule)
    w = w - (alpha * move).reshape(w.shape)
    new = {**moments, **memories, **initial}
    shapes = state_shapes(tuple(param.shape), rule)
    stored = {key: value.reshape(shapes[key]) for key, value in new.items()}
    return Result(rounded(w, param.dtype, rule, t), {**counted, **stored}, alpha)


# ----------------------------------------------------------------- (1) to (4): sizes and rates


def statistic_weight(t: Scalar, rule: TensorRule) -> Scalar:
    """Equation (1): the weight of the newest statistic, 1 at t = 1."""
    return smaller(larger(as_float(t) ** rule.beta2_decay, rule.kappa_low), rule.kappa_high)  # (1)


def weight_size(
    size: Tensor, initial: Tensor | None, t: Scalar, rule: TensorRule
) -> tuple[Tensor, State]:
    """The RMS that (3) scales by, and its new state; `size` is the present RMS(W).

    `initial` is the state's `initial_rms`, or None with scale="current". Before the first step it
    is the size that the shape suggests, which stands for that of a matrix that begins at zero or
    close to it, with scale="raised" of any smaller one. With scale="usual" it also stands for that
    of one that is smaller, but not small on purpose. A vector that begins at zero is scaled by its
    present RMS.
    """
    if initial is None:
        return size, {}
    first = initial
    if isinstance(t, Tensor) or t == 1:
        least = initial if rule.raises_small else NEAR_ZERO * initial
        own = torch.where(size < least, initial, size)
        is_similar = (size >= rule.usual_from * initial) & (size < initial)
        own = torch.where(is_similar, initial, own)
        # No host sync for a counter on the device.
        first = torch.where(t == 1, own, initial) if isinstance(t, Tensor) else own
    first = first.to(torch.float32)
    return torch.where(first > 0, first, size), {"initial_rms": first}


def relative_step(t: Scalar, lr: Scalar, rule: TensorRule) -> Scalar:
    """Equation (2): rho = min(lr, 1/sqrt(t)), at least `min_lr`, but 0 for lr = 0."""
    capped = smaller(lr, as_float(t) ** -0.5) if rule.is_capped else lr
    return larger(capped, rule.min_lr) * (lr > 0)  # (2)


def step_size(size: Scalar, t: Scalar, lr: Scalar, rule: TensorRule) -> Scalar:
    """Equation (3): the relative step times the size of the weight, RMS(W)."""
    if rule.absolute:
        return lr
    size = larger(size, rule.eps2)
    if rule.ramps:  # version 0.2: the cap is on the product
        t = as_float(t)
        return smaller(size * smaller(RAMP_PER_STEP * t, t**-0.5), lr)
    return relative_step(t, lr, rule) * size  # (3)


def decay_factor(alpha: Scalar, t: Scalar, lr: Scalar, rule: TensorRule) -> Scalar:
    """Equation (4): the factor by which decay multiplies W."""
    if rule.weight_decay == 0.0:
        return 1.0
    rate = lr if rule.decays_by_lr else alpha
    if rule.decays_by_rho:
        rate = relative_step(t, lr, rule)
    if rule.decays_by_square:
        rate = rate * smaller(rate / larger(lr, FLOAT32_TINY), 1.0)
    return 1 - rate * rule.weight_decay  # (4)


# --------------------------------------------------------------------- (5) (6): second moments


def second_moments(g: Tensor, state: State, t: Scalar, rule: TensorRule) -> State:
    """Equation (5): running means of the squared gradient, over rows and columns or dense."""
    kappa = statistic_weight(t, rule)
    if rule.dense:
        v = state["variance"].view_as(g)
        if rule.gamma is None:
            return {"variance": torch.lerp(v, g * g + rule.offset, kappa)}
        return {"variance": rule.gamma * v + (1 - rule.gamma) * g * g}  # (5')
    m, n = g.shape[-2:]
    row_mean = sum_of_squares(g, dim=-1) / (n + rule.count_eps) + rule.offset  # (m, 1)
    col_mean = sum_of_squares(g, dim=-2) / (m + rule.count_eps) + rule.offset  # (1, n)
    return {
        "row_var": torch.lerp(state["row_var"].view_as(row_mean), row_mean, kappa),  # (5)
        "col_var": torch.lerp(state["col_var"].view_as(col_mean), col_mean, kappa),
    }


def variance_of(moments: State, rule: TensorRule) -> Tensor:
    """Equation (6): V without its floor. R is divided first, so that R C does not overflow."""
    if rule.dense:
        return moments["variance"]
    row_var, col_var = moments["row_var"], moments["col_var"]
    divisor: Tensor | None = None  # (..., 1, 1)
    if rule.divides_by_mean:
        divisor = row_var.mean(dim=-2, keepdim=True).clamp(min=FLOAT32_TINY)
    elif rule.divides_by_max:
        divisor = row_var.amax(dim=-2, keepdim=True).clamp(min=rule.floor)
    return (row_var if divisor is None else row_var / divisor) * col_var  # (6)


def inverse_root(moments: State, rule: TensorRule) -> Tensor:
    """1 / sqrt(V) of (6), with the floor of V."""
    if rule.dense or rule.divides_by_max or rule.divides_by_mean:
        return variance_of(moments, rule).clamp(min=rule.variance_floor).rsqrt()
    # Without a divisor R C may overflow where the product of the roots does not.
    roots = moments["row_var"].rsqrt() * moments["col_var"].rsqrt()
    return roots.clamp(max=rule.variance_floor**-0.5)  # (6)


# ------------------------------------------------------------------------- (7) to (9): the move


def published_move(g: Tensor, moments: State, rule: TensorRule) -> Tensor:
    """The move of W in units of alpha, without momentum, from G and the moments of (5)."""
    if rule.boost is not None:
        root = moments["variance"].sqrt() + rule.eps1
        return rule.boost * g / root.clamp(min=FLOAT32_TINY)
    return directed(g * inverse_root(moments, rule), rule)


def directed(update: Tensor, rule: TensorRule) -> Tensor:
    """Equations (7) to (9) for U = G / sqrt(V), or for y of (13). A vector is one row."""
    if rule.divides_by_peak:
        update = update / update.abs().amax().clamp(min=rule.floor)  # (7)
    if rule.norm_clip > 0.0:  # version 0.2
        norm, unit = norm_of(update)
        update = update * (rule.norm_clip / (norm * unit).clamp(min=rule.norm_clip))
    move = update
    if rule.moves_by_sign:
        move = update.sign() * update.abs().amax(dim=-1, keepdim=True)  # (9)
    if rule.rms_bound < math.inf:
        move = move / larger(rms(update) / rule.rms_bound, 1.0)  # (8)
    return move


# ------------------------------------------------ (10) to (13): momentum, or orthogonal direction


def filtered_move(
    g: Tensor,
    moments: State,
    state: State,
    t: Scalar,
    rule: TensorRule,
    block: tuple[int, int] | None,
) -> tuple[Tensor, State]:
    """The move of W with momentum or in the orthogonal direction, and the new momentum state."""
    g = g.reshape(-1, g.shape[-1])  # a vector is one row
    variance = variance_of(moments, rule).reshape(-1, g.shape[-1])
    mean = mean_moment(moments)
    x = g * input_factor(g.square().mean(), mean, rule)
    if not rule.is_orthogonal:
        x = x * variance.clamp(min=rule.variance_floor).rsqrt()  # (10)
    memories: State = {}
    if rule.has_momentum:
        x, memories = with_momentum(x, state, t, rule)
        x = without_leaks(x, variance) if rule.bands > 1 else x
    if not rule.is_orthogonal:
        return directed(x, rule), memories
    white = mean.sqrt() * variance.clamp(min=rule.variance_floor).rsqrt()
    return orthogonal(x * white, block), memories


def input_factor(mean_square: Tensor, mean: Tensor, rule: TensorRule) -> Tensor:
    """The scalar factor of (10): 1 / s, and 1 / sqrt(V) if orthogonal.

    `mean_square` is the mean of this step's G^2, `mean` that of R or v. Their ratio estimates the
    size of x without another pass over G. The orthogonal direction divides by sqrt(R C) after the
    momentum, so its V in (10) is a scalar.
    """
    clip = input_clip(mean_square, mean, rule)
    if rule.is_orthogonal:
        clip = clip * mean.clamp(min=rule.variance_floor).sqrt()
    return 1.0 / clip


def input_clip(mean_square: Tensor, mean: Tensor, rule: TensorRule) -> Tensor:
    """The s of (10), from the means of this step's G^2 and of R or v."""
    return (mean_square / mean.clamp(min=FLOAT32_TINY)).sqrt().clamp(min=rule.least_input)


def mean_moment(moments: State) -> Tensor:
    """The mean of R, or of v for a dense variance."""
    key, dim = ("row_var", -2) if "row_var" in moments else ("variance", -1)
    return moments[key].mean(dim=dim, keepdim=True)


def with_momentum(x: Tensor, state: State, t: Scalar, rule: TensorRule) -> tuple[Tensor, State]:
    """Equations (11) to (13): y, and the new momentum state."""
    sums = state.get("band_sums")
    memory = memory_of(rule, t, x.shape[-1], sums)
    x = memory.to_bands(x)
    before = decode_momentum(state, tuple(x.shape))
    memories = encode_momentum(memory.averaged(before, x), rule.momentum_dtype)
    y = memory.from_bands(memory.lookahead(decode_momentum(memories, tuple(x.shape)), x))
    if sums is not None:
        totals, shape = band_totals(x, before, memory.bands), (x.shape[-2], x.shape[-1])
        memories["band_sums"] = memory.next_sums(sums, totals, shape)
    return y, memories


def without_leaks(y: Tensor, variance: Tensor) -> Tensor:
    """Set y to 0 where V is 0, as no gradient ever arrived there.

    The rounding errors of a DCT leak into such columns. A sign would make them as large as any
    other entry, whitening even larger.
    """
    return torch.where(variance > 0, y, 0.0)


# ---------------------------------------------------------------------------- small pieces


def working_copies(param: Tensor, grad: Tensor, rule: TensorRule) -> tuple[Tensor, Tensor]:
    """W and G in float32, a float64 W as it is; G with shape (n), (m, n) or (batch, m, n).

    With `maximize`, -G.
    """
    layout = factoring(tuple(param.shape), rule.factor)
    g = grad.to(torch.float32).reshape((-1,) if layout is None else layout.matrix)
    return param.to(torch.promote_types(param.dtype, torch.float32)), -g if rule.maximize else g


def sum_of_squares(x: Tensor, dim: int) -> Tensor:
    """Sums of x^2 along `dim`, with keepdim, without a temporary of x's size."""
    norm: Tensor = vector_norm(x, dim=dim, keepdim=True)
    return norm.square()


def rms(x: Tensor) -> Tensor:
    """RMS(x), a 0-dim tensor, finite for every finite x."""
    norm, unit = norm_of(x)
    return norm / math.sqrt(x.numel()) * unit


def host_scalar(x: Scalar) -> Scalar:
    """A Python number if reading it is free, else a 0-dim tensor."""
    if isinstance(x, Tensor):
        # .item() of a CPU tensor is a memory read; elsewhere it would wait for the device.
        return float(x.item()) if x.device.type == "cpu" else x.reshape(())
    return x


def smaller(a: Scalar, b: Scalar) -> Scalar:
    """min(a, b) without a host sync."""
    if isinstance(a, Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def larger(a: Scalar, b: Scalar) -> Scalar:
    """max(a, b) without a host sync."""
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)
