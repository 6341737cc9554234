"""How many messages a sharded step sends, how large they are, and what a thousand GPUs would see.

    python benchmarks/timing/collectives.py --out benchmarks/results/collectives.json
    python benchmarks/timing/collectives.py --markdown benchmarks/results/collectives.json
    python benchmarks/timing/collectives.py --quick

Messages are counted on 2, 3 and 4 processes over loopback (gloo), with the shapes of a real model
sharded by rows as FSDP2 does it, and on 2 x 2 (HSDP). They are compared with `predicted`, written
from the equations; the prediction is then evaluated for a larger model on more ranks, with a
latency and a bandwidth that are assumptions. Bytes are those of the buffer that a rank sends.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, ones
from torch.utils._python_dispatch import TorchDispatchMode

import maxfactor
from maxfactor.backends.triton.workspace import ROUND_ELEMENTS
from maxfactor.distributed.owner_exchange import dealt
from maxfactor.rule.newton_schulz import steps_at_a_time

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import (
    MODELS,
    Record,
    Shape,
    circumstances,
    elements,
    every_kind,
    shapes,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from maxfactor.recipes import RecipeName

FLOAT = 4  # bytes
PARTS = 3  # of a sum of squares of W or U, so that none overflows: src/maxfactor/rule/squares.py
GPU_WIRE = 2  # bytes for each entry of a matrix that is exchanged: bfloat16, and float16 back
LIMIT = timedelta(seconds=120)
RANKS_ON_PAPER = (8, 64, 1024)
LATENCY = 10e-6  # seconds for a message between two GPUs, an assumption
BANDWIDTH = 25e9  # bytes per second that a GPU can send, an assumption: 200 Gb/s


@dataclass(frozen=True)
class Message:
    """One collective: "sum" and "max" are all-reduces, "exchange" is an all-to-all."""

    kind: str
    bytes: int  # of each rank's buffer; of all ranks together for "exchange"


# ------------------------------------------------------------------------------- on paper


@dataclass(frozen=True)
class Reductions:
    """How many values an optimizer reduces for each tensor, besides those that all reduce."""

    max_rows: int = 0  # max R of (6), for each matrix
    matrix: dict[str, int] = field(default_factory=dict)  # of the third message
    vector: dict[str, int] = field(default_factory=dict)
    matrix_means: int = 0  # of the first message, for mean R: the sums of R and of G^2
    vector_means: int = 0  # of the first message, for mean v: the sum of v
    exchanged: tuple[str, ...] = ()  # kinds of layers whose direction is orthogonal, as a whole


# max|U| of (7), of a vector also that of its one row; the sum of U^2, in its parts, if d is
# finite; FAM's two sums of a matrix.
REDUCTIONS: dict[str, Reductions] = {
    "published-1.0": Reductions(1, {"max": 1}, {"max": 2}),
    "published-0.2": Reductions(1, {"max": 1, "sum": PARTS}, {"max": 1, "sum": PARTS}),
    "lean": Reductions(0, {"sum": PARTS}, {"sum": PARTS}, 2, exchanged=("conv",)),
    "fast": Reductions(0, {"sum": 2}, {}, 2, 1, exchanged=("conv",)),
    "quality": Reductions(0, {"sum": 2}, {}, 2, 1, exchanged=("conv", "hidden")),
    "Adafactor": Reductions(0, {"sum": PARTS}, {"sum": PARTS}, 2),
}
CONTENDERS = (*REDUCTIONS, "torch AdamW")


def kind_of(name: str, shape: Shape) -> str:
    """The kind of layer, as `for_model` sorts a Whisper."""
    if len(shape) < 2:
        return "vector"
    if "conv" in name:
        return "conv"
    return "embedding" if "embed" in name else "hidden"


def predicted(
    model: Mapping[str, Shape], contender: str, ranks: int, wire: int = FLOAT
) -> list[Message]:
    """The messages of a step where the first dimension is cut over `ranks`, from the equations.

    Matrices that are exchanged take `wire` bytes for each entry.
    """
    if contender == "torch AdamW" or ranks == 1:
        return []
    rule = REDUCTIONS[contender]
    first, second, third = Counter[str](), Counter[str](), Counter[str]()
    exchanged = 0
    for name, shape in model.items():
        first["sum"] += first_sums(shape, rule)
        if len(shape) < 2:
            third.update(rule.vector)
            continue
        second["max"] += rule.max_rows
        if is_exchanged(name, shape, contender):
            exchanged += math.prod(shape)
        else:
            third.update(rule.matrix)
    found = [packed(each, ranks) for each in (first, second, third)]
    messages = [message for message in found if message.bytes]
    return messages + [Message("exchange", wire * exchanged)] * (2 if exchanged else 0)


def first_sums(shape: Shape, rule: Reductions) -> int:
    """Sums of G^2 and of W^2, whether all values are finite; of a matrix also G^2 by columns."""
    if len(shape) < 2:
        return 2 + PARTS + rule.vector_means
    return 2 + PARTS + rule.matrix_means + columns(shape)


def columns(shape: Shape) -> int:
    """Columns of the matrix that a tensor is read as."""
    return matrix_of(shape)[1]


def matrix_of(shape: Shape) -> tuple[int, int]:
    """The matrix that a tensor is read as: the split with fewest rows + columns."""
    splits = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    return min(splits, key=sum)


def is_exchanged(name: str, shape: Shape, contender: str) -> bool:
    """Whether a tensor goes to one owner, which orthogonalises it."""
    rule = REDUCTIONS.get(contender)
    return rule is not None and kind_of(name, shape) in rule.exchanged


def packed(values: Counter[str], ranks: int) -> Message:
    """Sums among maxima have a slot for each rank."""
    sums, maxima = values["sum"], values["max"]
    if not maxima:
        return Message("sum", FLOAT * sums)
    return Message("max", FLOAT * (maxima + ranks * sums))


def seconds(message: Message, ranks: int, latency: Callable[[int], float]) -> float:
    """The cost model of an all-reduce: latency, and a rank's bytes by its bandwidth."""
    return latency(ranks) + 2 * (ranks - 1) / ranks * message.bytes / BANDWIDTH


