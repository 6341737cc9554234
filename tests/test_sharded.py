"""Sharded parameters against a single process: parameters and every state tensor, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from cases import Problem, group_of, problem
from maxfactor import Adafactor, MaxFactor, recipe
from maxfactor.backends.torch import batch as torch_batch
from maxfactor.backends.torch import step as torch_step
from maxfactor.distributed import owner_exchange
from maxfactor.distributed.placement import local
from maxfactor.rule.newton_schulz import orthogonal
from ranks import Ranks, mesh_of

Shape = tuple[int, ...]
Layout = tuple[int | None, ...]  # the cut dimension for each mesh dimension, None for copies

STEPS = 4  # the last of them has a gradient of zeros
SHAPES = [
    (8, 4),
    (7, 5),
    (1, 6),
    (6, 1),
    (9,),
    (1,),
    (),
    (3, 4, 5),
    (1, 4, 5),
    (5, 2, 3, 3),
    (0, 3),
]
WIDE = [(3, 256), (5, 128), (6, 128, 2)]  # rows that two ranks share in whole blocks of 64

SETTINGS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "0.1": recipe("published-0.1"),
    "0.2": recipe("published-0.2"),
    "0.3": recipe("published-0.3"),
    "no max_norm": {"switches": {"max_norm": False}},
    "dense": {"switches": {"full_matrix": True}},
    "last": {"switches": {"factor": "last"}},
    "small d": {"d": 0.2, "scale": "initial"},
    "factored": {"direction": "factored"},
    "factored last": {"direction": "factored", "maximize": True},
    "floors": {"eps": (0.05, 0.5)},
}
MOMENTA: dict[str, dict[str, Any]] = {
    "ema fp32": {"momentum": 0.9, "momentum_dtype": "fp32"},
    "nesterov factored": {
        "momentum": 0.8,
        "nesterov": True,
        "momentum_dtype": "fp32",
        "direction": "factored",
    },
    "fam fp32": {"momentum": {"warmup": 2, "theta": 0.8}, "momentum_dtype": "fp32"},
}
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "ema int8": {"momentum": 0.9},
    "fam int8": {"momentum": {"warmup": 2, "theta": 0.8}, "scale": "initial"},
    # A sign would make much of what two transforms leave of a zero.
    "bands fp32": {
        "momentum": {"warmup": 2, "bands": 4},
        "momentum_dtype": "fp32",
        "direction": "factored",
    },
}


# ------------------------------------------------------------------------------- what is run


def placed(x: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A tensor that every rank has, as a DTensor; a dimension that it lacks is not cut."""
    cuts = [None if cut is None or cut >= x.dim() else cut for cut in layout]
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(ours: Tensor, theirs: Tensor, what: str, noise: float = 1e-6) -> None:
    """Equal to `noise`, on this rank, to what a single process has of the whole tensor."""
    assert ours.dtype == theirs.dtype, what
    assert ours.shape == theirs.shape, what
    # What the momentum averages is of the order of 1, and may cancel.
    size = 1.0 if "momentum" in what else 0.0
    size = max(size, float(theirs.abs().max()) if theirs.numel() else 0.0)
    if isinstance(ours, DTensor):
        assert not any(placement.is_partial() for placement in ours.placements), what
        mesh, placements = ours.device_mesh, ours.placements
        theirs = distribute_tensor(theirs, mesh, placements, src_data_rank=None).to_local()
        ours = ours.to_local()
        assert ours.shape == theirs.shape, what
    if ours.dtype == torch.int8:
        assert int((ours.int() - theirs.int()).abs().sum()) <= 2, what  # on the edge of a code
        return
    if not torch.equal(ours, theirs):  # as they mostly are, and faster to see
        torch.testing.assert_close(
            ours, theirs, rtol=2e-6, atol=noise * size, msg=lambda m: what + m
        )


