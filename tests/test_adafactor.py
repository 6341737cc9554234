"""Adafactor against torch's, where the two define the same thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import problem
from maxfactor import Adafactor

TINY = 1e-30  # torch floors by eps1, the paper adds it: the same where gradients are not tiny


@pytest.mark.parametrize("shape", [(31, 7), (7, 31), (1, 6), (6, 1), (9,), (1,), (4, 5, 3)])
@pytest.mark.parametrize(
    ("lr", "weight_decay", "d"), [(0.01, 0.0, 1.0), (0.3, 0.1, 1.0), (0.05, 0.0, 2.0)]
)
@pytest.mark.parametrize("maximize", [False, True])
def test_equals_torch(
    shape: tuple[int, ...], lr: float, weight_decay: float, d: float, maximize: bool
) -> None:
    case = problem(shape, steps=15)
    case.grads = [grad + 0.01 * grad.sign() + 0.001 for grad in case.grads]  # none is zero
    ours, theirs = (torch.nn.Parameter(case.weight.clone()) for _ in range(2))
    one = Adafactor(
        [ours],
        lr=lr,
        eps=(TINY, 1e-3),
        clip_threshold=d,
        weight_decay=weight_decay,
        maximize=maximize,
        factor="last",  # torch's only way; the same as "auto" up to two dimensions
        relative_step=True,
    )
    two = torch.optim.Adafactor(
        [theirs], lr=lr, eps=(TINY, 1e-3), d=d, weight_decay=weight_decay, maximize=maximize
    )
    for grad in case.grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        one.step()
        two.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        for key, value in two.state[theirs].items():
            own = one.state[ours][key].to(value.dtype)  # torch counts steps in float32
            torch.testing.assert_close(own, value, rtol=2e-6, atol=0.0)


def test_no_lr_is_torch_at_its_default() -> None:
    case = problem((8, 5))
    ours, theirs = (torch.nn.Parameter(case.weight.clone()) for _ in range(2))
    one = Adafactor([ours])
    two = torch.optim.Adafactor([theirs], lr=1e-2, eps=(TINY, 1e-3))
    for grad in case.grads:
        ours.grad, theirs.grad = grad + 0.001, grad + 0.001
        one.step()
        two.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_clip_bounds_the_rms_of_the_update() -> None:
    """A published port inverts this for thresholds other than 1."""
    for threshold in (0.5, 1.0, 2.0):
        param = torch.nn.Parameter(torch.zeros(8, 5))
        optimizer = Adafactor([param], lr=1.0, clip_threshold=threshold)
        for scale in (1.0, 1000.0):  # the second step's update is far above any threshold
            before = param.detach().clone()
            param.grad = torch.full((8, 5), scale)
            optimizer.step()
        moved = (param.detach() - before).square().mean().sqrt().item()
        unclipped = 1000.0 / (0.5**0.8 * 1000.0**2 + (1 - 0.5**0.8)) ** 0.5
        assert moved == pytest.approx(min(threshold, unclipped), rel=1e-5)


def test_groups_resolve_the_meaning_of_lr_for_themselves() -> None:
    """A scheduler may then write an lr into a relative group without changing what it means."""
    relative, absolute = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    groups: list[dict[str, Any]] = [{"params": [relative]}, {"params": [absolute], "lr": 0.5}]
    optimizer = Adafactor(groups)
    assert [group["relative_step"] for group in optimizer.param_groups] == [True, False]
    optimizer.param_groups[0]["lr"] = 0.5
    relative.grad, absolute.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    optimizer.step()
    assert optimizer.effective_lr() == pytest.approx([0.5 * 0.5, 0.5])
