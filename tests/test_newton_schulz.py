"""The fused Newton-Schulz iteration: symmetric products, merged steps, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from maxfactor import MaxFactor
from maxfactor.backends.triton import workspace
from maxfactor.backends.triton.workspace import LaneParts, alike, batches_of, layout, norm_of
from maxfactor.rule import newton_schulz as reference

pytest.importorskip("triton")
products = pytest.importorskip("maxfactor.backends.triton.products")
fused = pytest.importorskip("maxfactor.backends.triton.orthogonal")
from maxfactor.backends.triton.borrowed import borrowed_bytes  # noqa: E402
from maxfactor.backends.triton.kernels.descriptors import ProductTile  # noqa: E402
from maxfactor.backends.triton.local_parameters import local_parameter  # noqa: E402
from maxfactor.backends.triton.plan import keys_of  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
UNIT = 16 if DEVICE == "cpu" else 64
# Rows and columns of a tile, and whether blocks are loaded by descriptors where sizes allow.
TILES = [(UNIT, UNIT, False), (UNIT, 2 * UNIT, False), (UNIT, UNIT, True), (UNIT, 2 * UNIT, True)]


def tuning(rows: int, cols: int, descriptors: bool) -> Any:
    if descriptors and DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no copy engine")
    return products.Tuning(ProductTile(rows, cols, UNIT), 4, 2, descriptors)


def random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


# ------------------------------------------------------------------------------ the products


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize(
    ("batch", "n", "depth"), [(2, 2 * UNIT, 3 * UNIT), (3, 37, 50), (1, 1, 5), (2, 17, UNIT)]
)
def test_symmetric_product(
    batch: int, n: int, depth: int, is_tall: bool, tile: tuple[int, int, bool]
) -> None:
    """Every element is written, and mirrored to the last bit."""
    x = random(batch, depth, n) if is_tall else random(batch, n, depth)
    added = random(batch, n, n, seed=1)
    added = (added + added.mT) / 2
    out = torch.full((batch, n, n), torch.nan, dtype=x.dtype, device=DEVICE)
    weights = {"alpha": 0.5, "beta": 0.25, "gamma": 3.0}
    products.symmetric(out, x, x, added=added, is_tall=is_tall, tuning=tuning(*tile), **weights)
    wide = x.double().mT if is_tall else x.double()
    eye = torch.eye(n, dtype=torch.float64, device=DEVICE)
    exact = 0.5 * wide @ wide.mT + 0.25 * added.double() + 3.0 * eye
    assert torch.equal(out, out.mT)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.max()))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_product_of_two_matrices_that_commute(tile: tuple[int, int, bool]) -> None:
    """Symmetric to the last bit although L Rᵀ rounds differently from R Lᵀ."""
    a = random(2, 40, 60, dtype=torch.float32) / 8
    square = (a @ a.mT).contiguous()
    cube = (square @ square @ square).contiguous()
    square, cube = square.to(torch.float16), cube.to(torch.float16)
    out = torch.empty_like(square)
    products.symmetric(out, square, cube, tuning=tuning(*tile))
    exact = square.double() @ cube.double()
    assert torch.equal(out, out.mT)
    assert float((out.double() - exact).norm() / exact.norm()) < 2e-3


# ----------------------------------------------------------------------------- the iteration


def iterate(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The fused iteration of matrices of any norm."""
    matrices, m, n = y.shape
    form, norm = layout(m, n, [matrices], dtype), norm_of(min(m, n))
    norms = torch.linalg.vector_norm(y.double(), dim=(1, 2), keepdim=True)
    x = (y.double() / norms * norm).to(dtype)
    squares = [x.new_empty(matrices, form.short, form.short) for _ in range(form.squares)]
    result: Tensor = fused.newton_schulz(x, torch.empty_like(x), squares, form, norm)
    return result / norm


def exact(y: Tensor) -> Tensor:
    return reference.newton_schulz(y.cpu().double())