def same_state(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    assert ours.keys() == theirs.keys(), what
    for key, value in ours.items():
        assert isinstance(value, DTensor) or key == "step"
        same(value, theirs[key], f"{key} of {what}: ")


def pair(shape: Shape, mesh: DeviceMesh, layout: Layout, seed: int = 0) -> tuple[Any, Any, Any]:
    """A problem, its parameter in a single process, and the same as a DTensor."""
    case = problem(shape, steps=STEPS, seed=seed)
    shard = torch.nn.Parameter(placed(case.weight, mesh, layout))
    return case, torch.nn.Parameter(case.weight.clone()), shard


def optimizer_for(rule: str, params: list[Tensor], settings: dict[str, Any]) -> Any:
    groups, others = group_of(params, settings)
    return Adafactor(params, **settings) if rule == "adafactor" else MaxFactor(groups, **others)


@dataclass(frozen=True)
class Single:
    """What a single process leaves: the weights of each step, the states of the first and last.

    What went wrong with a state in between would be there in the end.
    """

    cases: list[Problem]
    weights: list[list[Tensor]]
    states: dict[int, list[dict[str, Tensor]]]
    effective_lr: list[float]


KNOWN: dict[str, Single] = {}  # one for all layouts


def in_one_process(rule: str, settings: dict[str, Any], shapes: list[Shape]) -> Single:
    """All shapes in one optimizer, without shards."""
    key = repr((rule, settings, shapes))
    if key not in KNOWN:
        KNOWN[key] = steps_of_one_process(rule, settings, shapes)
    return KNOWN[key]


def steps_of_one_process(rule: str, settings: dict[str, Any], shapes: list[Shape]) -> Single:
    cases = [problem(shape, steps=STEPS, seed=i) for i, shape in enumerate(shapes)]
    params = [torch.nn.Parameter(case.weight.clone()) for case in cases]
    optimizer = optimizer_for(rule, list(params), {**settings, "foreach": False})
    weights, states = [], {}
    for t in range(STEPS):
        for case, param in zip(cases, params, strict=True):
            param.grad = case.grads[t].clone()
        optimizer.step()
        weights.append([param.detach().clone() for param in params])
        if t in (0, STEPS - 1):
            states[t] = [
                {key: value.clone() for key, value in optimizer.state[param].items()}
                for param in params
            ]
    return Single(cases, weights, states, optimizer.effective_lr())


def equals_one_process(
    ranks: int,
    rule: str,
    settings: dict[str, Any],
    layout: Layout,
    shapes: list[Shape],
    noise: float = 1e-6,
) -> None:
    """All shapes in one optimizer, next to the same without shards."""
    mesh = mesh_of(ranks) if len(layout) == 1 else mesh_of(2, ranks // 2)
    if mesh is None:
        return
    single = in_one_process(rule, settings, shapes)
    weights = [case.weight.clone() for case in single.cases]  # of which copies have the storage
    shards = [torch.nn.Parameter(placed(weight, mesh, layout)) for weight in weights]
    sharded = optimizer_for(rule, list(shards), settings)
    for t in range(STEPS):
        for case, shard in zip(single.cases, shards, strict=True):
            shard.grad = placed(case.grads[t], mesh, layout)
        kept = [local(shard.grad).clone() for shard in shards if shard.grad is not None]
        sharded.step()
        for i, shard in enumerate(shards):
            what = f"{tuple(shard.shape)} at {t}"
            same(shard.detach(), single.weights[t][i], f"parameter {what}: ", noise)
            assert shard.grad is not None
            assert torch.equal(local(shard.grad), kept[i]), "the gradient is the user's"
            if t in single.states:
                same_state(sharded.state[shard], single.states[t][i], what)
    assert sharded.effective_lr() == pytest.approx(single.effective_lr, rel=1e-6)


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("layout", [(0,), (1,), (2,)], ids=str)
def test_maxfactor(four: Ranks, name: str, layout: Layout) -> None:
    four.run(equals_one_process, 2, "maxfactor", SETTINGS[name], layout, SHAPES)


@pytest.mark.parametrize("layout", [(0,), (1,)], ids=str)
def test_more_ranks_than_rows(four: Ranks, layout: Layout) -> None:
    for settings in ({}, {"direction": "factored"}, MOMENTA["fam fp32"]):
        four.run(equals_one_process, 3, "maxfactor", settings, layout, SHAPES)
    four.run(equals_one_process, 3, "adafactor", {}, layout, SHAPES)


@pytest.mark.parametrize("layout", [(0,), (1,), (2,)], ids=str)
def test_adafactor(four: Ranks, layout: Layout) -> None:
    four.run(equals_one_process, 2, "adafactor", {}, layout, SHAPES)
    absolute = {"lr": 0.03, "weight_decay": 0.2, "clip_threshold": 0.4, "factor": "last"}
    four.run(equals_one_process, 2, "adafactor", absolute, layout, SHAPES)


def test_copies(four: Ranks) -> None:
    four.run(equals_one_process, 2, "maxfactor", {}, (None,), SHAPES)
    four.run(equals_one_process, 2, "maxfactor", IN_BLOCKS["fam int8"], (None,), SHAPES)


@pytest.mark.parametrize("layout", [(0, 1), (0, 0), (None, 0), (1, 0), (2, None)], ids=str)
def test_two_by_two(four: Ranks, layout: Layout) -> None:
    """A layout decides over which ranks a sum goes, settings which sums there are.

    So all settings meet the layout that cuts both ways, and others the two with most sums.
    """
    chosen = [{}, MOMENTA["fam fp32"]]
    if layout == (0, 1):
        chosen += [recipe("published-0.2"), {"direction": "factored"}]
    for settings in chosen:
        four.run(equals_one_process, 4, "maxfactor", settings, layout, SHAPES)
    four.run(equals_one_process, 4, "adafactor", {}, layout, SHAPES)


@pytest.mark.parametrize("name", MOMENTA)
@pytest.mark.parametrize("layout", [(0,), (1,), (2,)], ids=str)
def test_momentum(four: Ranks, name: str, layout: Layout) -> None:
    four.run(equals_one_process, 2, "maxfactor", MOMENTA[name], layout, SHAPES)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_momentum_in_blocks(four: Ranks, name: str) -> None:
    four.run(equals_one_process, 2, "maxfactor", IN_BLOCKS[name], (0,), SHAPES + WIDE)
    four.run(equals_one_process, 2, "maxfactor", IN_BLOCKS[name], (1,), WIDE)


@pytest.mark.parametrize("layout", [(0,), (1,), (2,), (None,), (0, 1), (0, 0), (1, None)], ids=str)
def test_orthogonal(four: Ranks, layout: Layout) -> None:
    """The iteration makes the last digits of the sums larger."""
    filtered = {"momentum": 0.9, "nesterov": True, "momentum_dtype": "fp32"}
    for settings in ({}, filtered):
        chosen = settings | {"direction": "orthogonal"}
        ranks = 2 * len(layout)
        four.run(equals_one_process, ranks, "maxfactor", chosen, layout, SHAPES, 1e-5)


@pytest.mark.parametrize("layout", [(0,), (1,)], ids=str)
@pytest.mark.parametrize("blocks", [("rows", 4), ("columns", 3)], ids=str)
def test_orthogonal_in_blocks(four: Ranks, blocks: tuple[str, int], layout: Layout) -> None:
    """The owner of a matrix cuts it, wherever the shards begin."""
    settings = {"direction": "orthogonal", "blocks": blocks}
    shapes: list[Shape] = [(12, 9), (4, 15), (12, 9), (9,), (20, 3)]
    four.run(equals_one_process, 3, "maxfactor", settings, layout, shapes, 1e-5)


# -------------------------------------------------------------------------------- collectives


def messages(
    count: int, layout: Layout, settings: dict[str, Any], shapes: list[Shape]
) -> tuple[int, int] | None:
    """All messages of a step, and how many of them are all-reduces."""
    mesh = mesh_of(2) if len(layout) == 1 else mesh_of(2, 2)
    if mesh is None:
        return None
    pairs = [pair(shape, mesh, layout) for shape in shapes[:count]]
    optimizer = MaxFactor([shard for _, _, shard in pairs], **settings)
    for case, _, shard in pairs:
        shard.grad = placed(case.grads[0], mesh, layout)
    with CommDebugMode() as counted:
        optimizer.step()
    found = {str(op): times for op, times in counted.get_comm_counts().items()}
    return sum(found.values()), sum(n for op, n in found.items() if "reduce" in op)


@pytest.mark.parametrize(
    ("layout", "settings", "expected"),
    [
        ((0,), {}, 3),
        ((0,), {"d": 0.3}, 3),
        ((1,), {"d": 0.3}, 2),  # max R is known where columns are cut
        ((0,), {"momentum": {"bands": 1}}, 2),
        ((0,), {"direction": "factored"}, 2),
        ((None,), {}, 0),
        ((None, 0), {}, 3),
        ((0, 1), {}, 5),
        ((0, 0), {"d": 0.3}, 6),
    ],
    ids=str,
)
def test_messages_of_a_step(
    four: Ranks, layout: Layout, settings: dict[str, Any], expected: int
) -> None:
    """At most three for each process group, whatever the number of parameters; no gathering."""
    shapes = [(8, 4), (9,), (7, 5), (4, 4, 2)] * 2
    for count in (1, 8):
        assert four.run(messages, count, layout, settings, shapes)[0] == (expected, expected)


@pytest.mark.parametrize(
    ("layout", "all_messages", "reductions"),
    [
        ((0,), 3, 1),
        ((1,), 3, 1),
        ((None,), 0, 0),
        ((None, 0), 3, 1),
        ((0, 1), 6, 2),
        ((0, 0), 6, 2),
    ],
    ids=str,
)
def test_messages_of_the_orthogonal_direction(
    four: Ranks, layout: Layout, all_messages: int, reductions: int
) -> None:
    """All matrices to their owners in one message for each process group, and back in another."""
    settings, shapes = {"direction": "orthogonal"}, [(8, 4), (7, 5), (4, 4, 2), (1, 6)] * 2
    for count in (1, 8):
        found = four.run(messages, count, layout, settings, shapes)[0]
        assert found == (all_messages, reductions)


def orthogonalised_here(layout: Layout) -> int:
    """How many matrices this rank worked on, of eight small ones and a large one."""
    mesh = mesh_of(4) if len(layout) == 1 else mesh_of(2, 2)
    assert mesh is not None
    shapes = [*[(8, 4)] * 4, (16, 16), *[(4, 8)] * 4]
    pairs = [pair(shape, mesh, layout) for shape in shapes]
    optimizer = MaxFactor([shard for _, _, shard in pairs], direction="orthogonal")
    for case, _, shard in pairs:
        shard.grad = placed(case.grads[0], mesh, layout)
    counts = []

    def counted(y: Tensor, block: tuple[int, int] | None) -> Tensor:
        counts.append(y.shape[:-2].numel())
        return orthogonal(y, block)

    with pytest.MonkeyPatch.context() as patched:
        for module in (torch_batch, torch_step):
            patched.setattr(module, "orthogonal", counted)
        optimizer.step()
    return sum(counts)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ((0,), [1, 2, 3, 3]),
        ((0, 1), [1, 2, 3, 3]),
        ((None, 0), [1, 1, 8, 8]),  # each half deals among itself
        ((None, None), [9, 9, 9, 9]),
    ],
    ids=str,
)
def test_every_matrix_is_orthogonalised_once(
    four: Ranks, layout: Layout, expected: list[int]
) -> None:
    """And by equal work: the large one weighs as much as 32 of the others."""
    assert sorted(four.run(orthogonalised_here, layout)) == expected


