"""`metrics.jsonl`: the course of a training, one line per event; also for TensorBoard."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from maxfactor_speech.atomic import write_atomically
from maxfactor_speech.errors import InputError, failure_reason

if TYPE_CHECKING:
    from pathlib import Path

    from maxfactor_speech.training.evaluation import Evaluation
    from maxfactor_speech.training.progress import Pace

METRICS = "metrics.jsonl"


class NoMetrics:
    """Writes nothing, for all processes but the first."""

    def pace(self, pace: Pace, betas: dict[str, list[float]]) -> None:
        """Write nothing."""

    def evaluated(
        self,
        step: int,
        seconds: float,
        evaluation: Evaluation,
        best: int | None,
        telemetry: dict[str, float],
    ) -> None:
        """Write nothing."""


class Metrics(NoMetrics):
    """Writes `metrics.jsonl`, and TensorBoard logs on request.

    Args:
        out: The folder of the training.
        step: The step that the training continues from. Lines of later steps are removed; -1 for a
            new training.
        tensorboard: Whether to write TensorBoard logs.
    """

    def __init__(self, out: Path, step: int, tensorboard: bool) -> None:
        self._path = out / METRICS
        # A line that is damaged, or was cut off by a crash, is removed.
        is_there = self._path.exists()
        lines = self._path.read_text(errors="replace").splitlines() if is_there else []
        kept = [line for line in lines if _step_of(line) <= step]
        write_atomically(self._path, "".join(f"{line}\n" for line in kept).encode())
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def pace(self, pace: Pace, betas: dict[str, list[float]]) -> None:
        """Write loss, learning rates and speed, and the betas of FAM if there are any."""
        line: dict[str, Any] = asdict(pace)
        self._write({**line, "beta": betas} if betas else line)

    def evaluated(
        self,
        step: int,
        seconds: float,
        evaluation: Evaluation,
        best: int | None,
        telemetry: dict[str, float],
    ) -> None:
        """Write error rates, the step of the best checkpoint so far, examples and telemetry."""
        line: dict[str, Any] = {"step": step, "seconds": seconds, "best": best}
        line |= {"wer": evaluation.wer, "raw_wer": evaluation.raw_wer, "cer": evaluation.cer}
        line |= {"examples": [example._asdict() for example in evaluation.examples]}
        self._write({**line, "optimizer": telemetry})
        if self._board is not None:
            for key, value in telemetry.items():
                self._board.add_scalar(f"optimizer/{key}", value, step)

    def close(self) -> None:
        """Close the TensorBoard logs."""
        if self._board is not None:
            self._board.close()

    def _write(self, line: dict[str, Any]) -> None:
        # JSON has no NaN: write null instead.
        clean = {key: None if value != value else value for key, value in line.items()}
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written, {failure_reason(error)}; --resume continues the "
                "training when it can"
            ) from error
        if self._board is not None:
            for key, value in clean.items():
                if key != "step" and isinstance(value, float):
                    self._board.add_scalar(key, value, line["step"])


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return 2**62  # later than any step, so it is removed


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Return the lines of a training's `metrics.jsonl`."""
    lines = (out / METRICS).read_text().splitlines()
    return [json.loads(line) for line in lines]
