"""On a real GPU: the same results as on the CPU, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import SHAPES, no_host_sync, problem, published
from maxfactor import Adafactor, MaxFactor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SETTINGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    **{version: (MaxFactor, published(version)) for version in ["0.1", "0.2", "0.3", "1.0"]},
    "adafactor": (Adafactor, {}),
    "adafactor lr": (Adafactor, {"lr": 0.01}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_cpu(shape: str, name: str, dtype: torch.dtype) -> None:
    cls, arguments = SETTINGS[name]
    case = problem(SHAPES[shape], dtype=dtype)
    there = torch.nn.Parameter(case.weight.clone().cuda())
    here = torch.nn.Parameter(case.weight.clone())
    two, one = cls([there], **arguments), cls([here], **arguments)
    for grad in case.grads:
        there.grad, here.grad = grad.cuda(), grad.clone()
        one.step()
        two.step()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(there.cpu(), here, rtol=tolerance, atol=1e-6)
    for key, value in one.state[here].items():
        torch.testing.assert_close(two.state[there][key].cpu(), value, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_wait_for_the_device(name: str, tensor_lr: bool) -> None:
    cls, arguments = SETTINGS[name]
    params = [torch.nn.Parameter(torch.ones(s, device="cuda")) for s in SHAPES.values()]
    if tensor_lr:
        arguments = arguments | {"lr": torch.tensor(0.01, device="cuda")}
    optimizer = cls(params, **arguments)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        with no_host_sync():
            optimizer.step()
    assert all(bool(param.isfinite().all()) for param in params)
