"""The optimizers that `maxfactor bench` measures."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

import maxfactor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Parameter

BASELINE = "torch AdamW fused"
LR = 1e-5  # small, so that the weights hardly change between the first step and the last


class Steps(Protocol):
    """An optimizer, as far as it is measured."""

    state: Any

    def step(self) -> Any:
        """Take one step."""


@dataclass(frozen=True)
class Contender:
    """An optimizer and its name in the table."""

    name: str
    make: Callable[[list[Parameter]], Steps]


class Several:
    """Several optimizers that share a model."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}

    def step(self) -> None:
        """Take one step with each."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.state = {p: s for each in self.optimizers for p, s in each.state.items()}


def ours(name: str, backend: str, label: str = "", **settings: Any) -> Contender:
    """Return an optimizer of MaxFactor with one of its backends."""
    chosen = {"foreach": backend == "foreach", "fused": backend == "fused", **settings}
    cls = getattr(maxfactor, name)
    label = " ".join(filter(None, (name, label, backend)))
    return Contender(label, lambda params: cls(params, lr=LR, **chosen))


BACKENDS = ("plain", "foreach", "fused")
FAM = {"momentum": maxfactor.FAM()}
FACTORED = {**FAM, "direction": "factored"}
UNCLIPPED = {**FACTORED, "d": math.inf}
ORTHOGONAL = {"momentum": 0.9, "nesterov": True, "direction": "orthogonal", "scale": "initial"}


def named(label: str, module: str, name: str, **settings: Any) -> Contender:
    """Return an optimizer of a package that is imported only when it is measured."""

    def make(params: list[Parameter]) -> Steps:
        optimizer: Steps = getattr(importlib.import_module(module), name)(
            params, **{"lr": LR, **settings}
        )
        return optimizer

    return Contender(label, make)


def muon(params: list[Parameter]) -> Steps:
    """Return Muon for matrices and AdamW for the rest, as its authors advise."""
    matrices = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]
    cls = getattr(torch.optim, "Muon", None)
    if cls is None:
        raise RuntimeError(f"torch {torch.__version__} has no Muon")
    return Several(cls(matrices, lr=LR), torch.optim.AdamW(others, lr=LR))


CONTENDERS = (
    *(ours("MaxFactor", backend) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "FAM", **FAM) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "FAM factored", **FACTORED) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "FAM unclipped", **UNCLIPPED) for backend in BACKENDS),
    *(ours("MaxFactor", backend, "orthogonal", **ORTHOGONAL) for backend in BACKENDS),
    *(ours("Adafactor", backend) for backend in BACKENDS),
    named("torch AdamW", "torch.optim", "AdamW"),
    named("torch AdamW foreach", "torch.optim", "AdamW", foreach=True),
    named(BASELINE, "torch.optim", "AdamW", fused=True),
    named("torch Adafactor", "torch.optim", "Adafactor"),
    named("torch Adafactor foreach", "torch.optim", "Adafactor", foreach=True),
    named("torch SGD", "torch.optim", "SGD"),
    named("torch SGD fused", "torch.optim", "SGD", fused=True),
    Contender("torch Muon + AdamW", muon),
    named("optimi AdamW", "optimi", "AdamW"),
    named("optimi Lion", "optimi", "Lion"),
    named("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit"),
    named("bitsandbytes Lion8bit", "bitsandbytes.optim", "Lion8bit"),
    named("torchao AdamW8bit", "torchao.optim", "AdamW8bit"),
    named("pytorch_optimizer AdaFactor", "pytorch_optimizer", "AdaFactor"),
    named("pytorch_optimizer CAME", "pytorch_optimizer", "CAME"),
    named("came_pytorch CAME", "came_pytorch", "CAME"),
    named("lion_pytorch Lion", "lion_pytorch", "Lion"),
)


def chosen(filters: Sequence[str]) -> list[Contender]:
    """Return the contenders whose name contains one of the words; all if there are none."""
    found = [
        contender
        for contender in CONTENDERS
        if not filters or any(word.lower() in contender.name.lower() for word in filters)
    ]
    if not found:
        names = ", ".join(repr(contender.name) for contender in CONTENDERS)
        raise SystemExit(f"no optimizer has one of {filters} in its name; the names are {names}")
    return found
