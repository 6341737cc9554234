"""The pictures of `maxfactor compare`: its report, and its bars in a terminal.

    python benchmarks/figures/report_picture.py
    python benchmarks/figures/report_picture.py --runs FOLDER    # reuses finished trainings

Trains `quality`, `fast` and `adamw` on connected digits, 400 steps each, which takes about four
minutes on two CPU cores, and draws into docs/pictures:

    report.png      the upper part of the report, as Chromium shows it
    terminal.svg    the bars after 35 s of training, drawn again from the stored metrics
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from speech_application import (
    RUNS,
    Comparison,
    Pace,
    Run,
    RunBars,
    RunProgress,
    Settings,
    read_metrics,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SETTINGS = Settings(steps=400, evaluate_every=50, validation_utterances=128, device="cpu")
OPTIMIZERS = ("quality", "fast", "adamw")
JOBS = 2
SECONDS = 35.0  # of training, at which the bars are shown
WIDTH, HEIGHT = 1200, 1252  # of the report, in pixels: as far as its table
COLORS = 64  # of the picture, which has few


def options() -> list[str]:
    """Return the command whose report is shown."""
    return [
        "compare", "--optimizers", ",".join(OPTIMIZERS), "--steps", str(SETTINGS.steps),
        "--evaluate-every", str(SETTINGS.evaluate_every),
        "--validation-utterances", str(SETTINGS.validation_utterances), "--jobs", str(JOBS),
    ]  # fmt: skip


def train(runs: Path) -> None:
    """Run the command; finished trainings in the folder are reused."""
    command = [sys.executable, "-m", "maxfactor_speech", *options()]
    subprocess.run([*command, "--device", "cpu", "--out", str(runs)], check=True)


def draw_report(page: Path, out: Path) -> None:
    """Draw the upper part of a report."""
    browser = shutil.which("chromium") or shutil.which("chromium-headless-shell")
    if browser is None:
        raise SystemExit("needs Chromium on PATH to draw the report")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--hide-scrollbars", "--virtual-time-budget=10000", f"--window-size={WIDTH},{HEIGHT}",
        f"--screenshot={out}", page.resolve().as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(out) as image:
        few = image.convert("RGB").quantize(COLORS)
    few.save(out, optimize=True)


def progress_at(metrics: Sequence[dict[str, float]], seconds: float) -> RunProgress:
    """Return how far a training was after so many seconds."""
    now = RunProgress(0)
    names = Pace.__dataclass_fields__
    for line in metrics:
        if line["seconds"] > seconds:
            break
        if "loss" in line:
            pace = Pace(**{name: line[name] for name in names})  # type: ignore[arg-type]
            now = RunProgress(pace.step, pace, now.wer)
        else:
            now = RunProgress(now.step, now.pace, line["wer"])
    return now


def draw_terminal(runs: Path, out: Path) -> None:
    """Draw the bars of the trainings that run first."""
    comparison = Comparison(SETTINGS, OPTIMIZERS)
    first = [comparison.run(name, None, 0) for name in OPTIMIZERS[:JOBS]]
    picture = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    picture.print("$ maxfactor " + " ".join(options()[:3]) + f" --jobs {JOBS} …", highlight=False)
    now = 0.0
    bars = RunBars(Console(file=io.StringIO(), force_terminal=True, width=100), lambda: now)
    bars.say = lambda line: picture.print(line, highlight=False)  # type: ignore[method-assign]
    for number, run in enumerate(first, 1):
        bars.started(run, number, len(OPTIMIZERS))
        bars.progressed(run, RunProgress(0))
    for now in (0.5 * SECONDS, SECONDS):
        for run in first:
            bars.progressed(run, progress_at(_metrics(run, runs), now))
    picture.print(bars.picture())
    bars.close()
    svg = picture.export_svg(title="maxfactor compare", unique_id="terminal")
    out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # needs no network


def _metrics(run: Run, runs: Path) -> list[dict[str, float]]:
    return read_metrics(runs / RUNS / run.folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and draw both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/picture"))
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args.runs)
    draw_report(args.runs / "report.html", args.out / "report.png")
    draw_terminal(args.runs, args.out / "terminal.svg")


if __name__ == "__main__":
    main()
