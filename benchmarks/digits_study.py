"""A second task beside momentum_study.py's: connected digits, on a CPU.

    python benchmarks/digits_study.py                     # two hours on two cores
    python benchmarks/digits_study.py --only lean         # the other rows stay as they are
    python benchmarks/digits_study.py --quick --out /tmp/digits.json

A small Whisper (width 128) learns spoken digits in 300 steps of 16. Every optimizer has three seeds
at each of its learning rates. Of recipes it tries what looked better in the first task. Writes
benchmarks/results/digits_study.json and prints it as a table.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from maxfactor import FAM
from maxfactor.recipes import BY_KIND, Recipe
from maxfactor_speech.preparation import prepare
from maxfactor_speech.processes import in_processes
from maxfactor_speech.settings import Settings
from maxfactor_speech.trainer import Trainer
from momentum_variants import variant
from rows import Record, chosen, command_line, keep

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

SEEDS = 3
Changes = tuple[tuple[str, float | str | FAM], ...]


@dataclass(frozen=True)
class Row:
    """An optimizer and its rates, and what is changed.

    Of a recipe of ours a setting, "KIND.SETTING" for some layers; of Muon an argument.
    """

    name: str
    optimizer: str
    rates: tuple[float, ...]
    changes: Changes = ()
    variant: str | None = None  # of momentum_variants.py


QUARTER_SAID = "norms and biases at a quarter of the rate"


def shares(**kinds: float) -> Changes:
    """Shares of the learning rate by kind of layer."""
    return tuple((f"{kind}.lr_share", share) for kind, share in kinds.items())


WHOLE = shares(embedding=1.0, head=1.0, vector=1.0)
AHEAD: Changes = (("nesterov", True),)


def remembering(beta: float) -> Changes:
    """The memory of `speech`'s hidden matrices; the whole rate where nothing else is said."""
    return (("hidden.momentum", beta), *WHOLE)


def up_to(beta: float, bands: int = 1, mix: float = 0.05) -> Changes:
    """FAM's longest memory; the whole rate where nothing else is said."""
    return (("momentum", FAM(beta_max=beta, bands=bands, mix=mix)), *WHOLE)


def fixed(beta: float) -> Changes:
    """A memory in FAM's place."""
    return (("momentum", beta), *WHOLE)