def ring(ranks: int) -> float:
    """Latency of an all-reduce in a ring: everything goes round twice."""
    return 2 * (ranks - 1) * LATENCY


def tree(ranks: int) -> float:
    """Latency of an all-reduce up and down a tree."""
    return 2 * math.ceil(math.log2(ranks)) * LATENCY


@dataclass(frozen=True)
class Busiest:
    """What the busiest rank owns of the matrices that are exchanged."""

    elements: int = 0
    operations: int = 0  # of the Newton-Schulz iterations
    rounds: int = 0  # in which they are exchanged

    def seconds(self, ranks: int, wire: int) -> float:
        """Both ways: messages for every other rank, one after the other, and the bytes."""
        if not self.elements:
            return 0.0
        sent = self.elements * wire * (ranks - 1) / ranks
        return 2 * (self.rounds * (ranks - 1) * LATENCY + sent / BANDWIDTH)


def busiest(model: Mapping[str, Shape], contender: str, ranks: int) -> Busiest:
    """Assign the matrices of a model to owners on paper."""
    matrices = [
        sorted(matrix_of(shape))
        for name, shape in model.items()
        if is_exchanged(name, shape, contender)
    ]
    costs = tuple(short * short * long for short, long in matrices)
    sizes = tuple(short * long for short, long in matrices)
    places = dealt(costs, sizes, ranks, ROUND_ELEMENTS)
    rounds = 1 + max((number for number, _ in places), default=-1)
    entries, products = Counter[int](), Counter[int]()
    for (_, owner), (short, long) in zip(places, matrices, strict=True):
        entries[owner] += short * long
        for steps in steps_at_a_time(short, long):
            products[owner] += 2 * (2 * short * short * long + (4 * steps - 3) * short**3)
    most_entries, most_products = (max(x.values(), default=0) for x in (entries, products))
    return Busiest(most_entries, most_products, rounds)


