"""The optimizer classes: arguments, groups, state, the step. The arithmetic is in `rule.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from maxfactor.backends.dispatch import choose
from maxfactor.backends.guard import Guard
from maxfactor.backends.step_io import Outcome, Pending, Work
from maxfactor.backends.torch import foreach, plain, sharded
from maxfactor.description import Description, describe_group
from maxfactor.distributed.placement import local, shards_of
from maxfactor.rule.fam import FAM, Spectrum, as_setting, spectrum
from maxfactor.rule.reference import host_scalar
from maxfactor.settings import Execution, Hyper, MaxFactorHyper
from maxfactor.state import check_kept, check_loaded, init_state, restored

if TYPE_CHECKING:
    from maxfactor.backends.triton.step import FusedStep

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_STEPS = {"plain": plain.step, "foreach": foreach.step, "sharded": sharded.step}

MARK = "made_by"  # the key under which every group says whose state it has, and in which format
STATE_FORMAT = 1

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class FactoredOptimizer(Optimizer):
    """What MaxFactor and Adafactor share: everything but their settings."""

    hyper_class: ClassVar[type[Hyper]]
    made_by: ClassVar[str]  # the name in a checkpoint, also for subclasses

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self.hyper_class.from_group(defaults)  # a wrong argument is refused before anything else
        self.defaults = defaults
        self._reset()
        super().__init__(_as_list(params), defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        for group in self.param_groups:  # a checkpoint may be older than one of the settings
            for name in self.hyper_class.names():
                group.setdefault(name, self.defaults[name])
            group.update({name: self.defaults[name] for name in Execution.names()})
            group[MARK] = self._mark
        self._has_fixed_momentum = [*map(has_fixed_momentum, self.param_groups)]

    def _reset(self) -> None:
        """Forget what is derived from groups and state, but not the number of skipped steps."""
        skipped = self.skipped if "_guard" in self.__dict__ else 0
        self._guard = Guard()
        self._guard.skipped = skipped
        self._outcome = Outcome()
        self._stepped: list[Tensor] = []
        self._fused: FusedStep | None = None
        if self._execution.fused:  # GradScaler then leaves unscaling and the check to the kernels
            self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with settings of its own; the defaults fill in what it leaves out."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        if "params" not in param_group:
            raise ValueError(f"a parameter group needs 'params', got only {sorted(param_group)}")
        group = dict(param_group)  # the caller's dict stays as it is, whatever happens below
        for name in Execution.names():
            if group.get(name, self.defaults[name]) != self.defaults[name]:
                raise ValueError(
                    f"{name} is one for the whole optimizer, got {group[name]!r} in a group; "
                    f"give {name} to {type(self).__name__} itself"
                )
        hyper = self.hyper_class.from_group({**self.defaults, **group})
        super().add_param_group({**group, **hyper.as_group(), MARK: self._mark})
        try:
            for name, param in self._named_group(len(self.param_groups) - 1):
                _check_parameter(name, param)
        except TypeError:
            self.param_groups.pop()
            raise
        self._has_fixed_momentum = [*map(has_fixed_momentum, self.param_groups)]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # torch.compile runs it as it is, as torch's optimizers do it too
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step for every parameter that has a gradient.

        Args:
            closure: Computes the loss anew and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _full_precision():  # autocast is for the model, and for the closure
            self._advance()
        return loss

    def _advance(self) -> None:
        """Take the step with the gradients that there are."""
        hypers = self._hypers()
        flat = [param for group in self.param_groups for param in group["params"]]
        if self._fused is None or not self._fused.fits(flat, hypers, self.state):
            pending = self._pending(hypers)
            if not pending:
                return
            backend = choose(pending, self._execution)  # may refuse, before there is any state
            is_first = not any(self.state[p.param] for p in pending)
            works = self._with_state(pending)
            if is_first and _is_rehearsal(pending):
                return
            if backend != "fused":
                self._run(_STEPS[backend], works)
                return
            self._fused = _fused_step(works, flat, hypers, self._fused)
        self._run_fused(self._fused, hypers)

    def _hypers(self) -> list[Hyper]:
        """The settings of each group, as they are now."""
        for index, (group, was_fixed) in enumerate(
            zip(self.param_groups, self._has_fixed_momentum, strict=True)
        ):
            if has_fixed_momentum(group) and not was_fixed:
                raise ValueError(
                    f"the momentum of group {index} was no number and is {group['momentum']} now; "
                    "a scheduler that wrote it needs cycle_momentum=False, and an optimizer that "
                    "is to have it must be built with it"
                )
        return [self._hyper_of(group) for group in self.param_groups]

    def _hyper_of(self, group: dict[str, Any]) -> Hyper:
        """The settings of a group, without what a scheduler keeps there for itself."""
        if "max_lr" in group and "min_lr" in self.defaults:  # OneCycleLR has a min_lr of its own
            group = {**group, "min_lr": self.defaults["min_lr"]}
        return self.hyper_class.from_group(group)

    def _run(self, backend: Callable[..., Outcome], works: list[Work]) -> None:
        """Take a step by one of the backends that the host can follow."""
        nonfinite = self._execution.nonfinite
        outcome = backend(works, check=nonfinite != "ignore")
        if outcome.nonfinite:
            self._guard.failed(outcome.nonfinite, nonfinite)
        else:
            self._guard.passed()
            self._outcome, self._stepped = outcome, [work.param for work in works]

    def _run_fused(self, fused: FusedStep, hypers: list[Hyper]) -> None:
        """Launch a step; the device decides whether it is skipped, and counts."""
        self._outcome = fused.step(
            hypers,
            nonfinite=self._execution.nonfinite,
            grad_scale=getattr(self, "grad_scale", None),  # both set by GradScaler
            found_inf=getattr(self, "found_inf", None),
        )
        self._stepped = fused.owners

    @property
    def _mark(self) -> str:
        return f"{self.made_by}/{STATE_FORMAT}"

    @property
    def _execution(self) -> Execution:
        return Execution(**{name: self.defaults[name] for name in Execution.names()})

    @property
    def skipped(self) -> int:
        """How many steps were not taken because a gradient was not finite."""
        return self._guard.skipped + (0 if self._fused is None else self._fused.skipped)

    def check_skipped(self) -> None:
        """Raise if 20 steps in a row were skipped, as `step` does, which replays of a graph cannot.

        It waits for the device. Without graphs there is no need to call it.
        """
        if self._fused is not None:
            self._fused.check_skipped()

    def effective_lr(self) -> list[float]:
        """The step size that each group really used last: alpha of (3), mean over its parameters.

        0 for a group that has not stepped. Reading it waits for the device; not reading it is free.
        """
        sizes = self._outcome.step_sizes
        # Both wait for the device, a tensor once; this is asked for by the user, not by the step.
        values = sizes.tolist() if isinstance(sizes, Tensor) else [float(size) for size in sizes]
        used = dict(zip(self._stepped, values, strict=True))
        groups = [
            [used[param] for param in group["params"] if param in used]
            for group in self.param_groups
        ]
        return [sum(group) / len(group) if group else 0.0 for group in groups]

    def describe(self) -> Description:
        """The parameter groups: tensors, settings, and the bytes that their state takes.

        It is a list with a `Row` for each group, prints as a table, and is computed from shapes
        and settings alone: before the first step, on the meta device, for all shards together.

        Example:
            >>> import torch, maxfactor
            >>> model = torch.nn.Linear(300, 200)
            >>> optimizer = maxfactor.MaxFactor(model.named_parameters())
            >>> table = optimizer.describe()
            >>> table[0].examples
            ('weight (200, 300)', 'bias (200,)')
            >>> table.total.state_bytes
            2808
        """
        return Description(
            describe_group(
                str(group.get("kind", index)),
                self._named_group(index),
                self._hyper_of(group),
                group["lr"],
            )
            for index, group in enumerate(self.param_groups)
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of every parameter, and the settings of each group.

        Once a step was taken, parameters that never had a gradient are in it too, with what they
        will start from: torch.distributed.checkpoint loads into an optimizer that has all states.
        """
        # Before the user's own hooks.
        handle = self.register_state_dict_post_hook(_complete, prepend=True)
        try:
            packed: dict[str, Any] = super().state_dict()
        finally:
            handle.remove()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, or refuse it and change nothing.

        Every state tensor keeps its own dtype for parameters of any dtype, and is copied: the dict
        that was loaded is not the optimizer's own state afterwards. A group that has the same names
        in another order is loaded by name, else parameters are matched by their order.
        """
        seen: dict[str, Any] = {}

        def check(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:  # after the user's own
            self._check_groups(loaded)
            pairs = zip(loaded["param_groups"], self.param_groups, strict=True)
            ordered = {**loaded, "param_groups": [_in_order(saved, own) for saved, own in pairs]}
            seen["states"] = self._check_states(ordered)
            return ordered

        def restore(_: Optimizer) -> None:  # before the user's own post-hooks
            on_device = self._execution.capturable
            for param, state, hyper in seen["states"]:
                self.state[param] = restored(param, state, hyper, step_on_device=on_device)

        handles = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _pending(self, hypers: list[Hyper]) -> list[Pending]:
        """Every parameter that has a gradient; an unusable gradient is an error."""
        pending = []
        for index, hyper in enumerate(hypers):
            for name, param in self._named_group(index):
                if param.grad is not None:
                    _check_gradient(name, param.grad)
                    pending.append(Pending(name, param, param.grad, hyper))
        return pending

    def _with_state(self, pending: list[Pending]) -> list[Work]:
        """Add the state, new where there is none."""
        on_device = self._execution.capturable
        for p in pending:
            if state := self.state[p.param]:
                check_kept(p.name, p.param, state, p.hyper)
        for p in pending:
            if not self.state[p.param]:
                self.state[p.param] = init_state(p.param, p.hyper, step_on_device=on_device)
        return [Work(p.name, p.param, p.grad, p.hyper, self.state[p.param]) for p in pending]

    def _named_group(self, index: int) -> list[tuple[str, Tensor]]:
        """A group's parameters with their names, or `param_3` for the fourth of all."""
        group = self.param_groups[index]
        first = sum(len(before["params"]) for before in self.param_groups[:index])
        return list(zip(_names(group, first), group["params"], strict=True))

    def _check_groups(self, loaded: dict[str, Any]) -> None:
        """Refuse what is no checkpoint, or has other groups."""
        if not {"param_groups", "state"} <= set(loaded):
            raise ValueError(
                f"a checkpoint of an optimizer has 'state' and 'param_groups', this one has "
                f"{sorted(map(str, loaded))[:5]}; give what optimizer.state_dict() returned"
            )
        saved_groups = loaded["param_groups"]
        for index, saved in enumerate(saved_groups):
            self._check_mark(index, saved)
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer has "
                f"{len(self.param_groups)}; build it with the same groups before loading"
            )
        first = 0
        for index, saved in enumerate(saved_groups):
            own = self._named_group(index)
            self._check_length(index, saved, own, first)
            first += len(own)

    def _check_states(self, loaded: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any], Hyper]]:
        """Return each parameter with its saved state and settings, or refuse the checkpoint."""
        states = []
        for index, saved in enumerate(loaded["param_groups"]):
            hyper = self._saved_hyper(index, saved)
            for key, (name, param) in zip(saved["params"], self._named_group(index), strict=True):
                if state := loaded["state"].get(key):
                    check_loaded(name, param, state, hyper)
                    states.append((param, state, hyper))
        return states

    def _saved_hyper(self, index: int, saved: dict[str, Any]) -> Hyper:
        """The settings of a checkpoint's group."""
        try:
            return self._hyper_of({**self.defaults, **saved})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the settings in the checkpoint's group {index} are damaged: {error}"
            ) from error

    def _check_mark(self, index: int, saved: dict[str, Any]) -> None:
        """Refuse a group that another optimizer saved, or a later version of this one."""
        found = saved.get(MARK)
        if found == self._mark:
            return
        if str(found).split("/")[0] == self.made_by:
            raise ValueError(
                f"the checkpoint's group {index} is marked {found!r}, and this version of "
                f"maxfactor reads {self._mark!r}; load it with the version that saved it"
            )
        whose = "another optimizer" if found is None else repr(found)
        raise ValueError(
            f"the checkpoint's group {index} was saved by {whose}, not by {self.made_by}; load it "
            "into the optimizer that saved it"
        )

    @staticmethod
    def _check_length(
        index: int, saved: dict[str, Any], own: list[tuple[str, Tensor]], first: int
    ) -> None:
        count = len(saved["params"])
        if count == len(own):
            return
        names = list(_names(saved, first)) if count > len(own) else [name for name, _ in own]
        whose = "the checkpoint" if count > len(own) else "this optimizer"
        raise ValueError(
            f"the checkpoint has {count} parameters in group {index}, this optimizer has "
            f"{len(own)}; {names[min(count, len(own))]!r} is only in {whose}"
        )


