"""Compiles the kernels for a GPU that is not there, and prints which ones.

    python tests/compile_kernels.py 90             # compute capability 9.0
    python tests/compile_kernels.py 90 --check     # types and shapes alone, which is faster

Triton's interpreter runs what the compiler refuses, such as a name that changes its type. Here
steps are planned and launched as on a GPU, by a driver that compiles for it and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import triton  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from triton._C.libtriton import ir  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler.compiler import make_backend  # type: ignore[import-untyped]
from triton.runtime import driver  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

import maxfactor
from maxfactor.backends import dispatch
from maxfactor.backends.triton import orthogonal, products
from maxfactor.backends.triton.workspace import ON_DEVICE

COMPILED: dict[str, set[str]] = {}  # variants of each kernel


class CompilingDriver:
    """A driver of a device that can only be compiled for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def check_kernel(src: Any, target: Any, options: dict[str, Any]) -> Any:
    """The first stage of Triton's compiler, which finds errors of names, types and shapes."""
    backend = make_backend(target)
    parsed, context = backend.parse_options(options), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    src.make_ir(target, parsed, functions, modules, context)
    return SimpleNamespace(hash=src.hash())


def compile_only(capability: int, *, check: bool) -> None:
    """Let each launch compile its kernel, or only check it, and not run it."""
    launch = JITFunction.run

    def compile_kernel(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        COMPILED.setdefault(self.fn.__name__, set()).add(kernel.hash)
        return kernel

    if check:
        triton.compiler.compile = check_kernel
    driver.set_active(CompilingDriver(capability))
    JITFunction.run = compile_kernel
    dispatch.is_interpreted = lambda: True  # the kernels may have tensors on the CPU
    setattr(orthogonal, "INTERPRETED", ON_DEVICE)  # noqa: B010


def step(model: nn.Module, optimizer: Any) -> None:
    """Launch two steps: the first measures the weights, too."""
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()


def model_of(dtype: torch.dtype) -> nn.Module:
    """All kinds of layers, with sizes that end inside a tile and with some that do not."""
    torch.manual_seed(0)
    layers = (
        nn.Embedding(65, 96),
        nn.MultiheadAttention(96, 4),
        nn.Linear(96, 384),
        nn.LayerNorm(384),
        nn.Linear(384, 91),
        nn.Conv1d(96, 96, 3),
    )
    return nn.Sequential(*layers).to(dtype)


def compile_recipes() -> None:
    """Steps of models: plain, recorded, scaled, in blocks of heads."""
    model = model_of(torch.float32)
    optimizer: Any = maxfactor.for_model(model, "quality", fused=True)
    optimizer.record_metrics(every=1)
    step(model, optimizer)
    model = model_of(torch.bfloat16)
    step(model, maxfactor.for_model(model, "quality", fused=True, heads_per_block=1))
    optimizer = maxfactor.for_model(model, "fast", fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 8.0), torch.zeros(1)
    step(model, optimizer)
    step(model, maxfactor.for_model(model, "lean", fused=True))
    for version in ("published-0.3", "published-1.0"):
        model = model_of(torch.float32)
        step(
            model, maxfactor.MaxFactor(model.parameters(), fused=True, **maxfactor.recipe(version))
        )


def compile_shards() -> None:
    """A step of one rank's shards; the other rank is not there, and nobody waits for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def shard(*shape: int) -> DTensor:
        return DTensor.from_local(torch.randn(shape), mesh, [Shard(0)], run_check=False)

    orthogonal = {"momentum": 0.9, "direction": "orthogonal"}
    for settings in (
        maxfactor.recipe("published-1.0"),
        {"momentum": {"beta_max": 0.9}},
        orthogonal,
    ):
        params = [nn.Parameter(shard(48, 65)), nn.Parameter(shard(33))]
        optimizer = maxfactor.MaxFactor(params, fused=True, **settings)
        for param in params:
            param.grad = shard(*param.to_local().shape)  # type: ignore[attr-defined]
        optimizer.step()
    dist.destroy_process_group()


def compile_products(capability: int) -> None:
    """The products of the Newton-Schulz iteration, by the tiles of a GPU."""
    tunings = (products.SMALL, products.LARGE[min(capability // 10, max(products.LARGE))])
    for tuning in tunings:
        for n, depth in ((256, 512), (200, 100)):
            for is_tall in (False, True):
                shape = (2, depth, n) if is_tall else (2, n, depth)
                x = torch.zeros(shape, dtype=torch.float16)
                out: Tensor = torch.zeros(2, n, n, dtype=torch.float16)
                products.symmetric(out, x, x, alpha=0.5, is_tall=is_tall, tuning=tuning)
            square = torch.zeros(2, n, n, dtype=torch.float16)
            options = {"alpha": 2.0, "beta": -5.0, "gamma": 3.0, "added": square}
            products.symmetric(out, square, square, tuning=tuning, **options)  # type: ignore[arg-type]


def main() -> None:
    """Compile, and print the number of variants of each kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", type=int, help="such as 90")
    parser.add_argument("--check", action="store_true", help="check types and shapes alone")
    options = parser.parse_args()
    if "TRITON_INTERPRET" in os.environ:
        parser.error("TRITON_INTERPRET is set; nothing is compiled for the interpreter")
    capability = options.capability
    compile_only(capability, check=options.check)
    compile_recipes()
    compile_shards()
    compile_products(capability)
    print(json.dumps({name: len(variants) for name, variants in COMPILED.items()}))


if __name__ == "__main__":
    main()
