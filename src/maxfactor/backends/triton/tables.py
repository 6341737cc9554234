"""The tables that the fused kernels read: settings of groups, and where everything of a tensor is.

`Plan` lays out the tensors of a step once: which matrices they are, which tiles and blocks those
have, where in the work space their partial sums go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from maxfactor.backends.step_io import Work
from maxfactor.backends.triton.kernels import layout as K  # noqa: N812
from maxfactor.distributed.placement import first_index, held, local, shards_of
from maxfactor.rule.reference import ADAFACTOR_MAX_STEP
from maxfactor.rule.rounding import is_stochastic
from maxfactor.settings import FLOAT32_TINY, AdafactorHyper, Hyper, MaxFactorHyper
from maxfactor.state import factoring

if TYPE_CHECKING:
    from collections.abc import Sequence

STORES = {"int8": tl.int8, "bf16": tl.bfloat16, "fp32": tl.float32}
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Shape = tuple[int, ...]
Matrix = tuple[int, int, int]  # rows, columns, position of the first element


# ------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Part(Work):
    """What this rank holds of a parameter, its gradient and state: all, where nothing is sharded.

    The gradient may still have to be placed as the parameter is: only its dtype is of use here.
    """

    whole: Shape
    first: Shape  # index in the whole parameter of the first element here

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.whole)


def part_of(work: Work) -> Part:
    """The tensors that the kernels get."""
    state = {key: local(value) for key, value in work.state.items()}
    whole = tuple(work.param.shape)
    first = (0,) * len(whole)
    if shards_of(work.param) and is_stochastic(work.param.dtype, work.hyper):
        first = first_index(work.param)
    return Part(work.name, held(work.param), held(work.grad), work.hyper, state, whole, first)


def settings_of(hyper: Hyper) -> list[float]:
    """A group's row of the table of settings."""
    row = {"BETA2_DECAY": hyper.beta2_decay, "EPS1": hyper.eps1, "EPS2": hyper.eps2}
    row |= {"WEIGHT_DECAY": hyper.weight_decay, "KAPPA_HIGH": 1.0, "D": 1.0}
    if isinstance(hyper, MaxFactorHyper):
        low, high = hyper.kappa_bounds
        row |= {"FLOOR": hyper.floor, "VARIANCE_FLOOR": hyper.variance_floor, "D": hyper.d}
        row |= {"GAMMA": hyper.gamma, "ONE_MINUS_GAMMA": 1.0 - hyper.gamma}
        row |= {"MIN_LR": hyper.min_lr, "COUNT_EPS": hyper.count_eps}
        row |= {"KAPPA_LOW": low, "KAPPA_HIGH": high, "CLIP": hyper.clip_threshold}
        row |= {"BOOST": hyper.scalar_boost or 0.0, **memory_settings(hyper)}
    elif isinstance(hyper, AdafactorHyper):
        row |= {"FLOOR": FLOAT32_TINY, "VARIANCE_FLOOR": FLOAT32_TINY}
        row |= {"OFFSET": hyper.eps1, "CLIP": hyper.clip_threshold}
    values = [0.0] * K.SETTINGS.value
    for name, value in row.items():
        values[getattr(K, name).value] = value
    return values


def memory_settings(hyper: MaxFactorHyper) -> dict[str, float]:
    """The settings of the momentum; without one, (13) gives the input back."""
    if hyper.momentum is None:
        return {"MIX": 1.0, "LOG_BETA": -math.inf}
    beta = hyper.fixed_beta
    row = {"FIXED_BETA": beta, "LOG_BETA": math.log(beta) if beta else -math.inf, "MIX": hyper.mix}
    if (fam := hyper.fam) is not None:
        row |= {"BETA_MIN": fam.beta_min, "BETA_MAX": fam.beta_max, "THETA": fam.theta}
        row["WARMUP"] = fam.warmup
    return row


