"""The training loop: resuming, the step, checkpoints and metrics, and the command."""

from __future__ import annotations

import errno
import io
import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import typer
from rich.console import Console
from transformers import WhisperForConditionalGeneration
from typer.testing import CliRunner

import maxfactor
from forked import Command
from maxfactor_speech import cli
from maxfactor_speech.atomic import write_atomically
from maxfactor_speech.cli import app
from maxfactor_speech.data import recordings, synthesis
from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.shards import ShardedUtterances
from maxfactor_speech.errors import InputError
from maxfactor_speech.signals import STOP_SIGNALS, sigterm_as_interrupt, stop_requests
from maxfactor_speech.training import checkpoint, loop
from maxfactor_speech.training.checksums import write_checksums
from maxfactor_speech.training.evaluation import Evaluation
from maxfactor_speech.training.folder_lock import folder_lock
from maxfactor_speech.training.loop import train
from maxfactor_speech.training.metrics import METRICS, Metrics
from maxfactor_speech.training.model_folder import load_model
from maxfactor_speech.training.preparation import Prepared, prepare
from maxfactor_speech.training.progress import Bar, Lines, Pace
from maxfactor_speech.training.settings import Settings, lr_factor
from maxfactor_speech.training.trainer import Trainer
from noise import prepared as noise_prepared
from noise import weights

TINY = Settings(
    optimizer="adamw",
    steps=6,
    batch_size=2,
    utterances=12,
    validation_utterances=2,
    evaluate_every=2,
    spec_augment=True,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    prepare(TINY, folder, 1)
    return folder


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / METRICS).read_text().splitlines()]


# ------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize(("optimizer", "every"), [("quality", 2), ("fast", 1), ("muon", 1)])
def test_a_resumed_training_reaches_the_same_weights(
    cache: Path, tmp_path: Path, optimizer: str, every: int
) -> None:
    """Evaluated and saved three times; Muon's steps are slow on a CPU, so one in between."""
    settings = replace(TINY, optimizer=optimizer, steps=3 * every, evaluate_every=every)
    train(settings, tmp_path / "whole", cache=cache, workers=1)
    part = prepare(settings, cache, 1)
    stopped = tmp_path / "stopped"
    read = 2 * every * TINY.batch_size + 1
    with pytest.raises(KeyError):  # in the middle of the step after the second checkpoint
        train(settings, stopped, prepared=_failing_after(part, read))
    assert checkpoint.checkpoints(stopped)[-1].name == f"step-{2 * every:08d}"
    train(settings, stopped, resume=True, cache=cache, workers=1)
    assert_same_weights(tmp_path / "whole", stopped)
    steps = [number * every for number in (1, 2, 3) for _ in ("loss", "error rate")]
    assert [line["step"] for line in lines(stopped)] == [0, *steps]


def test_a_checkpoint_does_not_change_device_settings(cache: Path, tmp_path: Path) -> None:
    """One from a GPU goes on here, and its rates were numbers."""
    settings = replace(TINY, optimizer="adamw")
    train(settings, tmp_path / "whole", cache=cache, workers=1)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "whole", moved)
    last = checkpoint.checkpoints(moved)[-1]
    shutil.rmtree(last)
    path = checkpoint.checkpoints(moved)[-1] / checkpoint.TRAINING
    saved = torch.load(path, weights_only=True)
    for group in saved["optimizers"][0]["param_groups"]:
        assert isinstance(group["lr"], float)
        group |= {"capturable": True, "fused": True}  # as AdamW has it there
    torch.save(saved, path)
    write_checksums(path.parent)
    train(settings, moved, resume=True, cache=cache, workers=1)
    assert_same_weights(tmp_path / "whole", moved)


def _failing_after(prepared: Prepared, count: int) -> Prepared:
    class Failing(ShardedUtterances):
        read = 0

        def __getitem__(self, number: int) -> Any:
            self.read += 1
            if self.read > count:
                raise KeyError("as good as a power cut")
            return super().__getitem__(number)

    assert isinstance(prepared.train, ShardedUtterances)
    return prepared._replace(train=Failing(prepared.train.paths))


def options(out: Path, cache: Path, steps: int, *more: str) -> list[str]:
    """The options of a small training."""
    chosen = ["train", "--out", str(out), "--workers=1", f"--cache={cache}", *more]
    if "--resume" not in more:
        chosen += ["--optimizer=quality", f"--steps={steps}", "--batch-size=2", "--utterances=12"]
        chosen += ["--validation-utterances=2"]
        chosen += ["--evaluate-every=3", "--spec-augment", "--device=cpu"]
    return chosen


