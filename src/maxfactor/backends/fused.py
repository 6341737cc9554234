"""The fused backend: a fixed number of Triton launches per step, and no wait for the device.

`Plan` lays out the tensors of a step once: which matrices they are, which tiles and blocks those
have, where in the work space their partial sums go. `FusedStep` keeps a plan while the tensors
stay the same, brings new addresses and settings to the device when they change, and launches.
"""

from __future__ import annotations

import math
import operator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from maxfactor.backends.kernels import layout as K  # noqa: N812
from maxfactor.backends.kernels.maxima import maxima, rescale
from maxfactor.backends.kernels.momentum import filtered
from maxfactor.backends.kernels.statistics import finalize, statistics
from maxfactor.backends.kernels.weights import apply
from maxfactor.guard import LIMIT, given_up, refused
from maxfactor.hyper import FLOAT32_TINY, AdafactorHyper, Hyper, MaxFactorHyper
from maxfactor.orthogonal import orthogonal
from maxfactor.placement import first_index, held, held_as, is_sharded, local, shards_of
from maxfactor.rounding import as_int32, is_stochastic, seed_key
from maxfactor.rule import ADAFACTOR_MAX_STEP
from maxfactor.state import factoring
from maxfactor.work import Outcome, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

# What is asked of every tensor in every step; `map` with these is several times a loop's speed.
GRAD, DTYPE, LAYOUT, VERSION = map(operator.attrgetter, ("grad", "dtype", "layout", "_version"))
STRIDED = {torch.strided}
WHITENED_AT_ONCE = 1 << 26  # elements
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


@dataclass
class Kind:
    """Tensors that share their launches."""

    key: Key
    general: bool
    dense: bool = False  # there is a tensor with a full variance
    whitens: bool = False  # there is one with an orthogonal direction
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
        if self.signed:
            return K.APPLY_SIGNS
        return K.APPLY_GENERAL if self.general else K.APPLY

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
    keys = [Key(w.param.dtype, w.grad.dtype, is_aligned(w), store_of(w)) for w in works]
    if len(set(keys)) > 2:
        keys = [key._replace(aligned=False) for key in keys]
    return keys


def store_of(work: Part) -> str | None:
    """How a tensor's momentum is stored, as `Key` wants it."""
    hyper, vector = work.hyper, len(work.whole) < 2
    if not isinstance(hyper, MaxFactorHyper) or not hyper.is_filtered(is_vector=vector):
        return None
    return hyper.momentum_store(is_vector=vector) or "none"


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
    values, counts = torch.tensor(runs, dtype=torch.int64).reshape(-1, 2).unbind(dim=1)
    return torch.repeat_interleave(values, counts)


# --------------------------------------------------------------------- orthogonal direction


