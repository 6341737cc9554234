"""Passes and updates as CUDA graphs: a small model's kernels end before the next starts.

The host needs longer to launch a small kernel than the GPU to run it. A graph of many kernels is
launched at once. That of a pass holds for one shape of batch alone; so batches are filled up to few
shapes, and each shape's graph is captured when it first comes. That of an update holds for all.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer
    from transformers import WhisperConfig

MOST = 48  # graphs at a time; the one that was not used for longest makes room
WARM_UP = 2  # passes before a capture: libraries set themselves up


class Captured(NamedTuple):
    """A captured pass; what goes in and comes out lies at the same place each time."""

    graph: Any
    inputs: list[Tensor]
    share: Tensor
    loss: Tensor


class PassGraphs:
    """Runs forward and backward passes by graphs.

    Gradients are added to what is in `.grad`, and stay where they are from step to step: `clear`
    sets them to zero, and nothing may set them to None.

    Args:
        model: Whose gradients the pass computes; nothing in it may be random.
        run: The pass: takes a list of tensors on the device and a share that the loss is
            multiplied by, adds to the gradients, and returns the loss without waiting for it.
    """

    def __init__(self, model: nn.Module, run: Callable[[Sequence[Tensor], Any], Tensor]) -> None:
        self._run = run
        self._params = [param for param in model.parameters() if param.requires_grad]
        for param in self._params:
            param.grad = torch.zeros_like(param)
        self._device = self._params[0].device
        self._known: OrderedDict[tuple[torch.Size, ...], Captured] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()  # one at a time: all use the same memory

    def __call__(self, inputs: Sequence[Tensor], share: float) -> Tensor:
        """Run the pass on tensors of the host; the loss holds until the next call."""
        shape = tuple(tensor.shape for tensor in inputs)
        if shape not in self._known:
            if len(self._known) >= MOST:
                self._known.popitem(last=False)
            self._known[shape] = self._captured(inputs)
        self._known.move_to_end(shape)
        one = self._known[shape]
        for own, tensor in zip(one.inputs, inputs, strict=True):
            own.copy_(tensor, non_blocking=True)
        one.share.fill_(share)
        one.graph.replay()
        return one.loss

    def clear(self) -> None:
        """Set all gradients to zero, in one launch or few."""
        torch._foreach_zero_([param.grad for param in self._params if param.grad is not None])

    def _captured(self, inputs: Sequence[Tensor]) -> Captured:
        own = [tensor.to(self._device, non_blocking=True) for tensor in inputs]
        share = torch.ones((), device=self._device)
        self._warm_up(own, share)
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, self._pool):
            loss = self._run(own, share)  # nothing is computed yet
        return Captured(graph, own, share, loss)

    def _warm_up(self, inputs: Sequence[Tensor], share: Tensor) -> None:
        """Run the pass as it is, on a stream of its own, and take its gradients back."""
        grads = [param.grad for param in self._params if param.grad is not None]
        before = [grad.clone() for grad in grads]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run(inputs, share)
        torch.cuda.current_stream().wait_stream(stream)
        torch._foreach_copy_(grads, before)


class UpdateGraph:
    """Runs what ends a step by a graph: the first time as it is, then captured, then replayed.

    Args:
        run: Changes weights and state by the gradients, all at the same places each time, and by
            no number of the host that changes: learning rates are in tensors.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._is_warm = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Run it."""
        if not self._is_warm:  # kernels are compiled, states are made
            self._is_warm = True
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*without CUDA graph capture")  # only this once
                self._run()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with _capturing(self._graph):
                self._run()  # nothing is computed yet
        self._graph.replay()


def captures(optimizers: Sequence[Optimizer]) -> bool:
    """Whether all of them are made for steps that are captured."""
    return all(optimizer.defaults.get("capturable", False) for optimizer in optimizers)


def _capturing(graph: Any, pool: Any = None) -> Any:
    # The thread that reads batches pins memory meanwhile, which is none of the graph's matter.
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


def is_random(config: WhisperConfig) -> bool:
    """Whether anything in a model's training pass is drawn, which a graph would not draw anew."""
    names = ("dropout", "attention_dropout", "activation_dropout")
    layers = ("encoder_layerdrop", "decoder_layerdrop")
    return any(getattr(config, name, 0.0) for name in (*names, *layers))