def start(out: Path, cache: Path, steps: int, *more: str) -> Command:
    """The training in a process of its own."""
    return Command(options(out, cache, steps, *more), out.parent / "said")


def wait_for_step(out: Path, step: int, process: Command) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        was_running = process.is_running()
        if (out / METRICS).exists():
            seen = (out / METRICS).read_text().split("\n")[:-1]  # without half a line
            if seen and json.loads(seen[-1])["step"] >= step:
                return
        if not was_running:
            raise AssertionError(process.said())
        time.sleep(0.005)
    raise AssertionError("the training did not come that far")


def test_a_killed_training_resumes_to_the_same_weights(cache: Path, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for _ in range(3):  # where others keep this process waiting, the training may end before
        shutil.rmtree(killed, ignore_errors=True)
        process = start(killed, cache, 18)
        wait_for_step(killed, random.randrange(3, 9), process)
        time.sleep(random.uniform(0.0, 0.1))  # amid a step, a decoding or a checkpoint
        with suppress(ProcessLookupError):
            process.kill(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            break
    assert process.wait() == -signal.SIGKILL
    for given in (options(killed, cache, 18, "--resume"), options(whole, cache, 18)):
        result = run(*given)  # in this process, which need not start
        assert result.exit_code == 0, result.output
    assert_same_weights(killed, whole)
    assert [line["step"] for line in lines(killed)] == [line["step"] for line in lines(whole)]
    assert not list(killed.rglob("*.partial"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_prints_how_to_continue(
    cache: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "my out"
    process = start(out, cache, 3000, "--tensorboard")
    wait_for_step(out, 3, process)
    process.kill(number)
    status = process.wait()
    output = "".join(process.said())
    assert status == 130, output
    hint = output.splitlines()[-1].strip()
    asked = f"--resume --out '{out}' --cache {cache} --workers 1 --tensorboard"
    assert hint.endswith(f" -m maxfactor_speech train {asked}")
    program = shutil.which(shlex.split(hint)[0])
    assert program is not None
    assert Path(program) == Path(sys.executable)
    assert "Traceback" not in output
    step = checkpoint.load_training(checkpoint.checkpoints(out)[-1])["step"]
    assert 3 <= step < 3000
    assert lines(out)[-1]["step"] == step


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of POSIX")
def test_a_folder_is_locked_until_its_training_ends(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(out, cache, 3000)
    wait_for_step(out, 3, process)
    for more in [[], ["--resume"]]:
        refused = run(*options(out, cache, 3000, *more))
        assert refused.exit_code == 2
        [line] = refused.output.splitlines()
        assert str(out) in line
        assert "another process is training here" in line
        assert "another --out" in line
    assert process.is_running()  # and is not disturbed
    process.kill(signal.SIGKILL)
    process.wait()
    with folder_lock(out):
        pass


def test_a_training_that_cannot_start_leaves_no_folder(cache: Path, tmp_path: Path) -> None:
    settings = replace(TINY, data=str(tmp_path / "none.tsv"), utterances=None)
    (tmp_path / "mine").mkdir()
    for name, left in [("out/deep", False), ("mine", True)]:
        with pytest.raises(InputError, match="no such file"):
            train(settings, tmp_path / name, cache=cache)
        assert (tmp_path / name).exists() == left


def test_a_file_system_without_locks_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def flock(_file: object, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder_lock(tmp_path):
        assert (tmp_path / "lock").exists()


def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    named = pytest.raises(
        InputError, match=r"lock: cannot be written, Is a directory; choose another folder with --o"
    )
    with named, folder_lock(tmp_path):
        raise AssertionError("the folder is not locked")


def test_a_training_in_a_thread_leaves_signals_alone() -> None:
    """Only the main thread may handle them."""
    before = [signal.getsignal(one) for one in STOP_SIGNALS]
    seen: list[object] = []

    def work() -> None:
        with stop_requests() as is_asked, sigterm_as_interrupt():
            seen.extend(signal.getsignal(one) for one in STOP_SIGNALS)
            seen.append(is_asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [*before, False]


# ------------------------------------------------------------------------------- the step


def trainer(cache: Path, **changes: Any) -> Trainer:
    settings = replace(TINY, spec_augment=False, **changes)
    return Trainer(settings, prepare(settings, cache, 1))


def test_accumulated_gradients_are_those_of_one_batch(cache: Path) -> None:
    whole, parts = trainer(cache, batch_size=4), trainer(cache, batch_size=4, grad_accum=2)
    batches = whole.batches()
    [batch] = next(batches)
    batches.close()
    halves = [type(batch)(*(tensor[part] for tensor in batch)) for part in (slice(1), slice(1, 4))]
    loss, same = whole.train_step([batch]), parts.train_step(halves)
    torch.testing.assert_close(loss, same)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_steps_take_as_many_batches_as_are_accumulated(cache: Path) -> None:
    batches = trainer(cache, grad_accum=3).batches()
    assert [len(next(batches)) for _ in range(2)] == [3, 3]
    batches.close()


@pytest.mark.parametrize("optimizer", ["quality", "adamw"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_keeps_weights_in_float32(cache: Path, dtype: str, optimizer: str) -> None:
    mixed = trainer(cache, dtype=dtype, optimizer=optimizer)
    batches = mixed.batches()
    losses = [float(mixed.train_step(next(batches))) for _ in range(3)]
    batches.close()
    assert all(np.isfinite(losses))
    assert {param.dtype for param in mixed.model.parameters()} == {torch.float32}
    assert 0.0 <= mixed.evaluate().cer < 20.0


def test_gradients_of_peers_are_clipped(cache: Path) -> None:
    norms = {}
    for clip in (None, 0.0):
        one = trainer(cache, clip=clip)
        one.optimizers[0].zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]  # noqa: ARG005
        batches = one.batches()
        one.train_step(next(batches))
        batches.close()
        norms[clip] = _norm(one.optimizers[0])
    assert norms[None] == pytest.approx(1.0, abs=1e-3)
    assert norms[0.0] > 1.5


def _norm(optimizer: torch.optim.Optimizer) -> float:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return float(torch.stack([g.norm() for g in grads if g is not None]).norm())


def test_the_learning_rate_schedule() -> None:
    settings = replace(TINY, steps=100, warmup=0.1)
    factors = [lr_factor(settings, step) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5)
    assert 0.0 < factors[99] < 0.001
    assert lr_factor(replace(settings, schedule="linear"), 55) == pytest.approx(0.5)
    assert lr_factor(replace(settings, schedule="constant"), 99) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"warmup": 1.0},
        {"lr": float("nan")},
        {"lr": 0.0},
        {"schedule": "step"},
        {"dtype": "int8"},
        {"optimizer": "sgd"},
        {"task": "songs"},
        {"clip": -1.0},
        {"clip": float("nan")},
        {"weight_decay": float("nan")},
        {"weight_decay": -1.0},
        {"lr": -1.0},
        {"utterances": 0},
        {"utterances": -5},
        {"validation_utterances": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"device": "foo"},
        {"validation": "own.tsv"},
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any]) -> None:
    [[name, value]] = change.items()
    with pytest.raises(ValueError, match=f"{name} must .*{value}"):
        Settings(**change)


# --------------------------------------------------------------- checkpoints and metrics


def test_checkpoints_are_models_and_the_last_are_kept(cache: Path, tmp_path: Path) -> None:
    train(replace(TINY, keep=2), tmp_path, cache=cache, workers=1)
    best = (tmp_path / "best").resolve()
    names = {path.name for path in checkpoint.checkpoints(tmp_path)}
    assert names == {"step-00000004", "step-00000006", best.name}
    model, codec, _ = load_model(tmp_path)
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    assert codec.decode(codec.encode("one two")) == "one two"
    evaluations = [line for line in lines(tmp_path) if "wer" in line]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6]
    assert evaluations[0]["best"] is None  # random weights are not kept
    assert evaluations[-1]["best"] == int(best.name.removeprefix("step-"))
    assert evaluations[0]["examples"][0].keys() == {"reference", "hypothesis"}
    paces = [line for line in lines(tmp_path) if "loss" in line]
    assert {"effective_lr", "steps_per_second"} <= paces[0].keys()
    # The scheduled rate of the settings, though some groups have a share of it.
    expected = [TINY.peak_lr * lr_factor(TINY, line["step"] - 1) for line in paces]
    assert [line["lr"] for line in paces] == pytest.approx(expected)


def test_a_folder_contains_only_one_training(cache: Path, tmp_path: Path) -> None:
    train(replace(TINY, steps=2), tmp_path, cache=cache, workers=1)
    with pytest.raises(InputError, match="already contains a training"):
        train(replace(TINY, steps=2), tmp_path, cache=cache, workers=1)
    with pytest.raises(InputError, match="seed=0, cannot resume with 1; choose another --out"):
        train(replace(TINY, seed=1), tmp_path, resume=True, cache=cache, workers=1)
    with pytest.raises(InputError, match=r"--steps 1: .* is already at step 2; give at least that"):
        train(replace(TINY, steps=1), tmp_path, resume=True, cache=cache, workers=1)


def test_more_steps_keep_the_synthesised_speech(cache: Path, tmp_path: Path) -> None:
    """By default its amount depends on the number of steps."""
    settings = replace(TINY, steps=2, utterances=None)
    train(settings, tmp_path, cache=cache, workers=1)
    assert train(replace(settings, steps=4), tmp_path, True, cache=cache, workers=1).step == 4
    rates = [line["lr"] for line in lines(tmp_path) if "lr" in line]
    assert rates[1] == pytest.approx(settings.peak_lr * lr_factor(replace(settings, steps=4), 3))
    again = train(replace(settings, steps=4, utterances=4), tmp_path, True, cache=cache, workers=1)
    assert again.step == 4


def test_a_full_disk_keeps_the_last_checkpoint(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(state: dict[str, Any], file: Any) -> None:
        if state["step"] == 4:
            file.write(b"some of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    message = r"step-00000004: .* full; free some space, then .* --resume from step-00000002, which"
    with pytest.raises(InputError, match=message):
        train(TINY, tmp_path, cache=cache, workers=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("length", [0, 10, 5000])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_resumes(
    cache: Path, tmp_path: Path, length: int
) -> None:
    options = ["train", "--resume", "--out", tmp_path, "--cache", cache, "--workers", 1]
    train(TINY, tmp_path, cache=cache, workers=1)
    last = checkpoint.checkpoints(tmp_path)[-1]
    for seed in range(5):  # which decides what pickle stumbles over
        (last / checkpoint.TRAINING).write_bytes(random.Random(seed).randbytes(length))
        result = run(*options)
        assert result.exit_code == 2, (result.output, result.exception)
        [line] = result.stderr.splitlines()
        assert f"{last / checkpoint.TRAINING}: is damaged, as its SHA-256 is not that of" in line
        assert line.endswith(
            f"delete {last} to resume from a checkpoint before it, if there is one"
        )
    shutil.rmtree(last)
    assert run(*options).exit_code == 0


def test_tensorboard_on_request(cache: Path, tmp_path: Path) -> None:
    train(
        replace(TINY, optimizer="lean", steps=2), tmp_path, cache=cache, workers=1, tensorboard=True
    )
    [events] = (tmp_path / "tensorboard").iterdir()
    assert events.stat().st_size > 200
    assert b"optimizer/hidden/update_ratio" in events.read_bytes()
    before, *_, last = [line["optimizer"] for line in lines(tmp_path) if "wer" in line]
    assert before == {}
    assert 0.0 < last["hidden/update_ratio"] < 1.0
    assert last["skipped"] == 0.0


def test_a_nan_loss_is_written_as_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    metrics.pace(Pace(1, float("nan"), 0.1, 0.1, 1.0, 1.0), {})
    assert lines(tmp_path)[0]["loss"] is None


def test_metrics_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    (tmp_path / METRICS).unlink(missing_ok=True)
    (tmp_path / METRICS).mkdir()
    with pytest.raises(InputError, match=f"{METRICS}: cannot be written, Is a directory"):
        metrics.pace(Pace(1, 0.5, 0.1, 0.1, 1.0, 1.0), {})


# ---------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    result = run(
        "train", "--optimizer", "adamw", "--steps", "2", "--batch-size", "2", "--utterances", "12",
        "--validation-utterances", "2",
        "--evaluate-every", "2", "--out", out, "--cache", cache, "--workers", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f" -m maxfactor_speech transcribe {out} {out / 'example.wav'}" in result.output
    return out


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"maxfactor {maxfactor.__version__} (torch {torch.__version__})\n"


def test_help_fits_a_screen() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) <= 24


def test_the_help_of_each_command_has_examples_that_are_right() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
        assert max(map(len, shown.splitlines())) <= 80
        examples = shown.split("Examples:")[1].strip().splitlines()
        assert len(examples) >= 2
        for example in examples:
            program, called, *arguments = shlex.split(example)
            assert (program, called) == ("maxfactor", name)
            command.make_context(name, arguments)  # raises for options that do not exist
        for option in command.params:
            assert getattr(option, "help", ""), (name, option.name)


def test_files_of_any_rate_are_transcribed(trained: Path, tmp_path: Path) -> None:
    example = trained / "example.wav"
    result = run("transcribe", trained, example)
    assert result.exit_code == 0, result.output
    samples, _ = soundfile.read(example)
    stereo = tmp_path / "stereo.flac"
    upsampled = np.repeat(samples, 3)
    soundfile.write(stereo, np.stack([upsampled, upsampled], 1), 3 * SAMPLE_RATE)
    both = run("transcribe", trained, example, stereo)
    assert both.output.splitlines()[0] == f"{example}\t{result.output.strip()}"
    assert both.output.splitlines()[1].startswith(f"{stereo}\t")


def test_a_trained_model_learns_another_language(
    trained: Path, cache: Path, tmp_path: Path
) -> None:
    result = run(
        "train", "--model", trained, "--language", "de", "--optimizer", "adamw", "--steps", "1",
        "--validation-utterances", "2",
        "--batch-size", "2", "--out", tmp_path / "out", "--cache", cache, "--workers", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output


def recorded(folder: Path, cache: Path) -> list[str]:
    """24 recordings, as lines of a TSV beside them."""
    spoken = synthesis.synthesise(synthesis.Script("digits"), 24, cache, 1)
    for number in range(24):
        soundfile.write(folder / f"{number}.wav", spoken[number].samples, SAMPLE_RATE)
    return [f"{number}.wav\t{spoken[number].text}\n" for number in range(24)]


def test_own_recordings_are_trained_on(tmp_path: Path, cache: Path) -> None:
    listing = recorded(tmp_path, cache)
    (tmp_path / "train.tsv").write_text("".join(listing[:20]))
    (tmp_path / "validation.tsv").write_text("".join(listing[20:]))
    out = tmp_path / "out"
    result = run(
        "train", "--data", tmp_path / "train.tsv", "--validation", tmp_path / "validation.tsv",
        "--optimizer", "adamw", "--steps", "1", "--batch-size", "2", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert isinstance(load_model(out).model, WhisperForConditionalGeneration)


def test_resuming_with_other_recordings_is_refused(tmp_path: Path, cache: Path) -> None:
    """They would come in another order, and spell with other tokens."""
    listing = recorded(tmp_path, cache)
    data = tmp_path / "all.tsv"
    data.write_text("".join(listing))
    settings = Settings(
        data=str(data), validation=str(data), optimizer="adamw", steps=4, batch_size=2,
        evaluate_every=2,
    )  # fmt: skip
    out = tmp_path / "out"
    train(settings, out)
    shutil.rmtree(checkpoint.checkpoints(out)[-1])
    data.write_text("".join([*listing[1:], listing[0].replace("\n", " q\n")]))
    with pytest.raises(InputError, match="was trained on other utterances than the data has now"):
        train(settings, out, resume=True)
    data.write_text("".join(listing))
    assert train(settings, out, resume=True).step == 4


def test_a_rare_letter_in_the_validation_set(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.wav"
    spoken = synthesis.synthesise(synthesis.Script("digits"), 4, cache, 1)
    soundfile.write(path, spoken[0].samples, SAMPLE_RATE)
    usual = [recordings.Recording(path, f"word {number}") for number in range(40)]
    rare = [recordings.Recording(path, f"q {number}") for number in range(99)]
    held_out = next(one for one in recordings.split_recordings([*usual, *rare])[1] if one in rare)
    lines = [f"a.wav\t{one.text}\n" for one in [*usual, held_out]]
    (tmp_path / "all.tsv").write_text("".join(lines))
    found = prepare(Settings(data=str(tmp_path / "all.tsv"), batch_size=2))
    assert found.codec.missing(held_out.text) == []
    (tmp_path / "more.tsv").write_text("a.wav\tø and a text that is longer than the others are\n")
    settings = Settings(
        data=str(tmp_path / "all.tsv"), validation=str(tmp_path / "more.tsv"), batch_size=2
    )
    assert prepare(settings).codec.missing("ø") == []


def test_a_model_with_more_mel_bands_is_evaluated(tmp_path: Path) -> None:
    """Whisper large-v3 has 128 of them."""
    given = noise_prepared()
    config = given.model.config
    config.num_mel_bins = 128
    model = WhisperForConditionalGeneration(config)
    model.generation_config = given.model.generation_config
    prepared = given._replace(model=model)
    result = train(replace(TINY, steps=2), tmp_path / "out", prepared=prepared)
    assert result.evaluation is not None


def wrong_transcribe(trained: Path, folder: Path) -> list[tuple[list[object], str]]:
    noise = folder / "noise.wav"
    noise.write_bytes(b"no audio")
    long = folder / "long.wav"
    soundfile.write(long, np.zeros(10 * SAMPLE_RATE, np.int16), SAMPLE_RATE)
    broken = folder / "broken"
    shutil.copytree(checkpoint.checkpoints(trained)[-1], broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    example = trained / "example.wav"
    return [
        (["transcribe", trained, folder / "missing.wav"], "missing.wav: no such file"),
        (["transcribe", trained, noise], "noise.wav: cannot be read as audio"),
        (["transcribe", trained, example, "--timestamps"], "this model has no time stamps; leave"),
        (["transcribe", trained, long], "long.wav: 10.0 s long, but the model takes at most "),
        (["transcribe", folder, example], f"{folder}: no config.json"),
        (["transcribe", broken, example], "broken/model.safetensors: is damaged, as its SHA-256"),
        (["transcribe", other, example], "other: contains a model of type 'bert'"),
        (["transcribe", trained, example, "--device", "foo"], "device must be cpu, cuda"),
        (["transcribe", trained, example, "--device", "cuda:99"], "use --device cpu"),
        (["compare", "--jobs", "0", "--out", folder / "out"], "jobs must be at least 1, got 0"),
        (["compare", "--out", noise], "noise.wav is a file; choose another folder with --out"),
        (
            ["compare", "--cache", noise, "--out", folder / "out"],
            "choose another folder with --cache",
        ),
        (
            ["compare", "--model", folder / "gone", "--out", folder / "out"],
            "gone: no such folder",
        ),
    ]


def wrong_train(trained: Path, folder: Path) -> list[tuple[list[object], str]]:
    example = trained / "example.wav"
    lists = {
        "missing": "nowhere.wav\thello\n",
        "empty": f"{example}\t \n",
        "single": f"{example}\thello\n",
    }
    for name, text in lists.items():
        (folder / f"{name}.tsv").write_text(text)
    pair = ["--validation", folder / "single.tsv"]
    return [
        (["--data", folder / "nothing"], "nothing: no such file or folder"),
        (
            ["--data", folder / "missing.tsv", *pair],
            "no recordings are left; 1 of 2 recordings are left out: 1 missing (nowhere.wav)",
        ),
        (["--data", folder / "empty.tsv"], "are left out: 1 no transcript (example.wav)"),
        (
            ["--data", folder / "missing.tsv", *pair, "--strict"],
            f"missing.tsv:1: {folder / 'nowhere.wav'}: no such file; leave out --strict",
        ),
        (["--strict"], "strict must be given with data, got True"),
        (["--data", folder / "single.tsv"], "only 1 recordings"),
        (["--data", folder / "single.tsv", *pair, "--model", trained], "no token for 'hello'"),
        (
            ["--data", folder / "single.tsv", *pair, "--language", "de"],
            "--language needs a multilingual model folder, but --model nano has no languages",
        ),
        (
            ["--data", folder / "single.tsv", *pair, "--translate"],
            "--translate needs a multilingual model folder",
        ),
        (["--translate"], "translate must be given with data"),
        (["--language", "fr"], "language must be one of en, de, es, got 'fr'"),
        (["--language", "klingon"], "language must be one of en, de, es, got 'klingon'"),
        (
            ["--model", "openai/whisper-small"],
            (
                "openai/whisper-small: no such folder, and models are not downloaded: for one of "
                "the Hugging Face Hub, run `hf download openai/whisper-small --local-dir "
                "whisper-small`, then give the folder whisper-small"
            ),
        ),
        (["--model", "whisper-base.en"], "`hf download openai/whisper-base.en --local-dir"),
        (["--patience", "0"], "patience must be a whole number of at least 1, got 0"),
        (["--task", "songs"], "task must be one of digits, sentences, got 'songs'"),
        (["--model", folder / "gone"], "gone: no such folder; nano, tiny, base are sizes of new"),
        (["--out", "/proc/foo"], "; choose another folder with --out"),
        (["--clip", "-1"], "clip must be finite and not negative (0 disables it), got -1.0"),
        (["--device", "foo"], "device must be cpu, cuda, cuda:1, …, got 'foo'"),
        (["--device", "cuda:99"], "device cuda:99: torch finds"),
        (["--device", "hpu"], "device hpu: torch cannot use it here; use --device cpu"),
        (["--device", "meta"], "device meta: torch cannot use it here; use --device cpu"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--validation", folder / "single.tsv"], "validation must be given with data"),
        (
            ["--data", folder / "single.tsv", *pair, "--utterances", "2"],
            "--utterances 2 applies only to synthesised speech; leave it out, or leave out --data",
        ),
        (["--out", example], "example.wav is a file; choose another folder with --out"),
        (["--out", example / "deeper"], "example.wav is a file; choose another folder with --out"),
        (["--cache", example], "example.wav is a file; choose another folder with --cache"),
        (["--resume"], "--resume needs --out"),
        (
            ["--resume", "--out", folder / "gone"],
            "gone: contains no training to resume; start one without",
        ),
        (["--out", trained], "already contains a training"),
        (
            ["--task", "sentences", "--model", trained, "--utterances", "2"],
            "no token for",
        ),
    ]


def test_wrong_input_is_reported_in_one_line(trained: Path, tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "out"
    cases = wrong_transcribe(trained, tmp_path)
    for arguments, message in wrong_train(trained, tmp_path):
        where = [] if "--out" in arguments or "--resume" in arguments else ["--out", out]
        base = ["train", "--cache", cache, "--workers", "1", "--steps", "1", "--batch-size", "2"]
        cases.append(([*base, *where, *arguments], message))
    for arguments, message in cases:
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output, result.exception)
        assert message in result.stderr, (arguments, result.stderr)
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert not out.exists()


def test_errors_are_reported_before_speech_is_synthesised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("speech is made")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(synthesis, "synthesise", refuse)
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    out = tmp_path / "out"
    cases: list[tuple[list[object], str]] = [
        (["train", "--optimizer", "lion"], "pip install lion-pytorch"),
        (["compare", "--optimizers", "quality,lion"], "pip install lion-pytorch"),
        (["train", "--model", tmp_path / "gone"], "gone: no such folder"),
        (["compare", "--model", tmp_path / "gone"], "gone: no such folder"),
        (["train", "--device", "cuda:99"], "torch finds"),
        (["compare", "--device", "cuda:99"], "torch finds"),
        (["train", "--out", tmp_path / "file"], "file is a file; choose another folder with --out"),
        (
            ["train", "--cache", tmp_path / "file"],
            "file is a file; choose another folder with --cache",
        ),
        (["train", "--out", tmp_path / ("a" * 300)], "cannot be written, "),
    ]
    for arguments, message in cases:
        where = [] if "--out" in arguments else ["--out", out]
        result = run(*arguments, *where)
        assert result.exit_code == 2, (arguments, result.output, result.exception)
        assert message in result.stderr
        assert not out.exists()


@pytest.mark.parametrize("found", [True, False])
def test_hints_name_the_program_as_it_was_called(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"maxfactor": "/bin/maxfactor", "python": sys.executable} if found else {}
    monkeypatch.setattr(cli, "which", places.get)
    monkeypatch.setattr(sys, "argv", ["/my env/bin/maxfactor"])
    assert cli._command() == ("maxfactor" if found else "'/my env/bin/maxfactor'")
    monkeypatch.setattr(sys, "argv", ["/env/lib/maxfactor_speech/__main__.py"])
    python = "python" if found else shlex.quote(sys.executable)
    assert cli._command() == f"{python} -m maxfactor_speech"


def test_a_sharded_training_is_continued_with_its_launcher() -> None:
    assert cli._launcher(None, 1).endswith(" train")
    assert cli._launcher("fsdp", 3) == (
        "torchrun --nproc-per-node 3 -m maxfactor_speech train --shard fsdp"
    )


def test_an_unusual_rate_is_warned_of_in_a_plain_line(cache: Path, tmp_path: Path) -> None:
    options = ["--steps", 1, "--batch-size", 2, "--utterances", 4, "--validation-utterances", 2]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = run(
            "train", "--lr", "1e-5", *options, "--cache", cache, "--workers", 1, "--out", tmp_path
        )
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stderr.splitlines() if "looks like a rate for AdamW" in line]
    assert line.startswith("maxfactor: warning: lr=1e-05 looks")
    assert "UserWarning" not in result.output
    assert ".py" not in result.stderr


def test_the_command_says_that_it_ended_early(cache: Path, tmp_path: Path) -> None:
    """With so small a rate nothing improves."""
    result = run(
        "train", "--optimizer", "adamw", "--lr", "1e-30", "--steps", "9", "--batch-size", "2",
        "--utterances", "12", "--validation-utterances", "2", "--evaluate-every", "1",
        "--patience", "1", "--out", tmp_path / "out", "--cache", cache, "--workers", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert " after 2 steps, " in result.output
    assert "ended early: no improvement in 1 evaluations" in result.output


def test_the_bar_shows_the_last_error_rate() -> None:
    shown = io.StringIO()
    bar = Bar(Console(file=shown, force_terminal=True, width=150))
    bar.begin("training", 2)
    for step, wer in ((1, 0.25), (2, 0.5)):
        bar.pace(Pace(step, 1.0, 0.1, 0.1, 1.0, 1.0))
        bar.evaluated(step, Evaluation(wer, wer, 0.1, []))
    bar.close()
    frames = [line for line in shown.getvalue().splitlines() if "2/2" in line]
    assert "WER 50.0%" in frames[-1]


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_the_rate_shown_is_the_scheduled_one(kind: type[Lines]) -> None:
    shown = io.StringIO()
    reporter = kind(Console(file=shown, force_terminal=True, width=150))
    reporter.begin("training", 2)
    reporter.pace(Pace(1, 1.0, lr=0.04, effective_lr=0.00123, steps_per_second=1.0, seconds=1.0))
    reporter.close()
    assert "lr 0.04 " in shown.getvalue()
    assert "123" not in shown.getvalue()


@pytest.mark.parametrize(("width", "together"), [(50, False), (80, True)])
def test_a_narrow_bar_shows_the_step(width: int, together: bool) -> None:
    shown = io.StringIO()
    bar = Bar(Console(file=shown, force_terminal=True, width=width))
    bar.begin("training", 2000)
    bar.pace(Pace(1500, 1.0, 0.1, 0.1, 1.0, 1.0))
    bar.evaluated(1500, Evaluation(0.25, 0.25, 0.1, []))
    bar.close()
    assert "WER 25.0%" in shown.getvalue()
    line = next(line for line in shown.getvalue().splitlines() if "1500/2000" in line)
    assert ("steps/s" in line) == together


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/one: cannot be written, "):
        write_atomically(tmp_path / "file" / "one", b"content")


@pytest.mark.parametrize(
    "source",
    [
        {"data": "d", "validation": "v", "strict": True},
        {"utterances": 5, "validation_utterances": 6},
        {
            "model": "folder", "optimizer": "lean", "clip": 0.0, "grad_accum": 1, "lora": 4,
            "lora_alpha": 2.0, "weights": "bf16", "release_gradients": True,
        },
    ],
    ids=["recorded", "synthesised", "small"],
)  # fmt: skip
def test_options_are_settings(source: dict[str, Any]) -> None:
    """A setting that the command cannot set, or an option that goes nowhere, is a mistake."""
    called: dict[str, Any] = {}
    settings = {
        "task": "sentences", "language": "de",
        "model": "tiny", "optimizer": "adamw", "lr": 0.5, "weight_decay": 0.2,
        "schedule": "linear", "warmup": 0.3, "clip": 2.0, "steps": 7, "batch_size": 3,
        "grad_accum": 2, "dtype": "bf16", "device": "cpu", "seed": 9, "spec_augment": True,
        "cuda_graphs": False, "freeze_encoder": True, "gradient_checkpointing": True,
        "evaluate_every": 4, "keep": 1, "patience": 3,
        "translate": "data" in source, **source,
    }  # fmt: skip

    def record(given: Settings, out: Path, *_: Any, **__: Any) -> None:
        called.update(vars(given), out=out)
        raise InputError("enough")

    options: list[object] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options += [f"--{option}" if value else f"--no-{option}"]
        else:
            options += [f"--{option}", value]
    patch_train(record, lambda: run("train", *options))
    optimizer = settings["optimizer"]
    assert called.pop("out") == Path(f"runs/{source.get('data', 'sentences')}-{optimizer}")
    left: dict[str, Any] = {"data": None, "validation": None, "strict": False}
    left |= {"utterances": None, "validation_utterances": 256, "weights": "fp32"}
    left |= {"lora": None, "lora_alpha": None, "release_gradients": False}
    assert called == {**left, **settings}


def patch_train(replacement: Callable[..., None], call: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", replacement)
        call()


def test_without_the_extra_packages_the_hint_is_one_that_works() -> None:
    """The package is on no index, so only a clone can be installed."""
    code = "import sys; sys.modules['typer'] = None; import maxfactor_speech.cli"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "In a clone of the repository, run: pip install '.[speech]'" in result.stderr
    source = Path(cli.__file__).parent
    texts = [path.read_text() for path in source.parent.rglob("*.py")]
    assert not any("maxfactor[" in text for text in texts)
