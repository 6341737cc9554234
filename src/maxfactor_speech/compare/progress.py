"""The progress of a comparison: a bar for each training on a terminal, lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from maxfactor_speech.processes import tell_parent
from maxfactor_speech.training.progress import Lines, Pace, Reporter, clock, make_bars

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType
    from rich.progress import TaskID

    from maxfactor_speech.compare.runs import Run
    from maxfactor_speech.training.evaluation import Evaluation


@dataclass(frozen=True)
class RunProgress:
    """How far a training is."""

    step: int
    pace: Pace | None = None  # None before the first steps
    wer: float | None = None  # of the last evaluation

    @property
    def status(self) -> str:
        """Loss, word error rate and learning rate, as far as they are known."""
        parts = [] if self.pace is None else [f"loss {self.pace.loss:.3f}"]
        parts += [] if self.wer is None else [f"WER {self.wer:.1%}"]
        parts += [] if self.pace is None else [f"lr {self.pace.lr:.3g}"]
        return "  ".join(parts)


class ToParent(Reporter):
    """Tells the process that shows the progress of all trainings about one of them."""

    def __init__(self) -> None:
        self._now = RunProgress(0)

    def begin(self, what: str, total: int, done: int = 0) -> None:  # noqa: ARG002
        """Tell the step at which the training begins."""
        self._tell(RunProgress(done))

    def pace(self, pace: Pace) -> None:
        """Tell about training steps."""
        self._tell(replace(self._now, step=pace.step, pace=pace))

    def evaluated(
        self,
        step: int,  # noqa: ARG002
        evaluation: Evaluation,
        is_best: bool = False,  # noqa: ARG002
    ) -> None:
        """Tell the word error rate."""
        self._tell(replace(self._now, wer=evaluation.wer))

    def _tell(self, now: RunProgress) -> None:
        self._now = now
        tell_parent(now)


class RunLines(Lines):
    """Reports a comparison in lines: its synthesis, and each tenth of each training.

    Args:
        say: Called with each line.
    """

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._steps: dict[str, int] = {}  # the step of each training that runs

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Report the beginning of the synthesis."""
        super().begin(what, total, done)
        self.say(f"{what}: {total} utterances, cached ones are reused …")

    def say(self, line: str) -> None:
        """Pass the line on."""
        self._say(line)

    def started(self, run: Run, number: int, count: int) -> None:
        """Report that the training with this number begins."""
        self.say(f"training {number} of {count}: {run}, {run.settings.steps} steps …")

    def progressed(self, run: Run, now: RunProgress) -> None:
        """Report each tenth of a training."""
        total, before = run.settings.steps, self._steps.get(run.folder)
        self._steps[run.folder] = now.step
        is_due = before is not None and 10 * now.step // total > 10 * before // total
        if now.pace is not None and is_due and now.step < total:  # its end has a line of its own
            left = clock((total - now.step) / max(now.pace.steps_per_second, 1e-9))
            self.say(f"  {run}: step {now.step} of {total}  {now.status}  {left} left")

    def ended(self, run: Run, outcome: str) -> None:
        """Report the result of a training."""
        self.say(f"{run}: {outcome}")


class RunBars(RunLines):
    """Shows a bar for each training that runs, and prints results above the bars.

    Args:
        console: A terminal.
        get_time: The clock that the remaining time is estimated by; None is that of the system.
    """

    def __init__(self, console: Console, get_time: Callable[[], float] | None = None) -> None:
        super().__init__(lambda line: console.print(line, markup=False, highlight=False))
        self._progress = make_bars(console, get_time)
        self._progress.start()
        self._tasks: dict[str, TaskID] = {}

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Show a bar for the synthesis."""
        self._tasks[""] = self._progress.add_task(what, total=total, completed=done, status="")

    def advance(self, count: int) -> None:
        """Advance the bar of the synthesis; it disappears at the end."""
        self._progress.advance(self._tasks[""], count)
        if self._progress.tasks[-1].finished:
            self._progress.remove_task(self._tasks.pop(""))

    def started(self, run: Run, number: int, count: int) -> None:
        """Add a bar."""
        super().started(run, number, count)
        name = f"{number}: {run.label}" if count > 1 else run.label
        steps = run.settings.steps
        self._tasks[run.folder] = self._progress.add_task(name, total=steps, status="starting")

    def progressed(self, run: Run, now: RunProgress) -> None:
        """Update a bar."""
        task = self._tasks[run.folder]
        if now.pace is None and now.wer is None:  # a resumed training begins at a later step
            self._progress.reset(task, completed=now.step, status="starting")
        else:
            self._progress.update(task, completed=now.step, status=now.status)

    def ended(self, run: Run, outcome: str) -> None:
        """Replace a bar by the result."""
        self._progress.remove_task(self._tasks.pop(run.folder))
        super().ended(run, outcome)

    def picture(self) -> RenderableType:
        """Return the bars as they are now."""
        return self._progress.get_renderable()

    def close(self) -> None:
        """Remove all bars."""
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()
        self._progress.stop()


def make_display(console: Console, say: Callable[[str], None]) -> RunLines:
    """Return bars for a terminal, lines for anything else."""
    return RunBars(console) if console.is_terminal else RunLines(say)
