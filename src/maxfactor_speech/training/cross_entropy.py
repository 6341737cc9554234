"""The mean cross-entropy of scores in half precision, without copies of them in float32.

A Whisper has about 52 000 scores per token. Computed the usual way, they take 16 bytes each: as
they are, in float32, their log-softmax, and a gradient. Here float32 is used for some rows at a
time, and the gradient overwrites the scores, so they take 2 bytes each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from maxfactor_speech.data.tokens import IGNORED

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE = 1 << 22  # scores in float32 at a time


def mean_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all labels that are not ignored, in float32.

    Args:
        scores: (batch, tokens, vocabulary); in half precision, backward overwrites them.
        labels: (batch, tokens).
    """
    rows, wanted = scores.flatten(0, 1), labels.flatten()
    if scores.dtype == torch.float32:
        return nn.functional.cross_entropy(rows, wanted)
    loss: Tensor = _HalfCrossEntropy.apply(rows, wanted)  # type: ignore[no-untyped-call]
    return loss


class _HalfCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=scores.device)
        norms = torch.empty(len(scores), device=scores.device)  # log-sum-exp of each row
        for part in _parts(scores):
            some, wanted = scores[part].float(), labels[part]
            norms[part] = some.logsumexp(dim=1)
            own = some.gather(1, wanted.clamp(min=0)[:, None]).squeeze(1)
            total += (norms[part] - own).masked_fill(wanted == IGNORED, 0.0).sum()
        count = (labels != IGNORED).sum()
        ctx.save_for_backward(scores, labels, norms, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        scores, labels, norms, count = ctx.saved_tensors
        weights = (labels != IGNORED) * (grads[0] / count)
        columns = torch.arange(scores.shape[1], device=scores.device)
        for part in _parts(scores):
            probabilities = (scores[part].float() - norms[part, None]).exp_()
            probabilities -= (columns == labels[part, None]).float()
            scores[part] = probabilities.mul_(weights[part, None])
        return scores, None


def _parts(scores: Tensor) -> Iterator[slice]:
    step = max(1, AT_ONCE // scores.shape[1])
    for start in range(0, len(scores), step):
        yield slice(start, start + step)
