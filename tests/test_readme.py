"""The README's code runs, and the table of versions is the one in `recipes.py`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from maxfactor.recipes import RECIPES
from maxfactor.settings import MaxFactorHyper

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
VERSIONS = (ROOT / "docs" / "versions.md").read_text()


def test_the_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    names = {"weight": torch.ones(3, 2), "grad": torch.ones(3, 2)}
    for block in blocks:
        exec(block, names)


def test_the_table_has_every_switch() -> None:
    rows = [line for line in VERSIONS.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])}
    everywhere = {"factor", "maximize", "beta2_decay", "rounding", "seed"}  # no version's own
    assert named == set(MaxFactorHyper.names()) - everywhere
    assert {key for settings in RECIPES.values() for key in settings} <= named
