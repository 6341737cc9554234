"""`ForModel` and `MaxFactorCallback`, for the Trainer and the Seq2SeqTrainer of transformers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

import maxfactor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import TrainerControl, TrainerState, TrainingArguments


class ForModel:
    """`maxfactor.for_model` in the form that a Trainer takes: `optimizer_cls_and_kwargs`.

    From transformers 5.2 on, the Trainer calls `ForModel()(model, **kwargs)`. Versions 4.47 to 5.1
    call `ForModel(parameters, **kwargs)`, or `ForModel(model, **kwargs)` if the model is among
    the kwargs: there, add `"model": model`, which newer versions accept too.

    The kwargs are the arguments of `for_model`: `recipe`, `lr`, and settings that replace the
    recipe's. The Trainer does not pass on its `learning_rate` and `weight_decay`.

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
        return maxfactor.for_model(model, recipe, lr, **overrides)

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
    """Logs step sizes, and warns of TrainingArguments that do not fit a maxfactor optimizer.

    `effective_lr/KIND` in the logs is the step size alpha of (3) in the last step, averaged over
    the parameters of a group. Other callbacks see it if they come later in `callbacks`. The
    Trainer puts those of `report_to` first: to have it in TensorBoard, set `report_to="none"` and
    give `callbacks=[MaxFactorCallback(), TensorBoardCallback()]`.

    Once, when training begins, it warns if `max_grad_norm`, by default 1, scales gradients down,
    and if `learning_rate` or `weight_decay` were set but are not used. `ForModel` cannot see them:
    the Trainer gives it the model alone.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002  # part of the event
        **kwargs: Any,
    ) -> None:
        """Refuse other optimizers, and warn once of arguments that do not fit."""
        optimizer = _unwrapped(kwargs.get("optimizer"))
        if self._has_warned or not state.is_world_process_zero:
            return
        self._has_warned = True
        for warning in _misfits(args, optimizer):
            warnings.warn(warning, UserWarning, stacklevel=2)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Add the step sizes to the logs of a training step."""
        logs: dict[str, float] = kwargs.get("logs") or {}
        if "loss" not in logs:  # an evaluation, or the summary at the end
            return
        optimizer = _unwrapped(kwargs.get("optimizer"))
        rates = {
            f"effective_lr/{_label(group, index)}": rate
            for index, (group, rate) in enumerate(
                zip(optimizer.param_groups, optimizer.effective_lr(), strict=True)
            )
        }
        logs.update(rates)
        state.log_history[-1].update(rates)  # the Trainer has just appended a copy of `logs`


def _label(group: dict[str, Any], index: int) -> str:
    """The kind of a group, such as `hidden`, with its blocks, such as `hidden_64_rows`."""
    parts = (group.get("kind", index), *reversed(group.get("blocks") or ()))
    return "_".join(map(str, parts))


def _unwrapped(optimizer: object) -> maxfactor.MaxFactor | maxfactor.Adafactor:
    """The optimizer inside of accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, (maxfactor.MaxFactor, maxfactor.Adafactor)):
        raise TypeError(
            f"MaxFactorCallback is for the optimizers of maxfactor, but the Trainer has "
            f"{type(inner).__name__}; set optimizer_cls_and_kwargs=(ForModel, {{}}), or remove "
            "the callback"
        )
    return inner


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