class MaxFactor(FactoredOptimizer):
    r"""Adafactor's factored second moments with sign updates scaled by each row's maximum.

    For a matrix view W (m x n) with gradient G, at step t:

    .. code-block:: text

        (1)  k = t^beta2_decay                     (2)  rho = min(lr, 1/sqrt(t))
        (3)  alpha = rho * max(eps2, RMS(W))       (4)  W <- (1 - lr * weight_decay) * W
        (5)  R <- lerp(R, row means of G^2, k)          C <- lerp(C, column means of G^2, k)
        (6)  V = R C / max(max R, eps1), V >= eps1^2
        (7)  U = G / sqrt(V),                           U <- U / max(max|U|, eps1)
        (8)  s = max(1, RMS(U) / d)
        (9)  W <- W - alpha / s * sign(U) * (row maximum of |U|)

    A vector is one row, with the variance (5') v <- gamma * v + (1 - gamma) * G^2 in place of (5).
    State: m + n floats and one step for a matrix, n floats and one step for a vector.

    With `momentum`, V = R C / mean R (v for a vector), V >= eps1^2, and

    .. code-block:: text

        (10) x = G / sqrt(V) / s_z                 s_z = max(1, sqrt(mean G^2 / mean R))
        (11) beta: a number, or FAM's for each band
        (12) M <- stored(beta * M + (1 - beta) * x)     c <- beta * c + 1 - beta
        (13) y = (1 - mu) * M / c + mu * x         mu = FAM's mix, 1 - beta with nesterov, or 0

    and y takes the place of G / sqrt(V) in (7). Other directions in place of (7) to (9):

    .. code-block:: text

        factored:    u = y, or G / sqrt(V) without momentum,
                     W <- W - alpha * u / max(1, RMS(u) / d)
        orthogonal:  V = mean R in (10), O = orthogonalised y / sqrt(R C) with RMS 1,
                     W <- W - alpha * O; vectors stay with (9)

    Args:
        params: Parameters, named parameters or groups, as for any torch optimizer.
        lr: The largest relative step. A float or a 0-dim tensor; schedulers may overwrite it.
        beta2_decay: Exponent of (1), not positive.
        eps: (eps1, eps2): the floor of variances and divisors, and the smallest RMS(W) in (3).
            eps1 = None means float32's machine epsilon.
        d: Bound on RMS(U) in (8), without effect from 1 on, and on RMS(y) with direction
            "factored"; `math.inf` sets none, which with momentum saves the fused step a pass.
        weight_decay: Decay of (4), decoupled from the gradient.
        gamma: Memory of the variance of vectors and scalars.
        maximize: Go up instead of down.
        factor: How a tensor with more than two dimensions becomes a matrix. "auto": one matrix,
            by the contiguous split with the fewest rows + columns. "last": the last two
            dimensions, the others as a batch, as published.
        max_norm: False leaves out max R in (6) and moves by U itself in (9). Version 0.3.
        min_lr: Lower bound on rho in (2) wherever lr > 0. Version 0.3.
        scalar_boost: A number: parameters with a single value move by
            alpha * scalar_boost * G / (sqrt(v) + eps1) instead. Version 0.3.
        eps_rms: A number: added to the counts in (5), in place of `mean_eps`, and to the
            divisors' floors in (6) and (7). Version 0.1.
        mean_eps: Added to the counts in (5); None means eps1.
        full_matrix: Keep a dense variance for matrices too, by (5'). Version 0.2.
        clip_threshold: Clip U to this L2 norm before (8); 0 for no clip. Version 0.2.
        kappa_bounds: Lower and upper bound of (1).
        step_rule: "relative" for (2) and (3); "ramp" for version 0.2's
            alpha = min(lr, max(eps2, RMS(W)) * min(1e-6 * t, 1/sqrt(t))).
        decay_by: What scales the decay in (4): "lr"; "relative_step" for rho of (2), so that decay
            falls as the step does; or "step_size" for alpha. Version 0.2.
        vector_direction: "sign_max" for (9), "update" to move vectors by U itself.
        momentum: None; a number in [0, 1), the memory beta of (12); or `FAM(...)`, which sets it
            for each tensor by how predictable the gradient is.
        nesterov: True looks ahead by mu = 1 - beta in (13), with a number as momentum.
        momentum_dtype: How a matrix's M is stored: "int8", one byte and a scale for 64 values;
            "bf16"; "fp32". None: int8. Vectors and scalars keep float32.
        direction: "sign_max" for (9), or "factored" or "orthogonal" as above. Orthogonal is for
            hidden matrices; give embeddings, heads and convolution stems a group of their own.
        scale: What (3) scales by: "current" for RMS(W), "initial" for the RMS that each parameter
            had before its first step, with which a weight cannot feed its own growth; one that
            was zero then is scaled by its present RMS.
        rounding: How 16-bit parameters are written: "stochastic" keeps small updates and decay on
            average, "nearest" loses them. None: stochastic for bfloat16, nearest for float16.
        seed: Seed of the stochastic rounding. None takes torch's seed, but 0 in a process group,
            where all ranks must round alike and torch's seeds may differ.
        foreach: True runs each operation over lists of tensors.
        fused: True runs the Triton kernels. None for both: fused on CUDA if Triton is there,
            else foreach there; parameter by parameter on the CPU. Sharded parameters (DTensors)
            refuse foreach, and have a backend of their own for what the kernels cannot do.
        capturable: True counts steps on the device, for CUDA graphs. A replay skips and counts
            as a step does, but cannot raise: call `check_skipped` now and then.
        nonfinite: What a NaN or infinity in any gradient does to the step. "skip": nothing is
            changed, `optimizer.skipped` counts it, and 20 in a row are an error. "raise": nothing
            is changed, and an error names the parameters. "ignore": no check.

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
    """

    hyper_class = MaxFactorHyper
    made_by = "maxfactor.MaxFactor"

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
        factor: str = "auto",
        max_norm: bool = True,
        min_lr: float = 0.0,
        scalar_boost: float | None = None,
        eps_rms: float | None = None,
        mean_eps: float | None = 1e-8,
        full_matrix: bool = False,
        clip_threshold: float = 0.0,
        kappa_bounds: tuple[float, float] = (0.0, 1.0),
        step_rule: str = "relative",
        decay_by: str = "lr",
        vector_direction: str = "sign_max",
        momentum: float | FAM | Mapping[str, Any] | None = None,
        nesterov: bool = False,
        momentum_dtype: str | None = None,
        direction: str = "sign_max",
        scale: str = "current",
        rounding: str | None = None,
        seed: int | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        nonfinite: str = "skip",
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "maximize": maximize,
            "factor": factor,
            "max_norm": max_norm,
            "min_lr": min_lr,
            "scalar_boost": scalar_boost,
            "eps_rms": eps_rms,
            "mean_eps": mean_eps,
            "full_matrix": full_matrix,
            "clip_threshold": clip_threshold,
            "kappa_bounds": kappa_bounds,
            "step_rule": step_rule,
            "decay_by": decay_by,
            "vector_direction": vector_direction,
            "momentum": as_setting(momentum),
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
        }
        super().__init__(params, defaults)

    def spectrum(self) -> dict[str, Spectrum]:
        """What FAM knows of each matrix that has stepped with it, by the parameter's name.

        Small tensors with one value for each band: the coherence `rho`, the memory `beta` of the
        next step, the `power` of the input. Nothing waits for the device until one is read.

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
        for index, group in enumerate(self.param_groups):
            fam = MaxFactorHyper.from_group(group).fam
            for name, param in self._named_group(index) if fam is not None else []:
                state = self.state.get(param, {})
                if fam is not None and "band_sums" in state:
                    found[name] = spectrum(
                        local(state["band_sums"]), host_scalar(state["step"]), fam
                    )
        return found


def has_fixed_momentum(group: dict[str, Any]) -> bool:
    """Whether a group's momentum is a number."""
    return isinstance(group.get("momentum"), Real)


