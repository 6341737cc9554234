"""Comparisons: the same data for all, finished trainings are reused, and the report."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from forked import Command
from maxfactor_speech.cli import app
from maxfactor_speech.compare import comparison as comparing
from maxfactor_speech.compare.comparison import compare
from maxfactor_speech.compare.progress import RunBars, RunLines, RunProgress, make_display
from maxfactor_speech.compare.report import report
from maxfactor_speech.compare.runs import (
    Comparison,
    Run,
    RunResult,
    best_label,
    best_lr,
    read_result,
)
from maxfactor_speech.errors import DivergedError, InputError
from maxfactor_speech.processes import in_processes, tell_parent
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training import settings as settings_module
from maxfactor_speech.training.folder_lock import folder_lock
from maxfactor_speech.training.loop import train
from maxfactor_speech.training.metrics import read_metrics
from maxfactor_speech.training.optimizers import default_lr, names
from maxfactor_speech.training.progress import Pace
from maxfactor_speech.training.settings import Settings, read_settings
from maxfactor_speech.training.trainer import Trainer

BASE = Settings(
    steps=2, batch_size=2, utterances=8, validation_utterances=2, evaluate_every=1, device="cpu"
)
SILENT = RunLines(lambda _: None)
FORKING = Path(__file__).with_name("forking_application.py")
BROWSER = shutil.which("chromium") or shutil.which("chromium-headless-shell")


def result_of(label: str = "adamw", **changes: Any) -> RunResult:
    """A result as good as a real one; two evaluations, of which the last is `wer`."""
    wer = changes.get("wer", 0.2) or 0.0
    examples = [{"reference": "one <two>", "hypothesis": "one too"}]
    last = {"wer": wer, "raw_wer": 1.5 * wer, "cer": 0.1, "examples": examples}
    first = {**last, "wer": 2 * wer, "cer": 0.2}
    lines = [
        {"step": 10, "loss": 2.0, "seconds": 1.0},
        {"step": 10, "seconds": 1.0, "best": 10, **first},
        {"step": 20, "loss": None, "seconds": 2.0},
        {"step": 20, "seconds": 2.0, "best": 20, **last},
    ]
    base: dict[str, Any] = {
        "label": label, "optimizer": label.split(",")[0], "lr": 0.001, "seed": 0, "steps": 20,
        "wer": wer, "raw_wer": 1.5 * wer, "cer": 0.1, "seconds": 2.0, "parameters": 1000,
        "state_bytes": 8000, "metrics": lines, "examples": examples,
    }  # fmt: skip
    return RunResult(**{**base, **changes})


def faked(monkeypatch: pytest.MonkeyPatch, wers: dict[tuple[str, float], float]) -> list[Run]:
    """Replace the trainings by numbers, and note what is trained."""
    seen: list[Run] = []
    speed = {"quality": 4.0, "adamw": 1.0, "muon": 5.0}

    def run_all(runs: list[Run], *_: Any) -> list[RunResult]:
        seen.extend(runs)
        return [
            result_of(
                run.label,
                lr=run.settings.lr or 0.0,
                optimizer=run.settings.optimizer,
                wer=wers.get((run.settings.optimizer, run.settings.lr or 0.0), 0.5),
                seconds=speed[run.settings.optimizer] * run.settings.steps,
            )
            for run in runs
        ]

    monkeypatch.setattr(comparing, "_run_all", run_all)
    monkeypatch.setattr(comparing, "prepare", lambda *_: None)
    return seen


def test_all_optimizers_get_the_same_data_seeds_and_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = faked(monkeypatch, {})
    base = replace(BASE, steps=100, utterances=None, seed=5)
    compare(Comparison(base, ["quality", "adamw"], seeds=2), tmp_path, display=SILENT)
    assert [(run.settings.optimizer, run.settings.seed) for run in seen] == [
        ("quality", 5), ("quality", 6), ("adamw", 5), ("adamw", 6),
    ]  # fmt: skip
    same = {replace(run.settings, optimizer="adamw", lr=None, seed=0) for run in seen}
    assert len(same) == 1
    assert len({run.folder for run in seen}) == 4


def test_tuning_takes_the_best_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = faked(monkeypatch, {("adamw", 0.002): 0.1, ("quality", 0.01): 0.05})
    comparison = Comparison(BASE, ["quality", "adamw"], seeds=2, tune=True)
    results = compare(comparison, tmp_path, display=SILENT)
    assert len(seen) == 2 * 5 + 2 * 2
    assert {run.settings.seed for run in seen[:10]} == {0}
    assert {(one.optimizer, one.lr) for one in results} == {("quality", 0.01), ("adamw", 0.002)}


def test_faster_optimizers_get_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = faked(monkeypatch, {})
    base = replace(BASE, steps=100, utterances=None)
    comparison = Comparison(base, ["quality", "adamw", "muon"], same_time=True)
    results = compare(comparison, tmp_path, display=SILENT)
    assert [one.label for one in results][3:] == ["adamw, same time"]  # muon is no faster
    longer = seen[-1].settings
    assert longer.steps == 400
    # Without a time to compare there is nothing to train.
    for missing in ("quality", "adamw"):
        left = [one for one in results[:3] if one.optimizer != missing]
        assert comparing._same_time_runs(comparison, left, {}) == []
    assert longer.utterance_count == base.utterance_count  # of the same data


@pytest.mark.parametrize(
    ("names", "seeds", "message"),
    [
        ([], 1, "at least one"),
        (["adamw", "adamw"], 1, "must differ"),
        (["adamw"], 0, "seeds must be at least 1"),
        (["sgd"], 1, "got 'sgd'"),
    ],
)
def test_wrong_comparisons_are_refused(names: list[str], seeds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Comparison(BASE, names, seeds)


@pytest.mark.usefixtures("forked_workers")
def test_finished_trainings_are_reused(tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    said: list[str] = []
    comparison = Comparison(BASE, ["quality", "adamw"])
    first = compare(comparison, out, 2, cache, RunLines(said.append))
    again = compare(comparison, out, 2, cache, RunLines(said.append))
    assert first == again
    assert len([line for line in said if line.startswith("training ")]) == 2
    assert len([line for line in said if re.search(r"seed 0: WER .* in \d+ s$", line)]) == 2
    halves = r"step 1 of 2  loss .*  WER .*  lr .* left$"
    assert len([line for line in said if re.search(halves, line)]) == 2
    quality, adamw = first
    assert quality.label == "quality"
    assert adamw.state_bytes / adamw.parameters == pytest.approx(8.0, abs=0.1)
    assert quality.state_bytes < adamw.state_bytes / 4
    assert adamw.gpu_bytes is None  # a CPU
    assert [line["step"] for line in quality.metrics] == [0, 1, 1, 2, 2]
    told = [line["beta"] for line in quality.metrics if "beta" in line]
    assert told[-1]["model.decoder.embed_tokens.weight"] == [pytest.approx(0.9)]
    page = report(first, "Speech")
    assert "<h3>quality</h3>" in page  # the heat map of its betas
    assert "GPU<br>peak" not in page
    ratios = page.split("<h2>Change of the weights per step")[1]
    assert "<h3>quality</h3>" in ratios
    assert "<h3>adamw</h3>" not in ratios
    other = replace(comparison, base=replace(BASE, task="sentences"))
    with pytest.raises(InputError, match="was started with task='digits'"):
        compare(other, out, 1, cache, RunLines(said.append))
    options = "--steps=2 --batch-size=2 --utterances=8 --validation-utterances=2 --device=cpu"
    result = CliRunner().invoke(
        app,
        ["compare", *options.split(), "--evaluate-every=1", f"--out={out}", f"--cache={cache}"],
    )
    assert result.exit_code == 0, result.output
    page, best, _, hint = result.output.splitlines()[-4:]
    assert page == f"report:  {out / 'report.html'}"
    assert best.startswith("best:    ")
    model, example = map(Path, hint.split()[-2:])
    assert (model / "checkpoints").is_dir()
    assert example.stat().st_size > 1000
    shown = (out / "report.html").read_text()
    assert "batches of 2, 8 training and 2 validation utterances" in shown
    assert "fp32, cpu." in shown
    assert "Up to 2 trainings ran at the same time" in shown


def test_tuning_reuses_the_training_with_the_default_rate() -> None:
    plain, tuning = Comparison(BASE, ["quality"]), Comparison(BASE, ["quality"], tune=True)
    tried = tuning.run("quality", default_lr("quality"), 0)
    assert plain.run("quality", None, 0) == tried


def test_equal_word_errors_are_ranked_by_characters_then_loss() -> None:
    def tried(lr: float, cer: float | None, loss: float) -> RunResult:
        wer = None if cer is None else 1.0
        lines = [{"step": 1, "seconds": 1.0, "loss": loss}]
        return result_of(lr=lr, wer=wer, cer=cer, metrics=lines)

    runs = [tried(0.1, 0.9, 1.0), tried(0.2, 0.8, 2.0), tried(0.3, 0.8, 1.5), tried(0.4, None, 0.1)]
    assert best_lr(runs, "adamw") == 0.3
    assert best_lr([tried(0.8, None, 1.0), tried(0.4, None, 1.0)], "adamw") == 0.4


def spoilt(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """Have the weights of an optimizer's trainings turn to NaN, in this process."""
    step = Trainer.train_step

    def train_step(trainer: Trainer, batches: Any) -> Any:
        loss = step(trainer, batches)
        if trainer.settings.optimizer == optimizer:
            next(trainer.model.parameters()).data.fill_(float("nan"))
        return loss

    monkeypatch.setattr(Trainer, "train_step", train_step)
    here = lambda work, runs, *_: (work(run) for run in runs)  # noqa: E731
    monkeypatch.setattr(comparing, "in_processes", here)


