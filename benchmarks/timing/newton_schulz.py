"""The Newton-Schulz iteration of the fused backend: tiles, speed, digits.

python benchmarks/timing/newton_schulz.py --out FILE.json       # on a CUDA device
python benchmarks/timing/newton_schulz.py --heads-per-block 1   # attention matrices in blocks
python benchmarks/timing/newton_schulz.py --quick               # small matrices, any device

For each tile size the symmetric products are checked against float64 and timed; the fastest is what
`maxfactor/backends/triton/products.py` should list for this architecture. The iteration is timed on
the hidden matrices of Whisper-large-v3, next to torch operations in bfloat16 and to torch's Muon,
and its singular values are compared with those of five steps in float64.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from maxfactor.backends.triton.kernels.descriptors import ProductTile
from maxfactor.backends.triton.orthogonal import newton_schulz
from maxfactor.backends.triton.products import IN_INTERPRETER, Tuning, symmetric, tuning_for
from maxfactor.backends.triton.workspace import alike, batches_of, layout, norm_of
from maxfactor.rule import newton_schulz as in_torch
from measurement import Record, circumstances, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = {(1280, 1280): 384, (5120, 1280): 64, (1280, 5120): 64}  # Whisper-large-v3's matrices
QUICK = {(24, 24): 2, (16, 48): 1}
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch's Muon, in every step
# The square matrices are those of attention: rows of q, k and v, columns of the output.
ATTENTION, QUICK_ATTENTION = (1280, 64, 288, 96), (24, 12, 1, 1)  # width, head, rows, columns
WARM_UP, REPEATS = (2, 7) if DEVICE.type == "cuda" else (0, 1)


def candidates() -> list[Tuning]:
    """Tiles, warps and stages that fit into registers and shared memory."""
    if DEVICE.type != "cuda":
        small = ProductTile(8, 8, 8)
        return [IN_INTERPRETER, Tuning(ProductTile(16, 32, 16), 1, 1), Tuning(small, 1, 1, True)]
    sizes = [(128, 128, 64, 4), (128, 128, 64, 8), (128, 256, 64, 8), (128, 128, 32, 4)]
    found = [
        Tuning(ProductTile(rows, cols, depth), warps, stages, descriptors)
        for rows, cols, depth, warps in sizes
        for descriptors in (False, True)[: 1 + (rows == cols)]
        for stages in ((2, 3, 4) if descriptors else (3, 4))
    ]
    return [each for each in found if shared_bytes(each) <= 200_000]


def shared_bytes(tuning: Tuning) -> int:
    """Shared memory of the operands that are prefetched."""
    rows, cols, depth = tuning.tile
    return 2 * depth * (rows + cols) * tuning.stages


def seconds(call: Callable[[], object], calls: int = 4) -> float:
    """The median time of a call on the device, which sleeps until all calls are launched."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        if DEVICE.type != "cuda":
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(calls * 10_000_000)  # 5 ms for each
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return median(times[WARM_UP:])


def random(*shape: int) -> Tensor:
    """Random matrices as the iteration has them: entries of 1 / sqrt(long side)."""
    return torch.randn(shape, device=DEVICE).mul_(max(shape[-2:]) ** -0.5).to(format_of_iteration())


def format_of_iteration() -> torch.dtype:
    """Float16; float32 in the interpreter."""
    return torch.float16 if DEVICE.type == "cuda" else torch.float32


# ------------------------------------------------------------------------------ the products


def tune(batch: int, short: int, long: int) -> Iterator[Record]:
    """Check and time the products of a wide, a tall and a square matrix for each tile size."""
    cases = {
        "gram_wide": (random(batch, short, long), False),
        "gram_tall": (random(batch, long, short), True),
        "square": (gram(random(batch, short, short), is_tall=False), False),
    }
    square = cases["square"][0]
    spare = torch.empty_like(square)
    for tuning in candidates():
        row: Record = {**tuning._asdict(), "tile": [*tuning.tile]}
        try:
            for name, (x, is_tall) in cases.items():
                row[name] = timed_product(x, tuning, is_tall=is_tall)
            row["polynomial_us"] = 1e6 * seconds(partial(polynomial, spare, square, tuning))
        except Exception as error:  # of any kind: the next size may fit
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        print(row, flush=True)
        yield row


