"""The optimizers that `maxfactor bench` measures."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

import maxfactor
from maxfactor_speech.errors import InputError
from maxfactor_speech.training.optimizers import PEERS, make_optimizer, names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Module, Parameter

BASELINE = "torch AdamW fused"
ALL = "all"
# Small, so that the weights hardly change between the first step and the last. Rates of recipes and
# of MaxFactor are relative to the weights.
LR, RELATIVE_LR = 1e-5, 1e-3


class Steps(Protocol):
    """An optimizer, as far as it is measured."""

    state: Any

    def step(self) -> Any:
        """Take one step."""


@dataclass(frozen=True)
class Contender:
    """An optimizer and its name in the table."""

    name: str
    make: Callable[[Module], Steps]


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
    lr = RELATIVE_LR if cls is maxfactor.MaxFactor else LR
    return Contender(label, lambda model: cls(model.parameters(), lr=lr, **chosen))


def trained(name: str) -> Contender:
    """Return an optimizer of `maxfactor train` and `maxfactor compare`, made as they make it."""
    lr = LR if name in PEERS else RELATIVE_LR

    def make(model: Module) -> Steps:
        optimizers = make_optimizer(model, name, lr)
        return optimizers[0] if len(optimizers) == 1 else Several(*optimizers)

    return Contender(name, make)


def with_heads(heads: int) -> Contender:
    """Return the recipe "quality" with attention matrices in blocks of some heads."""

    def make(model: Module) -> Steps:
        return maxfactor.for_model(model, "quality", RELATIVE_LR, heads_per_block=heads)

    return Contender(f"quality heads {heads}", make)


BACKENDS = ("plain", "foreach", "fused")
FAM = {"momentum": maxfactor.FAM()}
FACTORED = {**FAM, "direction": "factored"}
UNCLIPPED = {**FACTORED, "d": math.inf}
ORTHOGONAL = {"momentum": 0.9, "nesterov": True, "direction": "orthogonal", "scale": "initial"}


def named(label: str, module: str, name: str, **settings: Any) -> Contender:
    """Return an optimizer of a package that is imported only when it is measured."""

    def make(model: Module) -> Steps:
        optimizer: Steps = getattr(importlib.import_module(module), name)(
            model.parameters(), **{"lr": LR, **settings}
        )
        return optimizer

    return Contender(label, make)


def muon_for_all_matrices(model: Module) -> Steps:
    """Return Muon for all matrices, also embeddings, and AdamW for the rest."""
    params = list(model.parameters())
    matrices: list[Parameter] = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]
    cls = getattr(torch.optim, "Muon", None)
    if cls is None:
        raise RuntimeError(f"torch {torch.__version__} has no Muon")
    return Several(cls(matrices, lr=LR), torch.optim.AdamW(others, lr=LR))


CONTENDERS = (
    *map(trained, names()),
    *map(with_heads, (1, 4)),
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
    Contender("torch Muon + AdamW", muon_for_all_matrices),
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


DEFAULT = (*maxfactor.RECIPES[:3], *PEERS, BASELINE)


def chosen(wanted: Sequence[str]) -> list[Contender]:
    """Return the contenders of some names, in upper or lower case; those of DEFAULT if none.

    Raises:
        InputError: For a name that is not known.
    """
    known = {contender.name.lower(): contender for contender in CONTENDERS}
    if [name.lower() for name in wanted] == [ALL]:
        return list(CONTENDERS)
    for name in wanted:
        if name.lower() not in known:
            own = ", ".join(names())
            others = ", ".join(one.name for one in CONTENDERS if one.name not in names())
            raise InputError(
                f"no optimizer is named {name!r}; the names are {own}; for a single "
                f"implementation {others}; or {ALL} for everything"
            )
    return [known[name.lower()] for name in dict.fromkeys(wanted or DEFAULT)]