def flags_of(work: Part) -> int:
    """What a tensor's rule does differently, as bits."""
    hyper, vector = work.hyper, len(work.whole) < 2
    bits = {"VECTOR": vector, "MAXIMIZE": hyper.maximize}
    bits["DENSE"] = vector or hyper.keeps_dense_variance(work.numel)
    bits["STOCHASTIC"] = is_stochastic(work.param.dtype, hyper)
    if isinstance(hyper, MaxFactorHyper):
        bits["MAX_NORM"] = hyper.max_norm
        bits["SIGN"] = hyper.vector_direction == "sign_max" if vector else hyper.max_norm
        bits["FACTORED"] = hyper.direction == "factored"
        bits["SIGN"] &= not bits["FACTORED"]
        bits["FILTERED"] = hyper.is_filtered(is_vector=vector)
        bits["WHITENS"] = hyper.direction == "orthogonal" and not vector
        bits["ADAPTIVE"] = hyper.fam is not None and not vector
        bits["INITIAL"] = hyper.keeps_initial_rms
        bits["BOOSTED"] = hyper.is_boosted_scalar(work.numel)
        bits["RAMP"] = hyper.step_rule == "ramp"
        bits["DECAY_BY_LR"] = hyper.decay_by == "lr"
        bits["DECAY_BY_RHO"] = hyper.decay_by == "relative_step"
    elif isinstance(hyper, AdafactorHyper):
        bits |= {"ADAFACTOR": True, "MAX_NORM": True, "ABSOLUTE": not hyper.relative_step}
        bits["DECAY_BY_LR"] = hyper.lr is not None
    return sum(int(getattr(K, name).value) for name, value in bits.items() if value)


def is_general(hyper: Hyper, flags: int) -> bool:
    """Whether a tensor needs more than signs and row maxima."""
    if not isinstance(hyper, MaxFactorHyper):
        return True
    if flags & K.WHITENS.value:
        return False
    plain_sign = flags & K.SIGN.value and not flags & K.BOOSTED.value
    return not plain_sign or hyper.d < 1.0 or hyper.clip_threshold > 0.0


def rate_of(hyper: Hyper) -> float | Tensor:
    """The learning rate, where Adafactor without one has the paper's cap."""
    assert isinstance(hyper, (MaxFactorHyper, AdafactorHyper))
    return ADAFACTOR_MAX_STEP if hyper.lr is None else hyper.lr


def rate_address(hyper: Hyper) -> int:
    """Where a learning rate that lives on the device is; 0 for one that the host knows."""
    rate = rate_of(hyper)
    return rate.data_ptr() if isinstance(rate, Tensor) and rate.device.type != "cpu" else 0


def rate_value(hyper: Hyper) -> float:
    """The learning rate as the host knows it; 0 fills the place of one on the device."""
    rate = rate_of(hyper)
    return 0.0 if isinstance(rate, Tensor) and rate.device.type != "cpu" else float(rate)


def fixed_settings(hyper: Hyper) -> tuple[object, ...]:
    """Everything that a plan depends on: all settings, but of the rate only where it is."""
    group = hyper.as_group()
    rate = group.pop("lr")
    on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"
    return (type(hyper), *group.items(), rate is None, id(rate) if on_device else 0)


# ---------------------------------------------------------------------------------- plan


