"""The state of other optimizers, by formula: what `estimate_memory` compares recipes with.

References:
    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021: blocks with one scale.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maxfactor.state import Shape

PeerName = Literal["adamw", "adamw-8bit", "adafactor", "muon"]
PEERS: tuple[PeerName, ...] = get_args(PeerName)

FLOAT32 = 4  # bytes
STEP = 4  # bytes of torch's step counter
BLOCK_8BIT = 256  # values with one scale in bitsandbytes
SMALLEST_8BIT = 4096  # values; smaller tensors keep float32 moments in bitsandbytes
CODEBOOKS_8BIT = 2 * 256 * FLOAT32  # shared by all tensors


class Trained(NamedTuple):
    """A parameter, as far as its memory is concerned."""

    shape: Shape
    itemsize: int
    is_hidden: bool  # a matrix of a hidden layer

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def peer_state(name: PeerName, params: Sequence[Trained]) -> int:
    """Bytes of state after the first step."""
    extra = CODEBOOKS_8BIT if name == "adamw-8bit" else 0
    return extra + sum(map(STATES[name], params))


def peer_borrowed(name: PeerName, params: Sequence[Trained]) -> int:
    """Bytes that a step borrows, about; fused AdamW and the 8-bit kernels borrow nothing."""
    if name == "adafactor":  # tensor by tensor: the update and the variance
        return max((2 * each.numel * each.itemsize for each in params), default=0)
    if name == "muon":  # matrix by matrix: the look-ahead, and the iteration in bfloat16
        hidden = [each for each in params if each.is_hidden]
        return max((each.numel * (2 * each.itemsize + 4) for each in hidden), default=0)
    return 0


def _adamw(param: Trained) -> int:
    """Two moments in the parameter's dtype."""
    return STEP + 2 * param.numel * param.itemsize


def _adamw_8bit(param: Trained) -> int:
    """Two moments of one byte, with a scale per block. The step counter is a Python number."""
    if param.numel < SMALLEST_8BIT:
        return 2 * param.numel * FLOAT32
    return 2 * (param.numel + FLOAT32 * -(-param.numel // BLOCK_8BIT))


def _adafactor(param: Trained) -> int:
    """Factors over the last two dimensions, in the parameter's dtype."""
    if len(param.shape) < 2:
        return STEP + param.numel * param.itemsize
    *batch, m, n = param.shape
    return STEP + math.prod(batch) * (m + n) * param.itemsize


def _muon(param: Trained) -> int:
    """One momentum for hidden matrices, AdamW for the rest."""
    return param.numel * param.itemsize if param.is_hidden else _adamw(param)


STATES: dict[PeerName, Callable[[Trained], int]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "muon": _muon,
}