@pytest.mark.parametrize("optimizer", ["adamw", "quality"])
def test_a_nan_loss_ends_a_training_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: str
) -> None:
    spoilt(monkeypatch, optimizer)
    settings = replace(BASE, optimizer=optimizer, lr=0.25)
    with pytest.raises(DivergedError, match=r"the loss is nan at step 2; lower --lr.* 0\.25"):
        train(settings, tmp_path / "out", cache=tmp_path / "cache")


def test_too_many_skipped_steps_end_a_training_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(_: Trainer) -> None:
        raise FloatingPointError("20 steps in a row were skipped")

    monkeypatch.setattr(Trainer, "check_skipped", check)
    with pytest.raises(InputError, match="step 1: 20 steps in a row were skipped"):
        train(BASE, tmp_path / "out", cache=tmp_path / "cache")


def test_a_single_nan_loss_does_not_end_a_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = Trainer.train_step

    def train_step(trainer: Trainer, batches: Any) -> Any:
        loss = step(trainer, batches)
        return loss if trainer.step > 1 else loss * float("nan")

    monkeypatch.setattr(Trainer, "train_step", train_step)
    settings = replace(BASE, evaluate_every=2)
    assert train(settings, tmp_path / "out", cache=tmp_path / "cache").evaluation is not None


