"""Float64 NumPy oracle of MaxFactor, with momentum and without, and of Adafactor.

Written from the equations; imports nothing from the package. Tags such as `# (5)` are the
equation numbers of the design. Nothing here works in place, so every snapshot stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Axes = tuple[int, ...]
State = dict[str, Array]
Rate = float | Sequence[float]  # one value, or one per step

FLOAT32_EPS = 2.0**-23  # what eps1 = None stands for
FLOAT32_TINY = 2.0**-126  # the smallest divisor
BLOCK = 64  # values that share an int8 scale, and the length of a DCT
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5

FAM: dict[str, Any] = {
    "beta_min": 0.5,
    "beta_max": 0.98,
    "start": 0.9,
    "warmup": 20,
    "theta": 0.98,
    "mix": 0.05,
    "bands": 1,
}

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
    "decay_by": "lr",  # (4): "lr", "alpha", "rho" or "square"
    "eps_rms": None,  # given: replaces mean_eps, and is added to the floors
    "clip_threshold": 0.0,  # 0 = off
    "vector_sign": True,  # (9'): sign(U) * max|U|, else U
    "scalar_boost": None,
    "momentum": None,  # a number, or FAM's settings as a dict
    "nesterov": False,
    "momentum_dtype": "int8",
    "direction": "sign_max",
    "blocks": None,  # (14): "rows" or "columns", and how many a block has
    "scale": "current",
    "usual_from": 1.0 / 3.0,
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
    state: State  # "step", and "row_var" with "col_var", or "variance"; and what momentum needs
    update: Array  # U after (7) and the clip, before the sign; Adafactor: the clipped u
    step_size: float  # alpha of (3); Adafactor: lr_t
    momentum: Array | None = None  # M of (12) before it is stored


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
    momentum: float | dict[str, Any] | None
    nesterov: bool
    momentum_dtype: str
    direction: str
    blocks: tuple[str, int] | None
    scale: str
    usual_from: float

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
    rule = settings_of(version, **overrides)
    w = _float64(weight)
    state = fresh_state(rule, w.shape)
    snapshots = []
    for t, g in _gradients(w.shape, grads, rule.maximize):
        snapshots.append(one_step(rule, w, g, state, t))
        w, state = snapshots[-1].param, snapshots[-1].state
    return snapshots


def settings_of(version: str = "1.0", **overrides: object) -> Rule:
    """A version's settings with overrides."""
    settings: dict[str, Any] = {**VERSIONS[version], **overrides}
    return Rule(**settings)


def is_boosted(rule: Rule, size: int) -> bool:
    return size == 1 and rule.scalar_boost is not None