# All that a row is about is said here, so that a change of a recipe is no change of a row.
TRIED: dict[str, dict[str, Changes]] = {
    "speech": {
        **{f"memory of {beta:g}": remembering(beta) for beta in (0.95, 0.9, 0.85, 0.8)},
        "memory of 0.9, no look-ahead": (*remembering(0.9), ("hidden.nesterov", False)),
        "memory up to 0.92": (
            ("hidden.momentum", FAM(beta_max=0.92)),
            ("hidden.nesterov", False),
            *WHOLE,
        ),
        "memory of 0.9, current scale": (*remembering(0.9), ("scale", "current")),
        f"memory of 0.95, {QUARTER_SAID}": remembering(0.95) + shares(vector=0.25),
        f"memory of 0.9, {QUARTER_SAID}": remembering(0.9) + shares(vector=0.25),
        f"memory of 0.9, embeddings at half, {QUARTER_SAID}": (
            remembering(0.9) + shares(embedding=0.5, vector=0.25)
        ),
        f"memory of 0.9, convolutions at twice, embeddings at half, {QUARTER_SAID}": (
            remembering(0.9) + shares(conv=2.0, embedding=0.5, vector=0.25)
        ),
    },
    "fam": {
        **{f"memory up to {beta:g}": up_to(beta) for beta in (0.98, 0.92, 0.88, 0.84, 0.8)},
        **{f"fixed memory of {beta:g}": fixed(beta) for beta in (0.8, 0.9, 0.95)},
        "fixed memory of 0.8, look-ahead": fixed(0.8) + AHEAD,
        "fixed memory of 0.9, look-ahead": fixed(0.9) + AHEAD,
        "memory up to 0.92, initial scale": (
            *up_to(0.92),
            ("scale", "initial"),
            ("vector.scale", "current"),
        ),
        "memory up to 0.92, no weight decay": (*up_to(0.92), ("weight_decay", 0.0)),
        f"memory up to 0.92, {QUARTER_SAID}": up_to(0.92) + shares(vector=0.25),
        "memory up to 0.92, all but hidden at half the rate": (
            up_to(0.92) + shares(conv=0.5, embedding=0.5, head=0.5, vector=0.5)
        ),
        f"memory up to 0.92, convolutions and embeddings at half, {QUARTER_SAID}": (
            up_to(0.92) + shares(conv=0.5, embedding=0.5, head=0.5, vector=0.25)
        ),
        f"memory up to 0.88, {QUARTER_SAID}": up_to(0.88) + shares(vector=0.25),
        f"memory up to 0.88, convolutions at twice, embeddings at half, {QUARTER_SAID}": (
            up_to(0.88) + shares(conv=2.0, embedding=0.5, vector=0.25)
        ),
        f"memory up to 0.88, embeddings at half, {QUARTER_SAID}": (
            up_to(0.88) + shares(embedding=0.5, vector=0.25)
        ),
        f"memory up to 0.84, embeddings at half, {QUARTER_SAID}": (
            up_to(0.84) + shares(embedding=0.5, vector=0.25)
        ),
        f"memory up to 0.84, 16 % of the present, embeddings at half, {QUARTER_SAID}": (
            up_to(0.84, mix=0.16) + shares(embedding=0.5, vector=0.25)
        ),
        f"memory up to 0.88, embeddings, {QUARTER_SAID}": (
            up_to(0.88) + shares(embedding=0.25, vector=0.25)
        ),
        f"memory up to 0.88, convolutions at half, {QUARTER_SAID}": (
            up_to(0.88) + shares(conv=0.5, vector=0.25)
        ),
    },
    "lean": {
        "clip of the update at 1": (("d", 1.0),),
        "clip of the update at 1.5": (("d", 1.5),),
        f"clip of the update at 1, {QUARTER_SAID}": (("d", 1.0), *shares(vector=0.25)),
    },
}
RATES: dict[str, tuple[float, ...]] = {
    "speech": (0.01, 0.02, 0.04, 0.08),
    "fam": (0.02, 0.04, 0.08),
    "signs": (0.005, 0.01, 0.02),
    "lean": (0.01, 0.02, 0.028, 0.04),
    "adafactor": (0.01, 0.02, 0.028, 0.04),
    "adamw": (0.0005, 0.001, 0.002, 0.004),
    "muon": (0.005, 0.01, 0.02, 0.04),
}
# Of FAM's memories and the fixed ones, those that are tried by signs, too.
BY_SIGNS = (
    *(f"memory up to {beta:g}" for beta in (0.92, 0.98)),
    *(f"fixed memory of {beta:g}" for beta in (0.8, 0.9, 0.95)),
)
SIGNS: Changes = (("direction", "sign_max"), ("d", 1.0))
# What a memory of FAM belongs to, where it is not a whole matrix.
MEMORIES: dict[str, tuple[int, str | None]] = {
    "8 bands of a DCT": (8, None),
    "8 bands of a random basis": (8, "random_basis"),
    "4 groups of rows (heads)": (4, "row_groups"),
    "32 groups of rows": (32, "row_groups"),
}
ROWS = (
    *(
        Row(f"{recipe}, {name}", recipe, RATES[recipe], changes)
        for recipe, tried in TRIED.items()
        for name, changes in tried.items()
    ),
    *(
        Row(f"fam, memory up to 0.92, {name}", "fam", RATES["fam"], up_to(0.92, bands), change)
        for name, (bands, change) in MEMORIES.items()
    ),
    *(
        Row(f"fam by signs, {name}", "fam", RATES["signs"], TRIED["fam"][name] + SIGNS)
        for name in BY_SIGNS
    ),
    *(Row(peer, peer, RATES[peer]) for peer in ("adafactor", "adamw", "muon")),
    Row("muon, memory of 0.9", "muon", RATES["muon"], (("momentum", 0.9),)),
)