@pytest.mark.parametrize(
    "shape",
    [(2, 20, 20), (1, 20, 33), (2, 18, 40), (2, 18, 70), (1, 50, 9), (1, 8, 23), (1, 1, 7)],
)
def test_iteration_is_that_of_the_rule(shape: tuple[int, int, int]) -> None:
    y = random(*shape, dtype=torch.float32)
    if DEVICE == "cpu":
        ours = iterate(y, torch.float32).double()
        torch.testing.assert_close(ours, exact(y), rtol=1e-4, atol=1e-5)
    ours = iterate(y, torch.float16).double().cpu()
    assert float((ours - exact(y)).norm() / exact(y).norm()) < 0.01


def spectra(n: int) -> dict[str, Tensor]:
    noise = random(48, n, dtype=torch.float32)
    u, _, v = torch.linalg.svd(noise, full_matrices=False)
    fading = {
        f"condition 1e{d}": (u * torch.logspace(0, -d, 48, device=DEVICE)) @ v for d in (2, 6)
    }
    loud, spike = noise.clone(), 1e-4 * noise
    loud[0] *= 1e4
    spike[3, 5] = 1e3
    low = u[:, :4] @ v[:4] + 1e-4 * noise * n**-0.5
    return {"noise": noise, **fading, "rank 1": u[:, :1] @ v[:1], "low": low, "loud": loud} | {
        "spike": spike,
    }


@pytest.mark.parametrize("n", [48, 192])
def test_float16_keeps_more_digits_than_bfloat16(n: int) -> None:
    """Next to five steps in bfloat16: no singular value is wider, none is lost."""
    names, matrices = zip(*spectra(n).items(), strict=True)
    y = torch.stack(matrices).to(torch.bfloat16)
    before = reference.newton_schulz(y.cpu()).double()  # in bfloat16 on a CPU too
    ours, wanted = iterate(y, torch.float16).double().cpu(), exact(y)
    values = [torch.linalg.svdvals(each) for each in (ours, wanted, before)]
    for name, own, best, old, o, right, past in zip(
        names, *values, ours, wanted, before, strict=True
    ):
        assert own.max() < 1.25, name
        off, past_off = ((each - right).norm() / right.norm() for each in (o, past))
        assert off < 1.05 * past_off + 0.02, f"{name}: {off} after {past_off}"
        small = best < 0.5
        lost = ((best - own).clamp(min=0.0) * small).norm()
        assert lost <= ((best - old).abs() * small).norm() + 0.01, name


# ------------------------------------------------------------------------- memory and batches


def steps_of(params: list[Tensor], steps: int = 2) -> MaxFactor:
    optimizer = MaxFactor(params, momentum=0.9, nesterov=True, direction="orthogonal", fused=True)
    for step in range(steps):
        for i, param in enumerate(params):
            param.grad = random(*param.shape, dtype=torch.float32, seed=10 * step + i)
        optimizer.step()
    return optimizer


