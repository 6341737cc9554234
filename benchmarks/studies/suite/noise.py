"""Gradients of noise alone, at a constant rate: do weights vanish or run away?

    python benchmarks/studies/suite/noise.py              # 20 000 steps, a minute for each recipe

Decay and steps must balance: RMS(W) relative to its first value stays within .5 and 10, and a step
moves the weight less and less, as the cap of (2) falls.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))  # benchmarks/

import maxfactor
from measurement import RESULTS, Record, circumstances, write_json
from studies.suite.optimizers import OURS

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 20_000
LOOKS = (0.05, 0.25, 0.5, 1.0)  # of the steps
AVERAGED = 20  # steps that a move is averaged over
WIDTH = 64


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every recipe at its own rate and at ten times that."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS / "noise.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measured(name, factor, options.steps) for name in OURS for factor in (1.0, 10.0)]
    write_json(options.out, {**circumstances("cpu"), "steps": options.steps, "rows": rows})


def measured(recipe: str, factor: float, steps: int) -> Record:
    """The size of a hidden matrix and the relative move of a step, at four times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    weight = model.get_parameter("0.weight")
    name: maxfactor.RecipeName = recipe  # type: ignore[assignment]
    own = maxfactor.for_model(model, name).param_groups[0]["lr"]
    optimizer = maxfactor.for_model(model, name, lr=factor * own)
    first, moves, sizes, found = weight.detach().norm(), [], [], []
    looks = {round(share * steps) for share in LOOKS}
    for step in range(1, steps + 1):
        before = weight.detach().clone()
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        if any(look - AVERAGED < step <= look for look in looks):
            moves.append(float((weight.detach() - before).norm() / before.norm()))
            sizes.append(float(weight.detach().norm() / first))
        if step in looks:
            found.append(
                {
                    "step": step,
                    "size": round(sum(sizes) / len(sizes), 4),
                    "move": round(sum(moves) / len(moves), 6),
                }
            )
            moves, sizes = [], []
    print(recipe, factor, found, flush=True)
    return {"recipe": recipe, "lr": factor * own, "factor": factor, "looks": found}


if __name__ == "__main__":
    main()