def test_a_diverged_training_is_reported_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spoilt(monkeypatch, "quality")
    said: list[str] = []
    comparison = Comparison(BASE, ["quality", "adamw"], same_time=True)
    first = compare(comparison, tmp_path / "out", 1, tmp_path / "cache", RunLines(said.append))
    assert [one.wer is None for one in first] == [True, False]
    assert any("quality" in line and "diverged" in line for line in said)
    monkeypatch.setattr(comparing, "train", None)  # nothing is done again
    assert (
        compare(comparison, tmp_path / "out", 1, tmp_path / "cache", RunLines(said.append)) == first
    )
    cells = rows(report(first, "Speech"))
    assert cells["quality"][2] == "diverged"
    assert cells["adamw"][2].endswith("%")


def test_a_report_of_diverged_trainings() -> None:
    lost = [result_of("fast", wer=None, cer=None, metrics=[], examples=[], seed=n) for n in (0, 1)]
    page = report(lost, "Speech")
    assert rows(page)["fast"][2] == "diverged"
    assert 'class="best"' not in page
    some = [*lost[:1], result_of("fast", wer=0.01, seed=1), result_of("adamw", wer=0.5)]
    cells = rows(report(some, "Speech"))
    assert cells["fast"][2] == "1.0%, 1 of 2 diverged"
    assert best_label(some) == "adamw"