def polynomial(out: Tensor, square: Tensor, tuning: Tuning) -> Tensor:
    """P of the iteration: a product to which two matrices are added."""
    a, b, c = in_torch.COEFFICIENTS[0]
    return symmetric(out, square, square, alpha=c, beta=b, gamma=a, added=square, tuning=tuning)


def gram(x: Tensor, *, is_tall: bool) -> Tensor:
    """A in the dtype of x."""
    return (x.mT @ x if is_tall else x @ x.mT).contiguous()


def timed_product(x: Tensor, tuning: Tuning, *, is_tall: bool) -> Record:
    """The error, the time and the useful FLOP/s, and cuBLAS's on the full product."""
    exact = x[:1].double().mT @ x[:1].double() if is_tall else x[:1].double() @ x[:1].double().mT
    out = torch.full((len(x), *exact.shape[1:]), math.nan, dtype=x.dtype, device=x.device)
    symmetric(out, x, x, is_tall=is_tall, tuning=tuning)
    error = float((out[:1].double() - exact).norm() / exact.norm())
    assert error < 1e-3, f"off by {error}"
    assert torch.equal(out, out.mT), "not symmetric"
    full = 2 * x.numel() * exact.shape[1]
    own = seconds(lambda: symmetric(out, x, x, is_tall=is_tall, tuning=tuning))
    left, right = (x.mT, x) if is_tall else (x, x.mT)
    library = seconds(lambda: torch.bmm(left, right, out=out))
    return {
        "error": error,
        "microseconds": 1e6 * own,
        "of_full_tflops": full / own / 1e12,
        "cublas_tflops": full / library / 1e12,
        "ratio": library / own,
    }


# ----------------------------------------------------------------------------- the iteration


def iterate(x: Tensor) -> Tensor:
    """The fused iteration on matrices with the norm of `norm_of`; overwrites nothing."""
    matrices, m, n = x.shape
    form = layout(m, n, [matrices], x.dtype)
    squares = [x.new_empty(matrices, form.short, form.short) for _ in range(form.squares)]
    return newton_schulz(x.clone(), torch.empty_like(x), squares, form, norm_of(form.short))


def timed_iteration(m: int, n: int, tensors: int) -> Record:
    """Seconds of all matrices of a shape: ours by batches, torch's, and Muon's one by one."""
    [batches] = batches_of([alike(m, n, [tensors], 1, format_of_iteration())])
    sizes = [sum(each.parts) for each in batches]
    x = random(sizes[0], m, n)
    form = layout(m, n, [len(x)], x.dtype)
    spare = torch.empty_like(x)
    squares = [x.new_empty(len(x), form.short, form.short) for _ in range(form.squares)]
    norm = norm_of(form.short)
    ours = seconds(lambda: newton_schulz(x, spare, squares, form, norm), calls=1)
    y = random(len(x), m, n).to(torch.bfloat16)
    plain = seconds(lambda: in_torch.newton_schulz(y), calls=1)
    row = {"shape": [m, n], "tensors": tensors, "batch": sizes[0], "batches": len(sizes)}
    row |= {"ours": ours * tensors / len(x), "torch": plain * tensors / len(x)}
    one = y[0].clone()
    row["muon"] = seconds(lambda: muon(one), calls=4) * tensors
    row["tflop"] = operations(m, n, form.steps) * tensors / 1e12
    print(row, flush=True)
    return row


def operations(m: int, n: int, steps: tuple[int, ...]) -> float:
    """Useful operations of the iteration: half of a symmetric product's."""
    short, long = sorted((m, n))
    products = sum(1 + 4 * (merged - 1) for merged in steps)
    return len(steps) * 3 * short * short * long + products * short**3