class Key(NamedTuple):
    """What tensors must have in common to share their launches."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    aligned: bool  # every row of W, G and the variance starts on 16 bytes
    store: str | None  # of the momentum; "none" for a filter without one, None for no filter
    direct: bool  # W moves by the filtered gradient as it is, which takes no pass of its own


@dataclass
class Kind:
    """Tensors that share their launches."""

    key: Key
    general: bool
    dense: bool = False  # there is a tensor with a full variance
    whitens: bool = False  # there is one with an orthogonal direction
    peaks: bool = False  # there is one whose update is divided by its maximum, (7)
    blocks: list[tuple[int, int]] = field(default_factory=list)  # (matrix, how many)
    block_count: int = 0
    first_tile: int = 0
    tiles: int = 0

    @property
    def signed(self) -> bool:
        """Whether signs are kept as bits: not where G is needed anyway."""
        return not self.general

    @property
    def filters(self) -> bool:
        """Whether there is momentum, or an orthogonal direction."""
        return self.key.store is not None

    @property
    def has(self) -> dict[str, bool]:
        """What the kernels are compiled for, of tensors that are not like the others."""
        return {"VARIANCES": self.dense, "WHITENING": self.whitens}

    @property
    def memory(self) -> dict[str, Any]:
        """What the kernels are compiled for, of the momentum."""
        keeps = self.key.store in STORES
        return {"STORE": STORES.get(self.key.store or "", tl.float32), "KEEPS": keeps}

    @property
    def apply(self) -> K.Shape:
        """Pieces of `apply`: those of `statistics` where it takes the signs from there."""
        return K.APPLY_SIGNS if self.signed else K.APPLY_GENERAL

    @property
    def maxima(self) -> K.Shape:
        """Blocks of `maxima`."""
        return K.MAXIMA_GENERAL if self.general else K.MAXIMA


class Plan:
    """Where everything is for a fixed list of works, sorted by dtypes."""

    def __init__(self, works: Sequence[Part], keys: Sequence[Key], group_of: Sequence[int]) -> None:
        self.table: list[list[int]] = []
        self.tiles: list[tuple[int, int]] = []  # (matrix, how many)
        self.tile_count = self.block_count = 0
        self.first_of: list[int] = []  # the first matrix of each tensor
        self.tasks: list[tuple[int, int, int]] = []  # (matrix, kind, chunk) of `finalize`
        self.kinds: dict[Key, Kind] = {}
        self.general = {
            key
            for key, work in zip(keys, works, strict=True)
            if is_general(work.hyper, flags_of(work))
        }
        self.sizes = dict.fromkeys(("rows", "row_part", "col_part", "row_chunks", "col_chunks"), 0)
        for owner, work in enumerate(works):
            self._add(owner, work, keys[owner], group_of[owner])
        self.kinds = {key: kind for key, kind in self.kinds.items() if kind.tiles > 0}

    def _add(self, owner: int, work: Part, key: Key, group: int) -> None:
        flags = flags_of(work)
        common = {"STEP": work.state["step"].data_ptr(), "FLAGS": flags, "GROUP": group}
        common |= {"OWNER": owner, "NUMEL": work.numel}
        for name in ("momentum", "momentum_scale", "band_sums", "initial_rms"):
            if name in work.state:
                common[name.upper()] = work.state[name].data_ptr()
        self.first_of.append(len(self.table))
        matrices = matrices_of(work)
        if not matrices:
            task = K.OF_EMPTY if work.numel == 0 else K.OF_TENSOR
            self.tasks.append((len(self.table), task.value, 0))
            self._append(common)
            return
        kind = self.kinds.get(key) or Kind(key, key in self.general, first_tile=self.tile_count)
        self.kinds[key] = kind
        kind.dense |= bool(flags & K.DENSE.value)
        kind.whitens |= bool(flags & K.WHITENS.value)
        kind.peaks |= not flags & (K.FACTORED.value | K.WHITENS.value)
        first, first_tile, first_block = len(self.table), self.tile_count, kind.block_count
        for batch, shape in enumerate(matrices):
            self._add_matrix(work, shape, batch, common, kind)
        tiles = self.tile_count - first_tile
        for entry in self.table[first:]:
            entry[K.OWNER_TILE.value], entry[K.OWNER_TILES.value] = first_tile, tiles
            entry[K.OWNER_BLOCK.value] = self.block_count + entry[K.FIRST_BLOCK.value] - first_block
            entry[K.OWNER_BLOCKS.value] = kind.block_count - first_block
        self.block_count += kind.block_count - first_block
        kind.tiles += tiles
        self.tasks.append((first, K.OF_TENSOR.value, 0))

    def _add_matrix(
        self, work: Part, shape: Matrix, batch: int, common: dict[str, int], kind: Kind
    ) -> None:
        """Add a matrix of a batch."""
        m, n, start = shape
        k = len(self.table)
        strips, down = ceil_div(n, K.COLUMNS), ceil_div(m, K.TILE_ROWS)
        entry = {"ROWS": m, "COLS": n, "START": start, "STRIPS": strips, "DOWN": down}
        entry |= {"FIRST_TILE": self.tile_count, "ROW_SPACE": self._reserve("rows", m)}
        entry |= {"FIRST_BLOCK": kind.block_count, **in_whole(work, shape, batch)}
        if common["FLAGS"] & K.DENSE.value:
            entry["COL_VAR"] = work.state["variance"].data_ptr() + 4 * start
        else:
            entry |= self._add_factors(work, (m, n), batch, (strips, down))
        self.tiles.append((k, down * strips))
        self.tile_count += down * strips
        kind.blocks.append((k, ceil_div(m, kind.maxima.rows) if n else 0))
        kind.block_count += kind.blocks[-1][1]
        self._append({**common, **entry})

    def _add_factors(
        self, work: Part, shape: tuple[int, int], batch: int, tiles: tuple[int, int]
    ) -> dict[str, int]:
        """Places of a factored matrix' statistics and partial sums; `tiles` across and down."""
        (m, n), (strips, down), k = shape, tiles, len(self.table)
        row_chunks, col_chunks = ceil_div(m, K.CHUNK), ceil_div(n, K.CHUNK)
        self.tasks += [(k, K.OF_ROWS.value, chunk) for chunk in range(row_chunks)]
        self.tasks += [(k, K.OF_COLS.value, chunk) for chunk in range(col_chunks)]
        return {
            "ROW_VAR": work.state["row_var"].data_ptr() + 4 * batch * m,
            "COL_VAR": work.state["col_var"].data_ptr() + 4 * batch * n,
            "ROW_PART": self._reserve("row_part", strips * m),
            "COL_PART": self._reserve("col_part", down * n),
            "ROW_CHUNK": self._reserve("row_chunks", row_chunks),
            "ROW_CHUNKS": row_chunks,
            "COL_CHUNK": self._reserve("col_chunks", col_chunks),
        }

    def _append(self, entry: dict[str, int]) -> None:
        row = [0] * K.TABLE.value
        for name, value in entry.items():
            row[getattr(K, name).value] = value
        self.table.append(row)

    def _reserve(self, what: str, count: int) -> int:
        place = self.sizes[what]
        self.sizes[what] += count
        return place