def test_the_best_optimizer_has_the_best_mean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lucky = [result_of("fast", wer=0.01), result_of("fast", wer=0.9, seed=1)]
    steady = [result_of("adamw", wer=0.2), result_of("adamw", wer=0.1, seed=1)]
    monkeypatch.setattr(comparing, "compare", lambda *_: [*lucky, *steady])
    options = "--seeds=2 --steps=2 --batch-size=2 --utterances=8 --validation-utterances=2"
    where = [f"--out={tmp_path / 'out'}", f"--cache={tmp_path / 'cache'}"]
    result = CliRunner().invoke(app, ["compare", *options.split(), "--device=cpu", *where])
    assert result.exit_code == 0, result.output
    best, _, hint = result.output.splitlines()[-3:]
    assert best == "best:    adamw, WER 15.0% (mean of 2 seeds); after the last step 15.0%"
    assert Path(hint.split()[-2]).name == steady[1].folder
    lost = [result_of(wer=None, cer=None, metrics=[], examples=[])]
    monkeypatch.setattr(comparing, "compare", lambda *_: lost)
    result = CliRunner().invoke(app, ["compare", *options.split(), "--device=cpu", *where])
    assert result.exit_code == 2
    assert "all trainings diverged" in result.stderr


def arguments(out: Path, cache: Path, *options: str) -> list[str]:
    """Those of a small comparison."""
    small = [
        "--optimizers=quality",
        "--batch-size=2",
        "--utterances=8",
        "--validation-utterances=2",
    ]
    where = [f"--out={out}", f"--cache={cache}", "--device=cpu"]
    return ["compare", *small, *where, *options]


def trains(folder: Path) -> bool:
    """Whether a process has the lock of a training's folder."""
    try:
        with folder_lock(folder):
            return False
    except InputError:
        return True


def has_stepped(folder: Path) -> bool:
    """Whether a training has reported a step."""
    try:
        return any(line["step"] > 0 for line in read_metrics(folder))
    except (FileNotFoundError, json.JSONDecodeError):  # nothing yet, or half a line
        return False


