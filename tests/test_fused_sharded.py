"""The fused kernels on what a rank holds of sharded parameters, against plain ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from cases import no_host_sync, problem
from maxfactor import Adafactor, MaxFactor, recipe
from maxfactor.backends.step_io import StepInput
from maxfactor.distributed.placement import local
from maxfactor.settings import MaxFactorSettings
from ranks import Ranks, mesh_of

pytest.importorskip("triton")

from maxfactor.backends.triton import rounds
from maxfactor.backends.triton.orthogonal import Workspace
from maxfactor.backends.triton.workspace import ON_DEVICE
from maxfactor.backends.triton.workspace import Layout as BatchLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RUNS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "1.0": (MaxFactor, {}),
    "0.2": (MaxFactor, recipe("published-0.2")),
    "adafactor": (Adafactor, {}),
    "fam": (MaxFactor, {"momentum": {"warmup": 2, "theta": 0.8}, "scale": "initial"}),
    "orthogonal": (MaxFactor, {"momentum": 0.9, "nesterov": True, "direction": "orthogonal"}),
}
# The interpreter is slow: there a few of them, and a small net.
PAIRS = [(name, dtype) for name in RUNS for dtype in (torch.float32, torch.bfloat16)]
WIDTH = 300  # no whole rows of 16 bytes: the same instructions wherever the shards begin
if DEVICE == "cpu":
    PAIRS = [("1.0", torch.bfloat16), ("fam", torch.float32), ("orthogonal", torch.float32)]
    WIDTH = 6


class Net(nn.Module):
    """Matrices, a convolution, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.up(x).transpose(1, 2))
        return out


# ---------------------------------------------------------------------- where nothing is cut


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank: NCCL on a GPU, else gloo; over loopback and bounded in time."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)  # or the mesh warns that nobody has
    limit = timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, limit)  # type: ignore[attr-defined]
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    yield DeviceMesh(DEVICE, torch.arange(1))
    dist.destroy_process_group()


def same(sharded: nn.Module, plain: nn.Module, ours: Any, theirs: Any) -> None:
    """Equal in every bit: parameters and state."""
    for (name, shard), param in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(shard.detach()), param.detach()), name
        assert ours.state[shard].keys() == theirs.state[param].keys()
        for key, value in ours.state[shard].items():
            assert torch.equal(local(value), theirs.state[param][key]), f"{key} of {name}"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_one_rank_of_fsdp(mesh: DeviceMesh, name: str, dtype: torch.dtype) -> None:
    cls, settings = RUNS[name]
    torch.manual_seed(0)
    plain = Net().to(DEVICE, dtype)
    sharded = Net().to(DEVICE, dtype)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh)
    theirs = cls(plain.parameters(), seed=1, fused=True, **settings)
    # On a GPU the kernels are the default.
    ours = cls(sharded.parameters(), seed=1, fused=None if DEVICE == "cuda" else True, **settings)
    for t in range(3):
        x = torch.randn(4, 7, 3, device=DEVICE, dtype=dtype)
        sharded(x).square().mean().backward()
        if t == 1:  # somebody else writes, by the DTensor
            with torch.no_grad():
                for shard, param in zip(sharded.parameters(), plain.parameters(), strict=True):
                    shard.mul_(1.5)
                    param.mul_(1.5)
        for shard, param in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert shard.grad is not None
            param.grad = local(shard.grad).clone()
        theirs.step()
        quiet = no_host_sync() if DEVICE == "cuda" and t > 0 else nullcontext()
        with quiet, CommDebugMode() as counted:
            ours.step()
        assert counted.get_total_counts() == 0
        ours.zero_grad()
    assert ours._fused is not None
    same(sharded, plain, ours, theirs)
    assert ours.effective_lr() == theirs.effective_lr()
    assert ours.skipped == theirs.skipped == 0