def travels_as_bfloat16() -> None:
    """As on a GPU, where the iteration itself runs in bfloat16."""
    mesh = mesh_of(2)
    if mesh is None:
        return
    case, param, shard = pair((8, 6), mesh, (0,))
    single, sharded = (MaxFactor([p], direction="orthogonal") for p in (param, shard))
    param.grad, shard.grad = case.grads[0].clone(), placed(case.grads[0], mesh, (0,))
    single.step()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner_exchange, "WIRE", {"cpu": torch.bfloat16})
        sharded.step()
    move = float((param.detach() - case.weight).abs().max())
    same(shard.detach(), param.detach(), "parameter: ", 0.02 * move / float(param.abs().max()))
    assert not torch.equal(local(shard), placed(param.detach(), mesh, (0,)).to_local())


def test_matrices_may_travel_as_bfloat16(four: Ranks) -> None:
    four.run(travels_as_bfloat16)


# ---------------------------------------------------------------------- gradients that fail


def fails_alike(nonfinite: Any) -> None:
    mesh = mesh_of(2)
    if mesh is None:
        return
    case, param, shard = pair((4, 6), mesh, (0,))
    bias = torch.nn.Parameter(torch.ones(3))  # a plain parameter beside it
    single = MaxFactor([("w", param)], nonfinite=nonfinite)
    sharded = MaxFactor([("w", shard), ("b", bias)], nonfinite=nonfinite)
    for t in range(4):
        grad = case.grads[t].clone()
        if t == 2:
            grad[3, 1] = float("nan")  # on the second rank
        param.grad, shard.grad = grad, placed(grad, mesh, (0,))
        bias.grad = torch.ones(3)
        for optimizer in (single, sharded):
            if t == 2 and nonfinite == "raise":
                with pytest.raises(FloatingPointError, match="'w'"):
                    optimizer.step()
            else:
                optimizer.step()
    assert sharded.skipped == single.skipped
    assert float(sharded.state[bias]["step"]) == float(single.state[param]["step"])
    theirs = placed(param.detach(), mesh, (0,)).to_local()
    torch.testing.assert_close(local(shard.detach()), theirs, equal_nan=True)


