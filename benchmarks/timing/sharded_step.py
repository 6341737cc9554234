"""Step times of a sharded model on one GPU, next to the same model without shards.

    python benchmarks/timing/sharded_step.py --device cuda --model whisper-large-v3 --out FILE.json
    python benchmarks/timing/sharded_step.py --quick    # a small model on the CPU

Rows: the plain model; FSDP2 on a mesh of one rank, where nothing is cut; and the first of several
ranks, whose messages are left out (torch's "fake" process group, which returns at once): what a
rank itself does, without the time on the wire. Weights and gradients are random and fixed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import maxfactor
from maxfactor_speech.bench.step_time import cuda_extra, cuda_times, problem

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import MODELS, Record, circumstances, milliseconds, shapes, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module


def main(argv: Sequence[str] | None = None) -> Record:
    """Measure, print, write."""
    args = arguments(argv)
    rows: list[Record] = []
    result = {**circumstances(args.device), "model": args.model, "rows": rows}
    for ranks in [0, *args.ranks]:
        rows.append(measured(args, ranks))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        if args.out is not None:
            write_json(args.out, result)
    return result


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=MODELS, default="whisper-large-v3")
    parser.add_argument("--recipe", default="quality")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.model, args.repeats = "quick", 1
    return args


def measured(args: argparse.Namespace, ranks: int) -> Record:
    """The times of the first of some ranks; 0 without shards."""
    model = problem(shapes(args.model), torch.float32, args.device)
    if ranks:
        start_processes(args.device, ranks)
        shard(model, DeviceMesh(args.device, torch.arange(ranks)))
    before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    optimizer: Any = maxfactor.for_model(model, args.recipe)
    row: Record = {"ranks": ranks, "recipe": args.recipe}
    row["wall_ms"] = round(milliseconds(optimizer.step, args.device, args.repeats), 2)
    if args.device == "cuda":
        times = cuda_times(optimizer, args.repeats)
        row["gpu_ms"] = round(1e3 * median(times.gpu), 2)
        row["host_ms"] = round(1e3 * median(times.host), 2)
        row["borrowed_mb"] = round(cuda_extra(optimizer, before) / 1e6)
        row["fused"] = optimizer._fused is not None
    if ranks:
        dist.destroy_process_group()
    return row


def start_processes(device: str, ranks: int) -> None:
    """A process group of this process alone, or one that others seem to be in."""
    if ranks == 1:
        backend = "nccl" if device == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def shard(model: Module, mesh: DeviceMesh) -> None:
    """Shard weights and gradients by FSDP2."""
    grads = [param.grad for param in model.parameters()]
    for param in model.parameters():
        param.grad = None
    fully_shard(model, mesh=mesh)
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert grad is not None
        assert isinstance(param, DTensor)
        rows = param.to_local().shape[0] if param.dim() else 0
        own = grad[:rows].clone() if param.dim() else grad.clone()  # of the first rank
        param.grad = DTensor.from_local(
            own, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


if __name__ == "__main__":
    main()