@pytest.mark.gpu
def test_placements_of_gradients(mesh: DeviceMesh) -> None:
    """A gradient that is placed otherwise is placed as its parameter, step by step."""
    weight, grad = torch.randn(6, 9, device=DEVICE), torch.randn(6, 9, device=DEVICE)
    shard = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Shard(0)]))
    param = nn.Parameter(weight.clone())
    ours, theirs = MaxFactor([shard], fused=True), MaxFactor([param], fused=True)
    for placement in (Shard(0), Partial(), Shard(1)):
        param.grad = grad.clone()
        shard.grad = DTensor.from_local(grad.clone(), mesh, [placement])
        ours.step()
        theirs.step()
        assert torch.equal(local(shard.detach()), param.detach())
        assert torch.equal(local(shard.grad), grad), "the gradient belongs to the user"


@pytest.mark.gpu
def test_a_nan_skips_the_step(mesh: DeviceMesh) -> None:
    shard = nn.Parameter(distribute_tensor(torch.ones(6, 9, device=DEVICE), mesh, [Shard(0)]))
    optimizer = MaxFactor([shard], fused=True)
    for value in (1.0, float("nan"), 1.0):
        before = local(shard.detach()).clone()
        grad = torch.ones(6, 9, device=DEVICE)
        grad[2, 3] = value
        shard.grad = distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
        assert torch.equal(local(shard.detach()), before) == (value != 1.0)
    assert optimizer.skipped == 1
    assert float(optimizer.state[shard]["step"]) == 2.0


# ------------------------------------------------------------------ where parameters are cut

Shape = tuple[int, ...]
Layout = tuple[int | None, ...]  # the cut dimension for each mesh dimension, None for copies

STEPS = 2 if DEVICE == "cpu" else 4
# Two strips and uneven rows; no rows or no columns on a rank; vectors and a scalar; a convolution.
SHAPES: list[Shape] = [(3, 70), (1, 4, 5), (2, 1), (5,), (1,), (), (3, 2, 2), (0, 3)]
FAM = {"momentum": {"warmup": 1, "theta": 0.8}}
ORTHOGONAL: dict[str, Any] = {"direction": "orthogonal"}
LAST = {"switches": {"factor": "last"}}
SETTINGS: dict[str, tuple[type[Any], dict[str, Any], Layout]] = {
    # Without floors max R is of no consequence.
    "1.0 rows": (MaxFactor, {"eps": (1.0, 0.5)}, (0,)),
    "1.0 columns": (MaxFactor, {}, (1,)),
    "0.2 columns": (MaxFactor, recipe("published-0.2"), (1,)),
    "0.3 rows": (MaxFactor, recipe("published-0.3"), (0,)),
    "last": (MaxFactor, {**LAST, "d": 0.2, "scale": "initial"}, (2,)),
    "dense": (MaxFactor, {"switches": {"full_matrix": True}, "maximize": True}, (1,)),
    "adafactor rows": (Adafactor, {}, (0,)),
    "fam rows": (MaxFactor, FAM | {"scale": "initial"}, (0,)),
    "fam unclipped": (MaxFactor, FAM | {"direction": "factored", "d": math.inf}, (0,)),
    "fam columns": (MaxFactor, FAM | {"momentum_dtype": "fp32"}, (1,)),
}
ROUNDED: list[Layout] = [(0,), (1,)]
# All messages of a step, and how many of them are all-reduces.
COUNTED: list[tuple[Layout, dict[str, Any], tuple[int, int]]] = [
    ((0,), {}, (3, 3)),
    ((1,), {}, (2, 2)),  # max R is known where columns are cut
    ((0,), FAM, (2, 2)),
    ((0,), ORTHOGONAL | {"momentum": 0.9}, (4, 2)),  # the vectors have a maximum
    ((0, 1), ORTHOGONAL, (7, 3)),  # two process groups, of which one cuts the vectors
]
LARGER: list[Shape] = []
if DEVICE == "cuda":  # the interpreter is too slow for more
    LARGER = [(70, 520), (600, 40), (33, 301), (1000,), (48, 8, 3)]
    SETTINGS |= {
        "factored": (MaxFactor, {"direction": "factored"}, (0,)),
        "adafactor columns": (Adafactor, {"factor": "last", "lr": 0.03}, (1,)),
        "copies": (MaxFactor, {}, (None,)),
        "1.0 rows and columns": (MaxFactor, {}, (0, 1)),
        "fam rows twice": (MaxFactor, FAM | {"momentum_dtype": "fp32"}, (0, 0)),
        "adafactor copies of columns": (Adafactor, {}, (None, 1)),
        "last rows and columns": (MaxFactor, LAST, (1, 0)),
    }
    ROUNDED += [(0, 1), (0, 0)]
    COUNTED += [((0, 1), {}, (5, 5)), ((None, 0), {}, (3, 3))]


