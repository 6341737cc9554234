"""An optimizer from a SpeechBrain recipe: `python examples/speechbrain_hyperpyyaml.py`.

It reads speechbrain_hyperpyyaml.yaml with hyperpyyaml, as SpeechBrain does, and calls `opt_class`
with the parameters, as `Brain.init_optimizers` does. It does not import SpeechBrain itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hyperpyyaml import load_hyperpyyaml
from torch.nn.functional import cross_entropy

RECIPE = Path(__file__).with_suffix(".yaml")


def build() -> tuple[torch.nn.Module, Any]:
    """The model of the recipe, and its optimizer."""
    torch.manual_seed(0)
    with RECIPE.open(encoding="utf-8") as file:
        hparams = load_hyperpyyaml(file)
    model: torch.nn.Module = hparams["model"]
    return model, hparams["opt_class"](model.parameters())


def train(model: torch.nn.Module, optimizer: Any, steps: int) -> float:
    """Take some steps on the same batch; return the last loss."""
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    labels = (inputs[:, :2] > 0).long() @ torch.tensor([1, 2])
    for _ in range(steps):
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    model, optimizer = build()
    print(f"loss {train(model, optimizer, 1):.4f} at first, {train(model, optimizer, 99):.4f} now")
