"""Float64 NumPy oracle of MaxFactor and Adafactor.

Written from the equations; imports nothing from the package. Tags such as `# (5)` are the
equation numbers of the design. Nothing here works in place, so every snapshot stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Axes = tuple[int, ...]
State = dict[str, Array]
Rate = float | Sequence[float]  # one value, or one per step

FLOAT32_EPS = 2.0**-23  # what eps1 = None stands for

_COMMON: dict[str, object] = {
    "lr": 0.01,
    "beta2_decay": -0.8,
    "d": 1.0,
    "gamma": 0.99,
    "maximize": False,
    "factor": "auto",
    "full_matrix": False,
    "max_norm": True,
    "kappa_range": (0.0, math.inf),  # (1) is clamped to this
    "slow_start": False,  # 0.2's own (3)
    "min_lr": 0.0,
    "decay_by": "lr",  # (4): "lr" or "alpha"
    "eps_rms": None,  # given: replaces mean_eps, and is added to the floors
    "clip_threshold": 0.0,  # 0 = off
    "vector_sign": True,  # (9'): sign(U) * max|U|, else U
    "scalar_boost": None,
}

# mean_eps is the e of "divides by n + e" in (5); "eps1" means: that value. Version 0.1 has
# none of its own, its e is eps_rms.
VERSIONS: dict[str, dict[str, object]] = {
    "0.1": _COMMON
    | {"eps": (None, 1e-3), "weight_decay": 0.0, "mean_eps": 0.0}
    | {"eps_rms": 1e-8},
    "0.2": _COMMON
    | {"eps": (None, 1e-3), "weight_decay": 0.0, "mean_eps": 1e-12}
    | {"kappa_range": (0.0, 0.999), "slow_start": True, "decay_by": "alpha"}
    | {"clip_threshold": 1.0, "vector_sign": False},
    "0.3": _COMMON
    | {"eps": (1e-10, 1e-4), "weight_decay": 0.01, "mean_eps": "eps1"}
    | {"kappa_range": (0.001, 0.999), "min_lr": 1e-7}
    | {"vector_sign": False, "scalar_boost": 2.0},
    "1.0": _COMMON | {"eps": (1e-10, 1e-3), "weight_decay": 0.01, "mean_eps": 1e-8},
}


@dataclass(frozen=True)
class Snapshot:
    """What one step leaves behind, and the tensor and step size it moved by."""

    param: Array
    state: State  # "step", and "row_var" with "col_var", or "variance"
    update: Array  # U after (7) and the clip, before the sign; Adafactor: the clipped u
    step_size: float  # alpha of (3); Adafactor: lr_t


@dataclass(frozen=True)
class Rule:
    """One version's settings with the caller's overrides; an unknown name is a TypeError."""

    lr: Rate
    beta2_decay: float
    eps: tuple[float | None, float]
    d: float
    weight_decay: float
    gamma: float
    maximize: bool
    factor: str
    full_matrix: bool
    max_norm: bool
    kappa_range: tuple[float, float]
    slow_start: bool
    min_lr: float
    decay_by: str
    mean_eps: float | str
    eps_rms: float | None
    clip_threshold: float
    vector_sign: bool
    scalar_boost: float | None

    @property
    def eps1(self) -> float:
        return FLOAT32_EPS if self.eps[0] is None else self.eps[0]

    @property
    def floor(self) -> float:
        """The least divisor of (6) and (7)."""
        return self.eps1 + (self.eps_rms or 0.0)

    @property
    def count_eps(self) -> float:
        """What the means of (5) add to the count."""
        if self.eps_rms is not None:
            return self.eps_rms
        return self.eps1 if self.mean_eps == "eps1" else float(self.mean_eps)


# ---------------------------------------------------------------- MaxFactor


def maxfactor(
    weight: ArrayLike, grads: Sequence[ArrayLike], version: str = "1.0", **overrides: object
) -> list[Snapshot]:
    """Run MaxFactor over `grads`, one step each, from a fresh state."""
    settings: dict[str, Any] = {**VERSIONS[version], **overrides}
    rule = Rule(**settings)
    w = _float64(weight)
    rows, cols = matrix_view(w.shape, rule.factor)
    boosted = w.size == 1 and rule.scalar_boost is not None
    state = _fresh(w.shape, rows, cols, dense=w.ndim < 2 or rule.full_matrix or boosted)
    snapshots = []
    for t, g in _gradients(w.shape, grads, rule.maximize):
        lr = _at(rule.lr, t)
        alpha = step_size(rule, lr, t, rms(w))
        u = np.zeros_like(w)
        if w.size > 0:
            decay = lr if rule.decay_by == "lr" else alpha
            w = _float64((1.0 - decay * rule.weight_decay) * w)  # (4)
            state = statistics(rule, state, g, t, rows, cols)
            if boosted:
                u = boosted_scalar(rule, state["variance"], g)
                w = _float64(w - alpha * u)
            else:
                u = normalised(rule, g, second_moment(rule, state, rows))
                s = max(1.0, rms(u) / rule.d)  # (8)
                w = _float64(w - alpha / s * direction(rule, u, cols))  # (9)
        state = {**state, "step": _float64(t)}
        snapshots.append(Snapshot(w, state, u, alpha))
    return snapshots


def step_size(rule: Rule, lr: float, t: int, rms_w: float) -> float:
    """Alpha; `rms_w` is of W before decay."""
    scale = max(rule.eps[1], rms_w)
    if rule.slow_start:
        return min(lr, scale * min(1e-6 * t, 1.0 / math.sqrt(t)))  # (3) of 0.2
    rho = max(rule.min_lr, min(lr, 1.0 / math.sqrt(t)))  # (2)
    return rho * scale if lr > 0.0 else 0.0  # (3); min_lr counts only where lr > 0


def statistics(rule: Rule, state: State, g: Array, t: int, rows: Axes, cols: Axes) -> State:
    """The state after this gradient."""
    if "variance" in state:
        v = rule.gamma * state["variance"] + (1.0 - rule.gamma) * g**2  # (5')
        return {"variance": _float64(v)}
    low, high = rule.kappa_range
    kappa = min(high, max(low, t**rule.beta2_decay))  # (1)
    m, n = _count(g.shape, rows), _count(g.shape, cols)
    row_mean = np.sum(g**2, axis=cols, keepdims=True) / (n + rule.count_eps)
    col_mean = np.sum(g**2, axis=rows, keepdims=True) / (m + rule.count_eps)
    return {
        "row_var": lerp(state["row_var"], row_mean, kappa),  # (5)
        "col_var": lerp(state["col_var"], col_mean, kappa),  # (5)
    }


def second_moment(rule: Rule, state: State, rows: Axes) -> Array:
    """V, of the parameter's shape."""
    if "variance" in state:
        v = state["variance"]  # (6')
    elif rule.max_norm:
        r = state["row_var"]
        max_r = np.max(r, axis=rows, keepdims=True)  # per batch entry where there is one
        v = divide(r, np.maximum(max_r, rule.floor)) * state["col_var"]  # (6)
    else:
        v = state["row_var"] * state["col_var"]  # (6) without max R
    return _float64(np.maximum(v, rule.eps1**2))