def mesh_for(layout: Layout) -> DeviceMesh | None:
    return mesh_of(*(2,) * len(layout), device=DEVICE)


def placed(x: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A tensor that every rank has, as a DTensor; a dimension that it lacks is not cut."""
    cuts = [None if cut is None or cut >= x.dim() else cut for cut in layout]
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    return distribute_tensor(x.to(DEVICE), mesh, placements, src_data_rank=None)


def same_part(ours: Tensor, theirs: Tensor, what: str, tolerance: float = 1e-6) -> None:
    """Equal to this rank's part of what a single process has."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    size = 1.0 if "momentum" in what else 0.0  # of what it averages, and may cancel
    size = max(size, float(theirs.abs().max()) if theirs.numel() else 0.0)
    if isinstance(ours, DTensor):
        assert not any(placement.is_partial() for placement in ours.placements), what
        theirs = distribute_tensor(theirs, ours.device_mesh, ours.placements, src_data_rank=None)
        ours, theirs = local(ours), local(theirs)
    if ours.dtype == torch.int8:
        assert int((ours.int() - theirs.int()).abs().sum()) <= 2, what  # on the edge of a code
        return
    theirs, relative = theirs.to(ours.device), 2.0 * tolerance
    torch.testing.assert_close(
        ours, theirs, rtol=relative, atol=tolerance * size, msg=lambda m: what + m
    )


def is_orthogonal(settings: dict[str, Any]) -> bool:
    return settings.get("direction") == "orthogonal"


def tolerance_of(settings: dict[str, Any]) -> float:
    """Of parameters next to those of one process. The iteration amplifies rounding.

    On a GPU shards are sent in bfloat16, and iterated and returned in float16.
    """
    if not is_orthogonal(settings):
        return 1e-6
    return 3e-4 if DEVICE == "cuda" else 1e-5


Tensors = list[tuple[Shape, Layout, dict[str, Any]]]  # with the settings of their groups


def stepped_beside(
    cls: type[Any], settings: dict[str, Any], tensors: Tensors, mesh: DeviceMesh
) -> Any:
    """The optimizer of shards, by the kernels, after steps next to one of whole tensors.

    They are compared after each step: parameters, gradients and every state.
    """
    tolerance = tolerance_of(settings)
    # On a GPU the iteration has the format of the kernels, which torch operations do not have.
    by_kernels = DEVICE == "cuda" and is_orthogonal(settings)
    cases = [problem(shape, steps=STEPS, seed=i) for i, (shape, _, _) in enumerate(tensors)]
    for case in cases:
        case.grads.reverse()  # from large to small: a maximum of the last step would be seen
    layouts, own = [each for _, each, _ in tensors], [each for _, _, each in tensors]
    params = [nn.Parameter(case.weight.clone().to(DEVICE)) for case in cases]
    placed_weights = [placed(c.weight, mesh, at) for c, at in zip(cases, layouts, strict=True)]
    shards = [nn.Parameter(weight) for weight in placed_weights]
    groups = [
        [{"params": [p], **each} for p, each in zip(ps, own, strict=True)]
        for ps in (params, shards)
    ]
    single = cls(groups[0], foreach=None if by_kernels else False, fused=by_kernels, **settings)
    sharded = cls(groups[1], fused=None if DEVICE == "cuda" else True, **settings)
    for t in range(STEPS):
        for case, at, param, shard in zip(cases, layouts, params, shards, strict=True):
            param.grad = case.grads[t].clone().to(DEVICE)
            shard.grad = placed(case.grads[t], mesh, at)
        single.step()
        sharded.step()
        for case, param, shard in zip(cases, params, shards, strict=True):
            what = f"{tuple(param.shape)} at {t}: "
            same_part(shard.detach(), param.detach(), f"parameter {what}", tolerance)
            assert shard.grad is not None
            same_part(shard.grad, case.grads[t].to(DEVICE), "the gradient is the user's: ")
            assert sharded.state[shard].keys() == single.state[param].keys()
            for key, value in sharded.state[shard].items():
                same_part(value, single.state[param][key], f"{key} of {what}")
    assert sharded.effective_lr() == pytest.approx(single.effective_lr(), rel=max(1e-6, tolerance))
    return sharded


def equals_one_process(name: str) -> None:
    """All shapes in one optimizer, next to the same without shards and without kernels."""
    cls, settings, layout = SETTINGS[name]
    mesh = mesh_for(layout)
    if mesh is None:
        return
    in_codes = "momentum" in settings and "momentum_dtype" not in settings
    shapes = SHAPES if in_codes else SHAPES + LARGER  # many codes have some on the edge of another
    tensors: Tensors = [(shape, layout, {}) for shape in shapes]
    sharded = stepped_beside(cls, settings, tensors, mesh)
    assert sharded._fused is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_one_process(four: Ranks, name: str) -> None:
    four.run(equals_one_process, name)


def rounds_alike(layout: Layout) -> None:
    mesh = mesh_for(layout)
    if mesh is None:
        return
    case = problem((3, 70), dtype=torch.bfloat16, steps=2)
    param = nn.Parameter(case.weight.clone().to(DEVICE))
    shard = nn.Parameter(placed(case.weight, mesh, layout))
    single, sharded = (MaxFactor([p], seed=3, fused=True) for p in (param, shard))
    for grad in case.grads:
        param.grad, shard.grad = grad.clone().to(DEVICE), placed(grad, mesh, layout)
        single.step()
        sharded.step()
    theirs = placed(param.detach(), mesh, layout)
    assert torch.equal(local(shard.detach()), local(theirs))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ROUNDED, ids=str)
