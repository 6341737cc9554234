"""The maths: MaxFactor and Adafactor as pure functions, one equation after the other.

Nothing here is changed in place and nothing is read back to the host, so each function may be
called on its own. `step` is the functional form of one optimizer step:

    >>> import torch
    >>> from maxfactor import rule
    >>> weight, grad = torch.ones(3, 2), torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 0.0]])
    >>> hyper = rule.MaxFactorHyper(lr=0.01)
    >>> state = rule.init_state(weight, hyper)
    >>> weight, state, step_size = rule.step(weight, grad, state, hyper)

Notation: W weight, G gradient, t step, R and C row and column factors of the second moment,
U update, M momentum, RMS(x) = ||x|| / sqrt(numel). Tags such as `# (6)` are the equations of the
README; (11) to (13), the filter over time, are in `momentum.py` and `fam.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from maxfactor.rule.fam import FAM, band_totals
from maxfactor.rule.momentum import kept, memory_of, recalled
from maxfactor.rule.newton_schulz import orthogonal
from maxfactor.rule.rounding import rounded
from maxfactor.settings import FLOAT32_TINY, AdafactorHyper, Hyper, MaxFactorHyper
from maxfactor.state import State, factoring, init_state

__all__ = [
    "FAM",
    "AdafactorHyper",
    "MaxFactorHyper",
    "Result",
    "adafactor",
    "init_state",
    "maxfactor",
    "step",
]

Scalar = float | Tensor  # a Python number, or a 0-dim tensor that stays on its device

ADAFACTOR_MAX_STEP = 1e-2  # the paper's cap of the relative step, where no lr is given
RAMP_PER_STEP = 1e-6  # version 0.2's linear warm-up


class Result(NamedTuple):
    """A step's outcome: the new weight, the new state, and the step size alpha of (3)."""

    param: Tensor
    state: State
    step_size: Scalar