def normalised(rule: Rule, g: Array, v: Array) -> Array:
    """U, its largest magnitude 1, then clipped."""
    u = divide(g, np.sqrt(v))  # (7)
    u = divide(u, np.maximum(np.max(np.abs(u)), rule.floor))  # (7)
    norm = float(np.sqrt(np.sum(u**2)))
    if rule.clip_threshold > 0.0 and norm > rule.clip_threshold:
        u = _float64(u * (rule.clip_threshold / norm))
    return u


def direction(rule: Rule, u: Array, cols: Axes) -> Array:
    """What W moves along; a vector is one row."""
    signed = rule.vector_sign if u.ndim < 2 else rule.max_norm
    if not signed:
        return u
    return _float64(np.sign(u) * np.max(np.abs(u), axis=cols, keepdims=True))  # (9) (9')


def boosted_scalar(rule: Rule, v: Array, g: Array) -> Array:
    """Version 0.3's update of a parameter with one element."""
    assert rule.scalar_boost is not None
    return divide(rule.scalar_boost * g, np.sqrt(v) + rule.eps1)


# ---------------------------------------------------------------- Adafactor


def adafactor(
    weight: ArrayLike,
    grads: Sequence[ArrayLike],
    *,
    lr: Rate | None = None,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (1e-30, 1e-3),
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
    factor: str = "auto",
    relative_step: bool | None = None,
) -> list[Snapshot]:
    """Run Adafactor over `grads`, one step each, from a fresh state.

    `relative_step=True` with an `lr` is the meaning of `torch.optim.Adafactor`.
    """
    eps1 = FLOAT32_EPS if eps[0] is None else eps[0]
    w = _float64(weight)
    rows, cols = matrix_view(w.shape, factor)
    state = _fresh(w.shape, rows, cols, dense=w.ndim < 2)
    snapshots = []
    for t, g in _gradients(w.shape, grads, maximize):
        lr_t, decay = adafactor_rates(lr, relative_step, t, max(eps[1], rms(w)))
        u = np.zeros_like(w)
        if w.size > 0:
            state = adafactor_statistics(state, _float64(g**2 + eps1), t**beta2_decay, rows, cols)
            u = divide(g, np.sqrt(adafactor_second_moment(state, rows)))  # u = g / sqrt V
            u = _float64(u / max(1.0, rms(u) / clip_threshold))
            w = _float64((1.0 - decay * weight_decay) * w - lr_t * u)
        state = {**state, "step": _float64(t)}
        snapshots.append(Snapshot(w, state, u, lr_t))
    return snapshots


