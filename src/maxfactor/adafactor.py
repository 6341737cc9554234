"""Adafactor, with the backends and the state of MaxFactor.

References:
    Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maxfactor.optimizer import FactoredOptimizer, Params
from maxfactor.settings import AdafactorSettings, FactorMode, Nonfinite, Rounding

if TYPE_CHECKING:
    from torch import Tensor


class Adafactor(FactoredOptimizer):
    r"""Adafactor as in the paper (Shazeer and Stern, 2018), without first moment.

    .. code-block:: text

        k = t^beta2_decay                                   beta2 = 1 - k
        R <- lerp(R, row means of (G^2 + eps1), k)          C <- likewise over columns
        V = R C / mean R,   u = G / sqrt(V),                u <- u / max(1, RMS(u) / clip_threshold)
        W <- W - lr_t * (u + weight_decay * W)

    Tensors that are not matrices keep a full v <- lerp(v, G^2 + eps1, k) as V.

    Args:
        params: Parameters, named parameters or groups, as for any torch optimizer.
        lr: None: lr_t = min(1e-2, 1/sqrt(t)) * max(eps2, RMS(W)). A float or 0-dim tensor:
            lr_t = lr, unless `relative_step`.
        beta2_decay: Exponent of k, not positive.
        eps: (eps1, eps2): added to the squared gradient, and the smallest RMS(W).
            eps1 = None, torch's default, means 1e-30. In torch it is a floor, not a summand.
        clip_threshold: Bound on RMS(u).
        weight_decay: Decay of W in each step, scaled by lr_t, or by `lr` if that is given.
        maximize: Maximize the loss instead of minimizing it.
        factor: "auto" or "last", as in `Switches`.
        relative_step: True makes `lr` what torch.optim.Adafactor means by it:
            lr_t = min(lr, 1/sqrt(t)) * max(eps2, RMS(W)), and decay by lr * weight_decay.
            None: True without an lr, False with one.
        rounding: How 16-bit parameters are written: "stochastic" keeps small updates and decay on
            average, "nearest" loses them. None: stochastic for bfloat16, nearest for float16.
        seed: Seed of the stochastic rounding. None takes torch's seed, or 0 with several processes,
            as all ranks must round alike, and their torch seeds may differ.
        foreach: True runs torch operations on batches of tensors of one shape. With None or False
            large matrices without momentum are not batched on the CPU. Sharded parameters
            (DTensors) refuse True.
        fused: True runs the Triton kernels, or on a CPU passes compiled by Numba; False torch
            operations. None runs the kernels on CUDA if Triton is installed and supports the step.
        capturable: True counts steps on the device, for CUDA graphs. A replay skips and counts
            steps, but cannot raise: call `check_skipped` now and then.
        nonfinite: What happens if any gradient has a NaN or infinity. "skip": the step is skipped,
            `optimizer.skipped` counts it, and 20 in a row raise an error. "raise": the step is
            skipped, and an error names the parameters. "ignore": no check.

    Example:
        >>> import torch, maxfactor
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = maxfactor.Adafactor(model.parameters())
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    settings_class = AdafactorSettings
    made_by = "maxfactor.Adafactor"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        factor: FactorMode = "auto",
        relative_step: bool | None = None,
        rounding: Rounding | None = None,
        seed: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        nonfinite: Nonfinite = "skip",
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "factor": factor,
            "relative_step": relative_step,
            "rounding": rounding,
            "seed": seed,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)