def until(holds: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals and locks of POSIX")
@pytest.mark.parametrize(
    ("number", "to_all", "script"),
    [
        (signal.SIGTERM, False, None),
        (signal.SIGTERM, True, FORKING),
        (signal.SIGINT, True, FORKING),
    ],
    ids=["kill", "a scheduler", "Ctrl-C"],
)
def test_a_stopped_comparison_saves_and_ends_its_trainings(
    tmp_path: Path, number: signal.Signals, to_all: bool, script: Path | None
) -> None:
    out = tmp_path / "out"
    # One evaluation at its end: so the training would go on for long.
    options = ["--steps=20000", "--evaluate-every=20000"]
    rate = f"{default_lr('quality'):g}"
    metrics = out / "runs" / f"quality-lr{rate}-steps20000-seed0" / "metrics.jsonl"
    started = Command(arguments(out, tmp_path / "cache", *options), tmp_path / "said", script)
    try:
        assert until(lambda: has_stepped(metrics.parent))
        assert trains(metrics.parent)
        (os.killpg if to_all else os.kill)(started.pid, number)
        started.wait()
        assert until(lambda: not trains(metrics.parent))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # whoever is left
    said, complained = started.said()
    lines = said.splitlines()
    assert lines[0].startswith("synthesising speech: 10 utterances")
    assert f"training 1 of 1: quality, lr {rate}, seed 0, 20000 steps …" in lines
    assert "run the same command to continue" in lines[-1]
    assert "Traceback" not in complained
    [saved] = checkpoint.checkpoints(metrics.parent)  # though no evaluation was near
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert checkpoint.load_training(saved)["step"] == last["step"] > 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of POSIX")
def test_a_killed_process_is_detected(tmp_path: Path) -> None:
    """The functions are not from this module, because the workers would have to import it."""
    assert list(in_processes(abs, [-2, 3], 1)) == [2, 3]
    with pytest.raises(
        InputError, match=r"9: its process was killed by signal 9.*a smaller --jobs"
    ):
        list(in_processes(signal.raise_signal, [int(signal.SIGKILL)], 1))
    with pytest.raises(InputError, match="contains no training to resume"):
        list(in_processes(read_settings, [tmp_path], 1))
    with pytest.raises(InputError, match=r"3: its process ended with status 3; the reason is pri"):
        list(in_processes(sys.exit, [3], 1))


def test_workers_send_messages_before_their_result() -> None:
    told: list[tuple[int, object]] = []
    done = list(in_processes(tell_parent, [5, 6], 2, lambda item, what: told.append((item, what))))
    assert done == [None, None]
    assert sorted(told) == [(5, 5), (6, 6)]
    tell_parent("nobody")  # dropped: this is not a worker


@pytest.mark.parametrize("width", [80, 120])
def test_each_training_has_a_bar(width: int) -> None:
    shown = io.StringIO()
    bars = RunBars(Console(file=shown, force_terminal=True, width=width))
    comparison = Comparison(replace(BASE, steps=200), ["published-1.0", "adamw"])
    runs = [comparison.run(name, None, 0) for name in comparison.optimizers]
    for number, run in enumerate(runs, 1):
        bars.started(run, number, 2)
        bars.progressed(run, RunProgress(50))  # resumed
        pace = Pace(120, 1.25, lr=0.04, effective_lr=0.001, steps_per_second=2.0, seconds=60.0)
        bars.progressed(run, RunProgress(120, pace, wer=0.5))
    bars._progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    for name in ("1: published-1.0 ", "2: adamw "):
        line = [line for line in text.splitlines() if line.startswith(name)][-1]
        assert re.search(r"━ +120/200 loss 1\.250  WER 50\.0%  lr 0\.04 +[0-9-]+:", line), line
        assert len(line) <= width - 2  # room for ^C
    bars.ended(runs[0], "WER 10.0% in 60 s")
    bars.close()
    assert f"{runs[0]}: WER 10.0% in 60 s" in shown.getvalue()
    assert bars._progress.tasks == []


def test_the_synthesis_has_a_bar_until_it_is_done() -> None:
    shown = io.StringIO()
    bars = RunBars(Console(file=shown, force_terminal=True, width=100))
    bars.begin("synthesising speech", 10)
    bars.advance(4)
    bars._progress.refresh()
    assert [task.completed for task in bars._progress.tasks] == [4]
    bars.advance(6)
    assert bars._progress.tasks == []
    bars.close()
    assert "synthesising speech" in shown.getvalue()


@pytest.mark.parametrize(("terminal", "kind"), [(True, RunBars), (False, RunLines)])
def test_bars_need_a_terminal(terminal: bool, kind: type[RunLines]) -> None:
    display = make_display(Console(file=io.StringIO(), force_terminal=terminal), print)
    display.close()
    assert type(display) is kind


def test_lines_tell_each_tenth_of_a_training() -> None:
    said: list[str] = []
    lines = RunLines(said.append)
    run = Comparison(replace(BASE, steps=200), ["adamw"]).run("adamw", None, 0)
    lines.progressed(run, RunProgress(0))
    for step in range(10, 201, 10):
        pace = Pace(step, 1.25, lr=0.04, effective_lr=0.001, steps_per_second=2.0, seconds=1.0)
        lines.progressed(run, RunProgress(step, pace))
        lines.progressed(run, RunProgress(step, pace, wer=0.5))
    assert len(said) == 9
    assert said[0] == "  adamw, lr 0.001, seed 0: step 20 of 200  loss 1.250  lr 0.04  1:30 left"


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of POSIX")
def test_two_comparisons_do_not_train_in_one_folder(tmp_path: Path) -> None:
    comparison = Comparison(BASE, ["quality"])
    run = comparison.run("quality", None, 0)
    with (
        folder_lock(tmp_path / run.folder),
        pytest.raises(InputError, match="another process is training here"),
    ):
        comparing._train_in_worker(run, tmp_path, tmp_path / "cache", 1)


def test_parallel_trainings_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(settings_module, "find_device", torch.device)  # there need be no GPU
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(comparing, "_train", lambda *_: None)
    for device, jobs in [("cpu", 3), ("cpu", 16), ("cpu", 1), ("cuda", 3)]:
        run = Comparison(replace(BASE, device=device), ["quality"]).run("quality", None, 0)
        comparing._train_in_worker(run, tmp_path, None, jobs)
    assert taken == [2, 1]


def test_a_wrong_name_is_reported_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "--optimizers=sgd", f"--out={tmp_path / 'out'}"])
    assert result.exit_code == 2
    assert "got 'sgd'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------- the page