def fresh_state(rule: Rule, shape: tuple[int, ...]) -> State:
    """The state before the first step."""
    rows, cols = matrix_view(shape, rule.factor)
    boosted = is_boosted(rule, math.prod(shape))
    state = _fresh(shape, rows, cols, dense=len(shape) < 2 or rule.full_matrix or boosted)
    if rule.momentum is not None:
        state["momentum"] = np.zeros(shape)
        if len(shape) > 1 and rule.momentum_dtype == "int8":
            n = _count(shape, cols)
            blocks = (-(-n // BLOCK), *(1,) * (len(cols) - 1))
            state["momentum_scale"] = np.zeros((*shape[: len(rows)], *blocks))
        if len(shape) > 1 and isinstance(rule.momentum, dict):
            state["band_sums"] = np.zeros((3, (FAM | rule.momentum)["bands"]))
    if rule.scale != "current":
        state["initial_rms"] = _float64(assumed_size(shape, rule.scale))
    return {"step": _float64(0.0), **state}


def assumed_size(shape: tuple[int, ...], scale: str) -> float:
    """The size that may take the place of a matrix's own."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return 0.0
    fan_in = math.prod(shape[1:])
    return min(0.1, math.sqrt(2.0 / fan_in)) if scale == "raised" else 1.0 / math.sqrt(3.0 * fan_in)


def first_size(own: float, assumed: float, scale: str, usual_from: float = 1.0 / 3.0) -> float:
    """The size that the first step has, and later ones."""
    if own < assumed * (1.0 if scale == "raised" else 0.01):
        return assumed
    if scale == "usual" and assumed * usual_from <= own < assumed:
        return assumed
    return own


def one_step(
    rule: Rule, w: Array, g: Array, state: State, t: int, stored: Array | None = None
) -> Snapshot:
    """Step t from any state, with G negated already if it is to be.

    `stored`: use this as the momentum that (12) has stored, in place of the oracle's own rounding.
    """
    rows, cols = matrix_view(w.shape, rule.factor)
    lr = _at(rule.lr, t)
    size = rms(w)
    if rule.scale != "current" and w.size > 0:
        first = float(state["initial_rms"])
        if t == 1:
            first = first_size(size, first, rule.scale, rule.usual_from)
        state = {**state, "initial_rms": _float64(first)}
        size = first if first > 0.0 else size
    alpha = step_size(rule, lr, t, size)
    u, wanted = np.zeros_like(w), None
    if w.size > 0:
        rho = relative_step(rule, lr, t)
        square = rho * min(1.0, rho / lr) if lr > 0.0 else 0.0
        decay = {"lr": lr, "alpha": alpha, "rho": rho, "square": square}[rule.decay_by]
        w = _float64((1.0 - decay * rule.weight_decay) * w)  # (4)
        state = {**state, **statistics(rule, state, g, t, rows, cols)}
        orthogonal = rule.direction == "orthogonal" and w.ndim > 1
        if rule.momentum is not None or orthogonal:
            move, u, memories, wanted = filtered(rule, g, state, t, len(rows), stored)
            state = {**state, **memories}
            w = _float64(w - alpha * move)
        elif is_boosted(rule, w.size):
            u = boosted_scalar(rule, state["variance"], g)
            w = _float64(w - alpha * u)
        elif rule.direction == "factored":
            u = divide(g, np.sqrt(np.maximum(mean_moment(state, rows), rule.eps1**2)))
            w = _float64(w - alpha * u / max(1.0, rms(u) / rule.d))  # (9)
        else:
            u = normalised(rule, g, second_moment(rule, state, rows))
            s = max(1.0, rms(u) / rule.d)  # (8)
            w = _float64(w - alpha / s * direction(rule, u, cols))  # (9)
    return Snapshot(w, {**state, "step": _float64(t)}, u, alpha, wanted)


def step_size(rule: Rule, lr: float, t: int, rms_w: float) -> float:
    """Alpha; `rms_w` is of W before decay."""
    scale = max(rule.eps[1], rms_w)
    if rule.slow_start:
        return min(lr, scale * min(1e-6 * t, 1.0 / math.sqrt(t)))  # (3) of 0.2
    return relative_step(rule, lr, t) * scale  # (3)


def relative_step(rule: Rule, lr: float, t: int) -> float:
    """Rho; min_lr counts only where lr > 0."""
    return max(rule.min_lr, min(lr, 1.0 / math.sqrt(t))) if lr > 0.0 else 0.0  # (2)


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


# ---------------------------------------------------------------- momentum


def mean_moment(state: State, rows: Axes) -> Array:
    """R C / mean R, or v."""
    if "variance" in state:
        return state["variance"]
    r = state["row_var"]
    return _float64(divide(r, np.mean(r, axis=rows, keepdims=True)) * state["col_var"])


def filtered(
    rule: Rule, g: Array, state: State, t: int, split: int, stored: Array | None
) -> tuple[Array, Array, State, Array | None]:
    """The move, U or y before it, new memories, and M before it was stored.

    Everything as one matrix (m, n); `split` is the number of dimensions that count its rows.
    """
    shape, is_vector = g.shape, g.ndim < 2
    m = 1 if is_vector else math.prod(shape[:split])
    g = g.reshape(m, -1)
    if is_vector:
        v = state["variance"].reshape(1, -1)
        mean = float(np.mean(v))
    else:
        r, c = state["row_var"].reshape(-1, 1), state["col_var"].reshape(1, -1)
        mean = float(np.mean(r))
        v = divide(r * c, mean)
    floor = max(rule.eps1**2, FLOAT32_TINY)
    raw, v = v, _float64(np.maximum(v, floor))
    orthogonal = rule.direction == "orthogonal" and not is_vector
    least = 0.01 if orthogonal else 1.0
    s_z = max(least, math.sqrt(float(np.mean(g**2)) / max(mean, FLOAT32_TINY)))
    x = _float64(g / np.sqrt(max(mean, floor) if orthogonal else v) / s_z)  # (10)
    y, wanted = x, None
    memories: State = {}
    if rule.momentum is not None:
        seen = None if stored is None else stored.reshape(m, -1)
        y, memories, wanted = remembered(rule, x, state, t, is_vector=is_vector, stored=seen)
    bands = (FAM | rule.momentum)["bands"] if isinstance(rule.momentum, dict) else 1
    if bands > 1 and not is_vector:
        y = _float64(np.where(raw > 0.0, y, 0.0))  # no leaks to where there was no gradient
    move, u = turned(rule, y, v, mean, is_vector=is_vector)
    memories = {key: value.reshape(state[key].shape) for key, value in memories.items()}
    kept = None if wanted is None else wanted.reshape(shape)
    return move.reshape(shape), u.reshape(shape), memories, kept


def remembered(
    rule: Rule, x: Array, state: State, t: int, *, is_vector: bool, stored: Array | None
) -> tuple[Array, State, Array]:
    """Equations (11) to (13): y, the new memories, and M before it was stored."""
    fam = FAM | rule.momentum if isinstance(rule.momentum, dict) else None
    adaptive = fam is not None and not is_vector
    bands = fam["bands"] if fam is not None and adaptive else 1
    n = x.shape[1]
    if bands > 1:
        x = _float64(x @ dct_matrix(n).T)
    before = state["momentum"].reshape(x.shape)
    if "momentum_scale" in state:
        before = before * widened(state["momentum_scale"].reshape(x.shape[0], -1), n)
    memories: State = {}
    if fam is not None and adaptive:
        beta, c, memories["band_sums"] = adapted(fam, x, before, state["band_sums"], t)
        mu = fam["mix"]
    else:
        fixed = fam["start"] if fam is not None else float(rule.momentum)  # type: ignore[arg-type]
        beta, c = np.full((1, n), fixed), np.full((1, n), 1.0 - fixed**t)
        mu = fam["mix"] if fam is not None else (1.0 - fixed if rule.nesterov else 0.0)
    wanted = _float64(beta * before + (1.0 - beta) * x)  # (12)
    new, value = store(wanted, "fp32" if is_vector else rule.momentum_dtype)
    value = value if stored is None else stored
    y = _float64((1.0 - mu) * value / c + mu * x)  # (13)
    if bands > 1:
        y = _float64(y @ dct_matrix(n))
    return y, {**memories, **new}, wanted


def adapted(
    fam: dict[str, Any], x: Array, before: Array, sums: Array, t: int
) -> tuple[Array, Array, Array]:
    """Equation (11): beta and c of each column, and the new sums A, P and c of each band."""
    m, n = x.shape
    band = band_of_columns(n, fam["bands"])
    new = np.zeros_like(sums)
    beta_of, c_of = np.zeros((1, n)), np.zeros((1, n))
    for b in range(fam["bands"]):
        a, p, c = (float(row[b]) for row in sums)
        beta = min(max(1.0 - a / max(p, FLOAT32_TINY), fam["beta_min"]), fam["beta_max"])
        beta = fam["start"] if t <= fam["warmup"] else beta
        inside = band == b
        count = max(1, m * int(inside.sum()))
        guess = before[:, inside] / max(c, FLOAT32_TINY)
        theta = fam["theta"]
        new[0, b] = theta * a + (1.0 - theta) * float(np.sum(x[:, inside] * guess)) / count
        new[1, b] = theta * p + (1.0 - theta) * float(np.sum(x[:, inside] ** 2)) / count
        new[2, b] = beta * c + 1.0 - beta
        beta_of[0, inside], c_of[0, inside] = beta, new[2, b]
    return beta_of, c_of, new


def turned(rule: Rule, y: Array, v: Array, mean: float, *, is_vector: bool) -> tuple[Array, Array]:
    """Equation (9): the move, and U, or u, that it was made from."""
    if rule.direction == "orthogonal" and not is_vector:
        return in_blocks(_float64(y * math.sqrt(mean) / np.sqrt(v)), rule.blocks), y
    if rule.direction == "factored":
        return _float64(y / max(1.0, rms(y) / rule.d)), y
    u = divide(y, max(float(np.max(np.abs(y))), rule.floor))  # (7)
    move = u
    if not is_vector or rule.vector_sign:
        move = _float64(np.sign(u) * np.max(np.abs(u), axis=1, keepdims=True))
    return _float64(move / max(1.0, rms(u) / rule.d)), u  # (8)


def in_blocks(y: Array, blocks: tuple[str, int] | None) -> Array:
    """Equation (14): the whole matrix, or each block, orthogonalised and of RMS 1."""
    side, size = blocks or ("rows", y.shape[0])
    axis = {"rows": 0, "columns": 1}[side]
    parts = np.split(y, y.shape[axis] // size, axis)
    turned = [divide(o, rms(o)) for o in map(newton_schulz, parts)]
    return _float64(np.concatenate(turned, axis))


def newton_schulz(y: Array) -> Array:
    """Five quintic steps on the smaller side."""
    x = divide(y, math.sqrt(float(np.sum(y**2))))
    x = x.T if x.shape[0] > x.shape[1] else x
    for a, b, c in NEWTON_SCHULZ:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return _float64(x.T if y.shape[0] > y.shape[1] else x)


def store(values: Array, dtype: str) -> tuple[State, Array]:
    """What is kept, and the values that it stands for; (m, n)."""
    if dtype == "fp32":
        return {"momentum": values}, values
    if dtype == "bf16":
        kept = bfloat16(values)
        return {"momentum": kept}, kept
    n = values.shape[1]
    starts = range(0, n, BLOCK)
    largest = [np.max(np.abs(values[:, s : s + BLOCK]), axis=1, keepdims=True) for s in starts]
    scales = _float64(np.concatenate(largest, axis=1) / 127.0)
    codes = np.rint(divide(values, widened(scales, n)))  # to nearest, ties to even
    return {"momentum": codes, "momentum_scale": scales}, _float64(codes * widened(scales, n))


def widened(scales: Array, n: int) -> Array:
    """One scale for each value."""
    return _float64(np.repeat(scales, BLOCK, axis=1)[:, :n])


def bfloat16(values: Array) -> Array:
    """Rounded to eight significant bits, ties to even."""
    mantissa, exponent = np.frexp(values)
    return _float64(np.ldexp(np.rint(mantissa * 256.0) / 256.0, exponent))


def block_lengths(n: int) -> list[int]:
    return [BLOCK] * (n // BLOCK) + ([n % BLOCK] if n % BLOCK else [])


@cache
def dct_matrix(n: int) -> Array:
    """The orthonormal DCT-II of each block as one matrix: coefficients = matrix @ row."""
    whole = np.zeros((n, n))
    start = 0
    for length in block_lengths(n):
        for f in range(length):
            norm = math.sqrt((1.0 if f == 0 else 2.0) / length)
            for j in range(length):
                cosine = math.cos(math.pi * (2 * j + 1) * f / (2 * length))
                whole[start + f, start + j] = norm * cosine
        start += length
    return whole


def band_of_columns(n: int, bands: int) -> NDArray[np.int64]:
    """The band of each coefficient."""
    return np.array([f * bands // length for length in block_lengths(n) for f in range(length)])


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
    eps1 = 1e-30 if eps[0] is None else eps[0]  # None is the paper's own
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
