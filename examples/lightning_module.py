"""A LightningModule with automatic or manual optimization: `python examples/lightning_module.py`.

A second run resumes from the checkpoint of the first. `LearningRateMonitor` logs the rate of each
group under its name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import maxfactor

STEPS_PER_EPOCH, EPOCHS = 8, 6


class Classifier(lightning.LightningModule):
    """Tells the quadrant of a point."""

    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def configure_optimizers(self) -> Any:
        """MaxFactor and its schedule, which counts steps."""
        optimizer = maxfactor.for_model(self)  # instead of torch.optim.AdamW
        for group in optimizer.param_groups:
            group["name"] = group["kind"]  # for LearningRateMonitor
        schedule = maxfactor.AdaptiveSchedule(
            optimizer, warmup_steps=4, total_steps=STEPS_PER_EPOCH * EPOCHS
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the loss; with manual optimization, also step."""
        inputs, labels = batch
        loss = cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            schedule: Any = self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule.step()
        return loss


def fit(folder: Path, *, epochs: int, automatic: bool = True, resume: bool = False) -> Classifier:
    """Train up to an epoch, from the last checkpoint in a folder if it shall resume."""
    torch.manual_seed(0)
    inputs = torch.randn(STEPS_PER_EPOCH * 16, 16)
    labels = (inputs[:, :2] > 0).long() @ torch.tensor([1, 2])
    module = Classifier(automatic=automatic)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, logger=CSVLogger(str(folder), version=f"up-to-{epochs}"),
        callbacks=[LearningRateMonitor("step"), ModelCheckpoint(str(folder), save_last=True)],
    )  # fmt: skip
    data = DataLoader(TensorDataset(inputs, labels), batch_size=16)
    trainer.fit(module, data, ckpt_path=str(folder / "last.ckpt") if resume else None)
    print(f"epoch {epochs}  loss {trainer.callback_metrics['loss']:.4f}")
    return module


if __name__ == "__main__":
    for automatic in (True, False):
        with tempfile.TemporaryDirectory() as scratch:
            fit(Path(scratch), epochs=EPOCHS // 2, automatic=automatic)
            fit(Path(scratch), epochs=EPOCHS, automatic=automatic, resume=True)