def several() -> list[RunResult]:
    memory = {"model.encoder.conv1.weight": [0.9], "model.decoder.fc1.weight": [0.7, 0.8]}
    fam = result_of("fast", wer=0.04)
    fam.metrics[-1]["beta"] = memory
    return [
        fam,
        result_of("adamw", wer=0.2),
        result_of("adamw", wer=0.3, seed=1),
        result_of("adamw, same time", wer=0.1),
    ]


def rows(page: str) -> dict[str, list[str]]:
    """The cells of the table of results by their first."""
    table = page.split("<h2>Results</h2>")[1].split("</table>")[0]
    found = {}
    for row in table.split("<tbody>")[1].split("<tr")[1:]:
        name, *cells = [re.sub("<.*?>", "", cell) for cell in re.findall("<td>.*?</td>", row)]
        found[name] = cells
    return found


def test_the_table_has_means_and_spreads() -> None:
    cells = rows(report(several(), "Speech"))
    assert cells["adamw"][:2] == ["0.001", "20"]
    assert cells["adamw"][2] == "25.0% ± 7.1%"
    assert cells["adamw"][3:6] == ["37.5%", "10.0%", "20"]  # raw, CER, step of the best
    assert cells["adamw"][6:8] == ["25.0% ± 7.1%", "37.5%"]  # after the last step
    assert cells["adamw"][8] == "never"
    assert cells["fast"][2] == "4.0%"
    assert cells["fast"][8] == "10"
    assert cells["adamw, same time"][8] == "20"
    assert cells["fast"][9:] == ["100", "2", "0.01", "8.00"]


def overtrained(label: str, best: float, last: float) -> RunResult:
    """A training whose best checkpoint is not its last one."""
    result = result_of(label, wer=last)
    first, second = (line for line in result.metrics if "wer" in line)
    first.update(wer=best, raw_wer=best, cer=best)
    second["best"] = 10
    return result


def test_ranks_are_by_the_best_checkpoint_and_both_are_shown() -> None:
    results = [overtrained("fast", 0.05, 0.3), overtrained("adamw", 0.1, 0.2)]
    assert best_label(results) == "fast"
    page = report(results, "Speech")
    assert "Best: fast, with 5.0% of the words wrong at its best checkpoint. " in page
    assert "After the last step it is adamw, with 20.0%." in page
    assert "best checkpoint: fast 5.0% in 2 s, adamw 10.0% in 2 s." in page
    cells = rows(page)
    assert cells["fast"][2:8] == ["5.0%", "5.0%", "5.0%", "10", "30.0%", "45.0%"]
    tried = [
        replace(overtrained("fast", best, last), lr=lr)
        for lr, best, last in ((0.1, 0.05, 0.3), (0.2, 0.1, 0.2))
    ]
    assert best_lr(tried, "fast") == 0.1