def muon(x: Tensor) -> Tensor:
    """The iteration of torch's Muon, in bfloat16, one matrix at a time."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(x, MUON_COEFFICIENTS, 5, 1e-7)


# -------------------------------------------------------------------------------- the digits


def spectra(short: int, long: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices of all kinds, in bfloat16's digits, as the kernels hand them over."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    noise = torch.randn(short, long, generator=generator, device=DEVICE, dtype=torch.float64)
    u = torch.linalg.qr(noise[:, :short])[0]
    v = torch.linalg.qr(noise.mT)[0].mT
    yield "gaussian", noise
    for decades in (2, 4, 6):
        values = torch.logspace(0, -decades, short, device=DEVICE, dtype=torch.float64)
        yield f"condition 1e{decades}", (u * values) @ v
    rank = max(1, short // 32)
    low = u[:, :rank] @ v[:rank]
    yield "low rank, noise 1e-3", low + 1e-3 * noise * long**-0.5
    yield "low rank, noise 1e-5", low + 1e-5 * noise * long**-0.5
    yield "rank 1", u[:, :1] @ v[:1]


def spread(m: int, n: int) -> Iterator[Record]:
    """Singular values after five steps: in float64, in ours, in torch's bfloat16."""
    short = min(m, n)
    for name, matrix in spectra(short, max(m, n)):
        y = (matrix if m <= n else matrix.mT).to(torch.bfloat16).double().contiguous()
        x = (y / y.norm() * norm_of(short)).to(format_of_iteration())
        found = {
            "exact": exact_steps(y),
            "ours": iterate(x[None])[0] / norm_of(short),
            "torch": in_torch.newton_schulz(y.float()),
        }
        row: Record = {"shape": [m, n], "matrix": name}
        for key, o in found.items():
            values = singular_values(o.double())
            at = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=values.dtype, device=values.device)
            row[key] = [round(value, 4) for value in torch.quantile(values, at).tolist()]
            off = (o.double() - found["exact"]).norm() / found["exact"].norm()
            row[f"{key}_error"] = float(off)
        print(row, flush=True)
        yield row


def singular_values(o: Tensor) -> Tensor:
    """From the eigenvalues of the smaller Gram matrix, which are faster; off by about 1e-8."""
    gram_matrix = o.mT @ o if o.shape[0] > o.shape[1] else o @ o.mT
    values: Tensor = torch.linalg.eigvalsh(gram_matrix)
    return values.clamp(min=0.0).sqrt()


def exact_steps(y: Tensor) -> Tensor:
    """Five steps in float64; on CUDA `rule.newton_schulz` would round."""
    x: Tensor = y / y.norm()
    x = x.mT if x.shape[0] > x.shape[1] else x
    for a, b, c in in_torch.COEFFICIENTS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if y.shape[0] > y.shape[1] else x


def in_blocks(
    shapes: dict[tuple[int, int], int], attention: tuple[int, int, int, int], heads: int
) -> dict[tuple[int, int], int]:
    """The shapes if attention matrices are cut into blocks of some heads."""
    width, head, rows, columns = attention
    block = heads * head
    blocks, rest = divmod(width, block)
    if rest:
        raise SystemExit(f"--heads-per-block {heads} does not divide {width // head} heads")
    found = {shape: count for shape, count in shapes.items() if shape != (width, width)}
    return {(block, width): blocks * rows, (width, block): blocks * columns, **found}


def measure(shapes: dict[tuple[int, int], int], *, batch: int, short: int, long: int) -> Record:
    """All parts; one that fails is named, and the others are still measured."""
    record: Record = {}
    parts: dict[str, Callable[[], Any]] = {
        "tiles": lambda: list(tune(batch, short, long)),
        "iteration": lambda: [timed_iteration(m, n, count) for (m, n), count in shapes.items()],
        "spread": lambda: [row for m, n in shapes if m <= n for row in spread(m, n)],
    }
    for name, part in parts.items():
        try:
            record[name] = part()
        except Exception as error:  # of any kind
            record[name] = f"{type(error).__name__}: {error}"
            print(name, record[name], flush=True)
    if isinstance(record["iteration"], list):
        total = {
            key: sum(row[key] for row in record["iteration"])
            for key in ("ours", "torch", "muon", "tflop")
        }
        record["total"] = {**total, "ours_to_muon": total["ours"] / total["muon"]}
    return record


def main(given: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small matrices")
    parser.add_argument("--heads-per-block", type=int, help="cut attention matrices into blocks")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(given)
    shapes, attention = (QUICK, QUICK_ATTENTION) if arguments.quick else (HIDDEN, ATTENTION)
    if arguments.heads_per_block is not None:
        shapes = in_blocks(shapes, attention, arguments.heads_per_block)
    if arguments.quick:
        record = measure(shapes, batch=2, short=24, long=48)
    else:
        record = measure(shapes, batch=24, short=1280, long=5120)
    chosen = tuning_for(1280, DEVICE)
    record = {
        **circumstances(DEVICE.type),
        "heads_per_block": arguments.heads_per_block,
        "listed": {**chosen._asdict(), "tile": [*chosen.tile]},
        **record,
    }
    print(record.get("total"))
    if arguments.out:
        write_json(arguments.out, record)


if __name__ == "__main__":
    main()