@pytest.mark.parametrize("nonfinite", ["skip", "raise", "ignore"])
def test_nan_on_one_rank(four: Ranks, nonfinite: Any) -> None:
    four.run(fails_alike, nonfinite)


def fails_together() -> int | None:
    mesh = mesh_of(2, 2)
    assert mesh is not None
    case, _, shard = pair((4, 6), mesh, (0, 1))
    bias = torch.nn.Parameter(torch.ones(3))
    optimizer = MaxFactor([shard, bias])
    shard.grad = placed(case.grads[0], mesh, (0, 1))
    bias.grad = torch.full((3,), float("inf") if mesh.get_rank() == 2 else 1.0)
    optimizer.step()
    assert torch.equal(bias.detach(), torch.ones(3))
    return optimizer.skipped


def test_no_rank_goes_on_alone(four: Ranks) -> None:
    """Where it should not happen, in a copy: waiting for each other forever would be worse."""
    assert four.run(fails_together) == [1, 1, 1, 1]


# ---------------------------------------------------------------------- rounding and refusals


def rounds_alike(layout: Layout) -> None:
    mesh = mesh_of(2) if len(layout) == 1 else mesh_of(2, 2)
    if mesh is None:
        return
    case = problem((6, 7), dtype=torch.bfloat16, steps=STEPS)
    param = torch.nn.Parameter(case.weight.clone())
    shard = torch.nn.Parameter(placed(case.weight, mesh, layout))
    single, sharded = MaxFactor([param], seed=3), MaxFactor([shard], seed=3)
    for grad in case.grads:
        param.grad, shard.grad = grad.clone(), placed(grad, mesh, layout)
        single.step()
        sharded.step()
        same_state(sharded.state[shard], single.state[param], "bfloat16")
    assert torch.equal(local(shard.detach()), placed(param.detach(), mesh, layout).to_local())


