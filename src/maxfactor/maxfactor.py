"""MaxFactor and its arguments. The step is in `optimizer.py`, the arithmetic in `rule/`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from maxfactor.distributed.placement import is_sharded, local
from maxfactor.optimizer import FactoredOptimizer, Params
from maxfactor.rule.fam import Spectrum, spectrum
from maxfactor.rule.reference import host_scalar
from maxfactor.settings import (
    FAM,
    Direction,
    MaxFactorSettings,
    MomentumDtype,
    Nonfinite,
    Rounding,
    Scale,
    Switches,
    warn_of_rate,
)
from maxfactor.weight_sizes import is_to_be_judged, judge_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    class Sorter(Protocol):
        """Sorts the parameters of a model into groups; `for_model` leaves it to the optimizer."""

        def new_groups(
            self, module: nn.Module, groups: list[dict[str, Any]]
        ) -> list[dict[str, Any]]:
            """Groups for the parameters of a module that are not in `groups` yet."""

        def hidden(self) -> dict[Tensor, bool]:
            """The hidden matrices of the model, frozen ones, too; whether they are transposed."""


class MaxFactor(FactoredOptimizer):
    r"""The published rule, version 1.0. To train a model, use `maxfactor.for_model` instead.

    Adafactor's factored second moments, with sign updates scaled by each row's maximum. For a
    matrix view W (m x n) with gradient G, at step t:

    .. code-block:: text

        (1)  k = t^beta2_decay                     (2)  rho = min(lr, 1/sqrt(t))
        (3)  alpha = rho * max(eps2, RMS(W))       (4)  W <- (1 - lr * weight_decay) * W
        (5)  R <- lerp(R, row means of G^2, k)          C <- lerp(C, column means of G^2, k)
        (6)  V = R C / max(max R, eps1), V >= eps1^2
        (7)  U = G / sqrt(V),                           U <- U / max(max|U|, eps1)
        (8)  s = max(1, RMS(U) / d)
        (9)  W <- W - alpha / s * sign(U) * (row maximum of |U|)

    A vector is one row, with the variance (5') v <- gamma * v + (1 - gamma) * G^2 instead of (5).
    State: m + n floats and a step counter for a matrix, n floats and a counter for a vector.

    With `momentum`, V = R C / mean R (v for a vector), V >= eps1^2, and

    .. code-block:: text

        (10) x = G / sqrt(V) / s                   s = max(1, sqrt(mean G^2 / mean R))
        (11) beta: a number, or FAM's for each band
        (12) M <- stored(beta * M + (1 - beta) * x)     c <- beta * c + 1 - beta
        (13) y = (1 - mu) * M / c + mu * x         mu = FAM's mix, 1 - beta with nesterov, or 0

    and y replaces G / sqrt(V) in (7). Other directions replace (7) to (9):

    .. code-block:: text

        factored:    u = y, or G / sqrt(V) without momentum,
                     W <- W - alpha * u / max(1, RMS(u) / d)
        orthogonal:  V = mean R and s >= .01 in (10), W <- W - alpha * O; vectors move by (9)
        (14)         O = orthogonalised y / sqrt(R C) with RMS 1, or each of its blocks

    A group may have `transposed=True`, if its matrices have their inputs along the first dimension,
    as in GPT-2: sizes from shapes depend on the number of inputs. It may have `blocks`, which cuts
    its matrices for (14): ("rows", 64) orthogonalises blocks of 64 rows one by one, ("columns", 64)
    blocks of 64 columns. They are the heads of attention matrices, for example;
    `for_model(..., heads_per_block=1)` finds them. A block is cheaper than the whole matrix.

    Args:
        params: Parameters, named parameters or groups, as for any torch optimizer.
        lr: The largest relative step. A float or a 0-dim tensor; schedulers may overwrite it. At
            most 1e-4, as for AdamW, or above 1 gets a UserWarning, but 0 does not.
        beta2_decay: Exponent of (1), not positive.
        eps: (eps1, eps2), a tuple or list: the floor of variances and divisors, and the smallest
            RMS(W) in (3). eps1 = None means float32's machine epsilon.
        d: Bound on RMS(U) in (8), where d >= 1 has no effect, and on RMS(u) with direction
            "factored". `math.inf` is no bound; with momentum it saves the fused step a pass.
        weight_decay: Decay of (4), decoupled from the gradient.
        gamma: Decay rate of the variance of vectors and scalars in (5').
        maximize: Maximize the loss instead of minimizing it.
        momentum: None; beta of (12), a number in [0, 1); or `FAM(...)`, which adapts beta for each
            tensor to how predictable its gradient is.
        nesterov: True sets mu = 1 - beta in (13). It needs a number as momentum.
        momentum_dtype: How a matrix's M is stored: "int8", one byte and a scale for 64 values;
            "bf16"; "fp32". None: int8. Vectors and scalars keep float32.
        direction: "sign_max" for (9), or "factored" or "orthogonal" as above. Orthogonal is for
            hidden matrices and convolutions; give embeddings and heads a group of their own.
        scale: What (3) scales by: "current" for RMS(W), "initial" for the RMS that each parameter
            had before its first step, so that growing weights do not get larger steps. A matrix
            that begins at zero, or below a hundredth of 1 / sqrt(3 * fan_in), counts as that, the
            RMS with which torch.nn.Linear begins. A vector that was zero is scaled by its present
            RMS. "usual" is the same, and a matrix that begins smaller than that, but not smaller
            than a part of it (the switch `usual_from`), counts as that, too. "raised" is "initial"
            with a least size of min(0.1, sqrt(2 / fan_in)) for a matrix.
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
        switches: Differences of the published versions, as `Switches` or a dict.

    Example:
        >>> import torch, maxfactor
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = maxfactor.MaxFactor(model.parameters(), lr=0.01)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> old = maxfactor.MaxFactor(model.parameters(), **maxfactor.recipe("published-0.2"))
        >>> best = maxfactor.MaxFactor(
        ...     model.parameters(), momentum=0.95, nesterov=True, direction="orthogonal"
        ... )
        >>> query = torch.nn.Linear(96, 96, bias=False)  # three heads of 32 rows
        >>> heads = {"params": query.parameters(), "blocks": ("rows", 32)}
        >>> split = maxfactor.MaxFactor([heads], momentum=0.95, direction="orthogonal")
    """

    settings_class = MaxFactorSettings
    made_by = "maxfactor.MaxFactor"
    sorter: Sorter | None = None  # set by `for_model`

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (1e-10, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.01,
        gamma: float = 0.99,
        *,
        maximize: bool = False,
        momentum: float | FAM | Mapping[str, Any] | None = None,
        nesterov: bool = False,
        momentum_dtype: MomentumDtype | None = None,
        direction: Direction = "sign_max",
        scale: Scale = "current",
        rounding: Rounding | None = None,
        seed: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        nonfinite: Nonfinite = "skip",
        switches: Switches | Mapping[str, Any] | None = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "maximize": maximize,
            "momentum": momentum,
            "nesterov": nesterov,
            "momentum_dtype": momentum_dtype,
            "direction": direction,
            "scale": scale,
            "rounding": rounding,
            "seed": seed,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "nonfinite": nonfinite,
            "switches": switches,
            "blocks": None,  # of a group, as it depends on the layer; so is the next one
            "transposed": False,
        }
        super().__init__(params, defaults)
        if "kind" not in self.param_groups[0]:  # else `for_model` has looked at the rate
            warn_of_rate(lr, "the default, 0.01")

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: the model, too, by which its layers are sorted.

        A model that `fully_shard` has sharded cannot be copied: a copy does without.
        """
        state: dict[str, Any] = super().__getstate__()
        if self.sorter is None:
            return state
        state["left_out"] = dict(self.left_out)
        params = (param for group in self.param_groups for param in group["params"])
        return state if any(map(is_sharded, params)) else {**state, "sorter": self.sorter}

    def add_module(self, module: nn.Module) -> None:
        """Train layers that were unfrozen after `for_model` made this optimizer.

        Their parameters join the group of their kind, with its settings and its present learning
        rate, or form a new group with those of the recipe. A new group starts at the same fraction
        of its rate as the others. `AdaptiveSchedule` takes it in; torch's schedulers must be built
        anew. To resume, call `add_module` for the same modules before `load_state_dict`.

        Args:
            module: A part of the model that was given to `for_model`, or the model itself.

        Example:
            >>> import torch, maxfactor
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
            >>> frozen = model[0].requires_grad_(False)
            >>> optimizer = maxfactor.for_model(model)
            >>> optimizer.add_module(frozen.requires_grad_(True))
            >>> [(group["kind"], group["param_names"]) for group in optimizer.param_groups]
            [('head', ['1.weight']), ('vector', ['1.bias', '0.bias']), ('hidden', ['0.weight'])]
        """
        if self.sorter is None:
            raise ValueError(
                "add_module needs an optimizer that was made by maxfactor.for_model, which knows "
                "the kinds of a model's layers; use add_param_group instead"
            )
        before = len(self.param_groups)
        try:
            for group in self.sorter.new_groups(module, self.param_groups):
                self.add_param_group(group)  # checks everything
        except (TypeError, ValueError):
            del self.param_groups[before:]
            self.forget_settings()
            raise
        self._merge_kinds(before)

    def look_at_weights(self) -> bool:
        """Set what is small on purpose in groups of hidden matrices that were never stepped.

        Not earlier: weights may be loaded, broadcast or sharded after the optimizer was built.
        """
        new = [group for group in self.param_groups if is_to_be_judged(group)]
        if new:
            hidden = {} if self.sorter is None else self.sorter.hidden()
            stepped = {p: group.get("transposed", False) for group in new for p in group["params"]}
            judge_sizes(new, {**hidden, **stepped})
        return bool(new)

    def _merge_kinds(self, first: int) -> None:
        """Move the parameters of groups from index `first` on to older groups like theirs."""
        known = {_kind_of(group): group for group in self.param_groups[:first] if "kind" in group}
        new = self.param_groups[first:]
        del self.param_groups[first:]
        for group in new:
            if (old := known.get(_kind_of(group))) is None:
                self.param_groups.append(group)
            else:
                old["params"] += group["params"]
                old["param_names"] += group["param_names"]
        self.forget_settings()

    def spectrum(self) -> dict[str, Spectrum]:
        """FAM's statistics of each matrix, by the parameter's name.

        Each has one value per band: the coherence `rho`, the `beta` of the next step, and the
        `power` of the input. They are tensors on the device; only reading them waits for it.

        Example:
            >>> import torch, maxfactor
            >>> model = torch.nn.Linear(4, 2)
            >>> optimizer = maxfactor.MaxFactor(model.named_parameters(), momentum=maxfactor.FAM())
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> optimizer.spectrum()["weight"].beta
            tensor([0.9000])
        """
        found = {}
        for index in range(len(self.param_groups)):
            fam = self._settings(index).rules.matrix.fam
            if fam is None:
                continue
            for name, param in self.named_group(index):
                state = self.state.get(param, {})
                if "band_sums" in state:
                    found[name] = spectrum(
                        local(state["band_sums"]), host_scalar(state["step"]), fam
                    )
        return found


def _kind_of(group: dict[str, Any]) -> tuple[object, ...]:
    """The kind of a group, and how its matrices are stored and cut."""
    return group["kind"], group.get("transposed", False), *(group.get("blocks") or ())
