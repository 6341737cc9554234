"""`ForModel` and `MaxFactorCallback`, for the Trainer and the Seq2SeqTrainer of transformers."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy

import maxfactor
from maxfactor.integrations.step_logs import OPTIMIZERS, record, step_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from transformers import TrainerControl, TrainerState

# Optimizers whose TrainingArguments were looked at, so that nothing is said twice.
_looked_at: WeakSet[maxfactor.MaxFactor | maxfactor.Adafactor] = WeakSet()


class ForModel:
    """`maxfactor.for_model` in the form that a Trainer takes: `optimizer_cls_and_kwargs`.

    From transformers 5.2 on, the Trainer calls `ForModel()(model, **kwargs)`. Versions 4.47 to 5.1
    call `ForModel(parameters, **kwargs)`, or `ForModel(model, **kwargs)` if the model is among
    the kwargs: there, add `"model": model`, which newer versions accept too.

    The kwargs are the arguments of `for_model`: `recipe`, `lr`, and settings that replace the
    recipe's. The Trainer does not pass on its `learning_rate` and `weight_decay`. A UserWarning
    says so if they were set, and if `max_grad_norm`, by default 1, would scale gradients down.

    Example:
        >>> import tempfile, torch, transformers
        >>> from maxfactor.integrations.huggingface import ForModel
        >>> trainer = transformers.Trainer(
        ...     torch.nn.Linear(4, 2),
        ...     transformers.TrainingArguments(tempfile.gettempdir(), max_grad_norm=0),
        ...     optimizer_cls_and_kwargs=(ForModel, {"recipe": "fast"}),
        ... )
        >>> [group["kind"] for group in trainer.create_optimizer().param_groups]
        ['head', 'vector']
    """

    def __new__(cls, model: object = None, /, **settings: Any) -> Any:
        """Return a factory, or the optimizer if a model is given."""
        factory = super().__new__(cls)
        if model is not None:
            return factory(model, **settings)
        if settings:
            raise TypeError(
                f"ForModel() takes settings only together with a model, got {sorted(settings)}; "
                "give the Trainer optimizer_cls_and_kwargs=(ForModel, {...})"
            )
        return factory

    def __call__(
        self,
        model: object,
        /,
        recipe: maxfactor.RecipeName = "quality",
        lr: float | Tensor | None = None,
        **overrides: Any,
    ) -> maxfactor.MaxFactor:
        """Return the optimizer of a model.

        Args:
            model: The Trainer's model.
            recipe: As in `for_model`.
            lr: As in `for_model`; None takes the recipe's.
            **overrides: As in `for_model`. A "model" among them, which transformers before 5.2
                needs, must be the Trainer's.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"ForModel needs the model, got {type(model).__name__}; transformers before 5.2 "
                "gives the model's parameters instead: add it to the kwargs, as in "
                "optimizer_cls_and_kwargs=(ForModel, {'model': model, 'recipe': 'quality'})"
            )
        _check_same(model, overrides.pop("model", model))
        optimizer = maxfactor.for_model(model, recipe, lr, **overrides)
        trainer = _owner_of_caller(_is_trainer)
        if trainer is not None and trainer.is_world_process_zero():
            _warn_of_misfits(trainer.args, optimizer)
        return optimizer

    def __repr__(self) -> str:
        return "ForModel()"


def _check_same(own: nn.Module, named: object) -> None:
    """Refuse a "model" in the kwargs that is not the one that the Trainer trains."""
    if not isinstance(named, nn.Module) or set(named.parameters()) != set(own.parameters()):
        raise ValueError(
            f"the 'model' in the kwargs of ForModel, a {type(named).__name__}, does not have the "
            "parameters of the Trainer's model; from transformers 5.2 on, leave it out"
        )