def test_stochastic_rounding(four: Ranks, layout: Layout) -> None:
    """The same noise at the same place of the whole tensor."""
    four.run(rounds_alike, layout)


def messages(count: int, layout: Layout, settings: dict[str, Any]) -> tuple[int, int] | None:
    """All messages of a second step, and how many of them are all-reduces."""
    mesh = mesh_for(layout)
    if mesh is None:
        return None
    cases = [problem(shape, steps=1) for shape in [(2, 3), (5,)] * count]
    shards = [nn.Parameter(placed(case.weight, mesh, layout)) for case in cases]
    optimizer = MaxFactor(shards, fused=True, **settings)
    for case, shard in zip(cases, shards, strict=True):
        shard.grad = placed(case.grads[0], mesh, layout)
    with CommDebugMode() as counted:
        optimizer.step()
    found = {str(op): times for op, times in counted.get_comm_counts().items()}
    return sum(found.values()), sum(n for op, n in found.items() if "reduce" in op)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "settings", "expected"), COUNTED, ids=str)
def test_messages_of_a_step(
    four: Ranks, layout: Layout, settings: dict[str, Any], expected: tuple[int, int]
) -> None:
    """At most three for each process group, whatever the number of parameters.

    Only matrices with an orthogonal direction are gathered, all of them by one message.
    """
    for count in (1, 2):
        assert four.run(messages, count, layout, settings)[0] == expected


