"""Base class of MaxFactor and Adafactor: groups, state, step, checkpoints. No arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from maxfactor import checkpoint
from maxfactor.backends.dispatch import choose
from maxfactor.backends.runner import Runner
from maxfactor.backends.step_io import GroupStep, StepInput
from maxfactor.backends.triton.sharing import Sharing
from maxfactor.checkpoint import MARK, STATE_FORMAT
from maxfactor.description import Description, describe_group
from maxfactor.distributed.gradients import all_zero
from maxfactor.distributed.placement import is_sharded, local_tensor, overlaps
from maxfactor.rule.reference import host_scalar
from maxfactor.settings import (
    ADAFACTOR_MAX_STEP,
    Execution,
    GroupRules,
    Settings,
    Switches,
    as_setting,
    check_lr,
)
from maxfactor.state import State, block_shape, init_state
from maxfactor.telemetry import Known, Metrics, Recording, Report, report_of
from maxfactor.windows import Member, members_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.dispatch import Backend
    from maxfactor.backends.triton.inputs import Seen
    from maxfactor.backends.triton.step import FusedStep

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

WHOLE = -1  # key of the runner that steps all windows
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CheckedGroup(NamedTuple):
    """The checked settings of a group, and the raw values they come from."""

    group: dict[str, Any]
    values: dict[str, object]
    settings: Settings
    began_with_number: bool  # whether its momentum was a number at the first check


class Release(Protocol):
    """What an optimizer calls while `release_gradients` steps it in backward."""

    def finish(self) -> None:
        """Step the parameters that backward left."""

    def restart(self) -> None:
        """Expect a new backward."""

    def refresh(self) -> None:
        """Take in new parameters and states."""


class FactoredOptimizer(Optimizer):
    """Base class of MaxFactor and Adafactor, which add only their settings."""

    settings_class: ClassVar[type[Settings]]
    made_by: ClassVar[str]  # the optimizer's name in a checkpoint, also of subclasses
    release: Release | None = None  # while its gradients are released
    left_out: Mapping[str, str] = MappingProxyType({})  # parameters it does not train, and why
    _recording: Recording | None = None  # None until `record_metrics` is called

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self.settings_class.from_group(defaults)  # refuse wrong arguments first
        self.defaults = {name: as_setting(value) for name, value in defaults.items()}
        self._reset()
        super().__init__(_as_list(params), self.defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        for group in self.param_groups:  # a checkpoint may lack newer settings
            for name in self.settings_class.names():
                group.setdefault(name, self.defaults[name])
            group.update({name: self.defaults[name] for name in Execution.names()})
            group[MARK] = self._mark
        self.group_steps()

    def _reset(self) -> None:
        """Drop what is derived from groups and state; keep the number of skipped steps."""
        self._skipped_before = self.skipped if "_runners" in self.__dict__ else 0
        self._checked: dict[int, CheckedGroup] = {}
        # By window; WHOLE is all of them at once. Those that ran last come last.
        self._runners: dict[int, Runner] = {}
        self._sharing = Sharing()
        # So GradScaler leaves unscaling and the check to the kernels; a release refuses it.
        if self._execution.fused or self.release is not None:
            self._step_supports_amp_scaling = True
        if self.release is not None:
            self.release.refresh()

    def drop_plans(self) -> None:
        """Free the buffers of fused steps; keep step sizes and the number of skipped steps."""
        for runner in self._runners.values():
            runner.drop_plan()
        self._sharing.clear()

    def _runner(self, key: int) -> Runner:
        """The runner of a window, moved to the end."""
        runner = self._runners.pop(key, None)
        runner = runner or Runner(None if key == WHOLE else self._sharing)
        self._runners[key] = runner
        return runner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; settings that it lacks take the defaults."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        if "params" not in param_group:
            raise ValueError(f"a parameter group needs 'params', got only {sorted(param_group)}")
        group = dict(param_group)  # never change the caller's dict
        for name in Execution.names():
            if group.get(name, self.defaults[name]) != self.defaults[name]:
                raise ValueError(
                    f"{name} is one for the whole optimizer, but a group has {group[name]!r}; "
                    f"give {name} to {type(self).__name__} itself"
                )
        self._check_keys(group)
        settings = self.settings_class.from_group({**self.defaults, **group})
        super().add_param_group({**group, **settings.as_group(), MARK: self._mark})
        try:
            for name, param in self.named_group(len(self.param_groups) - 1):
                _check_parameter(name, param)
            self._settings(len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self.release is not None:
            self.release.refresh()

    def forget_settings(self) -> None:
        """Check all settings anew, after groups have changed places."""
        self._checked.clear()
        if self.release is not None:
            self.release.refresh()

    def _check_keys(self, group: dict[str, Any]) -> None:
        """Refuse switches outside of `switches`, as torch ignores unknown keys."""
        for field in fields(Switches):
            if field.name in group and field.name not in self.settings_class.names():
                raise TypeError(
                    f"{field.name} is a switch; give switches=maxfactor.Switches("
                    f"{field.name}={group[field.name]!r}) to the group"
                )

    # ------------------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # not traced by torch.compile, as in torch's own optimizers
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
        """Take the step with the present gradients."""
        if self._records:
            self._check_recordable()
        if self.release is not None:
            self.release.finish()
        else:
            self._step_all()
        if self._recording is not None:
            self._recording.advance()

    def _step_all(self) -> None:
        """Step all parameters that have a gradient."""
        groups = self.group_steps()
        flat = [param for group in self.param_groups for param in group["params"]]
        runner = self._runner(WHOLE)
        if (seen := runner.fits(flat, groups, self.state)) is not None:
            self._launch(runner, groups, seen)
            return
        members = self.members()
        inputs = self._inputs(groups, members)
        if not inputs:
            return
        backend = choose(inputs, self._execution)  # may raise, so before any state is made
        if self._rehearse(inputs):
            return
        if self.look_at_weights():
            inputs = self._inputs(self.group_steps(), members)
        self._run(runner, inputs, flat, members, backend)

    def look_at_weights(self) -> bool:
        """Before the first step: set what depends on the weights; return whether anything does."""
        return False

    def _run(
        self,
        runner: Runner,
        inputs: list[StepInput],
        flat: Sequence[Tensor],
        members: Sequence[Member],
        backend: Backend,
    ) -> None:
        """Take a step of some inputs; plan it first if it is a fused one."""
        self._add_states(inputs)
        if backend != "triton":
            is_compiled = backend == "compiled"
            if is_compiled and not self._unscale(inputs):
                if self._recording is not None:
                    self._recording.put_off()
                return
            record = runner.run_torch(
                inputs, self._execution, compiled=is_compiled, records=self._records
            )
            if self._recording is not None:
                self._recording.add(record)
            return
        groups = self.group_steps()
        runner.plan(inputs, flat, groups, _idle(groups, members, inputs))
        self._launch(runner, groups)

    def _unscale(self, inputs: list[StepInput]) -> bool:
        """Divide gradients by the scale of a GradScaler; return whether it found no overflow.

        It leaves that to optimizers with fused=True. The user's gradients are not changed.
        """
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and found.item():  # reading is free on the CPU
            return False
        if scale is not None:
            for each in inputs:
                each.grad = each.grad / scale
        return True

    def _rehearse(self, inputs: list[StepInput]) -> bool:
        """Only initialize the state if this is the first step of torch.distributed.checkpoint."""
        is_first = not any(self.state.get(each.param) for each in inputs)
        if not (is_first and _is_rehearsal(inputs)):
            return False
        self._add_states(inputs)
        return True

    # -------------------------------------------------------------- the step, window by window

    def step_window(
        self,
        members: Sequence[Member],
        flat: Sequence[Tensor],
        groups: list[GroupStep],
        choose_backend: Callable[[], Backend],
    ) -> None:
        """Take the step of one window, as a step of all parameters would; for `release.py`.

        Args:
            members: The members of the window.
            flat: Their parameters.
            groups: The result of `group_steps`, which is the same for all windows.
            choose_backend: Asked if the fused plan of the last step does not fit.
        """
        with torch.no_grad(), _full_precision():
            runner = self._runner(members[0].window)
            if (seen := runner.fits(flat, groups, self.state)) is not None:
                self._launch(runner, groups, seen)
            else:
                backend, inputs = choose_backend(), self._inputs(groups, members)
                self._run(runner, inputs, flat, self.members(), backend)

    def settle_windows(self) -> None:
        """After the windows of a step: prepare their next ones, where they are fused."""
        windows = (runner.fused for key, runner in self._runners.items() if key != WHOLE)
        if plans := [fused for fused in windows if fused is not None]:
            self._sharing.settle(plans)

    def choose_backend(self, members: Sequence[Member]) -> Backend:
        """The backend of a step of all parameters, some of whose gradients are not there yet."""
        groups = self.group_steps()
        trained = [each for each in members if each.param.requires_grad]
        return choose([_as_input(groups, each) for each in trained], self._execution)

    def rehearse(self) -> bool:
        """Take only the first step of torch.distributed.checkpoint; return whether it was that."""
        inputs = self._inputs(self.group_steps(), self.members())
        return bool(inputs) and self._rehearse(inputs)

    def inputs_on_meta(self, dtype: torch.dtype | None = None) -> list[StepInput]:
        """What a step of all parameters works on, without memory: everything is on "meta".

        Args:
            dtype: Of parameters and gradients; None is each parameter's own.
        """
        groups, inputs = self.group_steps(), []
        for each in self.members():
            shape, own = tuple(each.param.shape), dtype or each.param.dtype
            param = torch.empty(shape, dtype=own, device="meta")
            inputs.append(_as_input(groups, each._replace(param=param)))
            inputs[-1].state = init_state(param, inputs[-1].rule, step_on_device=True)
        return inputs

    def members(self) -> list[Member]:
        """All parameters, with their names, groups and windows."""
        return members_of(self.named_group(index) for index in range(len(self.param_groups)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as any torch optimizer does."""
        super().zero_grad(set_to_none)
        if self.release is not None:
            self.release.restart()

    def group_steps(self) -> list[GroupStep]:
        """The rules and learning rate of each group; only changed settings are checked."""
        return [
            GroupStep(self._settings(index).rules, _rate(group["lr"]))
            for index, group in enumerate(self.param_groups)
        ]

    def _settings(self, index: int) -> Settings:
        """The checked settings of a group, cached until one of them changes."""
        group = self.param_groups[index]
        # Schedulers write lr in every step; the rules depend only on whether it is None.
        values = {name: group.get(name) for name in self.settings_class.names()}
        values["lr"] = group["lr"] is None
        known = self._checked.get(index)
        if known and known.group is not group:  # a group before it was removed
            known = None
        if known and known.values == values:
            return known.settings
        has_number = isinstance(group.get("momentum"), Real)
        if known and has_number and not known.began_with_number:
            raise ValueError(
                f"the momentum of group {index} was no number and is {group['momentum']} now; "
                "if a scheduler wrote it, set cycle_momentum=False there; if you want it, build "
                "the optimizer with it"
            )
        settings = self.settings_class.from_group(group)
        _check_blocks(self.named_group(index), settings.rules)
        # Copies, to notice a change inside a dict.
        kept = {k: as_setting(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        began = known.began_with_number if known else has_number
        self._checked[index] = CheckedGroup(group, kept, settings, began)
        return settings

    def _inputs(self, groups: Sequence[GroupStep], members: Sequence[Member]) -> list[StepInput]:
        """Collect the members that have a gradient; refuse those that cannot be stepped."""
        inputs = []
        for each in members:
            if each.param.grad is not None:
                _check_gradient(each.name, each.param.grad)
                _check_memory(each.name, each.param)
                inputs.append(_as_input(groups, each))
        return inputs

    def _add_states(self, inputs: list[StepInput]) -> None:
        """Set the state of each input; create it at the first step."""
        on_device = self._execution.capturable
        for each in inputs:
            if state := self.state[each.param]:
                checkpoint.check_unchanged(each.name, each.param, state, each.rule)
        for each in inputs:
            if not self.state[each.param]:
                self.state[each.param] = init_state(each.param, each.rule, step_on_device=on_device)
            each.state = self.state[each.param]

    def _launch(self, runner: Runner, groups: list[GroupStep], seen: Seen | None = None) -> None:
        """Launch a fused step."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        record = runner.run_fused(  # both set by GradScaler
            groups, self._execution, scale, found, seen, records=self._records
        )
        if self._recording is not None:
            self._recording.add(record)

    @property
    def _records(self) -> bool:
        """Whether the present step is recorded."""
        return self._recording is not None and self._recording.is_due

    @property
    def _fused(self) -> FusedStep | None:
        """The plan of the fused step of all parameters."""
        return self._runners.get(WHOLE, Runner()).fused

    @property
    def _execution(self) -> Execution:
        return Execution(**{name: self.defaults[name] for name in Execution.names()})

    # ---------------------------------------------------------------------- what a user can ask

    @property
    def skipped(self) -> int:
        """The number of skipped steps, whose gradients were not finite; may wait for the device.

        While gradients are released, the number of the window that skipped most.
        """
        skipped = {key: runner.skipped for key, runner in self._runners.items()}
        return self._skipped_before + skipped.pop(WHOLE, 0) + max(skipped.values(), default=0)

    def check_skipped(self) -> None:
        """Raise if 20 steps in a row were skipped. It waits for the device.

        `step` does this itself; call it only between replays of a CUDA graph.
        """
        for runner in self._runners.values():
            runner.check_skipped()

    def effective_lr(self) -> list[float]:
        """The step size alpha of (3) in the last step of each group, averaged over its parameters.

        0 for a group that has not stepped. It waits for the device.
        """
        used: dict[Tensor, float] = {}
        for runner in self._runners.values():
            used |= runner.step_sizes()
        groups = [
            [used[param] for param in group["params"] if param in used]
            for group in self.param_groups
        ]
        return [sum(group) / len(group) if group else 0.0 for group in groups]

    def describe(self) -> Description:
        """Describe the parameter groups: tensors, settings, and bytes of state.

        Returns a list with a `Row` for each group, which prints as a table. It needs only shapes
        and settings, so it works before the first step and on the meta device. Of sharded
        parameters it counts all shards. Its `left_out` has what `for_model` left out, and why.

        Example:
            >>> import torch, maxfactor
            >>> model = torch.nn.Linear(300, 200)
            >>> optimizer = maxfactor.MaxFactor(model.named_parameters())
            >>> table = optimizer.describe()
            >>> table[0].examples
            ('weight (200, 300)', 'bias (200,)')
            >>> table.total.state_bytes
            2816
        """
        rows = [
            describe_group(
                str(group.get("kind", index)),
                self.named_group(index),
                self._settings(index).rules,
                group["lr"],
            )
            for index, group in enumerate(self.param_groups)
        ]
        return Description(rows, self.left_out)

    def record_metrics(self, every: int | None = 50) -> None:
        """Record what steps do to each parameter, for `metrics` and `report`.

        A recorded step does not wait for the device, and other steps do nothing for it. With
        released gradients, call it before backward. Refused with an error: sharded parameters, and
        steps that a CUDA graph captures.

        Args:
            every: Record the next step, then every `every`-th one. None records the next step
                alone, 0 ends the recording.
        """
        if every != 0:
            self._check_recordable()
        recording = self._recording or Recording()
        recording.schedule(every)  # or raises, and changes nothing
        self._recording = recording

    def metrics(self) -> Metrics:
        """What the last recorded step did to each parameter that had a gradient, by its name.

        The object is a mapping from names to `ParameterMetrics`; `summary()` makes a flat dict for
        a logger. Reading the first value waits for the device.

        Example:
            >>> import torch, maxfactor
            >>> model = torch.nn.Linear(4, 2)
            >>> optimizer = maxfactor.MaxFactor(model.named_parameters(), lr=0.01)
            >>> optimizer.record_metrics()
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> metrics = optimizer.metrics()
            >>> list(metrics), metrics["weight"].beta, metrics["weight"].clip
            (['weight', 'bias'], None, 1.0)
        """
        if self._recording is None or not self._recording.records:
            raise RuntimeError(
                "no step has been recorded; call optimizer.record_metrics() before optimizer.step()"
            )
        known: dict[Tensor, Known] = {}
        names: set[str] = set()
        for each in self.members():
            group, rules = self.param_groups[each.group], self._settings(each.group).rules
            kind = str(group.get("kind", f"group_{each.group}"))
            name = each.name if each.name not in names else f"{each.name} of group_{each.group}"
            names.add(name)
            known[each.param] = Known(name, kind, rules.of(tuple(each.param.shape)))
        return Metrics(self._recording.records, known, self._recording.age)

    def report(self, k: int = 5) -> Report:
        """Lines of plain English that name the parameters that stand out in `metrics()`.

        Gradients that are not finite, zero, vanish or dominate; parameters that change ten times
        as much, or a tenth as much, as the median of their kind; FAM's memory at its bounds;
        16-bit parameters most of whose changes rounding to nearest would lose.

        Args:
            k: At most as many parameters for each of these.
        """
        return report_of(self.metrics(), k)

    def _check_recordable(self) -> None:
        """Refuse to record what no backend can."""
        for each in self.members():
            if is_sharded(each.param):
                raise RuntimeError(
                    f"metrics cannot be recorded for sharded parameters, and parameter "
                    f"{each.name!r} is a DTensor; call record_metrics(every=0)"
                )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "metrics cannot be recorded while a CUDA graph is captured; call "
                "record_metrics(every=0), and record a step outside of the graph"
            )

    def named_group(self, index: int) -> list[tuple[str, Tensor]]:
        """A group's parameters with their names; the fourth unnamed one of all is `param_3`."""
        group = self.param_groups[index]
        names = group.get("param_names", group["params"])
        if len(names) != len(group["params"]):
            raise ValueError(
                f"group {index} has {len(group['params'])} parameters in 'params' and {len(names)} "
                "names in 'param_names'; change both lists alike, or call add_param_group"
            )
        first = sum(len(before["params"]) for before in self.param_groups[:index])
        return list(zip(checkpoint.names_of(group, first), group["params"], strict=True))

    # --------------------------------------------------------------------------- checkpoints

    @property
    def _mark(self) -> str:
        return f"{self.made_by}/{STATE_FORMAT}"

    def state_dict(self) -> dict[str, Any]:
        """The state of every parameter, and the settings of each group.

        After the first step it also has the initial state of parameters that never had a gradient,
        because torch.distributed.checkpoint expects a state for every parameter.
        """
        # Runs before the user's own hooks.
        handle = self.register_state_dict_post_hook(_complete, prepend=True)
        own = {param for group in self.param_groups for param in group["params"]}
        # Of groups that were removed; torch would look for their numbers.
        removed = {param: self.state.pop(param) for param in set(self.state) - own}
        try:
            packed: dict[str, Any] = super().state_dict()
        finally:
            handle.remove()
            self.state.update(removed)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; raise, and change nothing, if it does not fit.

        State tensors are copied and keep their dtypes, whatever the dtype of the parameter. A
        group with the same names in another order is matched by name, any other by order.
        """
        checkpoint.check_is_dict(state_dict)
        states: dict[Tensor, State] = {}

        def check(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:  # after the user's own
            groups, found = self._checked_load(loaded)
            states.update(found)
            return {**loaded, "param_groups": groups, "state": {}}  # torch would cast the states

        def restore(_: Optimizer) -> None:  # before the user's own post-hooks
            self.state.update(states)

        handles = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        # Torch makes new groups and states, and keeps the old ones; it only adds to the defaults.
        before = {**self.__dict__, "defaults": dict(self.defaults)}
        try:
            super().load_state_dict(state_dict)
        except BaseException:  # of a user's hook, too
            self.__dict__.clear()
            self.__dict__.update(before)
            if self.release is not None:
                self.release.refresh()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def _checked_load(
        self, loaded: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[Tensor, State]]:
        """The groups of a checkpoint in our order, and a copy of its states; changes nothing."""
        own = [self.named_group(index) for index in range(len(self.param_groups))]
        checkpoint.check_groups(loaded, own, self._mark)
        pairs = zip(loaded["param_groups"], self.param_groups, strict=True)
        groups = [checkpoint.in_order(saved, group) for saved, group in pairs]
        rules = [self._saved_rules(index, saved) for index, saved in enumerate(groups)]
        on_device = self._execution.capturable
        states = {
            param: checkpoint.restored(param, state, rule, step_on_device=on_device)
            for _, param, state, rule in checkpoint.check_states(
                {**loaded, "param_groups": groups}, own, rules
            )
        }
        return groups, states

    def _saved_rules(self, index: int, saved: dict[str, Any]) -> GroupRules:
        """The rules of a checkpoint's group."""
        lr = saved.get("lr")
        if isinstance(lr, Tensor) and (lr.is_meta or lr.layout != torch.strided):
            raise ValueError(
                f"the settings in the checkpoint's group {index} are damaged: lr is on device "
                f"{lr.device} with layout {lr.layout}, and must be dense, with a value"
            )
        try:
            rules = self.settings_class.from_group({**self.defaults, **saved}).rules
            _check_blocks(self.named_group(index), rules)
            return rules
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the settings in the checkpoint's group {index} are damaged: {error}"
            ) from error


def _rate(lr: object) -> float | Tensor:
    """A group's learning rate; for lr=None the cap of the Adafactor paper."""
    return ADAFACTOR_MAX_STEP if lr is None else check_lr(lr)


def _full_precision() -> ExitStack:
    """Disable autocast, which would run the rule's matrix products in 16 bits."""
    # Without an accelerator torch 2.6 raises; later versions return None.
    has_device = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if has_device else None
    stack = ExitStack()
    for kind in ("cpu", *([] if accelerator is None else [accelerator.type])):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _as_input(groups: Sequence[GroupStep], each: Member) -> StepInput:
    """What a backend gets; a missing gradient is taken for one like the parameter."""
    group, param = groups[each.group], each.param
    grad = param if param.grad is None else param.grad
    rule = group.rules.of(tuple(param.shape))
    return StepInput(each.name, param, grad, rule, group.lr, each.group, window=each.window)


def _idle(
    groups: Sequence[GroupStep], members: Sequence[Member], inputs: Sequence[StepInput]
) -> list[StepInput]:
    """The members that are not stepped; they choose the kernels together with those that are."""
    active = {id(each.param) for each in inputs}
    return [_as_input(groups, each) for each in members if id(each.param) not in active]


def _complete(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Add the initial state of parameters that have not stepped, if others have."""
    assert isinstance(optimizer, FactoredOptimizer)
    on_device = optimizer._execution.capturable
    for index, saved in enumerate(packed["param_groups"]):
        group, rules = optimizer.param_groups[index], optimizer._settings(index).rules
        # A group may hold a FAM object, and schedulers may write numpy numbers.
        saved.update({name: as_setting(value) for name, value in saved.items()})
        saved[MARK] = optimizer._mark  # also of a group that was inserted by hand
        for param, key in zip(group["params"], saved["params"], strict=True):
            if packed["state"] and param.requires_grad and not packed["state"].get(key):
                rule = rules.of(tuple(param.shape))
                packed["state"][key] = init_state(param, rule, step_on_device=on_device)


def _is_rehearsal(inputs: list[StepInput]) -> bool:
    """Whether this first step only initializes the state: lr and all gradients are 0.

    torch.distributed.checkpoint takes such a step before it loads. It is not counted.
    """
    return all(_is_zero(each.lr) for each in inputs) and all_zero(inputs)


def _is_zero(lr: float | Tensor) -> bool:
    """Whether lr is known to be 0 without a host sync."""
    rate = host_scalar(lr)
    return isinstance(rate, float) and rate == 0.0


def _as_list(params: object) -> list[Any]:
    """Return the parameters as a list; refuse the usual mistakes."""
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


def _check_parameter(name: str, param: Tensor) -> None:
    if getattr(param, "_fsdp_flattened", False):  # also with use_orig_params=True
        raise TypeError(
            f"parameter {name!r} is a flat parameter of FullyShardedDataParallel, without rows "
            "and columns; shard with torch.distributed.fsdp.fully_shard instead"
        )
    _check_overlap(name, param)
    if param.dtype in SUPPORTED_DTYPES:
        return
    remedy = "leave it out of the parameter list"
    if param.is_complex():
        remedy = "optimize a real parameter and use torch.view_as_complex(parameter) in the model"
    known = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
    raise TypeError(
        f"parameter {name!r} is {param.dtype}, but only {known} can be optimized; {remedy}"
    )


def _check_blocks(named: Iterable[tuple[str, Tensor]], rules: GroupRules) -> None:
    """Refuse blocks that do not divide a matrix."""
    for name, param in named:
        shape = tuple(param.shape)
        block_shape(shape, rules.of(shape), name)


def _check_memory(name: str, param: Tensor) -> None:
    """Refuse a parameter that has no values, or several elements in one place."""
    if param.is_meta:
        raise RuntimeError(
            f"parameter {name!r} is on the meta device, without values to step; call "
            "model.to_empty(device=...), load its weights, and build the optimizer from it"
        )
    _check_overlap(name, param)


def _check_overlap(name: str, param: Tensor) -> None:
    if overlaps(local_tensor(param)):
        raise ValueError(
            f"several elements of parameter {name!r} {tuple(param.shape)} share one place in "
            f"memory (strides {param.stride()}), as after expand(); clone() it first"
        )


def _check_gradient(name: str, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of parameter {name!r} is sparse ({grad.layout}), which is not "
            "supported; build its layer with sparse=False or call grad.to_dense() first"
        )