def adafactor_rates(
    lr: Rate | None, relative_step: bool | None, t: int, scale: float
) -> tuple[float, float]:
    """The factor of u, and the factor of weight_decay * W."""
    if lr is None:
        if relative_step is False:
            raise ValueError("relative_step=False needs an lr, got None")
        lr_t = min(1e-2, 1.0 / math.sqrt(t)) * scale
        return lr_t, lr_t
    rate = _at(lr, t)
    if relative_step:
        return min(rate, 1.0 / math.sqrt(t)) * scale, rate  # torch: decay by lr itself
    return rate, rate


def adafactor_statistics(
    state: State, square: Array, kappa: float, rows: Axes, cols: Axes
) -> State:
    """EMAs of g^2 + eps1 with beta2 = 1 - kappa."""
    if "variance" in state:
        return {"variance": lerp(state["variance"], square, kappa)}
    row_mean = np.mean(square, axis=cols, keepdims=True)
    col_mean = np.mean(square, axis=rows, keepdims=True)
    return {
        "row_var": lerp(state["row_var"], row_mean, kappa),
        "col_var": lerp(state["col_var"], col_mean, kappa),
    }


def adafactor_second_moment(state: State, rows: Axes) -> Array:
    """V = R C^T / mean R, the quotient first so that nothing underflows."""
    if "variance" in state:
        return state["variance"]
    r = state["row_var"]
    return _float64(divide(r, np.mean(r, axis=rows, keepdims=True)) * state["col_var"])


# ---------------------------------------------------------------- shared


def matrix_view(shape: tuple[int, ...], factor: str) -> tuple[Axes, Axes]:
    """The axes that count the rows, and those that run along a row; others are a batch."""
    ndim = len(shape)
    if ndim < 2:
        return (), tuple(range(ndim))  # a vector is one row
    if factor == "last":
        return (ndim - 2,), (ndim - 1,)
    if factor != "auto":
        raise ValueError(f'factor must be "auto" or "last", got {factor!r}')
    sizes = [math.prod(shape[:k]) + math.prod(shape[k:]) for k in range(1, ndim)]  # m + n
    k = 1 + sizes.index(min(sizes))  # the first on ties
    return tuple(range(k)), tuple(range(k, ndim))


def rms(x: Array) -> float:
    """The 2-norm over sqrt(numel); 0 for an empty array."""
    return float(np.sqrt(np.mean(x**2))) if x.size > 0 else 0.0


def lerp(start: Array, end: Array, weight: float) -> Array:
    return _float64((1.0 - weight) * start + weight * end)


def divide(a: ArrayLike, b: ArrayLike) -> Array:
    """a / b, and 0 where b is 0: a zero gradient without a floor (eps1 = 0) moves nothing."""
    x, y = np.broadcast_arrays(_float64(a), _float64(b))
    return _float64(np.divide(x, y, out=np.zeros(x.shape), where=y != 0.0))


def _float64(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float64)  # NumPy turns 0-d results into scalars; undo it


def _at(lr: Rate, t: int) -> float:
    return float(lr[t - 1] if isinstance(lr, Sequence) else lr)


def _gradients(
    shape: tuple[int, ...], grads: Sequence[ArrayLike], maximize: bool
) -> Iterator[tuple[int, Array]]:
    """t = 1, 2, ... with G, negated if `maximize`."""
    for t, grad in enumerate(grads, start=1):
        g = _float64(grad)
        if g.shape != shape:
            raise ValueError(f"gradient {t} has shape {g.shape}, the weight has {shape}")
        yield t, _float64(-g) if maximize else g


def _count(shape: tuple[int, ...], axes: Axes) -> int:
    return math.prod(shape[axis] for axis in axes)


def _fresh(shape: tuple[int, ...], rows: Axes, cols: Axes, *, dense: bool) -> State:
    """Zero statistics; a factored one has size 1 along the axes it averages over."""

    def zeros(averaged: Axes) -> Array:
        return np.zeros([1 if axis in averaged else size for axis, size in enumerate(shape)])

    return {"variance": zeros(())} if dense else {"row_var": zeros(cols), "col_var": zeros(rows)}
