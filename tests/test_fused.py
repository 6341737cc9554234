"""The fused kernels against `rule.step`: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import ADAFACTOR_VARIANTS, SHAPES, VARIANTS, problem
from torch import Tensor

from maxfactor import Adafactor, MaxFactor, recipe, rule

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a GPU or TRITON_INTERPRET=1",
    ),
]

# Several tiles, slabs and strips; odd sizes, so that rows are not aligned. The interpreter has
# small tiles, and gets small tensors.
LARGER: dict[str, tuple[int, ...]] = {
    "tiles": (9, 72),
    "slabs": (33, 8),
    "odd": (5, 67),
    "long": (100,),
}
if DEVICE == "cuda":
    LARGER = {"tiles": (70, 520), "slabs": (600, 40), "odd": (33, 301), "long": (1000,)}
ALL = {**SHAPES, **LARGER}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def expected(
    cases: dict[str, Any], hyper: rule.MaxFactorHyper | rule.AdafactorHyper, steps: int
) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """The same steps by the reference."""
    results = {}
    for name, case in cases.items():
        weight, state = case.weight, rule.init_state(case.weight, hyper)
        for grad in case.grads[:steps]:
            weight, state, _ = rule.step(weight, grad, state, hyper)
        results[name] = (weight, state)
    return results


def run(
    cls: type[Any], cases: dict[str, Any], arguments: dict[str, Any], steps: int
) -> tuple[Any, dict[str, Tensor]]:
    params = {n: torch.nn.Parameter(c.weight.clone().to(DEVICE)) for n, c in cases.items()}
    optimizer = cls(list(params.items()), fused=True, **arguments)
    for t in range(steps):
        for name, case in cases.items():
            params[name].grad = case.grads[t].clone().to(DEVICE)
        optimizer.step()
        for name, case in cases.items():
            grad = params[name].grad
            assert grad is not None
            assert torch.equal(grad.cpu(), case.grads[t])
    return optimizer, params


def compare(
    optimizer: Any, params: dict[str, Tensor], wanted: dict[str, tuple[Tensor, dict[str, Tensor]]]
) -> None:
    for name, (weight, state) in wanted.items():
        tolerance = TOLERANCE[weight.dtype]
        scale = float(weight.double().abs().max()) if weight.numel() else 1.0
        torch.testing.assert_close(
            params[name].detach().cpu(), weight, rtol=tolerance, atol=tolerance * scale, msg=name
        )
        ours = optimizer.state[params[name]]
        assert set(ours) == set(state)
        for key, value in state.items():
            torch.testing.assert_close(
                ours[key].cpu(), value, rtol=3e-6, atol=1e-37, msg=f"{key} of {name}"
            )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", ["0.1", "0.2", "0.3", "1.0"])
def test_maxfactor(version: str, variant: str) -> None:
    arguments = recipe(version) | VARIANTS[variant]
    cases = {name: problem(shape, steps=4) for name, shape in ALL.items()}
    optimizer, params = run(MaxFactor, cases, arguments, 4)
    compare(optimizer, params, expected(cases, rule.MaxFactorHyper(**arguments), 4))


@pytest.mark.parametrize("variant", ADAFACTOR_VARIANTS)
def test_adafactor(variant: str) -> None:
    arguments = ADAFACTOR_VARIANTS[variant]
    cases = {name: problem(shape, steps=4) for name, shape in ALL.items()}
    optimizer, params = run(Adafactor, cases, arguments, 4)
    compare(optimizer, params, expected(cases, rule.AdafactorHyper(**arguments), 4))
