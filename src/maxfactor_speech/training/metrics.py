"""`metrics.jsonl`: how a training went, a line at a time, and the same for TensorBoard."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from maxfactor_speech.data.audio import InputError
from maxfactor_speech.data.shards import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from maxfactor_speech.training.evaluation import Evaluation
    from maxfactor_speech.training.progress import Pace

METRICS = "metrics.jsonl"


class NoMetrics:
    """Writes nothing: the first process does."""

    def pace(self, pace: Pace, memory: dict[str, list[float]]) -> None:
        """Ignore it."""

    def evaluated(self, pace: Pace, evaluation: Evaluation) -> None:
        """Ignore it."""


class Metrics(NoMetrics):
    """Writes `metrics.jsonl`, a line at a time, and for TensorBoard on request.

    Args:
        out: Folder.
        step: The step that is gone on from; lines of later ones are taken out.
        tensorboard: Whether to write for TensorBoard.
    """

    def __init__(self, out: Path, step: int, tensorboard: bool) -> None:
        self._path = out / METRICS
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        write_whole(self._path, "".join(f"{line}\n" for line in kept).encode())
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def pace(self, pace: Pace, memory: dict[str, list[float]]) -> None:
        """Note how the training goes, with the memory of FAM where there is one."""
        line: dict[str, Any] = asdict(pace)
        self._write({**line, "beta": memory} if memory else line)

    def evaluated(self, pace: Pace, evaluation: Evaluation) -> None:
        """Note error rates and examples."""
        line: dict[str, Any] = {"step": pace.step, "seconds": pace.seconds}
        line |= {"wer": evaluation.wer, "cer": evaluation.cer}
        line |= {"examples": [example._asdict() for example in evaluation.examples]}
        self._write(line)

    def close(self) -> None:
        """Finish what is still open."""
        if self._board is not None:
            self._board.close()

    def _write(self, line: dict[str, Any]) -> None:
        # JSON knows no NaN: a loss that is none becomes null.
        clean = {key: None if value != value else value for key, value in line.items()}
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written, {error.strerror}") from error
        if self._board is not None:
            for key, value in clean.items():
                if key != "step" and isinstance(value, float):
                    self._board.add_scalar(key, value, line["step"])


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62  # cut off by a crash: taken out


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a folder's `metrics.jsonl`."""
    lines = (out / METRICS).read_text().splitlines()
    return [json.loads(line) for line in lines]