class Whitening:
    """The buffer that orthogonal directions go through, and their iteration.

    `filtered` writes into it what is to be orthogonalised, matrices of equal shape side by side;
    `apply` reads the directions. It is there only for the time of a step.
    """

    def __init__(self, works: Sequence[Part]) -> None:
        self.device = works[0].param.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.kind = KINDS[self.dtype]
        shapes: dict[tuple[int, int], list[int]] = {}
        for index, work in enumerate(works):
            if work.param.numel() and flags_of(work) & K.WHITENS.value:
                m, n, _ = matrices_of(work)[0]
                shapes.setdefault((m, n), []).append(index)
        self.groups = list(shapes.items())
        self.numel = sum(m * n * len(members) for (m, n), members in self.groups)
        self.buffer: Tensor | None = None

    def addresses(self, count: int) -> list[int]:
        """Make the buffer; where each tensor's matrix is in it, 0 for those that have none."""
        places = [0] * count
        if not self.groups:
            return places
        self.buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        at = self.buffer.data_ptr()
        for (m, n), members in self.groups:
            for index in members:
                places[index] = at
                at += m * n * self.buffer.element_size()
        return places

    def run(self) -> None:
        """Orthogonalise everything in the buffer, in batches of a bounded size."""
        start = 0
        for (m, n), members in self.groups:
            assert self.buffer is not None
            size = m * n * len(members)
            matrices = self.buffer[start : start + size].view(-1, m, n)
            for batch in matrices.split(max(1, WHITENED_AT_ONCE // (m * n))):
                batch.copy_(orthogonal(batch))
            start += size

    def release(self) -> None:
        """Give the memory back to torch."""
        self.buffer = None


# ---------------------------------------------------------------------------------- step


class FusedStep:
    """Runs steps for one set of tensors, for as long as they stay where they are.

    `owners` are the optimizer's parameters, `params` what this rank holds of them.

    Args:
        works: What the optimizer collected; their states' `step` moves to the device.
        flat: All parameters of all groups, those without a gradient included.
        hypers: The settings of all groups.
        status: The counters of a predecessor, to be carried on.
    """

    def __init__(
        self,
        works: Sequence[Work],
        flat: Sequence[Tensor],
        hypers: Sequence[Hyper],
        status: Tensor | None = None,
    ) -> None:
        self.device = works[0].param.device
        for work in works:
            work.state["step"] = work.state["step"].to(self.device, non_blocking=True)
        parts = [part_of(work) for work in works]
        kinds = sorted(zip(map(str, keys_of(parts)), range(len(works)), strict=True))
        self.order = [index for _, index in kinds]  # tensors of a kind side by side
        works, parts = [works[i] for i in self.order], [parts[i] for i in self.order]
        self.keys = keys_of(parts)
        self.names = [work.name for work in works]
        self.owners = [work.param for work in works]
        self.params = [part.param for part in parts]
        self.states = [work.state for work in works]
        self.has_shards = any(map(is_sharded, self.owners))
        self.grad_types = [type(work.grad) for work in works]
        self.tensors = list(chain.from_iterable(map(dict.values, self.states)))
        self.grad_dtypes = [key.grad_dtype for key in self.keys]
        self.flat = list(flat)
        active = {id(param) for param in self.owners}
        self.idle = [param for param in flat if id(param) not in active]
        self.fixed = [fixed_settings(hyper) for hyper in hypers]
        group_of = {id(hyper): index for index, hyper in enumerate(hypers)}
        self.plan = Plan(parts, self.keys, [group_of[id(part.hyper)] for part in parts])
        self.layouts = layouts(self.params)
        self.whitening = Whitening(parts)
        self.stand_ins = {
            i: torch.empty_like(param, memory_format=torch.contiguous_format)
            for i, param in enumerate(self.params)
            if not param.is_contiguous()
        }
        self.kept: list[Tensor] = []  # host memory that a captured graph reads at every replay
        self.grads: list[Any] = []  # of this step, gathered by `fits`
        self.found: list[int] = []  # where W and G were in the last step
        self.addresses: list[int] = []  # the same for the kernels, copies in place of strided ones
        self.versions: list[int] = []  # of the parameters whose squares are known
        self._allocate(status)
        self._upload(hypers)

    # Tables and work space -------------------------------------------------------------

    def _allocate(self, status: Tensor | None) -> None:
        plan, device = self.plan, self.device
        kinds = list(plan.kinds.values())
        tensors = len(self.params)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tasks = self._to_device(plan.tasks, torch.int32)
        self.tile_matrix = self._to_device(repeated(plan.tiles), torch.int32)
        self.blocks = [self._to_device(repeated(kind.blocks), torch.int32) for kind in kinds]
        self.first_of = self._to_device(plan.first_of, torch.int32)
        self.row_part = zeros(plan.sizes["row_part"])
        self.row_peak = zeros(plan.sizes["row_part"], 2, dtype=torch.int32)
        self.col_part = zeros(plan.sizes["col_part"])
        self.ratios = zeros(plan.sizes["col_chunks"], 2)
        self.row_sum_var = zeros(plan.sizes["row_chunks"])
        self.row_max = zeros(plan.sizes["rows"], dtype=torch.int32)
        self.extremes = zeros(len(plan.table), 3, dtype=torch.int32)
        self.squares, self.update_squares = zeros(plan.tile_count), zeros(plan.block_count)
        self.unsigned = zeros(plan.tile_count, dtype=torch.int8)
        tiles = plan.tile_count if any(kind.filters for kind in kinds) else 0
        self.tile_sums, self.filter_sums = (zeros(tiles, K.SUMS.value) for _ in range(2))
        self.scalars = zeros(tensors, K.SCALARS.value)
        self.update_max, self.bad = (zeros(tensors, dtype=torch.int32) for _ in range(2))
        self.status = zeros(K.STATUS.value, dtype=torch.int32) if status is None else status
        self.zero, self.one = zeros(1), zeros(1) + 1.0  # where GradScaler has given no tensors
        self.report = torch.zeros(K.STATUS.value, dtype=torch.int32)
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.report = self.report.pin_memory()

    def _upload(self, hypers: Sequence[Hyper]) -> None:
        self.settings = self._to_device([settings_of(hyper) for hyper in hypers], torch.float32)
        keys = [as_int32(seed_key(hyper.seed or 0)) for hyper in hypers]
        self.seed_keys = self._to_device(keys, torch.int32)
        self.rates = torch.zeros(len(hypers), device=self.device)
        self.rate_values: list[float] = []
        places = [rate_address(hyper) for hyper in hypers]
        for entry in self.plan.table:
            group = entry[K.GROUP.value]
            entry[K.LR.value] = places[group] or self.rates.data_ptr() + 4 * group
        self.table = self._to_device(self.plan.table, torch.int64)

    def _to_device(self, values: object, dtype: torch.dtype) -> Tensor:
        """Bring a table to the device without waiting for it."""
        host = torch.as_tensor(values, dtype=dtype)
        if self.device.type != "cuda" or host.numel() == 0:
            return host.to(self.device)
        host = host.pin_memory()
        if is_capturing(self.device):
            self.kept.append(host)
        return host.to(self.device, non_blocking=True)

    # One step --------------------------------------------------------------------------

    def fits(self, flat: Sequence[Tensor], hypers: Sequence[Hyper]) -> bool:
        """Whether the tensors and settings are still those that the plan was made for.

        This and `step` run over every tensor in every step: `map`, and no calls of our own.
        """
        states = chain.from_iterable(map(dict.values, self.states))
        if (
            len(flat) != len(self.flat)
            or not all(map(operator.is_, flat, self.flat))
            or not all(map(operator.is_, states, self.tensors))
            or any(param.grad is not None for param in self.idle)
            or [fixed_settings(hyper) for hyper in hypers] != self.fixed
        ):
            return False
        grads: list[Any] = list(map(GRAD, self.owners))
        if any(map(operator.is_, grads, repeat(None))) or set(map(LAYOUT, grads)) != STRIDED:
            return False
        if list(map(DTYPE, grads)) != self.grad_dtypes:
            return False
        here = grads
        if self.has_shards:
            if list(map(type, grads)) != self.grad_types:
                return False
            self.params, here = list(map(held, self.owners)), list(map(held, grads))
        found = list(map(Tensor.data_ptr, chain(self.params, here)))
        if found != self.found and not self._may_move(found):
            return False
        self.grads, self.found = grads, found
        return True

    def _may_move(self, addresses: list[int]) -> bool:
        """Whether tensors that are elsewhere now are still laid out as the plan wants them."""
        aligned = [key.aligned for key in self.keys]
        if any(fit and at & 15 for fit, at in zip(aligned * 2, addresses, strict=True)):
            return False
        return layouts(self.params) == self.layouts

    def step(
        self,
        hypers: Sequence[Hyper],
        *,
        nonfinite: str,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Outcome:
        """Launch one step, which does nothing if a gradient is not finite or `found_inf` is set."""
        if not is_capturing(self.device):  # a graph may not ask whether an event has passed
            self._raise_if_given_up()
        rates = [rate_value(hyper) for hyper in hypers]
        if rates != self.rate_values:
            self.rates.copy_(self._to_device(rates, torch.float32), non_blocking=True)
            self.rate_values = rates
        borrowed = self._bring_addresses()
        # In-place operations on a DTensor do not show in the version of what this rank holds.
        versions = list(map(VERSION, chain(self.params, self.owners if self.has_shards else [])))
        with on_device(self.device):
            self._launch(
                check=nonfinite != "ignore",
                # A graph is replayed when nobody looks at the versions: take the squares anew.
                stale=versions != self.versions or is_capturing(self.device),
                scaled=found_inf is not None or grad_scale is not None,
                grad_scale=grad_scale if grad_scale is not None else self.one,
                found_inf=found_inf if found_inf is not None else self.zero,
            )
        for i, stand_in in self.stand_ins.items():
            self.params[i].copy_(stand_in)
        written = self.params
        if self.stand_ins:
            written = [p for i, p in enumerate(written) if i not in self.stand_ins]
        if self.has_shards:
            written = [*written, *filter(is_sharded, self.owners)]
        increment_version(written)
        self.versions = [version + 1 for version in versions]
        del borrowed  # not before the launches that read them
        self.whitening.release()
        if nonfinite == "raise" and found_inf is None:
            self._raise_if_skipped()
        elif nonfinite != "ignore":
            self._bring_report()
        return Outcome(self.scalars[:, K.ALPHA.value])

    def _bring_addresses(self) -> list[Tensor]:
        """Upload the addresses of W and G if one of them has moved; return what they belong to."""
        grads, self.grads = self.grads or list(map(GRAD, self.owners)), []
        params = self.params
        if self.has_shards:
            grads = self._held_as_owners(grads)
        if not all(map(Tensor.is_contiguous, grads)):
            grads = [grad.contiguous() for grad in grads]
        if self.stand_ins:
            params = list(params)
            for i, stand_in in self.stand_ins.items():
                params[i] = stand_in.copy_(params[i])
        addresses = [0] * (3 * len(params))
        addresses[::3] = map(Tensor.data_ptr, params)
        addresses[1::3] = map(Tensor.data_ptr, grads)
        addresses[2::3] = self.whitening.addresses(len(params))
        if addresses != self.addresses:
            self.pointers = self._to_device(addresses, torch.int64)
            self.addresses = addresses
        return grads

    def _held_as_owners(self, grads: list[Tensor]) -> list[Tensor]:
        """What this rank holds of the gradients, each placed as its parameter."""
        found = list(map(held_as, grads, self.owners))
        for i, (grad, key) in enumerate(zip(found, self.keys, strict=True)):
            if key.aligned and grad.data_ptr() & 15:  # one that `fits` has not seen in its place
                found[i] = grad.clone()
        return found

    def _launch(
        self, *, check: bool, stale: bool, scaled: bool, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        kinds = list(self.plan.kinds.values())
        options = [launch_options(kind) for kind in kinds]
        # One bit for each element, only for the time of a step.
        words = K.PIECE_ROWS * K.COLUMNS if any(kind.signed for kind in kinds) else 0
        signs = torch.empty(self.plan.tile_count, words, dtype=torch.int32, device=self.device)
        for kind, option in zip(kinds, options, strict=True):
            if stale:
                self._apply(kind, signs, grad_scale, scaled=scaled, measure=True)
            statistics[(kind.tiles,)](
                self.pointers, self.table, self.tile_matrix, self.row_part, self.row_peak,
                self.col_part, self.extremes, signs, self.unsigned, self.tile_sums, self.settings,
                self.bad, self.status, grad_scale, kind.first_tile, CHECK=check, SCALED=scaled,
                SIGNED=kind.signed and not kind.filters, FILTERS=kind.filters,
                VARIANCES=kind.filters and kind.dense,
                G_KIND=KINDS[kind.key.grad_dtype], BUNDLE_=K.BUNDLE, TILE=K.TILE_ROWS,
                **K.STATISTICS.options, **option,
            )  # fmt: skip
        self._finalize(found_inf, scaled=scaled)
        for kind, blocks in zip(kinds, self.blocks, strict=True):
            if kind.filters:
                self._filter(kind, signs, grad_scale, scaled=scaled)
            else:
                self._maxima(kind, blocks, grad_scale, scaled=scaled)
        self._rescale()
        self.whitening.run()
        for kind in kinds:
            self._apply(kind, signs, grad_scale, scaled=scaled, measure=False)

    def _finalize(self, found_inf: Tensor, *, scaled: bool) -> None:
        finalize[(len(self.tasks),)](
            self.table, self.settings, self.tasks, self.row_part, self.col_part,
            self.extremes, self.row_sum_var, self.squares, self.scalars, self.update_max,
            self.ratios, self.row_max, self.bad, self.status, found_inf,
            SCALED=scaled, CHUNK_=K.CHUNK, PARTS_=K.PARTS_AT_ONCE, num_warps=K.FINALIZE_WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip

    def _rescale(self) -> None:
        if any(kind.general or kind.filters for kind in self.plan.kinds.values()):
            rescale[(len(self.params),)](
                self.table, self.settings, self.first_of, self.update_max, self.update_squares,
                self.filter_sums, self.scalars, self.status, enable_fp_fusion=True,
            )  # fmt: skip

    def _maxima(self, kind: Kind, blocks: Tensor, grad_scale: Tensor, *, scaled: bool) -> None:
        maxima[(len(blocks),)](
            self.pointers, self.table, self.settings, blocks, self.row_peak, self.ratios,
            self.extremes, self.row_sum_var, self.row_max, self.update_max,
            self.update_squares, self.scalars, self.status, grad_scale, SCALED=scaled,
            G_KIND=KINDS[kind.key.grad_dtype], GENERAL=kind.general, BUNDLE_=K.BUNDLE,
            STRIPS_=K.STRIPS_AT_ONCE, WIDTH_=K.COLUMNS if kind.general else K.MAXIMA_WIDTH,
            **kind.maxima.options, **launch_options(kind),
        )  # fmt: skip

    def _filter(self, kind: Kind, signs: Tensor, grad_scale: Tensor, *, scaled: bool) -> None:
        filtered[(kind.tiles,)](
            self.pointers, self.table, self.settings, self.tile_matrix, self.row_sum_var,
            self.row_max, self.update_max, self.tile_sums, self.filter_sums, self.scalars, signs,
            self.unsigned, self.status, grad_scale, kind.first_tile, SCALED=scaled,
            SIGNED=kind.signed, GENERAL=kind.general, **kind.has, **kind.memory,
            O_KIND=self.whitening.kind, G_KIND=KINDS[kind.key.grad_dtype], TILE=K.TILE_ROWS,
            **K.FILTERED_SHAPE.options, **launch_options(kind),
        )  # fmt: skip

    def _apply(
        self, kind: Kind, signs: Tensor, grad_scale: Tensor, *, scaled: bool, measure: bool
    ) -> None:
        """Write the weights, or only measure them."""
        apply[(kind.tiles,)](
            self.pointers, self.table, self.settings, self.tile_matrix, self.extremes,
            self.row_sum_var, self.row_max, self.update_max, self.squares, self.scalars, signs,
            self.unsigned, self.status, grad_scale, self.seed_keys, kind.first_tile, int(measure),
            SCALED=scaled, SIGNED=kind.signed, FILTERS=kind.filters, **kind.has, **kind.memory,
            O_KIND=self.whitening.kind, P_KIND=KINDS[kind.key.param_dtype],
            G_KIND=KINDS[kind.key.grad_dtype], TILE=K.TILE_ROWS, GENERAL=kind.general,
            **kind.apply.options, **launch_options(kind),
        )  # fmt: skip

    # The guard -------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """Steps that were skipped; reading it waits for the device."""
        return int(self.status[K.SKIPPED.value].item())  # asked for by the user

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradient was not finite; reading it waits."""
        marks = self.bad.tolist()  # asked for by the user, or on the way to an error
        return [name for name, mark in zip(self.names, marks, strict=True) if mark]

    def _raise_if_skipped(self) -> None:
        if names := self.nonfinite():  # waits for the device: that is what "raise" asks for
            raise refused(names)

    def _bring_report(self) -> None:
        """Start copying the counters to the host; the next step looks whether they have come."""
        if is_capturing(self.device):
            return
        self.report.copy_(self.status, non_blocking=True)
        if self.device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self._raise_if_given_up()

    def _raise_if_given_up(self) -> None:
        if self.event is not None and not self.event.query():
            return
        in_a_row = int(self.report[K.IN_A_ROW.value])
        if in_a_row >= LIMIT:
            names = self.nonfinite()
            self.report.zero_()
            self.status[K.IN_A_ROW.value] = 0
            raise given_up(in_a_row, names)


def launch_options(kind: Kind) -> dict[str, Any]:
    """What the kernels that touch W or G are compiled for."""
    # Fusing a product and a sum into one rounding is Triton's own default; newer ones ask for it.
    return {"COLS_": K.COLUMNS, "ALIGNED": kind.key.aligned, "enable_fp_fusion": True}


def layouts(params: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """What a plan takes for granted of each parameter, besides its address."""
    return [(p.shape, p.dtype, p.device, p.is_contiguous()) for p in params]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def increment_version(params: list[Tensor]) -> None:
    """Tell autograd that the kernels wrote the parameters, as an in-place operation would."""
    try:
        torch.autograd.graph.increment_version(params)
    except (AttributeError, TypeError, RuntimeError):  # an older torch takes one at a time
        for param in params:
            torch.autograd.graph.increment_version(param)