def _full_precision() -> ExitStack:
    """Turn autocast off, which would run the products of the rule in 16 bits."""
    accelerator = torch.accelerator.current_accelerator()
    stack = ExitStack()
    for kind in ("cpu", *([] if accelerator is None else [accelerator.type])):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _fused_step(
    works: list[Work], flat: list[Tensor], hypers: list[Hyper], before: FusedStep | None
) -> FusedStep:
    """Build the fused backend; imported here, because Triton is not needed for the others."""
    from maxfactor.backends.triton.sharded_step import FusedShards
    from maxfactor.backends.triton.step import FusedStep

    backend = FusedShards if any(shards_of(work.param) for work in works) else FusedStep
    return backend(works, flat, hypers, status=None if before is None else before.status)


def _complete(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Add the state of parameters that have not stepped where others have."""
    assert isinstance(optimizer, FactoredOptimizer)
    on_device = optimizer._execution.capturable
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        hyper = optimizer._hyper_of(group)
        # FAM may have been set in the group, and schedulers write numbers of numpy.
        saved.update({name: as_setting(value) for name, value in saved.items()})
        for param, key in zip(group["params"], saved["params"], strict=True):
            if packed["state"] and param.requires_grad and not packed["state"].get(key):
                packed["state"][key] = init_state(param, hyper, step_on_device=on_device)


def _is_rehearsal(pending: list[Pending]) -> bool:
    """Whether a first step is torch's way to get the state made: no rate, no gradient.

    torch.distributed.checkpoint does this to learn what it may load. Such a step does not count.
    """
    rates = [getattr(p.hyper, "lr", None) for p in pending]
    return all(map(_is_zero, rates)) and sharded.without_gradient(pending)


def _is_zero(lr: float | Tensor | None) -> bool:
    """Whether a rate is 0, as far as that can be known without waiting for a device."""
    rate = None if lr is None else host_scalar(lr)
    return isinstance(rate, float) and rate == 0.0


def _as_list(params: object) -> list[Any]:
    """The parameters as a list, with the usual first mistakes named."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params must be an iterable of parameters, got the module {type(params).__name__}; "
            "pass model.parameters() or model.named_parameters()"
        )
    if isinstance(params, (Tensor, dict)) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be an iterable of parameters or groups, got {type(params).__name__}; "
            "put it in a list"
        )
    listed = list(params)
    if not listed:
        raise ValueError(
            "params is empty: nothing to optimize; a generator such as model.parameters() "
            "can be used only once"
        )
    return listed


