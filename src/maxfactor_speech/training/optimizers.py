"""Optimizers by name: ours by recipe, and those that people come from."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

import maxfactor
from maxfactor.backends.dispatch import has_triton
from maxfactor.recipes import BY_KIND, RECIPES, find_recipe
from maxfactor_speech.data.audio import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.optim import Optimizer

# Rates for models of these sizes that start from random weights.
PEERS = {"adamw": 1e-3, "adafactor": 2e-2, "muon": 2e-2, "lion": 3e-4}
REST_OF_MUON = 0.1  # AdamW's rate for what Muon leaves out, as a share of Muon's
# Torch's Adafactor refuses or mistakes shards, its Muon orthogonalises each shard by itself.
WHOLE_ONLY = ("adafactor", "muon")
CLIP = 1.0  # the norm that peers' gradients are clipped to; ours bound the step themselves


def names() -> list[str]:
    """Every name that `make_optimizer` takes."""
    return [*BY_KIND, *RECIPES, *PEERS]


def default_lr(name: str) -> float:
    """A rate to begin with."""
    _check(name)
    return PEERS[name] if name in PEERS else float(find_recipe(name).common["lr"])


def default_clip(name: str) -> float | None:
    """The norm that gradients are clipped to, None for not at all."""
    return CLIP if name in PEERS else None


def check_cut(name: str, cuts: bool) -> None:
    """Refuse an optimizer that would be wrong on parts of parameters."""
    if cuts and name in WHOLE_ONLY:
        raise InputError(
            f"optimizer {name} cannot step parts of parameters; take --shard ddp, or a recipe of "
            f"ours or adamw"
        )


def check_installed(name: str) -> None:
    """Refuse an optimizer whose package is not there, or not new enough."""
    if name == "lion" and find_spec("lion_pytorch") is None:
        raise InputError("optimizer lion needs `pip install lion-pytorch`")
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise InputError(f"optimizer muon needs torch 2.9 or newer, this is {torch.__version__}")


def make_optimizer(
    model: nn.Module,
    name: str,
    lr: float | None = None,
    weight_decay: float | None = None,
    capturable: bool = False,
) -> list[Optimizer]:
    """Make the optimizer of a name, which are two where one leaves parameters to another.

    Args:
        model: Whose parameters are trained, those that want a gradient.
        name: One of `names()`.
        lr: The highest rate; None takes `default_lr`.
        weight_decay: Of matrices; None takes the recipe's, 0.01 for peers, 0.1 for what Muon
            itself handles.
        capturable: Whether CUDA graphs of steps are wanted, from those that can: ours with Triton,
            and AdamW.

    Example:
        >>> [optimizer] = make_optimizer(nn.Linear(3, 2), "adamw")
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [1, 1]
    """
    lr = default_lr(name) if lr is None else lr
    _check(name)
    check_installed(name)
    params = [param for param in model.parameters() if param.requires_grad]
    decay = 0.01 if weight_decay is None else weight_decay
    if name not in PEERS:
        changes: dict[str, object] = {"capturable": capturable and has_triton()}
        if weight_decay is not None:
            changes["weight_decay"] = weight_decay
        return [maxfactor.for_model(model, name, lr, **changes)]
    if name == "adamw":
        return [_adamw(params, lr, decay, capturable)]
    if name == "adafactor":
        return [torch.optim.Adafactor(_by_decay(params, decay), lr)]
    if name == "lion":
        return [_lion(params, lr, decay)]
    return _muon(model, lr, 0.1 if weight_decay is None else weight_decay, decay)


def _muon(model: nn.Module, lr: float, decay: float, rest_decay: float) -> list[Optimizer]:
    """Muon for the weights of hidden linear layers, AdamW for the rest."""
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    hidden = {
        id(one.weight): one.weight
        for one in model.modules()
        if isinstance(one, nn.Linear)
        and one.weight.requires_grad
        and id(one.weight) not in embedded
    }
    rest = [one for one in model.parameters() if one.requires_grad and id(one) not in hidden]
    return [
        torch.optim.Muon(hidden.values(), lr, weight_decay=decay),
        _adamw(rest, lr * REST_OF_MUON, rest_decay),
    ]


def _adamw(
    params: list[nn.Parameter], lr: float, decay: float, capturable: bool = False
) -> Optimizer:
    on_gpu = all(param.is_cuda for param in params)
    fused = on_gpu or None  # few launches; None leaves the choice to torch
    groups = _by_decay(params, decay)
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.98), fused=fused, capturable=capturable)


def _lion(params: list[nn.Parameter], lr: float, decay: float) -> Optimizer:
    from lion_pytorch import Lion

    lion: Optimizer = Lion(_by_decay(params, decay), lr=lr, betas=(0.9, 0.98))
    return lion


def _by_decay(params: Iterable[Tensor], decay: float) -> list[dict[str, object]]:
    """Two groups: matrices with decay, norms and biases without."""
    params = list(params)
    groups = [
        {"params": [one for one in params if one.ndim >= 2], "weight_decay": decay},
        {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check(name: str) -> None:
    if name not in names():
        raise ValueError(f"optimizer must be one of {', '.join(names())}, got {name!r}")
