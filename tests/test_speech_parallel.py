"""`maxfactor train --shard` in two processes: results, resuming, stopping and errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import maxfactor
from maxfactor.recipes import OWN
from maxfactor_speech.cli import app
from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.features import draw_stretches, spec_augment
from maxfactor_speech.data.screening import LEFT_OUT
from maxfactor_speech.errors import InputError
from maxfactor_speech.training import checkpoint, loop
from maxfactor_speech.training.folder_lock import folder_lock
from maxfactor_speech.training.metrics import read_metrics
from maxfactor_speech.training.parallel import MultiProcess
from maxfactor_speech.training.settings import Settings
from maxfactor_speech.training.trainer import Trainer
from noise import Noise, assert_close_weights, prepared, weights
from ranks import Ranks

BASE = Settings(
    optimizer="lean",
    steps=4,
    batch_size=4,
    grad_accum=2,
    evaluate_every=2,
    device="cpu",
    spec_augment=True,
)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def trained(settings: Settings, out: Path, shard: str | None, resume: bool = False) -> int:
    """A training in one of the processes, as if `torchrun` had started it."""
    if shard is not None:
        as_torchrun()
    return loop.train(settings, out, resume, prepared=prepared(32, 1), shard=shard).step


def as_torchrun() -> None:
    names = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    names |= {"WORLD_SIZE": dist.get_world_size(), "LOCAL_WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(value) for name, value in names.items()})


def assert_alike(one: Path, other: Path) -> None:
    """The same weights and the same curve, but for rounding."""
    of_convolutions = 0.1 if has_orthogonal_convolutions(one) else None
    assert_close_weights(weights(one), weights(other), 5e-5, of_convolutions)
    for line, same in zip(read_metrics(one), read_metrics(other), strict=True):
        assert line.keys() == same.keys()
        assert line["step"] == same["step"]
        assert line.get("loss", 0.0) == pytest.approx(same.get("loss", 0.0), rel=1e-5)
        assert line.get("wer") == same.get("wer")
        assert line.get("examples") == same.get("examples")


def has_orthogonal_convolutions(folder: Path) -> bool:
    """Whether a training was one of ours."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    return str(settings["optimizer"]) in OWN


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of trainings in one process, by optimizer."""
    folder = tmp_path_factory.mktemp("single")
    for optimizer in ("lean", "adamw"):
        trained(replace(BASE, optimizer=optimizer), folder / optimizer, None)
    return folder


@pytest.mark.parametrize(
    ("optimizer", "shard"), [("lean", "ddp"), ("lean", "fsdp"), ("adamw", "fsdp")]
)
def test_two_processes_train_like_one(
    two: Ranks, single: Path, tmp_path: Path, optimizer: str, shard: str
) -> None:
    settings = replace(BASE, optimizer=optimizer)
    assert two.run(trained, settings, tmp_path / "out", shard) == [4, 4]
    assert_alike(single / optimizer, tmp_path / "out")
    names = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000002", "step-00000004"]


def test_two_processes_freeze_the_encoder_and_recompute(two: Ranks, tmp_path: Path) -> None:
    settings = replace(BASE, freeze_encoder=True, gradient_checkpointing=True)
    trained(settings, tmp_path / "one", None)
    two.run(trained, settings, tmp_path / "two", "fsdp")
    assert_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("optimizer", "first", "second"),
    [("lean", "fsdp", None), ("lean", None, "fsdp"), ("adamw", None, "fsdp"),
     ("adamw", "fsdp", "ddp")],
)  # fmt: skip
def test_another_number_of_processes_resumes(
    two: Ranks,
    single: Path,
    tmp_path: Path,
    optimizer: str,
    first: str | None,
    second: str | None,
) -> None:
    settings, out = replace(BASE, optimizer=optimizer), tmp_path / "out"
    for shard, resume in ((first, False), (second, True)):
        if shard is None:
            trained(settings, out, None, resume)
        else:
            two.run(trained, settings, out, shard, resume)
        if not resume:
            drop_last(out)
    assert_alike(single / optimizer, out)


def drop_last(out: Path) -> None:
    """As if it had been killed between its two checkpoints."""
    last = checkpoint.checkpoints(out)[-1]
    last.rename(last.with_name(last.name + ".partial"))
    assert checkpoint.checkpoints(out)[-1].name == "step-00000002"


def test_one_process_asked_to_stop_stops_all(two: Ranks, tmp_path: Path) -> None:
    settings = replace(BASE, steps=50, evaluate_every=50)
    [step, same] = two.run(interrupted, settings, tmp_path, "fsdp")
    assert step == same < 50
    [folder] = checkpoint.checkpoints(tmp_path)
    assert checkpoint.load_training(folder)["step"] == step
    assert read_metrics(tmp_path)[-1]["step"] == step


def interrupted(settings: Settings, out: Path, shard: str) -> int:
    step = Trainer.train_step

    def with_signal(self: Trainer, batches: Any) -> torch.Tensor:
        if self.step == 2 and self.processes.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", with_signal)
        return trained(settings, out, shard)


def test_mixed_precision_and_our_best_recipe(two: Ranks, tmp_path: Path) -> None:
    """The orthogonal direction makes much of rounding: the curve is near, the weights are not."""
    settings = replace(BASE, optimizer="quality", dtype="fp16", spec_augment=False)
    trained(settings, tmp_path / "one", None)
    two.run(trained, settings, tmp_path / "two", "fsdp")
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-3)


def test_weights_in_bfloat16_and_adapters(two: Ranks, single: Path, tmp_path: Path) -> None:
    settings = replace(BASE, weights="bf16", spec_augment=False)
    trained(settings, tmp_path / "one", None)
    two.run(trained, settings, tmp_path / "two", "fsdp")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=0.05)
    assert {value.dtype for value in weights(tmp_path / "two").values()} == {torch.bfloat16}
    settings = replace(BASE, model=str(single / "lean"), lora=2)
    trained(settings, tmp_path / "alone", None)
    two.run(trained, settings, tmp_path / "shared", "ddp")
    assert_alike(tmp_path / "alone", tmp_path / "shared")


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out) if "loss" in line]


def test_own_recordings_in_two_processes(two: Ranks, tmp_path: Path) -> None:
    """Both leave out the same recordings, and replace the same damaged one."""
    table = recorded(tmp_path)
    settings = replace(BASE, data=str(table), validation=str(table), optimizer="adamw", steps=2)
    one, other = tmp_path / "one", tmp_path / "two"
    trained_on_own(settings, one, None)
    assert two.run(trained_on_own, settings, other, "ddp") == [2, 2]
    assert_alike(one, other)
    left_out = [(out / LEFT_OUT).read_text() for out in (one, other)]
    assert left_out[0] == left_out[1]
    assert len(left_out[0].splitlines()) == 4  # missing from both, damaged in validation


def recorded(folder: Path) -> Path:
    """Eight recordings, one of which only decoding finds to be damaged; one is missing."""
    noise = Noise(8)
    for number in range(8):
        soundfile.write(folder / f"{number}.flac", noise[number].samples, SAMPLE_RATE)
    damaged = folder / f"{int(noise.lengths.argmax())}.flac"
    damaged.write_bytes(damaged.read_bytes()[:9_000])
    lines = [f"{number}.flac\t{noise.text(number)}\n" for number in range(8)]
    (folder / "list.tsv").write_text("".join([*lines, "gone.flac\tabc\n"]))
    return folder / "list.tsv"


def trained_on_own(settings: Settings, out: Path, shard: str | None) -> int:
    if shard is not None:
        as_torchrun()
    return loop.train(settings, out, shard=shard).step


def test_processes_that_find_other_recordings_are_refused(two: Ranks, tmp_path: Path) -> None:
    two.run(differs, tmp_path / "out")


def differs(out: Path) -> None:
    as_torchrun()
    given = prepared(32, 1)._replace(train=Noise(24 + dist.get_rank()))
    with pytest.raises(InputError, match="the processes found different recordings"):
        loop.train(BASE, out, prepared=given, shard="ddp")


# --------------------------------------------------------------------------- communication


def test_communication_between_processes(two: Ranks) -> None:
    assert two.run(told) == [(1, 0.5, ["a", "b", "c"], "first"), (1, 0.5, ["a", "b", "c"], "rest")]


def told() -> tuple[int, float, list[str], str]:
    as_torchrun()
    processes = MultiProcess("ddp", "cpu")
    mine = [["a", "c"], ["b"]][processes.rank]
    done: list[str] = []

    def call() -> str:
        done.append("rest" if processes.rank else "first")
        return done[0]

    total, mean = processes.sum(processes.rank), processes.mean(processes.rank)
    return total, mean, processes.interleaved(mine), processes.run_first_then_others(call)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("batch", "--batch-size 5 cannot be divided among 2 processes.*such as 6"),
        ("optimizer", "optimizer adafactor cannot update sharded parameters; use --shard ddp"),
        ("other", "only the second process sees this"),
    ],
)
def test_a_failure_in_one_process_fails_in_all(
    two: Ranks, tmp_path: Path, case: str, message: str
) -> None:
    two.run(fails, tmp_path / "out", case, message)
    assert not (tmp_path / "out").exists()


def fails(out: Path, case: str, message: str) -> None:
    changes: dict[str, Any] = {"batch": {"batch_size": 5}, "optimizer": {"optimizer": "adafactor"}}
    with pytest.MonkeyPatch.context() as patch:
        if case == "other" and dist.get_rank() == 1:
            patch.setattr(loop, "check_folder", _refuses)
        with pytest.raises(InputError, match=message):
            trained(replace(BASE, **changes.get(case, {})), out, "fsdp")


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of POSIX")
def test_all_processes_see_that_the_folder_is_locked(two: Ranks, tmp_path: Path) -> None:
    with folder_lock(tmp_path):
        two.run(is_kept_out, tmp_path)
    two.run(trained, BASE, tmp_path, "ddp")


def is_kept_out(out: Path) -> None:
    with pytest.raises(InputError, match=f"{out}: another process is training here"):
        trained(BASE, out, "ddp")


def _refuses(*_: object) -> None:
    raise InputError("only the second process sees this")


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (
            ["--shard", "fsdp"],
            {},
            "torchrun .*2 -m maxfactor_speech train --shard fsdp",
        ),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun started 2 processes"),
        (["--shard", "tp"], {"RANK": "0"}, "one of ddp, fsdp, hsdp, got 'tp'"),
        (["--shard", "hsdp"], {"RANK": "0", "WORLD_SIZE": "2"}, "at least 4, got 2"),
        (["--shard", "hsdp"], {"RANK": "0", "WORLD_SIZE": "5"}, "even number.*got 5"),
    ],
)
def test_wrong_starts_are_reported_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "out"), *options])
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------- the command


def test_the_command_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "--local-addr", "127.0.0.1", "-m", "maxfactor_speech", "train"]
    command += ["--shard=fsdp", "--optimizer=quality", "--steps=2", "--batch-size=2"]
    command += ["--utterances=4", "--validation-utterances=2", "--device=cpu", "--workers=1"]
    command += [f"--cache={tmp_path}", f"--out={out}"]
    source = str(Path(maxfactor.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.terminate()  # torchrun ends what it started, if it still runs
    assert process.returncode == 0, errors
    assert output.count("after 2 steps") == 1  # the first process alone speaks
    heard = CliRunner().invoke(app, ["transcribe", str(out), str(out / "example.wav")])
    assert heard.exit_code == 0, heard.output


def test_parts_of_a_batch_are_masked_like_the_whole() -> None:
    features = torch.ones(4, 80, 50)
    draws = draw_stretches(4, torch.Generator().manual_seed(3))
    halves = [spec_augment(features[:2], own) for own in draws.split(2, dim=2)]
    assert torch.equal(torch.cat(halves), spec_augment(features, draws))
