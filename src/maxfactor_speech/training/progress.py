"""How a training tells people how it goes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from maxfactor_speech.training.evaluation import Evaluation


@dataclass(frozen=True)
class Pace:
    """How a training stands after some steps."""

    step: int
    loss: float
    lr: float  # what the schedule gives
    effective_lr: float  # what the optimizer made of it
    steps_per_second: float
    seconds: float  # of training so far, evaluations left out


class Reporter(Protocol):
    """Is told how a training goes."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Something that has so many parts begins."""
        ...

    def advance(self, count: int) -> None:
        """So many more parts are done."""
        ...

    def pace(self, pace: Pace) -> None:
        """Some steps were taken."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """The error rate was measured."""
        ...

    def say(self, line: str) -> None:
        """There is something to be read."""
        ...

    def close(self) -> None:
        """There will be no more."""
        ...


class Silent:
    """Tells nobody."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Ignore it."""

    def advance(self, count: int) -> None:
        """Ignore it."""

    def pace(self, pace: Pace) -> None:
        """Ignore it."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Ignore it."""

    def say(self, line: str) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Ignore it."""


class Lines:
    """One line for each thing that happens, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what, self._total, self._done = "", 0, 0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Say what begins."""
        self._what, self._total, self._done = what, total, done

    def advance(self, count: int) -> None:
        """Say every tenth of the whole."""
        tenths = 10 * self._done // self._total
        self._done += count
        if 10 * self._done // self._total > tenths:
            self.say(f"{self._what}: {self._done} of {self._total}")

    def pace(self, pace: Pace) -> None:
        """Say how it goes."""
        left = (self._total - pace.step) / max(pace.steps_per_second, 1e-9)
        self.say(
            f"step {pace.step} of {self._total}  loss {pace.loss:.4f}  "
            f"lr {pace.effective_lr:.2e}  {pace.steps_per_second:.2f} steps/s  "
            f"{_clock(left)} left"
        )

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Say the error rates."""
        self.say(_errors(step, evaluation))
        for example in evaluation.examples[:2]:
            self.say(f"  said:  {example.reference}")
            self.say(f"  heard: {example.hypothesis}")

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left open."""


class Bar(Lines):
    """A bar at the bottom of a terminal, and the error rates above it."""

    def __init__(self, console: Console) -> None:
        from rich import progress  # a training that nobody looks at needs it not
        from rich.table import Column

        super().__init__(console)
        # Where there is little room the bar gives way, and then the status takes more lines.
        whole, rest = Column(no_wrap=True), Column(ratio=1)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None, table_column=rest),
            progress.MofNCompleteColumn(table_column=whole),
            progress.TextColumn("{task.fields[status]}", table_column=Column()),
            progress.TimeRemainingColumn(compact=True, table_column=whole),
            console=console,
            expand=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("", status="", visible=False)
        self._wer = ""
        self._last: Pace | None = None

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Start the bar anew."""
        super().begin(what, total, done)
        self._progress.reset(
            self._task, description=what, total=total, completed=done, status="", visible=True
        )

    def advance(self, count: int) -> None:
        """Move the bar on."""
        self._progress.advance(self._task, count)

    def pace(self, pace: Pace) -> None:
        """Show how it goes beside the bar."""
        self._last = pace
        status = (
            f"loss {pace.loss:.3f}  {self._wer}lr {pace.effective_lr:.1e}  "
            f"{pace.steps_per_second:.1f} steps/s"
        )
        self._progress.update(self._task, completed=pace.step, status=status)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Keep the error rate beside the bar."""
        super().evaluated(step, evaluation)
        self._wer = f"WER {evaluation.wer:.1%}  "
        if self._last is not None:
            self.pace(self._last)

    def close(self) -> None:
        """Take the bar down."""
        self._progress.stop()


def reporter(console: Console) -> Reporter:
    """A bar on a terminal, lines elsewhere."""
    return Bar(console) if console.is_terminal else Lines(console)


def _errors(step: int, evaluation: Evaluation) -> str:
    return f"step {step}: WER {evaluation.wer:.1%}, CER {evaluation.cer:.1%}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