class MaxFactorCallback(TrainerCallback):
    """Logs what steps do to each kind of layer, and warns of TrainingArguments that do not fit.

    The logs of a training step get `effective_lr/KIND`, the step size alpha of (3), and the summary
    of `optimizer.metrics()` as `optimizer/KIND/update_ratio` and so on. They are in the Trainer's
    own log and in those of `report_to`: when training begins, the callback moves to the front. Only
    steps that `logging_steps` or `logging_strategy` select are recorded, so do not call
    `record_metrics` yourself.

    Once, when training begins, it warns if `max_grad_norm`, by default 1, scales gradients down,
    and if `learning_rate` or `weight_decay` were set but are not used; unless `ForModel` did. With
    released gradients it refuses `max_grad_norm`, which would clip nothing.
    """

    def __init__(self) -> None:
        self._has_warned = False
        self._epoch, self._share = 0.0, 1.0  # where the last step began, and its share of an epoch

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002  # part of the event
        **kwargs: Any,
    ) -> None:
        """Refuse what cannot work, warn once of arguments that do not fit, and move to the front.

        Reporters come first in a Trainer, and would miss what this callback adds to the logs.
        """
        optimizer = _unwrapped(kwargs.get("optimizer"))
        if optimizer.release is not None and args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={args.max_grad_norm:g} (the Trainer's default is 1) cannot act on "
                "released gradients, which backward has used; set max_grad_norm=0 in the "
                "TrainingArguments, as maxfactor bounds its steps itself"
            )
        if state.is_world_process_zero and not self._has_warned:
            self._has_warned = True
            _warn_of_misfits(args, optimizer)
        handler = _owner_of_caller(lambda owner: isinstance(owner, CallbackHandler))
        if handler is not None and self in handler.callbacks:
            handler.callbacks.remove(self)  # the handler is iterating; what comes next stays there
            handler.callbacks.insert(0, self)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Record the step if it will be logged."""
        record(_unwrapped(kwargs.get("optimizer")), on=self._is_logged(args, state))

    def _is_logged(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Whether the Trainer will log the coming step, as far as its arguments say."""
        coming, epoch = state.global_step + 1, state.epoch or 0.0
        if epoch > self._epoch:
            self._share = epoch - self._epoch
        self._epoch = epoch
        if args.logging_first_step and coming == 1:
            return True
        if args.logging_strategy == IntervalStrategy.STEPS:
            return coming % state.logging_steps == 0
        # As many batches as the last step had would end the epoch.
        ends = epoch + self._share > math.floor(epoch + 1e-6) + 1 - 1e-6
        return args.logging_strategy == IntervalStrategy.EPOCH and ends

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Add the numbers to the logs of a training step."""
        logs: dict[str, float] = kwargs.get("logs") or {}
        if "loss" not in logs:  # an evaluation, or the summary at the end
            return
        numbers = step_logs(_unwrapped(kwargs.get("optimizer")))
        logs.update(numbers)
        last = state.log_history[-1] if state.log_history else {}
        if last.get("step") == state.global_step:  # the Trainer has just appended a copy of `logs`
            last.update(numbers)


def _owner_of_caller(fits: Callable[[Any], bool]) -> Any:
    """The nearest `self` up the stack that fits, or None.

    Events of transformers pass neither the Trainer nor its callbacks on. Without them, warnings and
    the numbers of reporters are missing, but the training is the same.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if fits(owner := frame.f_locals.get("self")):
            return owner
        frame = frame.f_back
    return None


def _is_trainer(owner: object) -> bool:
    is_told = isinstance(getattr(owner, "args", None), TrainingArguments)
    return is_told and hasattr(owner, "create_optimizer")


def _unwrapped(optimizer: object) -> maxfactor.MaxFactor | maxfactor.Adafactor:
    """The optimizer inside of accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, OPTIMIZERS):
        raise TypeError(
            f"MaxFactorCallback is for the optimizers of maxfactor, but the Trainer has "
            f"{type(inner).__name__}; set optimizer_cls_and_kwargs=(ForModel, {{}}), or remove "
            "the callback"
        )
    return inner


def _warn_of_misfits(
    args: TrainingArguments, optimizer: maxfactor.MaxFactor | maxfactor.Adafactor
) -> None:
    """Warn of arguments that do not fit, once for each optimizer."""
    if optimizer in _looked_at:
        return
    _looked_at.add(optimizer)
    for warning in _misfits(args, optimizer):
        warnings.warn(warning, UserWarning, stacklevel=3)


def _misfits(
    args: TrainingArguments, optimizer: maxfactor.MaxFactor | maxfactor.Adafactor
) -> Iterator[str]:
    """What to say about the arguments of a Trainer."""
    if args.max_grad_norm:
        yield (
            f"max_grad_norm={args.max_grad_norm:g} (the Trainer's default is 1) scales gradients "
            "down before maxfactor sees them, which bounds its steps itself; set max_grad_norm=0 "
            "in the TrainingArguments"
        )
    unused = {"learning_rate": "lr"}
    if "kind" in optimizer.param_groups[0]:  # for_model made the groups, not the Trainer
        unused["weight_decay"] = "weight_decay"
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, own in unused.items():
        value = getattr(args, name)
        if value != defaults[name]:
            yield (
                f"{name}={value:g} in the TrainingArguments is not used: the optimizer has its "
                f"own; give {own!r} in the kwargs of optimizer_cls_and_kwargs, and leave {name} out"
            )
