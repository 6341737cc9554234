"""Progress reports: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType
    from rich.progress import Progress

    from maxfactor_speech.training.evaluation import Evaluation


@dataclass(frozen=True)
class Pace:
    """The state of a training after some steps."""

    step: int
    loss: float
    lr: float  # of the settings, by the schedule
    effective_lr: float  # the mean step size that the optimizer used
    steps_per_second: float
    seconds: float  # of training so far, without evaluations


class Reporter:
    """Is told about the progress of a training; this base class reports nothing."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Begin a task of `total` parts, of which `done` are done."""

    def advance(self, count: int) -> None:
        """Report `count` more parts of the task as done."""

    def pace(self, pace: Pace) -> None:
        """Report training steps."""

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool = False) -> None:
        """Report error rates."""

    def say(self, line: str) -> None:
        """Report a line of text."""

    def close(self) -> None:
        """End all reports."""


class Lines(Reporter):
    """Prints a line for each event, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what, self._total, self._done = "", 0, 0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Remember the task."""
        self._what, self._total, self._done = what, total, done

    def advance(self, count: int) -> None:
        """Print a line for each tenth of the task."""
        tenths = 10 * self._done // self._total
        self._done += count
        if 10 * self._done // self._total > tenths:
            self.say(f"{self._what}: {self._done} of {self._total}")

    def pace(self, pace: Pace) -> None:
        """Print loss, learning rate, speed and the time left."""
        left = (self._total - pace.step) / max(pace.steps_per_second, 1e-9)
        self.say(
            f"step {pace.step} of {self._total}  loss {pace.loss:.4f}  "
            f"lr {pace.lr:.3g}  {pace.steps_per_second:.2f} steps/s  "
            f"{clock(left)} left"
        )

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool = False) -> None:
        """Print error rates and two examples."""
        when = "before the first step" if step == 0 else f"step {step}"
        remark = ", the best so far" if is_best and step else ""
        self.say(f"{when}: {rates(evaluation)}{remark}")
        for example in evaluation.examples[:2]:
            self.say(f"  said:  {example.reference}")
            self.say(f"  heard: {example.hypothesis}")

    def say(self, line: str) -> None:
        """Print a line without markup."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Bar(Lines):
    """Shows a bar at the bottom of a terminal, and prints error rates above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = make_bars(console)
        self._progress.start()
        self._task = self._progress.add_task("", status="", visible=False)
        self._wer = ""
        self._last: Pace | None = None

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Restart the bar for another task."""
        super().begin(what, total, done)
        self._progress.reset(
            self._task, description=what, total=total, completed=done, status="", visible=True
        )

    def advance(self, count: int) -> None:
        """Advance the bar."""
        self._progress.advance(self._task, count)

    def pace(self, pace: Pace) -> None:
        """Show loss, error rate, learning rate and speed beside the bar."""
        self._last = pace
        status = (
            f"loss {pace.loss:.3f}  {self._wer}lr {pace.lr:.3g}  "
            f"{pace.steps_per_second:.1f} steps/s"
        )
        self._progress.update(self._task, completed=pace.step, status=status)

    def evaluated(self, step: int, evaluation: Evaluation, is_best: bool = False) -> None:
        """Print the error rates, and show the word error rate beside the bar."""
        super().evaluated(step, evaluation, is_best)
        self._wer = f"WER {evaluation.wer:.1%}  "
        if self._last is not None:
            self.pace(self._last)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


def make_bars(console: Console, get_time: Callable[[], float] | None = None) -> Progress:
    """Return bars with description, step, the field `status` and the remaining time."""
    from rich import progress  # not needed without a terminal
    from rich.constrain import Constrain
    from rich.table import Column

    class Bars(progress.Progress):
        def get_renderable(self) -> RenderableType:
            # Room for the ^C that a terminal shows. It would begin another line, which is not
            # removed with the bars.
            return Constrain(super().get_renderable(), console.width - 2)

    # In a narrow terminal the bar shrinks first, then the status wraps.
    whole, rest = Column(no_wrap=True), Column(ratio=1)
    return Bars(
        progress.TextColumn("{task.description}", markup=False, table_column=whole),
        progress.BarColumn(bar_width=None, table_column=rest),
        progress.MofNCompleteColumn(table_column=whole),
        progress.TextColumn("{task.fields[status]}", table_column=Column()),
        progress.TimeRemainingColumn(compact=True, table_column=whole),
        console=console,
        expand=True,
        get_time=get_time,
    )


def rates(evaluation: Evaluation) -> str:
    """Return the error rates as text; the raw one only where normalising makes a difference."""
    raw = f" (raw {evaluation.raw_wer:.1%})" if evaluation.raw_wer != evaluation.wer else ""
    return f"WER {evaluation.wer:.1%}{raw}, CER {evaluation.cer:.1%}"


def make_reporter(console: Console) -> Reporter:
    """Return a bar for a terminal, lines for anything else."""
    return Bar(console) if console.is_terminal else Lines(console)


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