@dataclass(frozen=True)
class Run:
    """One training."""

    row: Row
    settings: Settings
    cache: Path | None

    def __str__(self) -> str:
        return f"{self.row.name}, lr {self.settings.lr:g}, seed {self.settings.seed}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write, print."""
    options = parsed(arguments)
    names = chosen(options, (row.name for row in ROWS))
    rows = [row for row in ROWS if row.name in names]
    runs = [run for row in rows for run in runs_of(row, options)]
    prepare(runs[0].settings, options.cache, workers=options.jobs)  # before they all want it
    found: dict[Run, float] = {}
    for run, wer in in_processes(word_errors, runs, options.jobs):
        print(f"{run}: {wer:.2f} %", flush=True)
        found[run] = wer
    new = [summary(row.name, {run: found[run] for run in runs if run.row == row}) for row in rows]
    print(markdown(keep(options, "digits_study", (row.name for row in ROWS), new)))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, "digits_study")
    parser.add_argument("--cache", type=Path, help="folder of synthesised speech")
    return parser.parse_args(arguments)


def runs_of(row: Row, options: argparse.Namespace) -> list[Run]:
    """All rates with all seeds."""
    common = Settings(
        optimizer=row.optimizer, device="cpu", steps=300, utterances=4800, evaluate_every=300
    )
    rates, seeds = row.rates, range(SEEDS)
    if options.quick:
        common = replace(common, steps=4, batch_size=2, utterances=8, validation_utterances=4)
        rates, seeds = rates[:1], range(1)
    return [
        Run(row, replace(common, lr=lr, seed=seed), options.cache) for lr in rates for seed in seeds
    ]


def word_errors(run: Run) -> tuple[Run, float]:
    """Train on one core; the word error rate in per cent."""
    torch.set_num_threads(1)
    with changed(run.row), variant(run.row.variant):
        trainer = Trainer(run.settings, prepare(run.settings, run.cache, workers=1))
        batches = trainer.batches()
        try:
            while trainer.step < run.settings.steps:
                trainer.train_step(next(batches))
        finally:
            batches.close()  # ends its thread
        return run, round(100.0 * trainer.evaluate().wer, 3)


def changed(row: Row) -> AbstractContextManager[Any]:
    """The context in which an optimizer is made as the row wants it."""
    if row.optimizer in BY_KIND:
        return mock.patch.dict(BY_KIND, {row.optimizer: changed_recipe(row)})
    if row.changes:
        arguments: dict[str, Any] = dict(row.changes)
        muon = functools.partial(torch.optim.Muon, **arguments)
        return mock.patch.object(torch.optim, "Muon", muon)
    return nullcontext()


def changed_recipe(row: Row) -> Recipe:
    """The recipe as the row wants it."""
    recipe = BY_KIND[row.optimizer]
    common, by_kind = dict(recipe.common), {kind: dict(own) for kind, own in recipe.by_kind.items()}
    if row.variant is not None:  # which is a change of that backend
        common["foreach"] = True
    for name, value in row.changes:
        kind, _, setting = name.rpartition(".")
        settings = by_kind.setdefault(kind, {}) if kind else common
        settings[setting] = value
    return Recipe(common, by_kind)


def summary(name: str, found: Mapping[Run, float]) -> Record:
    """The errors of a row at each rate, by seed, and the best of them."""
    tried: dict[str, list[float]] = {}
    for run, wer in found.items():
        tried.setdefault(f"{run.settings.lr:g}", []).append(wer)
    best = min(tried, key=lambda lr: mean(tried[lr]))
    return {"name": name, "lr": float(best), "wer": tried[best], "tried": tried}


def markdown(record: Record) -> str:
    """The table of docs/fam.md."""
    lines = ["| | learning rate | WER %, mean (seeds) | at the other rates |", "|---|---|---|---|"]
    for row in record["rows"]:
        seeds = ", ".join(f"{wer:.1f}" for wer in row["wer"])
        others = ", ".join(
            f"{lr}: {mean(wers):.1f}" for lr, wers in row["tried"].items() if float(lr) != row["lr"]
        )
        lines.append(
            f"| {row['name']} | {row['lr']:g} | {mean(row['wer']):.1f} ({seeds}) | {others} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