def fails_alike(nonfinite: Any, rows: int, settings: dict[str, Any]) -> None:
    """The last row has a NaN; with a single row the second rank has nothing at all."""
    mesh = mesh_for((0,))
    if mesh is None:
        return
    case = problem((rows, 6), steps=3)
    param = nn.Parameter(case.weight.clone().to(DEVICE))
    shard = nn.Parameter(placed(case.weight, mesh, (0,)))
    gain = nn.Parameter(placed(torch.ones(1), mesh, (0,)))
    others = [("g", gain)]
    if rows > 1:
        others += [("b", nn.Parameter(torch.ones(3, device=DEVICE)))]  # a plain one beside it
    single = MaxFactor([("w", param)], fused=True, nonfinite=nonfinite, **settings)
    sharded = MaxFactor([*others, ("w", shard)], fused=True, nonfinite=nonfinite, **settings)
    for t in range(3):
        grad = case.grads[t].clone()
        if t == 1:
            grad[-1, 1] = float("nan")
        param.grad, shard.grad = grad.to(DEVICE), placed(grad, mesh, (0,))
        for _, other in others:
            other.grad = torch.ones_like(other)
        for optimizer in (single, sharded):
            if t == 1 and nonfinite == "raise":
                with pytest.raises(FloatingPointError, match="'w' is"):
                    optimizer.step()
            else:
                optimizer.step()
    assert sharded.skipped == single.skipped == 1
    for _, other in [*others, ("w", shard)]:
        assert float(sharded.state[other]["step"]) == 2.0
    same_part(shard.detach(), param.detach(), "parameter: ", tolerance_of(settings))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("nonfinite", "rows", "settings"),
    [("skip", 4, {}), ("raise", 4, {}), ("skip", 1, {}), ("skip", 4, ORTHOGONAL)],
)
def test_nan_on_one_rank(four: Ranks, nonfinite: Any, rows: int, settings: dict[str, Any]) -> None:
    four.run(fails_alike, nonfinite, rows, settings)


def overflows_alike() -> None:
    """GradScaler has seen an overflow on the second rank only: a step that is not counted."""
    mesh = mesh_for((0,))
    if mesh is None:
        return
    shard = nn.Parameter(placed(torch.ones(2, 3), mesh, (0,)))
    optimizer = MaxFactor([shard], fused=True)
    steps = []
    for overflow in (0.0, float(mesh.get_rank()), 0.0):
        shard.grad = placed(torch.full((2, 3), 8.0), mesh, (0,))
        optimizer.grad_scale = torch.tensor(8.0, device=DEVICE)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(overflow, device=DEVICE)  # type: ignore[attr-defined]
        optimizer.step()
        steps.append(float(optimizer.state[shard]["step"]))
    assert steps == [1.0, 1.0, 2.0]
    assert optimizer.skipped == 0
    same_part(optimizer.state[shard]["col_var"], torch.ones(1, 3, device=DEVICE), "unscaled: ")


@pytest.mark.gpu
def test_overflow_on_one_rank(four: Ranks) -> None:
    four.run(overflows_alike)


def goes_elsewhere(
    settings: dict[str, Any], shape: Shape, dtype: torch.dtype, layout: Layout, message: str
) -> None:
    """Refused with fused=True; without it, another backend takes the step."""
    mesh = mesh_for(layout)
    if mesh is None:
        return
    shard = nn.Parameter(placed(torch.ones(shape, dtype=dtype), mesh, layout))
    shard.grad = placed(torch.ones(shape, dtype=dtype), mesh, layout)
    optimizer = MaxFactor([("w", shard)], fused=True, **settings)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert not optimizer.state
    optimizer = MaxFactor([("w", shard)], **settings)
    optimizer.step()
    assert optimizer._fused is None
    assert float(optimizer.state[shard]["step"]) == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "shape", "dtype", "layout", "message"),
    [
        ({"momentum": {"bands": 4}}, (4, 64), torch.float32, (0,), "'w' .* 4 bands, .* bands=1"),
        (
            {},
            (2, 4, 3),
            torch.bfloat16,
            (1,),
            "'w' .* rows are not consecutive.* rounding='nearest'",
        ),
    ],
    ids=str,
)
def test_what_the_kernels_cannot_do(
    four: Ranks,
    settings: dict[str, Any],
    shape: Shape,
    dtype: torch.dtype,
    layout: Layout,
    message: str,
) -> None:
    four.run(goes_elsewhere, settings, shape, dtype, layout, message)


# ---------------------------------------------------------- whole matrices of several ranks