def parameters(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [
        torch.nn.Parameter(random(*shape, dtype=torch.float32, seed=100 + i))
        for i, shape in enumerate(shapes)
    ]


def test_batches_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one matrix, and all in one, in any order of the parameters."""
    shapes: list[tuple[int, ...]] = [(9, 24), (12,), (16, 8), (9, 24), (9, 24)]
    found = []
    for limit in (1, 1 << 30):
        monkeypatch.setattr(workspace, "BATCH_BYTES", limit)
        params = parameters(shapes)
        optimizer = steps_of(params)
        assert optimizer._fused is not None
        assert len(optimizer._fused._orthogonal.batches) == (4 if limit == 1 else 2)
        found.append(params)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def borrowed(shapes: list[tuple[int, int]]) -> int:
    """What a step on a GPU borrows, told without a device."""
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    optimizer = MaxFactor(params, momentum=0.9, direction="orthogonal")
    return borrowed_bytes(optimizer.inputs_on_meta())[1]


def test_memory_does_not_grow_with_the_model() -> None:
    """A few hundred MB, however many matrices there are."""
    whisper = [(1280, 1280)] * 384 + [(5120, 1280)] * 64 + [(1280, 5120)] * 64
    assert max(map(borrowed, (whisper, whisper * 3))) <= workspace.BATCH_BYTES
    assert borrowed([(1280, 1280)]) == 2 * 3 * 1280**2
    assert borrowed([(1280, 5120)]) == 2 * (2 * 1280 * 5120 + 1280**2)
    assert borrowed([(1280, 2560)]) == 2 * (2 * 1280 * 2560 + 2 * 1280**2)


def test_borrowed_bytes_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "LANES", 2)
    shapes: list[tuple[int, ...]] = [(9, 24), (12,), (16, 8), (9, 24)]
    fused_step = steps_of(parameters(shapes), steps=1)._fused
    assert fused_step is not None
    batches = fused_step._orthogonal.batches
    borrowed = fused_step._orthogonal.workspace.nbytes
    assert [batch.lane for batch in batches] == [0, 1]
    assert sum(batch.layout.nbytes for batch in batches) == borrowed
    assert fused_step.borrowed_bytes > borrowed


@needs_gpu
def test_borrowed_bytes_are_measured() -> None:
    """Peak memory of a step, but for cuBLAS's own workspaces, is what was told."""
    optimizer = steps_of(parameters([(512, 512)] * 6 + [(512, 1536)] * 3), steps=6)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert optimizer._fused is not None
    used = torch.cuda.max_memory_allocated() - before
    assert used <= optimizer._fused.borrowed_bytes + (1 << 20)


def batches_of_squares(runs: list[int]) -> list[LaneParts]:
    return batches_of([alike(1280, 1280, runs, 1, torch.float16)])[0]


def memory_of_lanes(batches: list[LaneParts]) -> int:
    """Bytes of the largest batch of each lane."""
    found: dict[int, int] = {}
    for lane, parts in batches:
        size = layout(1280, 1280, parts, torch.float16).nbytes
        found[lane] = max(found.get(lane, 0), size)
    return sum(found.values())


@pytest.mark.parametrize("tensors", [1, 5, 51, 384])
def test_parts_are_even(tensors: int) -> None:
    batches = batches_of_squares([tensors])
    parts = [part for batch in batches for part in batch.parts]
    assert sum(parts) == tensors
    assert max(parts) - min(parts) <= 1
    assert memory_of_lanes(batches) <= workspace.BATCH_BYTES


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("runs", [[8, 6, 7, 8, 1, 1], [31, 3, 3, 3], [3] * 30])
def test_batches_have_several_windows_but_their_parts_do_not(
    runs: list[int], lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they depend on the number of lanes."""
    alone = [part for run in runs for batch in batches_of_squares([run]) for part in batch.parts]
    monkeypatch.setattr(workspace, "LANES", lanes)
    batches = batches_of_squares(runs)
    parts = [part for batch in batches for part in batch.parts]
    assert parts == alone
    assert len(batches) < len(parts)
    assert memory_of_lanes(batches) <= workspace.BATCH_BYTES


def test_lanes_have_equal_amounts_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one batch. A part that is larger than half of the memory stays whole."""
    monkeypatch.setattr(workspace, "LANES", 2)
    batches = batches_of_squares([8, 14, 8, 8, 4] * 8)
    load = [0, 0]
    for lane, parts in batches:
        load[lane] += sum(parts)
    assert abs(load[0] - load[1]) <= 14
    assert [14] in [each.parts for each in batches]


def test_one_lane_if_another_would_be_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "LANES", 2)
    assert {each.lane for each in batches_of_squares([19] * 4 + [1] * 8)} == {0}
    assert {each.lane for each in batches_of_squares([18] * 4 + [1] * 8)} == {0, 1}
    assert workspace.lane_sizes(workspace.BATCH_BYTES + 1) == [workspace.BATCH_BYTES + 1]


@pytest.mark.parametrize("count", [1, 23, 64, 384])
@pytest.mark.parametrize(("most", "tiles"), [(27, 55), (9, 55), (40, 6), (5, 1)])
def test_batch_sizes_take_the_fewest_waves(count: int, most: int, tiles: int) -> None:
    """Of all sizes that fit, but for what more launches cost."""

    def waves(size: int) -> int:
        batches = [min(size, count - done) for done in range(0, count, size)]
        return sum(math.ceil(each * tiles / workspace.WAVE) for each in batches)

    size = workspace.batch_size(count, most, tiles)
    assert 1 <= size <= most
    saved = count / size / workspace.BATCHES_PER_WAVE
    assert waves(size) <= min(map(waves, range(1, min(most, count) + 1))) + saved


def test_waves_are_those_of_the_kernel() -> None:
    assert workspace.TILE_SIDE == products.LARGE[9].tile.rows == products.LARGE[9].tile.cols
    assert workspace.triangle(1280 // workspace.TILE_SIDE) == products.tiles_of(
        1280, products.LARGE[9].tile
    )


@pytest.mark.parametrize("runs", [[8, 8, 4] * 6 + [12, 8] * 12, [1, 2, 2, 1, 1] * 9, [30, 7, 1]])
def test_packed_runs_fill_batches(runs: list[int]) -> None:
    """Filled one after the other, they are the batches of first-fit decreasing: nearly full."""
    order = workspace.packed(runs, most=24)
    assert sorted(order) == list(range(len(runs)))
    batches = [0]
    for index in order:
        if batches[-1] and batches[-1] + runs[index] > 24:
            batches.append(0)
        batches[-1] += runs[index]
    large = sum(run > 24 for run in runs)
    assert len(batches) <= large + math.ceil(sum(run for run in runs if run <= 24) / 24)


@pytest.mark.parametrize(("lanes", "counts"), [(1, [24] * 15), (2, [12] * 18 + [8] * 18)])
def test_windows_change_places_so_that_batches_are_full(
    lanes: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoder windows of Whisper-large-v3 have 8, 8 and 4 square matrices, decoder windows 12, 8.

    In this order 20 of them fit into 24. Matrices of a window stay together. Two lanes have room
    for 12 each.
    """
    monkeypatch.setattr(workspace, "LANES", lanes)
    runs = [8, 8, 4] * 6 + [12, 8] * 12
    windows = [window for window, run in enumerate(runs) for _ in range(run)]
    param = torch.nn.Parameter(torch.empty(1280, 1280, device="meta"))
    optimizer = MaxFactor([param], momentum=0.9, direction="orthogonal")
    [own] = optimizer.inputs_on_meta()
    params = [local_parameter(replace(own, window=window)) for window in windows]
    keys = keys_of(params)
    order = fused.in_batches(range(len(params)), params, keys, workspace.ON_DEVICE)
    found = [params[index] for index in order]
    sizes = [len(own) for own in fused.by_window(range(len(found)), found)]
    assert sorted(sizes) == sorted(runs)
    [batches] = batches_of([fused.kind_of(found, torch.float16)])
    assert [sum(each.parts) for each in batches] == counts


def test_matrices_of_odd_sizes_are_not_batched_across_windows() -> None:
    """The second would not begin on 128 bytes, as it does without the first."""
    [batches] = batches_of([alike(33, 35, [2, 2], 1, torch.float16)])
    assert [each.parts for each in batches] == [[2], [2]]


def test_products_of_parts() -> None:
    factor, x = random(5, 24, 24), random(5, 24, 40)
    whole = products.multiply(torch.empty_like(x), factor, x, [5], is_tall=False)
    parts = products.multiply(torch.empty_like(x), factor, x, [2, 3], is_tall=False)
    torch.testing.assert_close(parts, whole)
    tall = x.mT.contiguous()
    whole = products.multiply(torch.empty_like(tall), factor, tall, [1, 4], is_tall=True)
    torch.testing.assert_close(whole, torch.bmm(tall, factor))


def test_tiny_directions_are_not_lost() -> None:
    """Gradients whose squares float32 cannot hold still turn into a direction of RMS 1."""
    param = torch.nn.Parameter(torch.ones(8, 12, device=DEVICE))
    optimizer = MaxFactor([param], direction="orthogonal", fused=True, lr=0.01)
    param.grad = random(8, 12, dtype=torch.float32) * 1e-17
    optimizer.step()
    moved = (param.detach() - 1.0).square().mean().sqrt()
    assert float(moved) > 1e-4
