"""`MaxFactorCallback`, for the Trainer of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from maxfactor.integrations.step_logs import OPTIMIZERS, record, step_logs

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    import maxfactor


class MaxFactorCallback(Callback):
    """Logs what steps do to each kind of layer, every `log_every_n_steps` of the Trainer.

    The logger gets `effective_lr/KIND`, the step size alpha of (3), and the summary of
    `optimizer.metrics()` as `optimizer/KIND/update_ratio` and so on. Only steps that are logged are
    recorded, so do not call `record_metrics` yourself. Names begin with the index of the optimizer
    if there are several.

    With released gradients it refuses `gradient_clip_val`, which would clip nothing.
    """

    def __init__(self) -> None:
        self._steps = 0  # of all optimizers, before the present batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Refuse other optimizers, and clipping that cannot act."""
        for optimizer in _optimizers(trainer):
            if optimizer.release is not None and trainer.gradient_clip_val:
                raise ValueError(
                    f"gradient_clip_val={trainer.gradient_clip_val:g} cannot act on released "
                    "gradients, which backward has used; leave it out, as maxfactor bounds its "
                    "steps itself"
                )

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002  # part of the event
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Record the step of this batch if it will be logged."""
        self._steps = trainer.global_step
        for optimizer in _optimizers(trainer):
            # As Lightning's own callbacks ask it.
            record(optimizer, on=trainer._logger_connector.should_update_logs)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Log the step of this batch, unless its gradients are accumulated."""
        is_logged = trainer._logger_connector.should_update_logs
        if not is_logged or trainer.global_step == self._steps:
            return
        optimizers = _optimizers(trainer)
        for index, optimizer in enumerate(optimizers):
            prefix = f"{index}/" if len(optimizers) > 1 else ""
            logs = {f"{prefix}{key}": value for key, value in step_logs(optimizer).items()}
            pl_module.log_dict(logs, on_step=True, on_epoch=False)


def _optimizers(trainer: Trainer) -> list[maxfactor.MaxFactor | maxfactor.Adafactor]:
    found = [each for each in trainer.optimizers if isinstance(each, OPTIMIZERS)]
    if not found:
        names = ", ".join(type(each).__name__ for each in trainer.optimizers)
        raise TypeError(
            f"MaxFactorCallback is for the optimizers of maxfactor, but the Trainer has {names}; "
            "return maxfactor.for_model(self) in configure_optimizers, or remove the callback"
        )
    return found