def keys_of(works: Sequence[Part]) -> list[Key]:
    """The kind of each tensor; two kinds if possible, so that a step has at most eight launches."""
    keys = [
        Key(w.param.dtype, w.grad.dtype, is_aligned(w), store_of(w), is_direct(w)) for w in works
    ]
    if len(set(keys)) > 2:
        keys = [key._replace(aligned=False) for key in keys]
    return keys


def store_of(work: Part) -> str | None:
    """How a tensor's momentum is stored, as `Key` wants it."""
    hyper, vector = work.hyper, len(work.whole) < 2
    if not isinstance(hyper, MaxFactorHyper) or not hyper.is_filtered(is_vector=vector):
        return None
    return hyper.momentum_store(is_vector=vector) or "none"


def is_direct(work: Part) -> bool:
    """Whether nothing of the whole tensor decides how W moves, once the gradient is filtered."""
    hyper = work.hyper
    if not isinstance(hyper, MaxFactorHyper) or not flags_of(work) & K.FILTERED.value:
        return False
    return hyper.direction == "factored" and math.isinf(hyper.d)


def is_aligned(work: Part) -> bool:
    """Whether 16 bytes at a time may be moved everywhere in a tensor."""
    rows_fit = all(n % 8 == 0 and start % 8 == 0 for _, n, start in matrices_of(work))
    return rows_fit and not (work.param.data_ptr() | work.grad.data_ptr()) & 15


def ceil_div(a: int, b: int) -> int:
    """How many pieces of b it takes to hold a."""
    return -(-a // b)


def matrices_of(work: Part) -> list[Matrix]:
    """Each matrix of a tensor, or what this rank holds of it, down to no rows or no columns.

    A vector becomes full rows of one tile's width, and the rest of it a shorter row.
    """
    shape, numel = tuple(work.param.shape), work.param.numel()
    layout = factoring(work.whole, work.hyper.factor)
    if work.numel == 0:
        return []
    if layout is not None:
        *batch, m, n = layout.of_shard(shape).matrix
        return [(m, n, index * m * n) for index in range(math.prod(batch))]
    whole = numel // K.COLUMNS * K.COLUMNS
    pieces = [(whole // K.COLUMNS, K.COLUMNS, 0), (1, numel - whole, whole)]
    return [piece for piece in pieces if piece[0] * piece[1] > 0]


def in_whole(work: Part, shape: Matrix, batch: int) -> dict[str, int]:
    """The size of the matrix that `shape` is a shard of, and where in the tensor that begins."""
    m, n, start = shape
    layout = factoring(work.whole, work.hyper.factor)
    if layout is None:
        return {"ALL_ROWS": m, "ALL_COLS": n, "ORIGIN": sum(work.first) + start, "STRIDE": n}
    m, n = layout.matrix[-2:]
    first = sum(at * math.prod(work.whole[d + 1 :]) for d, at in enumerate(work.first))
    return {"ALL_ROWS": m, "ALL_COLS": n, "ORIGIN": first + batch * m * n, "STRIDE": n}


def repeated(runs: Sequence[tuple[int, int]]) -> Tensor:
    """Each value as often as its count says."""
    table = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(-1, 2)
    values, counts = table.unbind(dim=1)
    return torch.repeat_interleave(values, counts)