def fine_tuned(label: str, *wers: float) -> RunResult:
    """A training of a model folder that was better before the first step."""
    examples = [{"reference": "one", "hypothesis": "one"}]
    lines = [
        {"step": 10 * number, "seconds": 1.0, "best": 0, "wer": wer, "raw_wer": wer, "cer": wer,
         "examples": examples}
        for number, wer in enumerate((0.05, *wers))
    ]  # fmt: skip
    return result_of(label, wer=wers[-1], raw_wer=wers[-1], cer=wers[-1], metrics=lines)


def test_ranks_do_not_count_what_a_model_could_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = [fine_tuned("quality", 0.4, 0.5), fine_tuned("adamw", 0.2, 0.3)]
    assert best_label(results) == "adamw"
    cells = rows(report(results, "Speech"))
    assert cells["adamw"][2:8] == ["20.0%", "20.0%", "20.0%", "10", "30.0%", "30.0%"]
    assert [cells[label][8] for label in ("adamw", "quality")] == ["never", "never"]
    tried = [replace(fine_tuned("fast", wer), lr=lr) for lr, wer in ((0.1, 0.4), (0.2, 0.3))]
    assert best_lr(tried, "fast") == 0.2
    monkeypatch.setattr(comparing, "compare", lambda *_: results)
    options = "--steps=2 --batch-size=2 --utterances=8 --validation-utterances=2 --device=cpu"
    where = [f"--out={tmp_path / 'out'}", f"--cache={tmp_path / 'cache'}"]
    shown = CliRunner().invoke(app, ["compare", *options.split(), *where]).output
    assert "best:    adamw, WER 20.0%; after the last step 30.0%\n" in shown
    assert "did not improve on the model that it began with, WER 5.0%" in shown


def test_comparisons_of_a_model_folder_have_a_quarter_of_the_rates() -> None:
    comparison = Comparison(replace(BASE, model="folder"), ["quality", "adamw"], tune=True)
    for name in comparison.optimizers:
        assert comparison.run(name, None, 0).settings.lr == 0.25 * default_lr(name)
    tried = {run.settings.peak_lr for run in comparing._tuning_runs(comparison)}
    assert 0.25 * default_lr("quality") in tried
    assert max(tried) == default_lr("quality")


def test_memory_is_the_state_and_that_of_a_gpu() -> None:
    assert "GPU<br>peak" not in report(several(), "Speech")
    page = report([result_of(gpu_bytes=50_000_000), result_of("lean", wer=None)], "Speech")
    assert "GPU<br>peak, MB" in page
    assert rows(page)["adamw"][-3:] == ["0.01", "8.00", "50"]
    assert len(rows(page)["lean"]) == len(rows(page)["adamw"])


def test_results_from_before_are_still_read(tmp_path: Path) -> None:
    run = Comparison(BASE, ["adamw"]).run("adamw", None, 0)
    folder = tmp_path / run.folder
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(vars(run.settings)))
    (folder / "result.json").write_text(json.dumps({**vars(result_of()), "peak_bytes": 5}))
    assert read_result(run, tmp_path) == result_of()
    for content in ("{", '{"label": "adamw"}', "[1]"):
        (folder / "result.json").write_text(content)
        with pytest.raises(InputError, match=r"result\.json: cannot be read, .*; delete it to tra"):
            read_result(run, tmp_path)


def test_the_page_shows_the_settings_and_the_rates_tried() -> None:
    tried = [result_of("adamw", lr=lr, wer=wer) for lr, wer in ((0.0005, 0.4), (0.001, 0.2))]
    tried.append(result_of("adamw", lr=0.002, wer=None, cer=None))
    page = report(several(), "Speech", "model nano, batches of 16", tried)
    assert '<p class="about">Model nano, batches of 16.</p>' in page
    table = page.split("<h2>Learning rates tried</h2>")[1].split("</table>")[0]
    assert "<td>0.0005: 40.0%</td>" in table
    assert '<td class="chosen">0.001: 20.0%</td>' in table
    assert "<td>0.002: diverged</td>" in table
    assert "Learning rates tried" not in report(several(), "Speech")


def test_the_page_warns_about_parallel_trainings() -> None:
    assert "at the same time" not in report(several(), "Speech")
    assert "Up to 3 trainings ran at the same time" in report([result_of(jobs=3)], "Speech")