def on_paper(model: str, contender: str, ranks: int) -> Record:
    """What a step costs by this model on GPUs, where matrices are exchanged in 16 bits."""
    messages = predicted(shapes(model), contender, ranks, wire=GPU_WIRE)
    reductions = [message for message in messages if message.kind != "exchange"]
    owner = busiest(shapes(model), contender, ranks)
    exchange = owner.seconds(ranks, GPU_WIRE)
    weights = FLOAT * elements(shapes(model))
    return {
        "model": model,
        "optimizer": contender,
        "ranks": ranks,
        "messages": len(reductions) + 2 * owner.rounds,
        "all_reduce_bytes": sum(message.bytes for message in reductions),
        "all_to_all_bytes": 2 * GPU_WIRE * owner.elements,
        "ring_ms": 1e3 * (sum(seconds(each, ranks, ring) for each in reductions) + exchange),
        "tree_ms": 1e3 * (sum(seconds(each, ranks, tree) for each in reductions) + exchange),
        "newton_schulz_tflop": owner.operations / 1e12,
        # FSDP itself: weights before the forward and the backward pass, then gradients.
        "fsdp_bytes": 3 * weights * (ranks - 1) / ranks,
        "fsdp_ms": 3e3 * weights * (ranks - 1) / ranks / BANDWIDTH,
    }


# ------------------------------------------------------------------------------- measured


class Messages(TorchDispatchMode):
    """Records the collectives of this process, with the bytes that it sends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            # The first argument of an all-to-all is its output, the second what it sends.
            given = args[1] if name == "alltoall_base_" else args[0]
            tensors = given if isinstance(given, (list, tuple)) else [given]
            self.found.append((name, sum(x.numel() * x.element_size() for x in tensors)))
        return func(*args, **(kwargs or {}))


def optimizer_for(contender: str, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The optimizer with its groups by kind of layer."""
    if contender == "torch AdamW":
        return torch.optim.AdamW(params.values())
    if contender == "Adafactor":
        return maxfactor.Adafactor(params.values())
    groups: dict[str, Record] = {}
    for name, param in params.items():
        kind = kind_of(name, tuple(param.shape))
        group = groups.setdefault(kind, {"params": [], **recipe_settings(contender)[kind]})
        group["params"].append(param)
    return maxfactor.MaxFactor(list(groups.values()))


@functools.cache
def recipe_settings(recipe: str) -> dict[str, Record]:
    """The settings that `for_model` gives each kind of layer."""
    optimizer = maxfactor.for_model(every_kind(), cast("RecipeName", recipe))
    names = ("params", "param_names", "kind")
    return {
        group["kind"]: {name: value for name, value in group.items() if name not in names}
        for group in optimizer.param_groups
    }


def counted(contender: str, model: Mapping[str, Shape], mesh: DeviceMesh) -> list[tuple[str, int]]:
    """The messages of this rank in the second step."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    params = {
        name: torch.nn.Parameter(ones(shape, device_mesh=mesh, placements=placements))
        for name, shape in model.items()
    }
    optimizer = optimizer_for(contender, params)
    for shape, param in zip(model.values(), params.values(), strict=True):
        param.grad = ones(shape, device_mesh=mesh, placements=placements)
    optimizer.step()
    messages = Messages()
    with messages:
        optimizer.step()
    return messages.found


def torch_adafactor(mesh: DeviceMesh) -> list[dict[str, str]]:
    """What torch's own Adafactor does with shards, compared with the same step without them."""
    rows = []
    for shape in [(8,), (8, 4), (4, 4, 4)]:
        generator = torch.Generator().manual_seed(0)
        weight, grad = (torch.randn(shape, generator=generator) for _ in range(2))
        grad = grad * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
        plain = torch.nn.Parameter(weight.clone())
        shard = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        plain.grad, shard.grad = grad, distribute_tensor(grad, mesh, [Shard(0)])
        torch.optim.Adafactor([plain]).step()
        try:
            torch.optim.Adafactor([shard]).step()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            outcome = f"raises {type(error).__name__}: {str(error).splitlines()[0][:90]}"
        else:
            moved = (plain.detach() - weight).abs().max()
            whole: Tensor = shard.full_tensor()  # type: ignore[attr-defined]
            wrong = (whole.detach() - plain.detach()).abs().max() / moved
            outcome = "equal" if wrong < 1e-5 else f"wrong by {float(wrong):.0%} of the step"
        rows.append({"shape": str(shape), "outcome": outcome})
    return rows


