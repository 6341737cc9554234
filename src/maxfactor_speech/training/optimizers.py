"""Optimizers by name: MaxFactor's recipes, and the optimizers they are compared with."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

import maxfactor
from maxfactor_speech.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.optim import Optimizer

# Learning rates for models of these sizes with random initial weights.
PEERS = {"adamw": 1e-3, "adafactor": 2e-2, "muon": 2e-2, "lion": 3e-4}
# Of an optimizer's default rate, for weights that are trained already. The default is for random
# weights, which have to move far. Within 20 steps it undoes much of what a good model has learned.
FINE_TUNING_SHARE = 0.25
ADAMW_SHARE = 0.1  # AdamW's rate for parameters that Muon leaves out, as a fraction of Muon's
# torch's Adafactor rejects shards or is wrong on them; its Muon orthogonalises each shard alone.
UNSHARDED_ONLY = ("adafactor", "muon")
CLIP = 1.0  # gradient norm for the peers; MaxFactor bounds its step itself


def names() -> list[str]:
    """Return all names that `make_optimizer` takes."""
    return [*maxfactor.RECIPES, *PEERS]


def default_lr(name: str, fine_tuning: bool = False) -> float:
    """Return the learning rate that an optimizer has by default.

    Args:
        name: One of `names()`.
        fine_tuning: Whether the weights that it trains are trained already.
    """
    _check(name)
    lr = PEERS[name] if name in PEERS else _recipe_lr(name)
    return FINE_TUNING_SHARE * lr if fine_tuning else lr


@lru_cache
def _recipe_lr(name: str) -> float:
    layer = nn.Linear(1, 1, device="meta")  # on "meta", so that no random numbers are drawn
    return float(maxfactor.for_model(layer, cast("maxfactor.RecipeName", name)).defaults["lr"])


def default_clip(name: str) -> float | None:
    """Return the norm that gradients are clipped to by default; None is no clipping."""
    return CLIP if name in PEERS else None


def check_shardable(name: str, is_sharded: bool) -> None:
    """Raise InputError for sharded parameters with an optimizer that cannot update them."""
    if is_sharded and name in UNSHARDED_ONLY:
        raise InputError(
            f"optimizer {name} cannot update sharded parameters; use --shard ddp, or the "
            f"optimizer adamw or one of {', '.join(maxfactor.RECIPES[:3])}"
        )


def check_installed(name: str) -> None:
    """Raise InputError if an optimizer's package is missing or too old."""
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
    """Return the optimizer of a name; "muon" is two optimizers, Muon and AdamW.

    Args:
        model: The model; parameters that require a gradient are trained.
        name: One of `names()`.
        lr: The peak learning rate; None is `default_lr`.
        weight_decay: For matrices; None is the recipe's, 0.1 for Muon, 0.01 for the other peers.
        capturable: Whether steps should be capturable in CUDA graphs, if the optimizer can:
            MaxFactor with Triton, and AdamW.

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
        changes: dict[str, Any] = {"capturable": capturable and find_spec("triton") is not None}
        if weight_decay is not None:
            changes["weight_decay"] = weight_decay
        return [maxfactor.for_model(model, cast("maxfactor.RecipeName", name), lr, **changes)]
    if name == "adamw":
        return [_adamw(params, lr, decay, capturable)]
    if name == "adafactor":
        return [torch.optim.Adafactor(_by_decay(params, decay), lr)]
    if name == "lion":
        return [_lion(params, lr, decay)]
    return _muon(model, lr, 0.1 if weight_decay is None else weight_decay, decay)


def _muon(model: nn.Module, lr: float, decay: float, adamw_decay: float) -> list[Optimizer]:
    """Return Muon for the weights of hidden linear layers, and AdamW for the rest."""
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
        _adamw(rest, lr * ADAMW_SHARE, adamw_decay),
    ]


def _adamw(
    params: list[nn.Parameter], lr: float, decay: float, capturable: bool = False
) -> Optimizer:
    on_gpu = all(param.is_cuda for param in params)
    fused = on_gpu or None  # None is torch's own choice
    groups = _by_decay(params, decay)
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.98), fused=fused, capturable=capturable)


def _lion(params: list[nn.Parameter], lr: float, decay: float) -> Optimizer:
    from lion_pytorch import Lion

    lion: Optimizer = Lion(_by_decay(params, decay), lr=lr, betas=(0.9, 0.98))
    return lion


def _by_decay(params: Iterable[Tensor], decay: float) -> list[dict[str, object]]:
    """Return two groups: matrices with weight decay, norms and biases without."""
    params = list(params)
    groups = [
        {"params": [one for one in params if one.ndim >= 2], "weight_decay": decay},
        {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check(name: str) -> None:
    if name not in names():
        raise ValueError(f"optimizer must be one of {', '.join(names())}, got {name!r}")
