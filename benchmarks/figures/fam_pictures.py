"""The pictures of docs/fam.md and the README, from the files in benchmarks/results.

    python benchmarks/figures/fam_pictures.py
    python benchmarks/figures/fam_pictures.py --out FOLDER

Prints the numbers that docs/fam.md quotes from fam_spectrum.json, and draws into docs/pictures:

    coherence.svg   made-up gradients with a coherence of .3 and of .05, and their momentum
    beta.svg        the memory of every matrix during a training, from fam_spectrum.json
    bands.svg       power and coherence of each band, from fam_spectrum.json
    rates.svg       word error rate against learning rate, from momentum_study.json
    main.svg        the main table of the study, from momentum_study.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from maxfactor import FAM

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import RESULTS, Record
from studies.fam_spectrum import MEL, PARTS, SECOND, TOKENS, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder for the pictures")
    for name in ("fam_spectrum", "momentum_study"):
        option = "--" + name.split("_")[-1]  # --spectrum, --study
        parser.add_argument(option, type=Path, default=RESULTS / f"{name}.json")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    spectrum = json.loads(options.spectrum.read_text())
    draw_all(spectrum, json.loads(options.study.read_text()), options.out)
    print_findings(spectrum)


# ------------------------------------------------------------------------ numbers of the text


def print_findings(spectrum: Record) -> None:
    """The numbers that docs/fam.md quotes from the trainings."""
    one, several = spectrum["trainings"]
    longest = FAM().beta_max
    for training in (one, several):
        print(f"bands {training['bands']}: WER {training['wer']:.1%}")
    betas = {name: matrix["beta"][0] for name, matrix in one["matrices"].items()}
    for at, step in enumerate(one["steps"]):
        if step in (21, 30, 60, 99, 150, 300):
            rho = median(matrix["rho"][0][at] for matrix in one["matrices"].values())
            beta = median(values[at] for values in betas.values())
            print(f"step {step}: median coherence {rho:.3f}, median beta {beta:.2f}")
    reached = sorted(
        next((s for s, beta in zip(one["steps"], values, strict=True) if beta >= longest), -1)
        for values in betas.values()
    )
    print(f"first step at beta {longest}: {reached}, median {median(reached):g}; -1: never")
    late = [b for values in betas.values() for b in values[len(values) // 2 :]]
    print(f"at beta {longest} in the second half: {mean(b >= longest for b in late):.1%}")
    [tokens] = [values for name, values in betas.items() if part_of(name) == TOKENS]
    print(f"{TOKENS}: beta from {min(tokens):.2f} to {max(tokens):.2f}, last {tokens[-1]:.3f}")
    for span in (EARLY, LATE):
        for name, parts in {MEL: [MEL], SECOND: [SECOND], "hidden": HIDDEN}.items():
            for quantity in ("power", "rho"):
                values = means(profiles(several, parts, quantity, span))
                print(f"steps {span}, {name}, {quantity}: {[round(x, 3) for x in values]}")


# ------------------------------------------------------------------------------- the pictures


INK, PALE, GRID = "#24292f", "#8c959f", "#e6e8eb"
OURS, THEIRS = "#d55e00", "#0072b2"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # A white background also on a dark page; a fixed salt and no date, so that the same numbers
    # give the same file.
    "savefig.facecolor": "white",
    "svg.hashsalt": "fam",
}


def draw_all(spectrum: Record, study: Record, folder: Path) -> None:
    """Every picture."""
    one, several = spectrum["trainings"]
    rows = study["tables"]["main"]
    with mpl.rc_context(STYLE):
        for name, figure in (
            ("coherence", coherence_picture()),
            ("beta", beta_picture(one)),
            ("bands", bands_picture(several)),
            ("rates", rates_picture(rows)),
            ("main", main_picture(rows)),
        ):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, dpi=110)


def steps_of_memory(beta: float) -> float:
    """About how many steps an average with this beta goes back."""
    return 1.0 / (1.0 - beta)


# What a coherence is


def coherence_picture(steps: int = 240) -> Figure:
    """A noisy gradient whose steady part changes its sign half-way, and its momentum."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(SEED)).tolist()
    signal = [1.0 if step < steps // 2 else -1.0 for step in range(steps)]
    for axes, rho in zip(panels, (0.3, 0.05), strict=True):
        loudness = math.sqrt(1 / rho - 1)  # the steady part has power 1
        inputs = [s + loudness * n for s, n in zip(signal, noise, strict=True)]
        axes.plot(inputs, ".", color=PALE, markersize=3.5, alpha=0.8, label="gradient, each step")
        axes.plot(signal, color=INK, linewidth=1.4, label="its steady part")
        axes.plot(averaged(inputs, rho), color=OURS, linewidth=1.8, label="momentum")
        beta = 1 - rho
        axes.set_title(
            f"coherence {rho:g}: β = {beta:g}, remembers about {steps_of_memory(beta):.0f} steps"
        )
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_ylim(-9, 9)
        axes.margins(x=0.01)
    panels[-1].set_xlabel("step")
    figure.legend(*panels[0].get_legend_handles_labels(), **BELOW, ncols=3)
    return figure


SEED = 4  # of the noise: one with which both averages visibly change their sign
BELOW: dict[str, Any] = {"loc": "outside lower center", "frameon": False}


def averaged(inputs: Sequence[float], rho: float) -> list[float]:
    """Equations (12) and (13) with beta = 1 - rho, for one number."""
    beta, mix = 1 - rho, FAM().mix
    memory = correction = 0.0
    found = []
    for x in inputs:
        memory = beta * memory + (1 - beta) * x
        correction = beta * correction + 1 - beta
        found.append((1 - mix) * memory / correction + mix * x)
    return found


# How the memory moves


def beta_picture(training: Record) -> Figure:
    """A row of colours for each matrix, with the loss above."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 5))
    losses, steps = training["loss"], training["steps"]
    above.plot(range(1, len(losses) + 1), losses, color=INK, linewidth=1.2)
    above.set_ylabel("loss")
    above.set_ylim(bottom=0)
    above.grid(color=GRID, linewidth=0.8)
    matrices = tall_enough(list(training["matrices"].values()))
    image = axes.imshow(
        [[math.log(steps_of_memory(beta)) for beta in matrix["beta"][0]] for matrix in matrices],
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=math.log(steps_of_memory(FAM().beta_min)),
        vmax=math.log(steps_of_memory(FAM().beta_max)),
        extent=(0, steps[-1], len(matrices), 0),
    )
    mark_parts(axes, [matrix["part"] for matrix in matrices])
    axes.set_xlabel("step")
    axes.spines[:].set_visible(False)
    ticks = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
    bar = figure.colorbar(image, ax=axes, pad=0.02, label="memory: β, and about how many steps")
    labels = [f"{beta:g} ({steps_of_memory(beta):.0f})" for beta in ticks]
    bar.set_ticks([math.log(steps_of_memory(beta)) for beta in ticks], labels=labels)
    bar.outline.set_visible(False)
    return figure


def tall_enough(matrices: Sequence[Record]) -> list[Record]:
    """Repeat matrices that are alone in their part, so that there is room for its name."""
    parts = [matrix["part"] for matrix in matrices]
    return [one for one in matrices for _ in range(2 if parts.count(one["part"]) == 1 else 1)]


def mark_parts(axes: Axes, parts: list[str]) -> None:
    """Name each part of the network once, with a white line between it and the next."""
    names = list(dict.fromkeys(parts))
    middles = []
    for name in names:
        first, count = parts.index(name), parts.count(name)
        middles.append(first + count / 2)
        if first:
            axes.axhline(first, color="white", linewidth=2.5)
    axes.set_yticks(middles, names)
    axes.tick_params(axis="y", length=0)


# Where the spectrum is coloured


EARLY, LATE = (21, 60), (150, 300)  # first and last step of what is averaged


def bands_picture(training: Record) -> Figure:
    """Power of each band, and coherence early and late."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = ("power, mean band = 1", "coherence, steps {} to {}", "coherence, steps {} to {}")
    views = (("power", LATE), ("rho", EARLY), ("rho", LATE))
    for axes, title, (quantity, span) in zip(panels, titles, views, strict=True):
        axes.set_title(title.format(*span))
        bands = range(1, training["bands"] + 1)
        hidden = profiles(training, HIDDEN, quantity, span)
        for values in hidden:
            axes.plot(bands, values, color=THEIRS, linewidth=0.6, alpha=0.3)
        label = f"{len(hidden)} hidden matrices, thick: their mean"
        axes.plot(bands, means(hidden), "o-", color=THEIRS, markersize=4, label=label)
        for part, colour in ((MEL, OURS), (SECOND, "#e69f00")):
            [values] = profiles(training, (part,), quantity, span)
            axes.plot(bands, values, "o-", color=colour, markersize=4, label=part)
        axes.set_xticks(bands, ["smooth", *[""] * (len(bands) - 2), "rough"])
        axes.grid(color=GRID, linewidth=0.8)
    panels[0].set_yscale("log")
    panels[0].set_yticks(ticks := [0.01, 0.1, 1, 10], [f"{tick:g}" for tick in ticks])
    panels[0].yaxis.set_minor_locator(NullLocator())
    highest = panels[1].get_ylim()[1]
    for axes in panels[1:]:
        axes.set_ylim(-0.03, highest)
        axes.axhline(0.0, color=PALE, linewidth=0.8, zorder=0)
    panels[1].set_xlabel("band of the cosine transform along a row")
    figure.legend(*panels[0].get_legend_handles_labels(), **BELOW, ncols=3)
    return figure


HIDDEN = tuple(part for part in PARTS.values() if "attention" in part or "feed" in part)


def profiles(
    training: Record, parts: Sequence[str], quantity: str, span: tuple[int, int]
) -> list[list[float]]:
    """A value for each matrix and band, the mean over some steps; powers relative to their mean."""
    first, last = span
    chosen = [at for at, step in enumerate(training["steps"]) if first <= step <= last]
    # The quick test ends before the late span begins.
    chosen = chosen or [len(training["steps"]) - 1]
    found = []
    for matrix in training["matrices"].values():
        if matrix["part"] in parts:
            values = [mean(band[at] for at in chosen) for band in matrix[quantity]]
            level = mean(values) if quantity == "power" else 1.0
            found.append([value / level for value in values])
    return found


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each column."""
    return [mean(column) for column in zip(*rows, strict=True)]


# The study


@dataclass(frozen=True)
class Look:
    """A row of the study in a picture."""

    label: str
    colour: str
    marker: str


LOOKS = {
    "quality": Look("quality (ours, orthogonal)", OURS, "o"),
    "fast": Look("fast (ours, FAM)", "#e69f00", "o"),
    "lean": Look("lean (ours, no momentum)", "#b8860b", "o"),
    "muon + adamw": Look("Muon + AdamW", "#009e73", "s"),
    "adamw, clip 1": Look("AdamW, clipping 1", THEIRS, "s"),
    "adamw": Look("AdamW", "#56b4e9", "s"),
    "adafactor (torch)": Look("Adafactor (torch)", "#cc79a7", "s"),
    "lion": Look("Lion", "#777777", "s"),
}


def rates_picture(rows: Sequence[Record]) -> Figure:
    """Word error rate, mean of a rate's seeds, against the rate as a multiple of the best one."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in sorted(rows, key=lambda row: row["wer_mean"]):
        look = LOOKS[row["name"]]
        rates = [float(rate) / row["lr"] for rate in row["tried"]]
        errors = [mean(wers) for wers in row["tried"].values()]
        label = f"{look.label}: {row['lr']:g}"
        axes.plot(rates, errors, look.marker + "-", color=look.colour, markersize=5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks := [0.125, 0.25, 0.5, 1, 2, 4], ["⅛", "¼", "½", "best", "2", "4"])
    axes.set_xlim(ticks[0] / 1.1, ticks[-1] * 1.1)
    axes.set_yticks(ticks := [0.5, 1, 2, 5, 10, 20, 50, 100], [f"{tick:g} %" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("learning rate, in multiples of the best one (in the legend)")
    axes.set_title("Word error rate on unseen sentences, mean of a rate's seeds")
    axes.grid(color=GRID, linewidth=0.8)
    figure.legend(**BELOW, ncols=2)
    return figure


MOST = 16.0  # per cent that the axis shows


def main_picture(rows: Sequence[Record]) -> Figure:
    """Word error rate with a dot for each seed, and the state that it costs."""
    rows = sorted(rows, key=lambda row: -row["wer_mean"])
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(4, 3))
    for at, row in enumerate(rows):
        colour = LOOKS[row["name"]].colour
        bar_of_errors(left, at, row, colour)
        size = row["state_bytes_per_parameter"]
        right.barh(at, size, color=colour, alpha=0.75, height=0.62)
        right.text(size + 0.15, at, f"{size:.2f}", va="center", fontsize=10)
    left.set_yticks(range(len(rows)), [LOOKS[row["name"]].label for row in rows])
    left.set_xlim(0, MOST)
    left.set_xticks(range(0, int(MOST) + 1, 5))
    right.set_xlim(0, 9.5)
    right.set_xticks(range(0, 9, 2))
    left.set_title("word error rate, %")
    right.set_title("bytes of state per parameter")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["bottom"].set_visible(False)
    return figure


def bar_of_errors(axes: Axes, at: int, row: Record, colour: str) -> None:
    """The mean as a bar, the seeds as dots; a bar that is too long is cut off with an arrow."""
    height = row["wer_mean"]
    axes.barh(at, min(height, MOST), color=colour, alpha=0.75, height=0.62)
    if height > MOST:
        label = f"{height:.0f} %  →"
        axes.text(MOST - 0.3, at, label, ha="right", va="center", color="white", fontsize=10)
        return
    seeds = len(row["wer"])
    offsets = [0.4 * (number - (seeds - 1) / 2) / max(seeds, 3) for number in range(seeds)]
    axes.plot(row["wer"], [at + y for y in offsets], "o", color=INK, markersize=3)
    axes.text(max(row["wer"]) + 0.3, at, f"{height:.2f}", va="center", fontsize=10)


if __name__ == "__main__":
    main()