def count_on_rank(rank: int, world: int, port: int, task: Record, folder: str) -> None:
    """One process: count for every contender, and write what this rank found."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    mesh = init_device_mesh("cpu", tuple(task["mesh"]))
    model = shapes(task["model"])
    found = {each: counted(each, model, mesh) for each in task["contenders"]}
    adafactor = torch_adafactor(mesh) if task["with_torch"] else []
    (Path(folder) / f"{rank}.json").write_text(json.dumps([found, adafactor]))
    dist.destroy_process_group()


def measure(task: Record, folder: Path) -> tuple[list[Record], list[Any]]:
    """Start the processes; return a row for each contender, and what torch's Adafactor did."""
    folder.mkdir(parents=True, exist_ok=True)
    world = math.prod(task["mesh"])
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)  # type: ignore[attr-defined]
    mp.spawn(count_on_rank, args=(world, store.port, task, str(folder)), nprocs=world)  # type: ignore[attr-defined,no-untyped-call]
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    rows = [
        row_of(task, contender, [found[contender] for found, _ in answers])
        for contender in task["contenders"]
    ]
    return rows, answers[0][1]


def row_of(task: Record, contender: str, ranks: list[list[Any]]) -> Record:
    """What was counted on all ranks, beside the prediction."""
    names = [[name for name, _ in found] for found in ranks]
    assert all(each == names[0] for each in names), "ranks sent different messages"
    is_exchange = [name == "alltoall_base_" for name in names[0]]
    copies = math.prod(task["mesh"][:-1])  # each exchanges among its own ranks
    sizes = [[size for _, size in found] for found in ranks]
    totals = [
        sum(column) // copies if exchange else column[0]
        for exchange, column in zip(is_exchange, zip(*sizes, strict=True), strict=True)
    ]
    expected = predicted(shapes(task["model"]), contender, task["mesh"][-1])
    return {
        "optimizer": contender,
        "model": task["model"],
        "mesh": task["mesh"],
        "messages": [
            {"name": name, "bytes": total} for name, total in zip(names[0], totals, strict=True)
        ],
        "predicted": [asdict(message) for message in expected],
        "as_predicted": totals == [message.bytes for message in expected]
        and is_exchange == [message.kind == "exchange" for message in expected],
    }


# ------------------------------------------------------------------------------- the command


