"""`estimate_memory`: the memory of a training, without activations, before it is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from maxfactor.backends.borrowed import borrowed_bytes
from maxfactor.model_groups import ModelSorter, for_model
from maxfactor.peer_memory import PEERS, PeerName, Trained, peer_borrowed, peer_state
from maxfactor.recipes import RECIPES, RecipeName

if TYPE_CHECKING:
    from torch import nn

    from maxfactor.maxfactor import MaxFactor


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a training in bytes, without activations.

    Attributes:
        weights: Parameters, frozen ones too, and buffers.
        gradients: All gradients, or the most that are there at a time if they are released.
        state: The optimizer's state tensors, exactly.
        borrowed: Buffers of a step on a GPU, about.
    """

    weights: int
    gradients: int
    state: int
    borrowed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.state + self.borrowed


def estimate_memory(
    model: nn.Module,
    recipe: RecipeName | PeerName = "quality",
    dtype: torch.dtype | None = None,
    *,
    gradient_release: bool = False,
    heads_per_block: int | None = None,
) -> MemoryEstimate:
    """Estimate the memory that training a model takes on a GPU, without activations.

    It needs only shapes: the model may be on the meta device, and nothing is allocated.

    Args:
        model: The model, with its frozen layers frozen.
        recipe: A recipe of `for_model`; or, for comparison, "adamw" (torch, fused), "adamw-8bit"
            (bitsandbytes), "adafactor" (torch), "muon" (torch; AdamW for all but hidden matrices).
        dtype: Of the weights, if the model were cast to it. None: as it is.
        gradient_release: Whether gradients are released in backward (`release_gradients`). It is
            assumed that they arrive in the order of the parameters, last one first.
        heads_per_block: As in `for_model`.

    Example:
        >>> import torch, maxfactor
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(1000, 1000)
        >>> maxfactor.estimate_memory(model, "adamw").state
        8008008
        >>> maxfactor.estimate_memory(model, "lean", torch.bfloat16).state
        12020
    """
    if recipe not in RECIPES and recipe not in PEERS:
        known = ", ".join(map(repr, (*RECIPES, *PEERS)))
        raise ValueError(f"unknown recipe {recipe!r}; known recipes and optimizers: {known}")
    _check_dtype(dtype)
    is_peer = recipe in PEERS
    for name, value in (
        ("gradient_release", gradient_release),
        ("heads_per_block", heads_per_block),
    ):
        if is_peer and value:
            raise ValueError(
                f"{name} is for the recipes of maxfactor, and {recipe!r} is another optimizer; "
                "leave it out"
            )
    chosen: RecipeName = "quality" if is_peer else cast("RecipeName", recipe)
    optimizer = for_model(model, chosen, heads_per_block=heads_per_block)
    weights = sum(_bytes(each, dtype) for each in (*model.parameters(), *model.buffers()))
    gradients = sum(_bytes(each, dtype) for each in model.parameters() if each.requires_grad)
    if is_peer:
        peer, trained = cast("PeerName", recipe), _trained(optimizer, dtype)
        return MemoryEstimate(
            weights, gradients, peer_state(peer, trained), peer_borrowed(peer, trained)
        )
    return MemoryEstimate(
        weights,
        _released_bytes(model, optimizer, dtype) if gradient_release else gradients,
        optimizer.describe().total.state_bytes,
        borrowed_bytes(optimizer.inputs_on_meta(dtype), by_window=gradient_release),
    )


def _check_dtype(dtype: object) -> None:
    """Refuse what weights cannot be cast to."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype must be a torch.dtype, got {dtype!r} ({type(dtype).__name__}); "
            "give one such as torch.bfloat16"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"dtype must be one of floating-point numbers, got {dtype}; give one such as "
            "torch.bfloat16"
        )


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    casts = dtype is not None and tensor.is_floating_point()
    return tensor.numel() * (dtype if casts and dtype else tensor.dtype).itemsize


def _trained(optimizer: MaxFactor, dtype: torch.dtype | None) -> list[Trained]:
    """What another optimizer would train: everything that is not frozen."""
    sorter = optimizer.sorter
    assert isinstance(sorter, ModelSorter)
    return [
        Trained(
            tuple(param.shape),
            (dtype or param.dtype).itemsize,
            param.ndim == 2 and sorter.kind_of(name) == "hidden",
        )
        for name, param in sorter.named()
    ]


def _released_bytes(model: nn.Module, optimizer: MaxFactor, dtype: torch.dtype | None) -> int:
    """The most gradients at a time, if they arrive from the last parameter to the first.

    A tied parameter has a gradient from its last use on, which is complete at its first one.
    """
    uses = [each for _, each in model.named_parameters(remove_duplicate=False)]
    first = {param: index for index, param in reversed(list(enumerate(uses)))}
    window_of = {each.param: each.window for each in optimizer.members()}
    waiting: dict[int, set[Tensor]] = {}
    for param, window in window_of.items():
        waiting.setdefault(window, set()).add(param)
    held, peak = set[Tensor](), 0
    for index in reversed(range(len(uses))):
        param = uses[index]
        if not param.requires_grad:
            continue
        held.add(param)
        peak = max(peak, sum(_bytes(each, dtype) for each in held))
        if first[param] == index and param in window_of:
            missing = waiting[window_of[param]]
            missing.discard(param)
            if not missing:
                held -= {each for each in held if window_of.get(each) == window_of[param]}
    return peak