@pytest.mark.parametrize("layout", [(0,), (1,), (0, 1), (0, 0)], ids=str)
def test_stochastic_rounding(four: Ranks, layout: Layout) -> None:
    """The same noise at the same place of the whole tensor."""
    four.run(rounds_alike, layout)


def refuses(settings: dict[str, Any], layout: Layout, message: str) -> None:
    mesh = mesh_of(2)
    if mesh is None:
        return
    case, _, shard = pair((6, 100), mesh, layout)
    optimizer = MaxFactor([("w", shard)], **settings)
    shard.grad = placed(case.grads[0], mesh, layout)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert not optimizer.state
    same(shard.detach(), case.weight, "unchanged: ")


@pytest.mark.parametrize(
    ("settings", "layout", "message"),
    [
        ({"foreach": True}, (0,), "foreach=True .* leave foreach out"),
        ({"capturable": True}, (0,), "capturable=True .* leave capturable out"),
        ({"momentum": 0.9}, (1,), r"'w' \(6, 100\) .* momentum_dtype='fp32'"),
        (
            {"momentum": {"bands": 4}, "momentum_dtype": "fp32"},
            (1,),
            "bands=1 and momentum_dtype='fp32' .* along its rows",
        ),
    ],
    ids=str,
)
def test_refusals(four: Ranks, settings: dict[str, Any], layout: Layout, message: str) -> None:
    four.run(refuses, settings, layout, message)


