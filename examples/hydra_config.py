"""An optimizer from a Hydra configuration: `python examples/hydra_config.py optimizer=rule`.

The settings are in hydra_config.yaml. Lists and dicts may come as omegaconf's own types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hydra
import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from omegaconf import DictConfig

    import maxfactor


def build(config: DictConfig) -> tuple[nn.Module, maxfactor.MaxFactor]:
    """A small classifier and the optimizer that the configuration chooses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    if config.optimizer == "recipe":
        return model, instantiate(config.recipe, model)
    return model, instantiate(config.rule, list(model.named_parameters()))


def train(model: nn.Module, optimizer: maxfactor.MaxFactor, steps: int) -> float:
    """Take some steps on the same batch; return the last loss."""
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    labels = (inputs[:, :2] > 0).long() @ torch.tensor([1, 2])
    for _ in range(steps):
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@hydra.main(version_base=None, config_path=".", config_name="hydra_config")
def main(config: DictConfig) -> None:
    """Train with the configuration of hydra_config.yaml and the command line."""
    model, optimizer = build(config)
    print(optimizer.describe())
    print(f"loss {train(model, optimizer, config.steps):.4f}")


if __name__ == "__main__":
    main()