def table(rows: Iterable[Sequence[object]]) -> str:
    """Rows as aligned text."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def as_text(result: Mapping[str, Any]) -> str:
    """Two tables: counted, and on paper."""
    counted_rows: list[list[object]] = [["optimizer", "mesh", "messages", "bytes", "as predicted"]]
    for row in result["measured"]:
        mesh = "x".join(map(str, row["mesh"]))
        sizes = " + ".join(f"{message['bytes']:,}" for message in row["messages"]) or "0"
        counted_rows.append(
            [row["optimizer"], mesh, len(row["messages"]), sizes, row["as_predicted"]]
        )
    paper: list[list[object]] = [
        [
            "optimizer",
            "ranks",
            "messages",
            "reduced MB",
            "exchanged MB",
            "ring ms",
            "tree ms",
            "FSDP ms",
        ]
    ]
    for row in result["on_paper"]:
        both = [f"{row[key] / 1e6:.2f}" for key in ("all_reduce_bytes", "all_to_all_bytes")]
        times = [f"{row[key]:.2f}" for key in ("ring_ms", "tree_ms", "fsdp_ms")]
        paper.append([row["optimizer"], row["ranks"], row["messages"], *both, *times])
    tables = [table(counted_rows), table(paper)]
    torch_rows = [f"torch Adafactor {row['shape']}: {row['outcome']}" for row in result["torch"]]
    return "\n\n".join([*tables, "\n".join(torch_rows)])


def as_markdown(result: Mapping[str, Any]) -> str:
    """The two tables of docs/distributed.md: counted on one mesh after the other, and on paper."""
    counted_rows = ["| | messages | bytes on 2 ranks | on 3 | on 4 | as predicted |"]
    paper = ["| | messages | all-reduced MB | exchanged MB, both ways | ring, ms | tree, ms |"]
    for contender in CONTENDERS:
        rows = [row for row in result["measured"] if row["optimizer"] == contender]
        sizes = [[f"{message['bytes']:,}" for message in row["messages"]] for row in rows]
        told = [" + ".join(each) or "0" for each, row in zip(sizes, rows, strict=True)][:3]
        exact = "yes" if all(row["as_predicted"] for row in rows) else "no"
        counted_rows.append("| " + " | ".join([contender, str(len(sizes[0])), *told, exact]) + " |")
        rows = [row for row in result["on_paper"] if row["optimizer"] == contender]
        counts = [str(row["messages"]) for row in rows]
        cells = [contender, counts[0] if len({*counts}) == 1 else " / ".join(counts)]
        cells += [
            over_ranks([row[key] / 1e6 for row in rows])
            for key in ("all_reduce_bytes", "all_to_all_bytes")
        ]
        cells += [over_ranks([row[key] for row in rows]) for key in ("ring_ms", "tree_ms")]
        paper.append("| " + " | ".join(cells) + " |")
    for lines in (counted_rows, paper):
        lines.insert(1, "|" + "---|" * (lines[0].count("|") - 1))
    return "\n".join([*counted_rows, "", *paper])


def over_ranks(values: Sequence[float]) -> str:
    """Values for each of RANKS_ON_PAPER in a cell."""
    return " / ".join(f"{value:.3g}" for value in values) if any(values) else "0"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=MODELS, default="whisper-tiny", help="counted")
    parser.add_argument("--on-paper", choices=MODELS, default="whisper-large-v3")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="a tiny model on two ranks")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path, help="print the tables of a JSON, count nothing")
    options = parser.parse_args(argv)
    if min(options.ranks) < 2:
        parser.error(f"--ranks must be at least 2, got {min(options.ranks)}")
    if options.quick:
        options.model, options.ranks = "quick", [2]
    return options


def main(argv: Sequence[str] | None = None) -> Record:
    """Count, compare, print, write."""
    options = arguments(argv)
    if options.markdown is not None:
        written: Record = json.loads(options.markdown.read_text())
        print(as_markdown(written))
        return written
    meshes = [[ranks] for ranks in options.ranks] + ([] if options.quick else [[2, 2]])
    measured, adafactor = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for index, mesh in enumerate(meshes):
            task = {"mesh": mesh, "model": options.model, "contenders": CONTENDERS}
            task["with_torch"] = index == 0
            rows, outcome = measure(task, Path(scratch) / str(index))
            measured += rows
            adafactor += outcome
    paper = [on_paper(options.on_paper, each, k) for each in CONTENDERS for k in RANKS_ON_PAPER]
    result: Record = {
        **circumstances("cpu"),
        "arguments": {
            name: value for name, value in vars(options).items() if name not in ("out", "markdown")
        },
        "assumed": {"latency_seconds": LATENCY, "bandwidth_bytes_per_second": BANDWIDTH},
        "measured": measured,
        "on_paper": paper,
        "torch": adafactor,
    }
    print(as_text(result))
    if options.out is not None:
        write_json(options.out, result)
    return result


if __name__ == "__main__":
    main()
