"""A loop with accelerate: `python examples/accelerate_loop.py`.

Gradients of two batches are accumulated, the model runs in bfloat16, and `save_state` writes a
checkpoint from which `load_state` goes on, bit for bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import maxfactor


class Training:
    """A small classifier with all that accelerate prepares."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(128, 16)
        labels = (inputs[:, :2] > 0).long() @ torch.tensor([1, 2])  # the quadrant
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = maxfactor.for_model(model, "fast")  # instead of torch.optim.AdamW
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
        )
        self.model, self.optimizer, self.data, self.schedule = self.accelerator.prepare(
            model,
            optimizer,
            DataLoader(TensorDataset(inputs, labels), batch_size=16),
            maxfactor.AdaptiveSchedule(optimizer, warmup_steps=4, total_steps=steps),
        )

    def epoch(self) -> float:
        """Train on all batches once; return their mean loss."""
        losses = []
        for inputs, labels in self.data:
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(inputs), labels)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return sum(losses) / len(losses)


def main(folder: Path, epochs: int = 12) -> None:
    """Train, save half-way, and train the second half again from the checkpoint."""
    training = Training(steps=4 * epochs)
    for epoch in range(epochs):
        if epoch == epochs // 2:
            training.accelerator.save_state(str(folder))
        print(f"epoch {epoch:2}  loss {training.epoch():.6f}")
    training.accelerator.load_state(str(folder))
    for epoch in range(epochs // 2, epochs):
        print(f"epoch {epoch:2}  loss {training.epoch():.6f}, from the checkpoint")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch) / "checkpoint")
