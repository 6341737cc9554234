"""What every recipe leaves after 10 steps: a digest for each backend and dtype.

    python tests/digests.py --check     compares with tests/digests.json
    python tests/digests.py             writes it anew

The fused kernels, in Triton's interpreter, take 6 steps of a smaller model. A digest is the hash of
all parameters and state tensors, and for each key of the state two numbers in float64: the norm
over all parameters, and a projection. Where only the order of a sum changed, the hash differs and
the numbers agree. Gradients are drawn, not computed, so nothing feeds back.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from interpreter import speed_up_interpreter
from maxfactor import Adafactor, MaxFactor, for_model, recipe

FILE = Path(__file__).with_name("digests.json")
STEPS = 10
FUSED_STEPS = 6  # Triton's interpreter takes a second for each
PUBLISHED = ("published-0.1", "published-0.2", "published-0.3", "published-1.0")
OWN = ("lean", "fast", "quality")
ADAFACTOR: dict[str, dict[str, Any]] = {
    "adafactor": {"weight_decay": 0.1},
    "adafactor lr": {"lr": 0.01, "weight_decay": 0.1},
}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
ALLOWED = {"param": 3e-5, "momentum": 3e-4, "momentum_scale": 1e-4}
BACKENDS = ("plain", "foreach", "fused", "sharded")


class Model(nn.Module):
    """One parameter at least of each kind of layer."""

    def __init__(self, *, small: bool, large: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 20)
        self.up = nn.Linear(20, 70, bias=False)
        self.norm = nn.LayerNorm(7)
        if small:
            return
        self.conv = nn.Conv1d(20, 24, 3)
        self.down = nn.Linear(70, 24)
        self.gate = nn.Parameter(torch.zeros(()))
        if large:  # more than a block of rows
            self.wide = nn.Linear(1000, 600)
        self.head = nn.Linear(24, 30)


def cases() -> Iterator[tuple[str, str, str]]:
    """(recipe, backend, dtype); "large" is float32 with a matrix of several blocks."""
    for name in (*PUBLISHED, *OWN, *ADAFACTOR):
        for backend in BACKENDS:
            for dtype in DTYPES if backend != "fused" else ("float32", "bfloat16"):
                yield name, backend, dtype
        for backend in ("plain", "foreach"):
            yield name, backend, "large"


def digest(name: Any, backend: str, dtype: str) -> dict[str, Any]:
    """Take the steps of a case. Sharded parameters need a process group of one."""
    torch.manual_seed(0)
    chosen = DTYPES.get(dtype, torch.float32)
    model = Model(small=backend == "fused", large=dtype == "large").to(chosen)
    if backend == "sharded":
        shard(model)
    optimizer = build(model, name, backend)
    steps = FUSED_STEPS if backend == "fused" else STEPS
    shapes = tuple(param.shape for param in model.parameters())
    for grads in gradients(shapes, chosen, steps):
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = as_placed(grad.clone(), param)
        optimizer.step()
    return summary(model, optimizer)


@cache
def gradients(
    shapes: tuple[torch.Size, ...], dtype: torch.dtype, steps: int
) -> list[list[torch.Tensor]]:
    """The gradients of every step, the same for all recipes."""
    random = np.random.default_rng(1)

    def drawn(shape: torch.Size) -> torch.Tensor:
        values = random.normal(size=shape) * np.exp(random.normal(size=shape))
        return torch.from_numpy(np.asarray(values)).to(dtype)

    return [[drawn(shape) for shape in shapes] for _ in range(steps)]


def build(model: nn.Module, name: Any, backend: str) -> torch.optim.Optimizer:
    """The optimizer of a case."""
    how: dict[str, Any] = {"foreach": backend == "foreach", "fused": backend == "fused", "seed": 5}
    if backend == "sharded":
        del how["foreach"]
    if name in ADAFACTOR:
        return Adafactor(model.named_parameters(), **ADAFACTOR[name], **how)
    if name in PUBLISHED:
        return MaxFactor(model.named_parameters(), **recipe(name), **how)
    return for_model(model, recipe=name, **how)


def shard(model: nn.Module) -> None:
    """Make every parameter a DTensor on a mesh of one rank."""
    mesh = init_device_mesh("cpu", (1,))
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(distribute_tensor(param.detach(), mesh)))


def as_placed(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A gradient as its parameter is."""
    if not isinstance(param, DTensor):
        return grad
    return distribute_tensor(grad, param.device_mesh, param.placements)


def summary(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The hash, and (norm, projection) of each key."""
    together = hashlib.sha256()
    by_key: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, param in sorted(model.named_parameters()):
        for key, value in sorted({"param": param, **optimizer.state[param]}.items()):
            local = value.to_local() if isinstance(value, DTensor) else value
            local = local.detach().cpu().contiguous()
            local = local.to(torch.float32) if key == "step" else local  # as it was once stored
            together.update(f"{name} {key} {local.dtype} {tuple(local.shape)}".encode())
            together.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
            by_key.setdefault(key, []).append(local.double().reshape(-1).numpy())
    numbers = {}
    for key, values in by_key.items():
        flat = np.concatenate(values)
        weights = np.cos(np.arange(flat.size) * 1.7)
        numbers[key] = [float(f"{x:.12e}") for x in (np.linalg.norm(flat), flat @ weights)]
    return {"hash": together.hexdigest()[:16], "numbers": numbers}


def difference(found: dict[str, Any], stored: dict[str, Any]) -> float:
    """The largest difference as a multiple of what is allowed; 0 for equal bits.

    Allowed is 1e-6 of a key's norm. A number that is rounded to 16 or 8 bits may tip over when a
    sum before it changes in its last bit, so weights of 16 bits and codes have more.
    """
    if found["hash"] == stored["hash"]:
        return 0.0
    assert found["numbers"].keys() == stored["numbers"].keys()
    largest = 0.0
    for key, numbers in stored["numbers"].items():
        allowed = ALLOWED.get(key, 1e-6) * max(numbers[0], 1e-30)
        pairs = zip(numbers, found["numbers"][key], strict=True)
        largest = max(largest, *(abs(a - b) / allowed for a, b in pairs))
    return largest


def main() -> None:
    """Write the file, or compare with it."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as in conftest.py
    speed_up_interpreter()
    torch.set_num_threads(1)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    found = {" / ".join(case): digest(*case) for case in cases()}
    torch.distributed.destroy_process_group()
    if "--check" in sys.argv:
        stored = json.loads(FILE.read_text())
        for case, value in found.items():
            print(f"{case:40} {difference(value, stored[case]):.2f} of what is allowed")
        return
    lines = [f"{json.dumps(case)}: {json.dumps(value)}" for case, value in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
