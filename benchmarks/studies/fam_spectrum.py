"""What FAM sees while a small Whisper learns digits, for the pictures of docs/fam.md.

    python benchmarks/studies/fam_spectrum.py            # two trainings on the CPU, a few minutes
    python benchmarks/studies/fam_spectrum.py --quick --out FILE.json

Trains with the recipe `fast` twice, with one band and with eight, and reads `optimizer.spectrum()`
every few steps. Here FAM's memory may reach its own default of 0.98, every layer has the full
learning rate, and the update is clipped at 1. benchmarks/figures/fam_pictures.py draws the result.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import RESULTS, Record, circumstances, write_json
from speech_application import Script
from studies.digits_table import DIGITS
from studies.entries import fam, first_fast
from studies.runs import Run, quick
from studies.speech_task import FeatureSets
from studies.training import Training, prepare_speech, task_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SENTENCES = 1000  # of the study's validation
STEPS, RATE = 500, 0.04
QUICK_STEPS = 24  # FAM takes over at step 21
READ_EVERY = {1: 3, 8: 6}  # bands, and the steps between two readings
MEL, SECOND, TOKENS = "mel convolution", "second convolution", "token embedding"
PARTS = {  # in the order in which speech passes through them
    "encoder.conv1": MEL,
    "encoder.conv2": SECOND,
    "encoder self_attn": "encoder attention",
    "encoder fc": "encoder feed-forward",
    "decoder.embed_tokens": TOKENS,
    "decoder.embed_positions": "decoder positions",
    "decoder self_attn": "decoder attention",
    "decoder encoder_attn": "cross-attention",
    "decoder fc": "decoder feed-forward",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train twice and write what FAM saw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test of a few seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "fam_spectrum.json")
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="folder for speech")
    options = parser.parse_args(arguments)
    plans = [Plan(run_of(bands, options.quick), every) for bands, every in READ_EVERY.items()]
    prepare_speech([plan.run for plan in plans], options.cache, workers=1)
    write_json(
        options.out,
        {
            "command": "python benchmarks/studies/fam_spectrum.py" + " --quick" * options.quick,
            **circumstances("cpu"),
            "study_validation": {"sentences": SENTENCES, "words": study_words()},
            "trainings": [trained(plan, options.cache) for plan in plans],
        },
    )


@dataclass(frozen=True)
class Plan:
    """A training, and the steps between two readings of the spectrum."""

    run: Run
    every: int

    @property
    def bands(self) -> int:
        """FAM's bands."""
        bands: int = self.run.settings["momentum"]["bands"]
        return bands


def run_of(bands: int, is_quick: bool) -> Run:
    """The run of one training."""
    task: dict[str, Any] = {**DIGITS, "steps": STEPS, "train": 16 * STEPS}
    run = first_fast("spectrum", (RATE,), momentum=fam(bands=bands), d=1.0, **task).at(RATE)
    return Run(**{**quick(run).described, "steps": QUICK_STEPS}) if is_quick else run


def study_words() -> int:
    """How many words the study's error rates are shares of."""
    script = Script("sentences", "en", "validation", seed=0)
    return sum(len(script.request(i).text.split()) for i in range(SENTENCES))


def trained(plan: Plan, cache: Path) -> Record:
    """Train, and return what FAM saw on the way."""
    device = torch.device("cpu")
    training = Training(
        plan.run, task_of(plan.run, cache, device, FeatureSets(cache, device)), device
    )
    [optimizer] = training.optimizers
    steps: list[int] = []
    readings: list[dict[str, Any]] = []

    def look(step: int) -> None:
        if step % plan.every == 0:
            steps.append(step)
            readings.append(optimizer.spectrum())  # type: ignore[attr-defined]

    training.run("eager", look)
    wer = training.task.measured()["wer"] / 100.0
    print(f"{plan.bands} bands: loss {float(training.losses[-1]):.3f}, WER {wer:.2%}", flush=True)
    shapes = {name: list(param.shape) for name, param in training.task.model.named_parameters()}
    return {
        "bands": plan.bands,
        "run": plan.run.described,
        "wer": round(wer, 5),
        "steps": steps,
        "loss": [round(loss, 4) for loss in training.losses.tolist()],
        "matrices": {name: history(name, shapes[name], readings) for name in ordered(readings[-1])},
    }


def history(name: str, shape: list[int], readings: Sequence[dict[str, Any]]) -> Record:
    """What was seen of a matrix: for each quantity and band a list over the steps."""
    found: Record = {"part": part_of(name), "shape": shape}
    for quantity in ("rho", "beta", "power"):
        values = torch.stack([getattr(reading[name], quantity) for reading in readings], dim=1)
        found[quantity] = [[float(f"{x:.3g}") for x in band] for band in values.tolist()]
    return found


def part_of(name: str) -> str:
    """The part of a Whisper that a parameter belongs to."""
    [part] = [part for key, part in PARTS.items() if all(word in name for word in key.split())]
    return part


def ordered(names: Iterable[str]) -> list[str]:
    """Names of matrices by part, in a part as they come."""
    order = list(PARTS.values())
    return sorted(names, key=lambda name: order.index(part_of(name)))


if __name__ == "__main__":
    main()
