"""Coefficients of five Newton-Schulz steps, from the spectra that occur in trainings.

    python benchmarks/studies/newton_schulz_coefficients.py record --device cuda --out spectra.json
    python benchmarks/studies/newton_schulz_coefficients.py choose --out spectra.json
    python benchmarks/studies/newton_schulz_coefficients.py record --quick   # tiny, to test it

`record` trains the suite's tasks with `quality` and stores the singular values of what the
iteration gets, divided by the Frobenius norm. `choose` computes coefficients step by step: an odd
quintic that is nearest to 1 on an interval, then on the interval that this one maps it to. The
lower end of the first interval is what is chosen, by the deviation of the results' singular values
from their own RMS. It is chosen on all tasks but one and looked at on that one, in turn.

References:
    Amsel et al., "The Polar Express: Optimal Matrix Sign Methods and Their Application to the Muon
        Algorithm", 2025: minimax steps one after another are the best composition.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from maxfactor.rule import newton_schulz as iteration
from measurement import RESULTS, Record, circumstances, write_json
from studies.suite import speech_data
from studies.suite.tasks import TASKS, make_task
from studies.suite.training import Training
from studies.suite.trials import Trial
from studies.suite.variants import own_rate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Spectra = dict[str, list[NDArray[np.float64]]]

FROM_SCRATCH = ("whisper", "conformer", "wave", "llama", "bert", "phonemes")
LOOKS = (3, 10, 30, 100, 300)  # steps whose spectra are recorded
STORED = 64  # singular values of a matrix, evenly among its sorted ones
STEPS = 5
SAFETY = 1.01  # singular values may exceed their interval by rounding
LOWER_ENDS = (1e-4, 2e-4, 4e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 4e-3, 8e-3)


# --------------------------------------------------------------------------------- recording


def record(tasks: Sequence[str], cache: Path, device: torch.device, *, quick: bool) -> Record:
    """The spectra of tasks."""
    if any(TASKS[task].is_speech for task in tasks):
        speech_data.synthesise(cache, 2, quick)
    return {task: list(spectra_of(task, cache, device, quick=quick)) for task in tasks}


def spectra_of(
    task: str, cache: Path, device: torch.device, *, quick: bool
) -> Iterator[list[float]]:
    """Train, and yield the singular values of each matrix at the recorded steps."""
    # Torch operations: the kernels do not call the function that is watched.
    trial = Trial(task, "quality", own_rate("quality"), settings={"fused": False}, quick=quick)
    training = Training(trial, make_task(trial, cache, device))
    training.task.model.train()
    seen: list[Tensor] = []
    given = iteration.newton_schulz

    def watched(y: Tensor) -> Tensor:
        if training.taken + 1 in LOOKS:
            seen.extend(iteration.unit_norm(y.float()).reshape(-1, *y.shape[-2:]))
        return given(y)

    with patch.object(iteration, "newton_schulz", watched):
        for _ in range(min(LOOKS[-1], training.task.steps)):
            training.one(training.gradients)
    for matrix in seen:
        values = torch.linalg.svdvals(matrix).flip(0).cpu().double().numpy()
        places = np.linspace(0, len(values) - 1, min(STORED, len(values))).round().astype(int)
        yield [float(f"{value:.3g}") for value in values[places]]


# -------------------------------------------------------------------------------- coefficients


def minimax(low: float, high: float) -> tuple[NDArray[np.float64], float]:
    """a, b, c of the quintic ax + bx³ + cx⁵ that is nearest to 1 on an interval, and its error.

    By the exchange algorithm of Remez: the error has its largest size, with changing signs, at both
    ends and at two points between.
    """
    inner = np.array([low + (high - low) / 4, low + 3 * (high - low) / 4])
    for _ in range(200):
        points = np.array([low, *inner, high])
        powers = np.stack([points, points**3, points**5, [1.0, -1.0, 1.0, -1.0]], axis=1)
        a, b, c, error = np.linalg.solve(powers, np.ones(4))
        squares = np.sort(np.roots([5 * c, 3 * b, a]).real)
        moved = np.sqrt(np.clip(squares, low**2, high**2))
        if np.abs(moved - inner).max() < 1e-12:
            break
        inner = moved
    return np.array([a, b, c]), float(abs(error))


def chain(low: float, steps: int = STEPS) -> list[NDArray[np.float64]]:
    """Coefficients for singular values from `low` to 1, step by step."""
    found, high = [], 1.0
    for _ in range(steps):
        best, error = minimax(low, high)
        found.append(best)
        low, high = 1.0 - error, 1.0 + error
    margins = np.array([SAFETY, SAFETY**3, SAFETY**5])
    return [each / margins for each in found[:-1]] + found[-1:]


def iterated(values: NDArray[np.float64], coefficients: Sequence[Any]) -> NDArray[np.float64]:
    """What the steps make of singular values."""
    for a, b, c in coefficients:
        squares = values * values
        values = values * (a + squares * (b + squares * c))
    return values


def deviation(spectra: Sequence[NDArray[np.float64]], coefficients: Sequence[Any]) -> float:
    """How far singular values are from their RMS, which the step scales to 1."""
    results = [iterated(values, coefficients) for values in spectra]
    results = [values / np.sqrt((values**2).mean()) for values in results if values.any()]
    return float(np.sqrt(np.mean([((values - 1.0) ** 2).mean() for values in results])))


def choose(spectra: Spectra) -> Record:
    """The best lower end on all tasks, and what one gives that was chosen on the others."""
    fixed = iteration.COEFFICIENTS
    found = {low: chain(low) for low in LOWER_ENDS}
    by_task = {
        task: {low: deviation(own, each) for low, each in found.items()}
        for task, own in spectra.items()
    }

    def best(tasks: Sequence[str]) -> float:
        return min(found, key=lambda low: sum(by_task[task][low] for task in tasks))

    left_out = {}
    for task in spectra:
        low = best([other for other in spectra if other != task] or [task])
        left_out[task] = {"low": low, "deviation": round(by_task[task][low], 4)}
    low = best(list(spectra))
    return {
        "low": low,
        "coefficients": [[round(float(value), 4) for value in each] for each in found[low]],
        "fixed": {task: round(deviation(own, fixed), 4) for task, own in spectra.items()},
        "chosen": {task: round(by_task[task][low], 4) for task in spectra},
        "left_out": left_out,
    }


# -------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> None:
    """Record spectra, or choose coefficients by them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "choose"))
    parser.add_argument("--tasks", default=",".join(FROM_SCRATCH), help="separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"))
    parser.add_argument("--out", type=Path, default=RESULTS / "newton_schulz_spectra.json")
    parser.add_argument("--quick", action="store_true", help="tiny, to test the program")
    options = parser.parse_args(arguments)
    if options.what == "record":
        torch.set_num_threads(1)
        tasks, device = options.tasks.split(","), torch.device(options.device)
        spectra = record(tasks, options.cache, device, quick=options.quick)
        write_json(options.out, {**circumstances(options.device), "spectra": spectra})
        return
    stored = json.loads(options.out.read_text())
    spectra = {task: [np.array(own) for own in each] for task, each in stored["spectra"].items()}
    stored["choice"] = choose(spectra)
    write_json(options.out, stored)
    print(json.dumps(stored["choice"], indent=1))


if __name__ == "__main__":
    main()