def refuses_mixtures() -> None:
    mesh = mesh_of(2)
    if mesh is None:
        return
    part = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()])
    param = torch.nn.Parameter(part)
    param.grad = part.clone()
    with pytest.raises(RuntimeError, match="redistribute it to Shard or Replicate"):
        MaxFactor([param]).step()


def test_partial_parameters_are_refused(four: Ranks) -> None:
    four.run(refuses_mixtures)


# --------------------------------------------------------------------------- state dictionaries


def moves_state(settings: dict[str, Any], layout: Layout) -> None:
    """A single process's state into shards, and back; the next steps are equal."""
    mesh = mesh_of(2) if len(layout) == 1 else mesh_of(2, 2)
    if mesh is None:
        return
    case, param, shard = pair((6, 128), mesh, layout)
    single, sharded = MaxFactor([param], **settings), MaxFactor([shard], **settings)
    for grad in case.grads[:3]:
        param.grad = grad.clone()
        single.step()
    with torch.no_grad():
        shard.copy_(placed(param.detach(), mesh, layout))
    sharded.load_state_dict(single.state_dict())
    same_state(sharded.state[shard], single.state[param], "loaded")
    again = torch.nn.Parameter(param.detach().clone())
    back = MaxFactor([again], **settings)
    back.load_state_dict(sharded.state_dict())
    for key, value in back.state[again].items():
        assert torch.equal(value, single.state[param][key]), key
    for grad in case.grads[3:]:
        param.grad, shard.grad = grad.clone(), placed(grad, mesh, layout)
        single.step()
        sharded.step()
        same(shard.detach(), param.detach(), "after loading: ")
        same_state(sharded.state[shard], single.state[param], "after loading")


@pytest.mark.parametrize("layout", [(0,), (1,), (0, 1), (None, 0)], ids=str)
def test_state_dictionaries(four: Ranks, layout: Layout) -> None:
    four.run(moves_state, {}, layout)
    four.run(moves_state, {"momentum": {"warmup": 2}, "scale": "initial"}, layout)


def test_a_rehearsal_does_not_count() -> None:
    """torch.distributed.checkpoint steps a fresh optimizer without rate and gradient."""
    weight = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = MaxFactor([weight], lr=0.0, momentum={"warmup": 2}, scale="initial")
    before = weight.detach().clone()
    weight.grad = torch.zeros(3, 4)
    optimizer.step()
    assert torch.equal(weight.detach(), before)
    state = dict(optimizer.state[weight])
    assert float(state.pop("initial_rms")) == pytest.approx(1 / math.sqrt(12))  # by its shape
    assert all(not value.any() for value in state.values())
    weight.grad = torch.ones(3, 4)  # a first step of a warm-up counts
    optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 1.0