def test_error_rates_above_one_are_shown_if_all_are() -> None:
    def top(*results: RunResult) -> float:
        [first, _] = re.findall(r'"range":\[0\.0,([0-9.]+)\]', report(results, "Speech"))
        return float(first)

    assert top(result_of("fast", wer=1.2)) == pytest.approx(1.05 * 1.2)
    assert top(result_of("fast", wer=1.2), result_of("adamw", wer=0.5)) == pytest.approx(1.05)
    assert top(result_of("fast", wer=None, metrics=[])) == pytest.approx(1.05)


def test_every_optimizer_has_its_own_color() -> None:
    page = report([result_of(name) for name in names()], "Speech")
    colors = re.findall(r'class="swatch" style="background:(#[0-9a-f]+)"', page)
    assert len(set(colors)) == len(names())


def test_the_page_escapes_texts() -> None:
    page = report(several(), "Speech <b>")
    assert "Speech &lt;b&gt;" in page
    assert "one &lt;two&gt;</dd>" in page
    assert "one <del>too</del>" in page


def test_the_page_needs_no_network() -> None:
    page = report(several(), "Speech")
    outside = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)[^"]*"', page)
    assert outside == []


def in_browser(path: Path, size: str = "1200,1000") -> subprocess.CompletedProcess[str]:
    """Show a page, without anything outside of it; return what it has become."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--disable-background-networking", "--virtual-time-budget=10000", f"--window-size={size}",
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


# Whatever is wider than the page and does not scroll inside a box, and the widths of all charts.
MEASURE = """
<pre id="measured"></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => {
  const inside = frame.contentDocument, width = inside.documentElement.clientWidth;
  const wide = [...inside.body.querySelectorAll("*")].filter(
    one => one.getBoundingClientRect().right > width + 1 && !one.closest(".scroll *")
           && !one.closest("svg *"));
  const charts = [...inside.querySelectorAll(".main-svg")].map(one => one.clientWidth);
  inside.querySelector(".legend button").click();
  setTimeout(() => {
    const hidden = [...inside.querySelectorAll(".charts .plotly-graph-div")].map(
      chart => chart.data.filter(trace => trace.visible === false).length);
    document.getElementById("measured").textContent = JSON.stringify({
      width, page: inside.documentElement.scrollWidth, wide: wide.map(one => one.outerHTML),
      charts, hidden});
  }, 500);
}, 3000);
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report(several(), "Speech"))
    shown = in_browser(path)
    assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line] == []
    assert len(re.findall('class="plot-container', shown.stdout)) == 5  # four charts, a heat map
    assert len(re.findall('class="main-svg"', shown.stdout)) >= 5
    for title in ("Word error rate by steps", "Training loss by seconds of training"):
        assert title in shown.stdout


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [420, 1200])
def test_nothing_runs_off_the_page(tmp_path: Path, width: int) -> None:
    """In a frame, because the windows of Chromium cannot be as narrow as a phone."""
    results = [*several(), *(result_of(name) for name in names() if name not in ("fast", "adamw"))]
    page = report(results, "Optimizers compared: recordings/in_a_folder_with_a_long_name, nano")
    style = f"width:{width}px;height:900px;border:0"
    frame = f'<iframe style="{style}" srcdoc="{html.escape(page)}"></iframe>{MEASURE}'
    (tmp_path / "frame.html").write_text(f"<!doctype html><body>{frame}</body>")
    shown = in_browser(tmp_path / "frame.html", "1300,1000").stdout
    found = json.loads(shown.split('<pre id="measured">')[1].split("</pre>")[0])
    assert found["page"] == found["width"] <= width
    assert found["wide"] == []
    columns = 1 if width < 800 else 2
    assert all(0.4 * width < one <= width for one in found["charts"])
    assert min(found["charts"]) < 1.1 * width / columns
    assert found["hidden"] == [1] * 4  # a click on the legend hides a curve in each chart


def test_results_are_restored_from_json() -> None:
    one = result_of()
    assert RunResult(**json.loads(json.dumps(vars(one)))) == one
