"""Forward and backward passes and updates as CUDA graphs.

For a small model, the host needs longer to launch a kernel than the GPU to run it. A CUDA graph
launches many kernels at once. The graph of a pass is valid for one shape of batch, so batches are
padded to few shapes, and a graph is captured when a shape first occurs. The graph of an update is
valid for all shapes.
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

MOST_GRAPHS = 48  # the least recently used graph is dropped for a new one
WARM_UP = 2  # passes before a capture, in which libraries initialise themselves


class CapturedPass(NamedTuple):
    """A captured pass with the tensors that it reads and writes."""

    graph: Any
    inputs: list[Tensor]
    share: Tensor
    loss: Tensor


class PassGraphs:
    """Runs forward and backward passes as graphs.

    Gradients accumulate in `.grad`, whose memory must stay in place: use `zero_grads`, and never
    set a gradient to None.

    Args:
        model: The model whose gradients are computed; its passes must not use random numbers.
        run: The pass. It takes tensors on the device and a factor for the loss, adds to the
            gradients, and returns the loss without waiting for the device.
    """

    def __init__(self, model: nn.Module, run: Callable[[Sequence[Tensor], Any], Tensor]) -> None:
        self._run = run
        self._params = [param for param in model.parameters() if param.requires_grad]
        for param in self._params:
            param.grad = torch.zeros_like(param)
        self._device = self._params[0].device
        self._captured: OrderedDict[tuple[torch.Size, ...], CapturedPass] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()  # shared: only one graph runs at a time

    def __call__(self, inputs: Sequence[Tensor], share: float) -> Tensor:
        """Run the pass on tensors of the host; the loss is valid until the next call."""
        shape = tuple(tensor.shape for tensor in inputs)
        if shape not in self._captured:
            if len(self._captured) >= MOST_GRAPHS:
                self._captured.popitem(last=False)
            self._captured[shape] = self._capture(inputs)
        self._captured.move_to_end(shape)
        captured = self._captured[shape]
        for own, tensor in zip(captured.inputs, inputs, strict=True):
            own.copy_(tensor, non_blocking=True)
        captured.share.fill_(share)
        captured.graph.replay()
        return captured.loss

    def zero_grads(self) -> None:
        """Set all gradients to zero in place, with few launches."""
        torch._foreach_zero_([param.grad for param in self._params if param.grad is not None])

    def _capture(self, inputs: Sequence[Tensor]) -> CapturedPass:
        own = [tensor.to(self._device, non_blocking=True) for tensor in inputs]
        share = torch.ones((), device=self._device)
        self._warm_up(own, share)
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, self._pool):
            loss = self._run(own, share)  # only recorded, not computed
        return CapturedPass(graph, own, share, loss)

    def _warm_up(self, inputs: Sequence[Tensor], share: Tensor) -> None:
        """Run the pass without a graph, on another stream, and restore the gradients."""
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
    """Runs the update of a step as a graph: the first call runs it directly, the second captures.

    Args:
        run: Updates weights and state from the gradients, at the same addresses in each call. No
            number of the host may change between calls: learning rates are tensors.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._is_warm = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Run the update."""
        if not self._is_warm:  # compiles kernels and allocates state
            self._is_warm = True
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*without CUDA graph capture")  # intended
                self._run()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with _capturing(self._graph):
                self._run()  # only recorded, not computed
        self._graph.replay()


def are_capturable(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the steps of all optimizers can be captured."""
    return all(optimizer.defaults.get("capturable", False) for optimizer in optimizers)


def _capturing(graph: Any, pool: Any = None) -> Any:
    # "thread_local": the thread that reads batches pins memory at the same time.
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


def is_random(config: WhisperConfig) -> bool:
    """Return whether training passes use random numbers, which a graph would not draw anew."""
    names = ("dropout", "attention_dropout", "activation_dropout")
    layers = ("encoder_layerdrop", "decoder_layerdrop")
    return any(getattr(config, name, 0.0) for name in (*names, *layers))
