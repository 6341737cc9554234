"""Forward and backward passes as CUDA graphs: a small model's kernels end before the next starts.

The host needs longer to launch a small kernel than the GPU to run it. A graph of all kernels of a
pass is launched at once, but holds for one shape of batch alone; so batches are filled up to few
shapes, and each shape's graph is captured when it first comes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import WhisperConfig

MOST = 48  # graphs at a time; the one that was not used for longest makes room
WARM_UP = 2  # passes before a capture: libraries set themselves up


class Graph(NamedTuple):
    """A captured pass; what goes in and comes out lies at the same place each time."""

    graph: Any
    features: Tensor
    labels: Tensor
    share: Tensor
    loss: Tensor


class Graphs:
    """Runs a forward and backward pass by graphs.

    Gradients are added to what is in `.grad`, and stay where they are from step to step: `clear`
    sets them to zero, and nothing may set them to None.

    Args:
        model: Whose gradients the pass computes; nothing in it may be random.
        run: The pass: takes features, labels and a share that the loss is multiplied by, adds to
            the gradients, and returns the loss without waiting for it.
    """

    def __init__(self, model: nn.Module, run: Callable[[Tensor, Tensor, Any], Tensor]) -> None:
        self._run = run
        self._params = [param for param in model.parameters() if param.requires_grad]
        for param in self._params:
            param.grad = torch.zeros_like(param)
        self._known: OrderedDict[tuple[torch.Size, torch.Size], Graph] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()  # one at a time: all use the same memory

    def __call__(self, features: Tensor, labels: Tensor, share: float) -> Tensor:
        """Run the pass; the loss holds until the next call."""
        shape = features.shape, labels.shape
        if shape not in self._known:
            if len(self._known) >= MOST:
                self._known.popitem(last=False)
            self._known[shape] = self._captured(features, labels)
        self._known.move_to_end(shape)
        one = self._known[shape]
        one.features.copy_(features)
        one.labels.copy_(labels)
        one.share.fill_(share)
        one.graph.replay()
        return one.loss

    def clear(self) -> None:
        """Set all gradients to zero, in one launch or few."""
        torch._foreach_zero_([param.grad for param in self._params if param.grad is not None])

    def _captured(self, features: Tensor, labels: Tensor) -> Graph:
        features, labels = features.clone(), labels.clone()
        share = torch.ones((), device=features.device)
        self._warm_up(features, labels, share)
        graph = torch.cuda.CUDAGraph()
        # The thread that reads batches pins memory meanwhile, which is none of the graph's matter.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._run(features, labels, share)  # nothing is computed yet
        return Graph(graph, features, labels, share, loss)

    def _warm_up(self, features: Tensor, labels: Tensor, share: Tensor) -> None:
        """Run the pass as it is, on a stream of its own, and take its gradients back."""
        grads = [param.grad for param in self._params if param.grad is not None]
        before = [grad.clone() for grad in grads]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run(features, labels, share)
        torch.cuda.current_stream().wait_stream(stream)
        torch._foreach_copy_(grads, before)


def is_random(config: WhisperConfig) -> bool:
    """Whether anything in a model's training pass is drawn, which a graph would not draw anew."""
    names = ("dropout", "attention_dropout", "activation_dropout")
    layers = ("encoder_layerdrop", "decoder_layerdrop")
    return any(getattr(config, name, 0.0) for name in (*names, *layers))