def _names(group: dict[str, Any], first: int) -> Iterable[str]:
    """Names of a group's parameters; `first` is the index of its first among all."""
    numbered = (f"param_{first + i}" for i in range(len(group["params"])))
    return chain(group.get("param_names", numbered))


def _in_order(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A saved group in the order of one's own, where both have the same names; else as it is."""
    names = own.get("param_names", [])
    keys = dict(zip(saved.get("param_names", []), saved["params"], strict=False))
    if len(keys) != len(own["params"]) or set(keys) != set(names):
        return saved
    return {**saved, "params": [keys[name] for name in names], "param_names": list(names)}


def _check_parameter(name: str, param: Tensor) -> None:
    if getattr(param, "_fsdp_flattened", False):  # and with use_orig_params=True, a piece of one
        raise TypeError(
            f"parameter {name!r} is a flat parameter of FullyShardedDataParallel, which has lost "
            "its rows and columns; shard with torch.distributed.fsdp.fully_shard instead"
        )
    if param.dtype in SUPPORTED_DTYPES:
        return
    remedy = "leave it out of the parameter list"
    if param.is_complex():
        remedy = "optimize a real parameter and use torch.view_as_complex(parameter) in the model"
    known = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
    raise TypeError(
        f"parameter {name!r} is {param.dtype}, but only {known} can be optimized; {remedy}"
    )


def _check_gradient(name: str, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of parameter {name!r} is sparse ({grad.layout}), which is not "
            "supported; build its layer with sparse=False or call grad.to_dense() first"
        )
