"""`release_gradients`: steps parameters during backward and frees their gradients at once.

References:
    Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023:
        the update is fused with backward.
"""

from __future__ import annotations

import operator
import weakref
from functools import partial
from itertools import chain, groupby, repeat
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from maxfactor.distributed.placement import is_sharded
from maxfactor.optimizer import FactoredOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.hooks import RemovableHandle

    from maxfactor.backends.dispatch import Backend
    from maxfactor.backends.step_io import GroupStep
    from maxfactor.windows import Member

# Asked of all parameters in every step; `map` with these is several times faster than a loop.
GRAD, REQUIRES_GRAD = map(operator.attrgetter, ("grad", "requires_grad"))
PARAMS, RATE = map(operator.itemgetter, ("params", "lr"))


def release_gradients(model: nn.Module, optimizer: FactoredOptimizer) -> GradientRelease:
    """Step parameters during backward, and free their gradients at once.

    The parameters of each group are cut, in their order, into windows of at most 33.5 M elements:
    64 MiB of gradients in bfloat16. A window is stepped in backward as soon as all of its gradients
    are there. The result is that of `optimizer.step()` after backward, bit for bit. Only the check
    for gradients that are not finite works window by window.

    The loop stays as it is: `optimizer.step()` steps the windows that backward left, because some
    of their parameters had no gradient, and has nothing to do if there are none. The learning rate
    is that of the time of backward, so call `scheduler.step()` after it, as usual.

    Refused with an error, because a gradient is used before they could act: several backwards for
    a step (gradient accumulation), GradScaler, CUDA graphs (`capturable=True`), sharded parameters
    and several processes. Clipping after backward cannot be refused here: `clip_grad_norm_` finds
    no gradient and does nothing. Leave it out, as the step is bounded. `MaxFactorCallback`, for
    trainers, refuses it.

    Args:
        model: The model that the optimizer trains; it may be compiled.
        optimizer: A MaxFactor or Adafactor with parameters of this model.

    Returns:
        A handle. `handle.remove()`, or the end of a `with` block, restores the usual step.

    Example:
        >>> import torch, maxfactor
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = maxfactor.for_model(model, recipe="lean")
        >>> handle = maxfactor.release_gradients(model, optimizer)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, FactoredOptimizer):
        raise TypeError(
            f"optimizer must be a MaxFactor or Adafactor of maxfactor, got "
            f"{type(optimizer).__name__}; only these step window by window"
        )
    if optimizer.release is not None:
        raise ValueError(
            "the gradients of this optimizer are released already; call remove() on the first "
            "handle before releasing them again"
        )
    if optimizer.defaults["capturable"]:
        raise ValueError(
            "release_gradients does not support capturable=True: a CUDA graph would replay the "
            "windows of one backward; build the optimizer with capturable=False"
        )
    _check_processes(model)
    _check_parameters(model, optimizer)
    return GradientRelease(optimizer)


class GradientRelease:
    """The handle of `release_gradients`; also a context manager that removes it at its end."""

    def __init__(self, optimizer: FactoredOptimizer) -> None:
        self._optimizer = optimizer
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._members: list[Member] = []
        self._flat: list[Tensor] = []  # their parameters
        self._frozen: list[Tensor] = []  # those that `refresh` found to be frozen
        self._windows: dict[int, list[Member]] = {}
        self._params_of: dict[int, list[Tensor]] = {}  # by window
        self._window_of: dict[Tensor, int] = {}
        # By window: whose gradient came last. The next time only this one has a hook, because each
        # hook interrupts backward.
        self._last: dict[int, Tensor] = {}
        self._new_last: list[int] = []  # windows that have one since the last step
        self._missing: dict[int, set[Tensor]] = {}  # by window without such: gradients yet to come
        self._arrived: set[Tensor] = set()  # parameters whose hook was called since the last step
        # Parameters whose gradient backward used since then, by id: hashing tensors is slow.
        self._used: dict[int, Tensor] = {}
        # Chosen, and looked up, at most once for each backward.
        self._backend: Backend | None = None
        self._groups: list[GroupStep] = []
        self._rates: list[object] = []  # of these groups
        self._formats: list[tuple[torch.device, torch.dtype]] = []  # of the parameters
        self._lock = RLock()
        self._scaled_before = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = True  # so GradScaler calls step, which refuses it
        optimizer.drop_plans()
        optimizer.release = self
        self.refresh()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore the usual step. Gradients that are still there stay for it."""
        if self._optimizer.release is not self:
            return
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._optimizer.release = None
        self._optimizer.drop_plans()
        self._optimizer._step_supports_amp_scaling = self._scaled_before

    # ------------------------------------------------------------------- called by the optimizer

    def refresh(self) -> None:
        """Cut the present parameters into windows, and hook those that are new or unfrozen."""
        self._members = self._optimizer.members()
        self._flat = [each.param for each in self._members]
        self._frozen = [param for param in self._flat if not param.requires_grad]
        by_window = groupby(self._members, key=lambda each: each.window)
        self._windows = {window: list(members) for window, members in by_window}
        self._params_of = {
            window: [each.param for each in members] for window, members in self._windows.items()
        }
        self._window_of = {each.param: each.window for each in self._members}
        self._groups = []
        self._last.clear()
        self._new_last.clear()
        for param in [param for param in self._hooks if param not in self._window_of]:
            self._hooks.pop(param).remove()
        self._listen(filter(REQUIRES_GRAD, self._flat))
        self._expect()

    def restart(self) -> None:
        """Expect a new backward."""
        self._arrived.clear()
        self._used.clear()
        self._backend, self._groups = None, []
        self._follow_groups()
        self._expect()
        for window in self._new_last:
            last = self._last.get(window)
            for param in self._params_of[window] if last is not None else ():
                if param is not last and param in self._hooks:
                    self._hooks.pop(param).remove()
        self._new_last.clear()

    def finish(self) -> None:
        """Step the windows that backward left; refuse GradScaler."""
        self._follow_groups()
        self._groups = []  # settings may have changed since backward
        optimizer = self._optimizer
        scaling = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
        if scaling:  # set by GradScaler, which does not clear them after an error
            for name in scaling:
                delattr(optimizer, name)
            raise RuntimeError(
                "released gradients cannot be used with GradScaler: backward has already stepped "
                "with scaled gradients; train in bfloat16 without a scaler, or call "
                "handle.remove(), and start again from the weights before this backward"
            )
        if not self._arrived and optimizer.rehearse():
            self._free(self._flat)
        else:
            left = [each for each in self._members if each.param.grad is not None]
            for each in left:  # before any window is stepped
                if id(each.param) in self._used:
                    raise _second_gradient(each.name)
            for window in {each.window: None for each in left}:
                self._last.pop(window, None)  # its gradient did not come this time
                self._step(window)
            optimizer.settle_windows()
        self.restart()

    # -------------------------------------------------------------------------------- in backward

    def take(self, param: Tensor) -> None:
        """Note that a gradient is complete; step its window if it is the last one."""
        with self._lock:  # autograd has a thread for each device
            if not self._arrived:  # once for each backward
                self._follow_groups()
                _check_processes(None)
                self._expect()  # parameters may have been frozen or unfrozen since
                formats = [(each.device, each.dtype) for each in self._flat]
                if formats != self._formats:  # choose, or refuse, before any window is stepped
                    self._formats = formats
                    self._choose_backend()
            if param not in self._window_of:  # it was removed from its group
                return
            if param in self._arrived or id(param) in self._used:
                raise _second_gradient(
                    next(each.name for each in self._members if each.param is param)
                )
            self._arrived.add(param)
            window = self._window_of[param]
            if not self._missing_after(param, window):
                used = self._params_of[window]
                if has_none(map(GRAD, used)):
                    used = [other for other in used if other.grad is not None]
                self._step(window)
                if self._last.get(window) is not param:
                    self._last[window] = param
                    self._new_last.append(window)
                self._used.update(zip(map(id, used), used, strict=True))

    def _missing_after(self, param: Tensor, window: int) -> set[Tensor]:
        """The gradients of a window that are yet to come; from now on their hooks are there."""
        if window not in self._last:
            if window not in self._missing:  # a step after backward raised
                self._missing[window] = self._absent(window)
            missing = self._missing[window]
            missing.discard(param)
            return missing
        missing = self._absent(window)
        if missing:  # they come in another order than last time
            del self._last[window]
            self._missing[window] = missing
            self._listen(missing)
        return missing

    def _absent(self, window: int) -> set[Tensor]:
        """The trainable parameters of a window that have no gradient."""
        own = self._params_of[window]
        if not has_none(map(GRAD, own)):
            return set()
        return {other for other in own if other.requires_grad and other.grad is None}

    def _listen(self, params: Iterable[Tensor]) -> None:
        """Hook parameters that have no hook."""
        # The garbage collector does not look into hooks: a strong reference would keep the model.
        take = partial(_take, weakref.ref(self))
        for param in params:
            if param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(take)

    def _step(self, window: int) -> None:
        """Step the members of a window that have a gradient, and free it."""
        flat = self._params_of[window]
        if all(map(operator.is_, map(GRAD, flat), repeat(None))):
            return
        self._optimizer.look_at_weights()
        rates = [*map(RATE, self._optimizer.param_groups)]
        if not self._groups or not all(map(operator.is_, rates, self._rates)):
            self._groups, self._rates = self._optimizer.group_steps(), rates
        self._optimizer.step_window(self._windows[window], flat, self._groups, self._choose_backend)
        self._free(flat)

    def _choose_backend(self) -> Backend:
        """The backend of windows that have no fused plan."""
        if self._backend is None:
            self._backend = self._optimizer.choose_backend(self._members)
            if self._backend != "triton":  # then for all windows
                self._optimizer.drop_plans()
        return self._backend

    @staticmethod
    def _free(params: list[Tensor]) -> None:
        for param in params:
            param.grad = None

    def _expect(self) -> None:
        """Expect a gradient of every trainable parameter that has not had one."""
        self._missing = {}
        for window, params in self._params_of.items():
            if window in self._last:
                continue
            own = [param for param in params if param.requires_grad]
            self._missing[window] = {param for param in own if param not in self._arrived}
            self._listen(own)

    def _follow_groups(self) -> None:
        """Take in parameters that were added to groups, removed from them, or unfrozen."""
        if self._is_outdated():
            self.refresh()

    def _is_outdated(self) -> bool:
        """Whether parameters were replaced, or unfrozen, since `refresh`."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        flat = [*chain.from_iterable(map(PARAMS, groups))]
        return (
            len(flat) != len(self._flat)
            or not all(map(operator.is_, flat, self._flat))
            or any(map(REQUIRES_GRAD, self._frozen))
        )


def has_none(values: Iterable[object]) -> bool:
    """Whether a value is None; tensors are not compared."""
    return any(map(operator.is_, values, repeat(None)))


@_disable_dynamo
def _take(release: weakref.ref[GradientRelease], param: Tensor) -> None:
    """The hook of a parameter: hand its gradient over, while the optimizer is alive."""
    if (alive := release()) is not None:
        alive.take(param)


def _second_gradient(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r} got a second gradient before optimizer.step(), but released "
        "gradients cannot be accumulated: the first one may have been used already; call "
        "optimizer.step() after every backward, with larger batches instead of accumulation "
        "(and checkpoint(use_reentrant=False) for layers that are used twice), or call "
        "handle.remove()"
    )


def _check_processes(model: nn.Module | None) -> None:
    """Refuse data-parallel training, which averages gradients after they would be used."""
    is_wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    if is_wrapped or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        raise RuntimeError(
            "release_gradients is for one process: with several, gradients are averaged or "
            "sharded after backward has used them here; train without it, and shard the model by "
            "fully_shard to save memory"
        )


def _check_parameters(model: nn.Module, optimizer: FactoredOptimizer) -> None:
    own = set(model.parameters())
    for each in optimizer.members():
        if is_sharded(each.param):
            raise RuntimeError(
                f"release_gradients does not support sharded parameters, and parameter "
                f"{each.name!r} is a DTensor; its gradient is sharded as well, so train without it"
            )
        if each.param not in own:
            raise ValueError(
                f"parameter {each.name!r} of the optimizer is not in the model "
                f"{type(model).__name__}; give the model that the optimizer was built for"
            )