def step(param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> Result:
    """Take one step of the rule that `hyper` belongs to; the arguments are left as they were."""
    if isinstance(hyper, MaxFactorHyper):
        return maxfactor(param, grad, state, hyper)
    if isinstance(hyper, AdafactorHyper):
        return adafactor(param, grad, state, hyper)
    raise TypeError(f"hyper must be a MaxFactorHyper or an AdafactorHyper, got {hyper!r}")


# ------------------------------------------------------------------------------- MaxFactor


def maxfactor(param: Tensor, grad: Tensor, state: State, hyper: MaxFactorHyper) -> Result:
    """One step of MaxFactor, equations (1) to (13)."""
    counted = dict(state, step=state["step"] + 1)
    if param.numel() == 0:
        return Result(param.clone(), counted, 0.0)
    t, lr = host_scalar(counted["step"]), host_scalar(hyper.lr)
    w, g = working_copies(param, grad, hyper)

    size, kept = weight_size(rms(w), state.get("initial_rms"), t)
    alpha = step_size(size, t, lr, hyper)  # (2) (3), W before decay
    w = w * (1 - decay_rate(alpha, t, lr, hyper) * hyper.weight_decay)  # (4)
    if "variance" in state:
        v = state["variance"].view_as(g)
        moments = {"variance": hyper.gamma * v + (1 - hyper.gamma) * g * g}  # (5')
    else:
        kappa = statistic_weight(t, hyper)  # (1)
        moments = factors(g, state, kappa, count_eps=hyper.count_eps)  # (5)
    if hyper.is_filtered(is_vector=g.dim() == 1):
        move, memories = filtered_move(g, moments, state, t, hyper)
    else:
        move, memories = published_move(g, moments, hyper), {}
    w = w - (alpha * move).reshape(w.shape)
    new = stored(counted, {**moments, **memories, **kept})
    return Result(rounded(w, param.dtype, hyper, t), new, alpha)


def published_move(g: Tensor, moments: State, hyper: MaxFactorHyper) -> Tensor:
    """What W moves against without momentum, from G and the statistics of (5)."""
    variance = moments["variance"] if "variance" in moments else factored_variance(moments, hyper)
    if hyper.is_boosted_scalar(g.numel()):
        return boosted_scalar(g, variance, hyper)
    if hyper.direction == "factored":
        update = g * variance.clamp(min=hyper.variance_floor).rsqrt()
        return update / rms_divisor(update, hyper.d)  # (9)
    update = normalized(g, variance, hyper)  # (7)
    move = direction(update, hyper)  # (9)
    if hyper.d < 1.0:  # RMS(U) <= max|U| = 1, so from d = 1 on (8) is 1 and costs nothing
        move = move / rms_divisor(update, hyper.d)  # (8)
    return move


def weight_size(size: Tensor, initial: Tensor | None, t: Scalar) -> tuple[Tensor, State]:
    """The RMS that (3) scales by, and what is kept of it; `size` is RMS(W) now.

    `initial` is the state's `initial_rms`, or None with scale="current". A parameter that was zero
    at first has no size of its own to keep to, and is scaled by its present one.
    """
    if initial is None:
        return size, {}
    # A counter on the device is not read.
    first = torch.where(t == 1, size, initial) if isinstance(t, Tensor) else initial
    if not isinstance(t, Tensor) and t == 1:
        first = size
    first = first.to(torch.float32)
    return torch.where(first > 0, first, size), {"initial_rms": first}


def statistic_weight(t: Scalar, hyper: MaxFactorHyper) -> Scalar:
    """Equation (1): the weight of the newest statistic, 1 at t = 1."""
    low, high = hyper.kappa_bounds
    return smaller(larger(t**hyper.beta2_decay, low), high)


def step_size(size: Scalar, t: Scalar, lr: Scalar, hyper: MaxFactorHyper) -> Scalar:
    """Equations (2) and (3): the relative step times the weight's own size, RMS(W)."""
    size = larger(size, hyper.eps2)
    if hyper.step_rule == "ramp":  # version 0.2: the cap is on the product
        return smaller(size * smaller(RAMP_PER_STEP * t, t**-0.5), lr)
    return relative_step(t, lr, hyper) * size  # (3)


def relative_step(t: Scalar, lr: Scalar, hyper: MaxFactorHyper) -> Scalar:
    """Equation (2): rho = min(lr, 1/sqrt(t)). A rate of 0 stays 0, whatever `min_lr` says."""
    return larger(smaller(lr, t**-0.5), hyper.min_lr) * (lr > 0)  # (2)


def decay_rate(alpha: Scalar, t: Scalar, lr: Scalar, hyper: MaxFactorHyper) -> Scalar:
    """What `weight_decay` is multiplied by in (4)."""
    if hyper.decay_by == "relative_step":
        return relative_step(t, lr, hyper)
    return lr if hyper.decay_by == "lr" else alpha


def factored_variance(moments: State, hyper: MaxFactorHyper) -> Tensor:
    """Equation (6): V = R C / max R. R is divided first, so that the product cannot overflow."""
    row_var, col_var = moments["row_var"], moments["col_var"]
    if hyper.direction == "factored":
        return relative_to_mean(row_var) * col_var
    if not hyper.max_norm:
        return row_var * col_var
    largest = row_var.amax(dim=-2, keepdim=True)  # (1, 1), one for each matrix of a batch
    return row_var / largest.clamp(min=hyper.floor) * col_var


def relative_to_mean(row_var: Tensor) -> Tensor:
    """R / mean R, Adafactor's form of (6), for each matrix of a batch."""
    return row_var / row_var.mean(dim=-2, keepdim=True).clamp(min=FLOAT32_TINY)


def normalized(g: Tensor, variance: Tensor, hyper: MaxFactorHyper) -> Tensor:
    """Equation (7): U = G / sqrt(V), scaled to a largest entry of 1; then version 0.2's clip."""
    update = g * variance.clamp(min=hyper.variance_floor).rsqrt()
    update = update / update.abs().amax().clamp(min=hyper.floor)
    if hyper.clip_threshold > 0.0:
        norm = vector_norm(update).clamp(min=hyper.clip_threshold)
        update = update * (hyper.clip_threshold / norm)
    return update


def direction(update: Tensor, hyper: MaxFactorHyper) -> Tensor:
    """Equation (9): each entry moves by its sign times its row's largest; a vector is one row."""
    is_vector = update.dim() == 1
    if hyper.vector_direction == "update" if is_vector else not hyper.max_norm:
        return update
    return update.sign() * update.abs().amax(dim=-1, keepdim=True)


def boosted_scalar(g: Tensor, variance: Tensor, hyper: MaxFactorHyper) -> Tensor:
    """Version 0.3's rule for a parameter with a single value."""
    assert hyper.scalar_boost is not None
    return hyper.scalar_boost * g / (variance.sqrt() + hyper.eps1).clamp(min=FLOAT32_TINY)


# ------------------------------------------------------- MaxFactor with momentum, or orthogonal


def filtered_move(
    g: Tensor, moments: State, state: State, t: Scalar, hyper: MaxFactorHyper
) -> tuple[Tensor, State]:
    """What W moves against with momentum or in the orthogonal direction, and the new memories."""
    is_vector = g.dim() == 1
    g = g.reshape(-1, g.shape[-1])  # a vector is one row
    variance = second_moment(moments, is_vector=is_vector)
    x = g * input_factor(g.square().mean(), variance, moments, hyper)  # (10)
    memories: State = {}
    if hyper.momentum is not None:
        x, memories = filtered(x, state, t, hyper, is_vector=is_vector)  # (11) (12) (13)
        x = without_leaks(x, variance) if hyper.bands > 1 and not is_vector else x
    if hyper.direction == "orthogonal" and not is_vector:
        return orthogonal(x * whitening(variance, moments, hyper)), memories  # (9)
    if hyper.direction == "factored":
        return x / rms_divisor(x, hyper.d), memories  # (9)
    update = x / x.abs().amax().clamp(min=hyper.floor)  # (7)
    by_row = not is_vector or hyper.vector_direction == "sign_max"
    move = update.sign() * update.abs().amax(dim=-1, keepdim=True) if by_row else update  # (9)
    return (move / rms_divisor(update, hyper.d) if hyper.d < 1.0 else move), memories  # (8)


def second_moment(moments: State, *, is_vector: bool) -> Tensor:
    """V of (10), without its floor: R C / mean R, or v as one row; (..., m, n)."""
    if is_vector:
        return moments["variance"].unsqueeze(-2)
    return relative_to_mean(moments["row_var"]) * moments["col_var"]


def input_factor(
    mean_square: Tensor, variance: Tensor, moments: State, hyper: MaxFactorHyper
) -> Tensor:
    """Equation (10): what G is multiplied by, one over sqrt(V) and the clip s_z.

    The orthogonal direction takes the momentum before it preconditions, so its V is one number.
    `mean_square` is the mean of this step's G^2: compared with the averages it tells how far the
    input would stick out, at no further pass over it.
    """
    mean = mean_moment(moments)
    clip = (mean_square / mean.clamp(min=FLOAT32_TINY)).sqrt().clamp(min=1.0)  # s_z
    if hyper.direction == "orthogonal" and "row_var" in moments:
        variance = mean
    return variance.clamp(min=hyper.variance_floor).rsqrt() / clip


def mean_moment(moments: State) -> Tensor:
    """The mean of R, or mean v of a vector."""
    key, dim = ("row_var", -2) if "row_var" in moments else ("variance", -1)
    return moments[key].mean(dim=dim, keepdim=True)


def filtered(
    x: Tensor, state: State, t: Scalar, hyper: MaxFactorHyper, *, is_vector: bool
) -> tuple[Tensor, State]:
    """Equations (11) to (13): y, and the new momentum with what belongs to it."""
    sums = state.get("band_sums")
    memory = memory_of(hyper, t, x.shape[-1], sums)
    x = memory.enter(x)
    before = recalled(state, tuple(x.shape))
    store = hyper.momentum_store(is_vector=is_vector)
    assert store is not None
    memories = kept(memory.absorbed(before, x), store)  # (12)
    y = memory.leave(memory.seen(recalled(memories, tuple(x.shape)), x))  # (13)
    if sums is not None:
        assert hyper.fam is not None
        totals, shape = band_totals(x, before, memory.bands), (x.shape[-2], x.shape[-1])
        memories["band_sums"] = memory.next_sums(sums, totals, shape, hyper.fam)  # (11)
    return y, memories


def whitening(variance: Tensor, moments: State, hyper: MaxFactorHyper) -> Tensor:
    """What the orthogonal direction multiplies y by: one over the relative sqrt(V)."""
    return mean_moment(moments).sqrt() * variance.clamp(min=hyper.variance_floor).rsqrt()


def without_leaks(y: Tensor, variance: Tensor) -> Tensor:
    """Zero where there never was a gradient: rounding leaks there from the other columns of a DCT.

    A sign would make the leak as large as any entry, whitening larger than all.
    """
    return torch.where(variance > 0, y, 0.0)


# ------------------------------------------------------------------------------- Adafactor


def adafactor(param: Tensor, grad: Tensor, state: State, hyper: AdafactorHyper) -> Result:
    """One step of Adafactor as in the paper, without first moment (README, "Adafactor")."""
    counted = dict(state, step=state["step"] + 1)
    if param.numel() == 0:
        return Result(param.clone(), counted, 0.0)
    t = host_scalar(counted["step"])
    w, g = working_copies(param, grad, hyper)

    alpha, decay = adafactor_rates(rms(w), t, hyper)
    kappa = t**hyper.beta2_decay  # 1 - beta2
    if "variance" in state:
        v = state["variance"].view_as(g)
        variance = torch.lerp(v, g * g + hyper.eps1, kappa)
        moments = {"variance": variance}
    else:
        moments = factors(g, state, kappa, offset=hyper.eps1)
        variance = relative_to_mean(moments["row_var"]) * moments["col_var"]  # V = R C / mean R
    update = g * variance.clamp(min=FLOAT32_TINY).rsqrt()
    update = update / rms_divisor(update, hyper.clip_threshold)
    w = w * (1 - decay) - (alpha * update).reshape(w.shape)
    return Result(rounded(w, param.dtype, hyper, t), stored(counted, moments), alpha)


def adafactor_rates(size: Scalar, t: Scalar, hyper: AdafactorHyper) -> tuple[Scalar, Scalar]:
    """The step size and the share of W that decays; `size` is RMS(W)."""
    if not hyper.relative_step:
        assert hyper.lr is not None
        lr = host_scalar(hyper.lr)
        return lr, lr * hyper.weight_decay
    cap = ADAFACTOR_MAX_STEP if hyper.lr is None else host_scalar(hyper.lr)
    alpha = smaller(cap, t**-0.5) * larger(size, hyper.eps2)
    # With an lr this is torch.optim.Adafactor's rule, where lr itself scales the decay.
    return alpha, (alpha if hyper.lr is None else cap) * hyper.weight_decay


# ---------------------------------------------------------------------------- small pieces


def working_copies(param: Tensor, grad: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """W and G in the precision of the arithmetic; G as a vector, (m, n) or (batch, m, n).

    Float32 for both, except that a float64 W is not rounded.
    """
    layout = factoring(tuple(param.shape), hyper.factor)
    g = grad.to(torch.float32).reshape((-1,) if layout is None else layout.matrix)
    return param.to(torch.promote_types(param.dtype, torch.float32)), -g if hyper.maximize else g


def stored(counted: State, moments: State) -> State:
    """The new state, each tensor in the shape it is kept in."""
    return {**counted, **{key: x.reshape(counted[key].shape) for key, x in moments.items()}}


def factors(
    g: Tensor, state: State, kappa: Scalar, *, count_eps: float = 0.0, offset: float = 0.0
) -> State:
    """Equation (5): the running means of the squared gradient over rows and over columns."""
    m, n = g.shape[-2:]
    row_mean = sum_of_squares(g, dim=-1) / (n + count_eps) + offset  # (m, 1)
    col_mean = sum_of_squares(g, dim=-2) / (m + count_eps) + offset  # (1, n)
    return {
        "row_var": torch.lerp(state["row_var"].view_as(row_mean), row_mean, kappa),
        "col_var": torch.lerp(state["col_var"].view_as(col_mean), col_mean, kappa),
    }


def sum_of_squares(x: Tensor, dim: int) -> Tensor:
    """Sums along `dim`, kept as 1, without a temporary of x's size."""
    norm: Tensor = vector_norm(x, dim=dim, keepdim=True)
    return norm.square()


def rms(x: Tensor) -> Tensor:
    """RMS(x), a 0-dim tensor. Row by row first: one long float32 sum would lose digits."""
    norm: Tensor = vector_norm(vector_norm(x, dim=-1)) if x.dim() > 1 else vector_norm(x)
    return norm / math.sqrt(x.numel())


def rms_divisor(update: Tensor, d: float) -> Scalar:
    """Equation (8): s = max(1, RMS(U) / d)."""
    return larger(rms(update) / d, 1.0)


def host_scalar(x: Scalar) -> Scalar:
    """A Python number where that costs nothing, else the 0-dim tensor itself."""
    if isinstance(x, Tensor):
        # .item() of a CPU tensor is a memory read; elsewhere it would wait for the device.
        return float(x.item()) if x.device.type == "cpu" else x.reshape(())
    return x


def smaller(a: Scalar, b: Scalar) -> Scalar:
    """min(a, b) without reading a tensor back."""
    if isinstance(a, Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def larger(a: Scalar, b: Scalar) -> Scalar:
    """max(a, b) without reading a tensor back."""
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)