NESTEROV = {"momentum": 0.9, "nesterov": True}
MIXED: Tensors = [
    *[((3, 70), (0,), {})] * 3,  # two strips, uneven rows
    ((1, 4, 5), (0,), {}),  # nothing on a rank
    ((7, 3), (1,), {"momentum_dtype": "fp32"}),  # other launches in the same round
    ((7, 3), (0,), {}),
    ((2, 3), (None,), {}),  # every rank has it, and iterates it
    ((0, 3), (0,), {}),
    ((4, 5), (0,), {"direction": "sign_max"}),
    ((5,), (0,), {}),
]
BLOCKS: Tensors = [
    *[((6, 5), (0,), {"blocks": ("rows", 2)})] * 2,
    ((6, 5), (1,), {"blocks": ("rows", 2)}),
    *[((5, 6), (0,), {"blocks": ("columns", 3)})] * 2,
    ((5, 6), (1,), {"blocks": ("columns", 3)}),
    ((5, 6), (0,), {}),
]
# Settings, tensors, and how many matrices or blocks each rank iterates.
WHOLE: dict[str, tuple[dict[str, Any], Tensors, list[int]]] = {
    "fam": (FAM | {"scale": "initial"}, MIXED, [3, 5]),
    "blocks": (NESTEROV | {"momentum_dtype": "fp32"}, BLOCKS, [6, 10]),
    "copies of shards": ({}, [((4, 6), (None, 0), {}), ((5, 3), (None, 1), {})], [1, 1, 1, 1]),
    "rows and columns": ({}, [((4, 6), (0, 1), {}), ((5, 3), (1, 0), {})], [0, 0, 1, 1]),
    "rows twice": (NESTEROV, [((3, 4), (0, 0), {}), ((5, 3), (0, None), {})], [0, 0, 1, 2]),
}


def orthogonalises_once(name: str, most: int) -> tuple[int, int] | None:
    """How many matrices are iterated here in a step, and the number of rounds."""
    settings, tensors, _ = WHOLE[name]
    mesh = mesh_for(tensors[0][1])
    if mesh is None:
        return None
    iterated: list[tuple[Workspace, int]] = []
    iterate = Workspace.iterate

    def counted(self: Workspace, form: BatchLayout, lane: int = 0) -> None:
        iterated.append((self, form.matrices))
        iterate(self, form, lane)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Workspace, "iterate", counted)
        patched.setattr(rounds, "ROUND_ELEMENTS", most)
        sharded = stepped_beside(MaxFactor, settings | ORTHOGONAL, tensors, mesh)
    # On a GPU the optimizer of whole tensors iterates by kernels, too.
    own = sharded._fused._orthogonal.workspace, sharded._fused._rounds._workspace
    here = sum(number for workspace, number in iterated if workspace in own)
    return here // STEPS, len(sharded._fused._rounds.rounds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WHOLE)
def test_whole_matrices_are_orthogonalised_once(four: Ranks, name: str) -> None:
    """Each by one rank of those that share it."""
    found = [each for each in four.run(orthogonalises_once, name, 1000) if each is not None]
    assert sorted(number for number, _ in found) == WHOLE[name][2]


@pytest.mark.gpu
def test_rounds(four: Ranks) -> None:
    """What a rank gathers at a time is bounded: then there are several rounds."""
    (_, several), (_, as_many) = four.run(orthogonalises_once, "fam", 1)[:2]
    assert several == as_many == 3


def test_borrowed_memory_is_bounded() -> None:
    """On the first of eight ranks, however many matrices there are: the number of the documents."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = DeviceMesh("cpu", torch.arange(8))
    rule = MaxFactorSettings(direction="orthogonal").rules.matrix
    found = []
    for layers in (32, 64):
        shapes = [*[(1280, 1280)] * 12, *[(1280, 5120), (5120, 1280)] * 2] * layers
        shards = [torch.empty(shape[0] // 8, shape[1], device="meta") for shape in shapes]
        params = [DTensor.from_local(each, mesh, [Shard(0)], run_check=False) for each in shards]
        inputs = [StepInput("", param, param, rule, 0.1, 0) for param in params]
        found.append(rounds.borrowed_bytes(rounds.exchanges_of(inputs), ON_DEVICE))
    dist.destroy_process_group()
    assert found[0] == found[1] <= 320e6
