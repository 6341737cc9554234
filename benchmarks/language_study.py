"""A language model on a CPU: our recipes beside AdamW, Adafactor and Muon.

    python benchmarks/language_study.py                   # 40 minutes on two cores
    python benchmarks/language_study.py --only fam        # the other rows stay as they are
    python benchmarks/language_study.py --quick --out /tmp/language.json

A small Llama (width 128, four layers) reads the source of Python's standard library byte by byte,
400 steps of 16 pieces of 128; what counts are bits per byte of files that it never saw. Each
optimizer tries four learning rates with the first seed, more where the best one lies at the edge,
and has three seeds at the best. None of our settings was chosen by this task. Writes
benchmarks/results/language_study.json and prints it as a table.
"""

from __future__ import annotations

import functools
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from maxfactor_speech.optimizers import default_clip, make_optimizer
from maxfactor_speech.processes import in_processes
from rows import Record, chosen, command_line, keep
from speech_runs import rate_factor, state_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEDS = 3
MOST_RATES = 6  # with those beyond the edge of the ones given
UNSEEN = 20  # every so many-th file is kept for validation
RATES: dict[str, tuple[float, ...]] = {
    "speech": (0.01, 0.02, 0.04, 0.08),
    "fam": (0.02, 0.04, 0.08, 0.16),
    "lean": (0.01, 0.02, 0.04, 0.08),
    "adamw": (0.001, 0.002, 0.004, 0.008),
    "adafactor": (0.01, 0.02, 0.04, 0.08),
    "muon": (0.005, 0.01, 0.02, 0.04),
}


@dataclass(frozen=True)
class Task:
    """Sizes, all that a run has besides its optimizer."""

    steps: int = 400
    batch: int = 16
    context: int = 128
    width: int = 128
    layers: int = 4
    validation: int = 256  # pieces


QUICK = Task(steps=4, batch=2, context=32, width=16, layers=1, validation=4)


@dataclass(frozen=True)
class Run:
    """One training."""

    optimizer: str
    lr: float
    seed: int = 0
    task: Task = Task()

    def __str__(self) -> str:
        return f"{self.optimizer}, lr {self.lr:g}, seed {self.seed}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, write, print."""
    options = command_line(__doc__, "language_study").parse_args(arguments)
    names = chosen(options, RATES)
    next_runs = quick_runs if options.quick else missing
    done: dict[Run, Record] = {}
    while runs := [run for name in names for run in next_runs(name, done)]:
        for run, found in in_processes(trained, runs, options.jobs):
            print(f"{run}: {found['bits']:.4f} bits, {found['seconds']:.0f} s", flush=True)
            done[run] = found
        train, unseen = corpus()
        record = keep(
            options,
            "language_study",
            RATES,
            [summary(name, done) for name in names],
            bytes={"train": len(train), "unseen": len(unseen)},
        )
    print(markdown(record))


def missing(name: str, done: dict[Run, Record]) -> list[Run]:
    """What is to be run next: rates, rates beyond the edge, then seeds at the best rate."""
    rates = sorted({run.lr for run in done if run.optimizer == name} | set(RATES[name]))
    search = [Run(name, lr) for lr in rates]
    if due := [run for run in search if run not in done]:
        return due
    best = min(search, key=lambda run: done[run]["bits"]).lr
    if best in (rates[0], rates[-1]) and len(rates) < MOST_RATES:
        return [Run(name, best * (0.5 if best == rates[0] else 2.0))]
    runs = (Run(name, best, seed) for seed in range(SEEDS))
    return [run for run in runs if run not in done]


def quick_runs(name: str, done: dict[Run, Record]) -> list[Run]:
    """One small run."""
    run = Run(name, RATES[name][0], task=QUICK)
    return [] if run in done else [run]


# ----------------------------------------------------------------------------- one training


@functools.cache
def corpus() -> tuple[bytes, bytes]:
    """The source of the standard library without its tests: for training, and unseen."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts)
    ]
    train = b"".join(path.read_bytes() for at, path in enumerate(paths) if at % UNSEEN)
    return train, b"".join(path.read_bytes() for path in paths[::UNSEEN])


def trained(run: Run) -> tuple[Run, Record]:
    """Train on one core; bits per byte of what was not seen."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    task = run.task
    train, unseen = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in corpus())
    model = llama(task)
    optimizers = make_optimizer(model, run.optimizer, run.lr)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    highest = [group["lr"] for group in groups]
    clip = default_clip(run.optimizer)
    begun = time.perf_counter()
    for step in range(task.steps):
        for group, lr in zip(groups, highest, strict=True):
            group["lr"] = lr * rate_factor(step, task.steps)
        loss_of(model, pieces(train, torch.randint(len(train), (task.batch,)), task)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - begun
    parameters = sum(param.numel() for param in model.parameters())
    return run, {
        "bits": round(bits_per_byte(model, unseen, task), 5),
        "seconds": round(seconds, 1),
        "state_bytes_per_parameter": round(state_bytes(optimizers) / parameters, 3),
    }


def llama(task: Task) -> LlamaForCausalLM:
    """A model of bytes; its head is its embedding, so that all agree on what is hidden."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=task.width,
            intermediate_size=3 * task.width,
            num_hidden_layers=task.layers,
            num_attention_heads=max(1, task.width // 32),
            max_position_embeddings=task.context,
            tie_word_embeddings=True,
        )
    )


def pieces(text: Tensor, starts: Tensor, task: Task) -> Tensor:
    """Pieces of a text; those that would go beyond its end begin anew."""
    places = starts[:, None] + torch.arange(task.context)
    return text[places % len(text)].long()


def loss_of(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, text: Tensor, task: Task) -> float:
    """Mean over pieces that lie evenly in a text."""
    starts = torch.arange(task.validation) * (len(text) // task.validation)
    model.eval()
    losses = [float(loss_of(model, pieces(text, own, task))) for own in starts.split(task.batch)]
    return mean(losses) / math.log(2.0)


# -------------------------------------------------------------------------------- the table


def summary(name: str, done: dict[Run, Record]) -> Record:
    """An optimizer at each of its rates, and at the best one by seed."""
    own = {run: found for run, found in done.items() if run.optimizer == name}
    first = {run.lr: found["bits"] for run, found in own.items() if run.seed == 0}
    best = min(first, key=lambda lr: first[lr])
    best_runs = [own[run] for run in sorted(own, key=lambda run: run.seed) if run.lr == best]
    return {
        "name": name,
        "lr": best,
        "bits": [found["bits"] for found in best_runs],
        "tried": {f"{lr:g}": first[lr] for lr in sorted(first)},
        "seconds": [found["seconds"] for found in best_runs],
        "state_bytes_per_parameter": best_runs[0]["state_bytes_per_parameter"],
    }


def markdown(record: Record) -> str:
    """The table of docs/fam.md, the best row first."""
    titles = "learning rate | bits per byte, mean (seeds) | at the other rates | state, B/parameter"
    lines = [f"| | {titles} |", "|---|---|---|---|---|"]
    for row in sorted(record["rows"], key=lambda row: mean(row["bits"])):
        seeds = ", ".join(f"{bits:.3f}" for bits in row["bits"])
        others = ", ".join(
            f"{lr}: {bits:.3f}" for lr, bits in row["tried"].items() if float(lr) != row["lr"]
        )
        size = row["state_bytes_per_parameter"]
        lines.append(
            f"| {row['name']} | {row['lr']:g} | {mean(row['bits']):.3f} ({seeds}) | {others} "
            f"| {size:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
