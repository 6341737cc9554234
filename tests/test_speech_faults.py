"""Faults while a training runs: killed at any write, a full disk, damaged files, a lost process.

`make soak` runs many more of them.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from forks import ended, forked, killed_at, killed_beyond
from maxfactor_speech.cli import app
from maxfactor_speech.errors import InputError
from maxfactor_speech.training import checkpoint, checksums, loop
from maxfactor_speech.training.metrics import METRICS, Metrics, read_metrics
from maxfactor_speech.training.model_folder import load_model
from maxfactor_speech.training.parallel import SingleProcess
from maxfactor_speech.training.preparation import Prepared
from maxfactor_speech.training.progress import Reporter
from maxfactor_speech.training.settings import SETTINGS, Settings, resumed
from maxfactor_speech.training.trainer import Trainer
from noise import assert_close_weights, prepared, weights
from soak import IS_SOAK, amount

resource: Any = pytest.importorskip("resource")  # limits and forks of POSIX

T = TypeVar("T")
STEPS = 3
BASE = Settings(
    optimizer="lean", steps=STEPS, batch_size=6, evaluate_every=1, keep=1, device="cpu",
    utterances=24, validation_utterances=6,
)  # fmt: skip
KILLS = amount(44, 400)
MIDDLE_KILLS = amount(6, 80)  # amid a write
TRAINING_KILLS = amount(2, 60)  # anywhere in a training
DAMAGES = amount(310, 2_000)
MODEL_DAMAGES = amount(30, 300)
FULL_DISKS = amount(15, 60)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


class Crash(Reporter):
    """Ends a training after an evaluation, before its checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def evaluated(self, step: int, *_: Any) -> None:
        if step == self.step:
            raise InterruptedError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    loop.train(BASE, out, prepared=fresh())
    return out


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, which has only the checkpoint of step 1."""
    out = tmp_path_factory.mktemp("begun") / "out"
    with pytest.raises(InterruptedError):
        loop.train(BASE, out, prepared=fresh(), reporter=Crash(2))
    assert [path.name for path in checkpoint.checkpoints(out)] == ["step-00000001"]
    return out


@pytest.fixture(scope="module")
def unsaved(begun: Path) -> Trainer:
    """The same in step 2, ready to be saved."""
    last = checkpoint.checkpoints(begun)[-1]
    trainer = loop._trainer(BASE, fresh(), last, SingleProcess())
    batches = trainer.batches()
    loop.train_until(trainer, batches, 2)
    batches.close()
    trainer.note(trainer.evaluate())
    return trainer


def copy_of(out: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(out, to, symlinks=True)
    return to


def resume(out: Path) -> None:
    loop.train(BASE, out, resume=True, prepared=data())


def fresh() -> Prepared:
    """A tiny model, as a checkpoint has the same files for any; its second step is its best."""
    return prepared(12, 1)


@cache
def data() -> Prepared:
    """Its model is not used where a checkpoint has another one."""
    return fresh()


def assert_ends_alike(out: Path, whole: Path) -> None:
    """Resume a training: weights and curve are those of the one that nothing disturbed."""
    resume(out)
    last, expected = checkpoint.checkpoints(out)[-1], checkpoint.checkpoints(whole)[-1]
    assert last.name == expected.name == f"step-{STEPS:08d}"
    name = "model.safetensors"
    assert (last / name).read_bytes() == (expected / name).read_bytes()
    assert [line["step"] for line in read_metrics(out)] == [
        line["step"] for line in read_metrics(whole)
    ]
    assert (out / "best").resolve().is_dir()
    left = {path.name for path in (out / "checkpoints").iterdir()}
    assert left == {last.name, (out / "best").resolve().name}


def outcome(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """What a call returned, or the sentence with which it was refused."""
    try:
        return call(), None
    except InputError as error:
        return None, str(error)


# ------------------------------------------------------------------------------------ killed


def test_a_checkpoint_killed_between_any_two_writes(
    whole: Path, begun: Path, unsaved: Trainer, tmp_path: Path
) -> None:
    """Every write of a checkpoint, one after the other, and from the first again in `make soak`.

    Many writes change no name and no byte before they are killed, such as an `open` of a folder.
    A training that is resumed sees files alone, so each state of them is resumed once.
    """
    names, states, number, rounds = set(), set(), 0, 0
    for _ in range(KILLS):
        out = copy_of(begun, tmp_path / "out")
        if not killed_at(number, partial(unsaved.save, out)):
            number, rounds = 0, rounds + 1
            out = copy_of(begun, out)
            assert killed_at(number, partial(unsaved.save, out))
        names.add(checkpoint.checkpoints(out)[-1].name)
        state = files_of(out)
        if IS_SOAK or state not in states:
            assert_ends_alike(out, whole)
        states.add(state)
        number += 1
    assert rounds >= 1  # so there was no write after the last kill
    assert len(states) > 20
    assert names == {"step-00000001", "step-00000002"}  # killed before the new name, and after it


def files_of(out: Path) -> frozenset[tuple[str, str | bytes | None]]:
    """All names in a folder, with the target of a link and the content of a file."""

    def content(path: Path) -> str | bytes | None:
        if path.is_symlink():
            return str(path.readlink())
        return None if path.is_dir() else path.read_bytes()

    return frozenset((str(path.relative_to(out)), content(path)) for path in out.rglob("*"))


def test_a_checkpoint_killed_amid_a_write(
    whole: Path, begun: Path, unsaved: Trainer, tmp_path: Path
) -> None:
    folder = checkpoint.checkpoints(begun)[-1]
    sizes = sorted(path.stat().st_size for path in folder.iterdir())
    random_sizes = random.Random(0)
    for number in range(MIDDLE_KILLS):
        most = sizes[-1 - number % len(sizes)]
        out = copy_of(begun, tmp_path / "out")
        assert killed_beyond(random_sizes.randrange(most - 1), partial(unsaved.save, out))
        assert checkpoint.checkpoints(out)[-1].name == "step-00000001"
        assert_ends_alike(out, whole)


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd has threads, which forks lack")
def test_a_training_killed_at_any_write(whole: Path, begun: Path, tmp_path: Path) -> None:
    chosen = random.Random(1)
    for _ in range(TRAINING_KILLS):
        out = copy_of(begun, tmp_path / "out")
        for number in (chosen.randrange(130), chosen.randrange(60)):  # killed once, and again
            killed_at(number, partial(resume, out))
        assert_ends_alike(out, whole)


def test_saving_again_writes_nothing(whole: Path, tmp_path: Path) -> None:
    """A finished training that is resumed keeps its checkpoint, and mends a lost link."""
    out = copy_of(whole, tmp_path / "out")
    (out / "best").unlink()
    last = checkpoint.checkpoints(out)[-1]
    before = last.stat().st_ino, (last / "training.pt").stat().st_mtime_ns
    resume(out)
    assert (last.stat().st_ino, (last / "training.pt").stat().st_mtime_ns) == before
    assert (out / "best").resolve().name == (whole / "best").resolve().name


def test_copies_in_place_of_links(
    whole: Path, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links are refused, `best` is a copy, which is replaced as a whole."""

    def refused(*_: object, **__: object) -> None:
        raise OSError("links are refused")

    monkeypatch.setattr(Path, "symlink_to", refused)
    out = copy_of(begun, tmp_path / "out")
    (out / "best").unlink(missing_ok=True)
    resume(out)
    assert not (out / "best").is_symlink()
    assert checksums.check_model(out / "best") == []
    expected = (whole / "best" / "model.safetensors").read_bytes()
    assert (out / "best" / "model.safetensors").read_bytes() == expected
    assert not (out / "best.partial").exists()


def test_a_best_link_that_cannot_be_written_is_named(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoints stay, and no part of a link is left."""
    out = copy_of(whole, tmp_path / "out")
    kept = [path.name for path in checkpoint.checkpoints(out)]
    best = int((out / "best").resolve().name.removeprefix("step-"))
    (out / "best").unlink()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", full)
    with pytest.raises(InputError, match=r"best: cannot be written, the disk is full"):
        checkpoint.tidy(out, 1, best)
    assert [path.name for path in checkpoint.checkpoints(out)] == kept
    assert not list(out.glob("best*"))


def test_a_defect_while_saving_is_raised_as_it_is(
    begun: Path, unsaved: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the program is no InputError; half a checkpoint is deleted all the same."""

    def defect(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(torch, "save", defect)
    out = copy_of(begun, tmp_path / "out")
    unsaved._saved = None
    with pytest.raises(KeyError, match="a defect"):
        unsaved.save(out)
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["step-00000001"]


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    names = ["step-00000009", "step-100000000", "step-20000000", "step-copy", "step-00000003.old"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "step-00000009", "step-20000000", "step-100000000",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ a full disk


@contextmanager
def tiny_disk(folder: Path, size: int, files: int = 64) -> Iterator[Path]:
    """A file system of its own; needs the rights of root."""
    folder.mkdir()
    options = ["-o", f"size={size},nr_inodes={files}"]
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


FULL_DISK = (
    r"step-00000002: cannot be written, the disk is full; free some space, then continue with "
    r"--resume from step-00000001, which is kept$"
)


def disk_size(out: Path) -> int:
    """Bytes of whole pages, as tmpfs counts."""
    return sum(4096 * -(-one.stat().st_size // 4096) for one in out.rglob("*") if one.is_file())


@AS_ROOT
def test_a_full_disk_at_any_point(
    whole: Path, begun: Path, unsaved: Trainer, tmp_path: Path
) -> None:
    """The previous checkpoint stays; with more room the training goes on."""
    used, new = disk_size(begun), disk_size(checkpoint.checkpoints(begun)[-1])
    for number in range(FULL_DISKS):
        size = used + 4096 + (new - 4 * 4096) * number // FULL_DISKS
        with tiny_disk(tmp_path / f"disk{number}", size) as disk:
            out = copy_of(begun, disk / "out")
            with pytest.raises(InputError, match=FULL_DISK):
                unsaved.save(out)
            assert [one.name for one in (out / "checkpoints").iterdir()] == ["step-00000001"]
            checksums.check_checkpoint(out / "checkpoints" / "step-00000001")
            again = copy_of(out, tmp_path / "again")
        if number in (0, FULL_DISKS - 1):
            assert_ends_alike(again, whole)


@AS_ROOT
def test_a_disk_without_room_for_names(begun: Path, unsaved: Trainer, tmp_path: Path) -> None:
    """As many files as the file system takes: folders, files and the link fail in turn."""
    used, outcomes = 2 + sum(1 for _ in begun.rglob("*")), []
    for left in range(1, 16, amount(2, 1)):
        with tiny_disk(tmp_path / f"disk{left}", 1 << 24, used + left) as disk:
            out = copy_of(begun, disk / "out")
            unsaved._saved = None
            _, reason = outcome(partial(unsaved.save, out))
            named = r": cannot be written, the disk is full; free some space"
            assert reason is None or re.search(named, reason)
            last = checkpoint.checkpoints(out)[-1]
            outcomes.append(last.name)
            checksums.check_checkpoint(last)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {"step-00000001", "step-00000002"}


# ---------------------------------------------------------------------------------- damaged files


def damaged(content: bytes, chosen: random.Random) -> bytes:
    """A flipped bit, some lost bytes at the end, or a block of zeros."""
    kind, size = chosen.randrange(4), len(content)
    if kind == 0:
        return content[: chosen.randrange(size)]
    start = chosen.randrange(size)
    if kind == 1:
        end = min(size, start + chosen.choice([1, 16, 512]))
        return content[:start] + bytes(end - start) + content[end:]
    flipped = bytes([content[start] ^ (1 << chosen.randrange(8))])
    return content[:start] + flipped + content[start + 1 :]


def test_damaged_checkpoints_are_refused(begun: Path, tmp_path: Path) -> None:
    """Whatever is damaged in whichever file: one sentence names it, or nothing has changed."""
    out, chosen = copy_of(begun, tmp_path / "out"), random.Random(2)
    last = checkpoint.checkpoints(out)[-1]
    before = {path: path.read_bytes() for path in sorted(last.iterdir())}
    assert {path.name for path in before} >= {
        "checksums.json", "config.json", "generation_config.json", "model.safetensors",
        "preprocessor_config.json", "tokenizer.json", "training.pt",
    }  # fmt: skip
    refused = 0
    for number in range(DAMAGES):
        path = list(before)[number % len(before)]
        path.write_bytes(damaged(before[path], chosen))
        same = path.read_bytes() == before[path]
        same |= path.name == "checksums.json" and read_or_none(path) == json.loads(before[path])
        if same:
            checksums.check_checkpoint(last)
        else:
            with pytest.raises(InputError) as caught:
                resume(out)
            message = str(caught.value)
            assert str(last) in message
            assert message.endswith(
                f"delete {last} to resume from a checkpoint before it, if there is one"
            )
            assert "\n" not in message
            refused += 1
        path.write_bytes(before[path])
    assert refused > 0.9 * DAMAGES
    checksums.check_checkpoint(last)


def read_or_none(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


@pytest.mark.parametrize("name", ["training.pt", "checksums.json", "tokenizer.json"])
def test_a_lost_file_is_named(begun: Path, whole: Path, tmp_path: Path, name: str) -> None:
    out = copy_of(begun, tmp_path / "out")
    last = checkpoint.checkpoints(out)[-1]
    (last / name).unlink()
    with pytest.raises(InputError, match=re.escape(f"{last / name}: no such file")):
        resume(out)
    shutil.rmtree(last)
    data.cache_clear()  # from the beginning, with random weights
    assert_ends_alike(out, whole)
    data.cache_clear()


def test_damaged_model_folders(begun: Path, tmp_path: Path) -> None:
    """As `--model`: weights are refused, a text is refused or remarked, or nothing has changed."""
    source = checkpoint.checkpoints(begun)[-1]
    folder, chosen = copy_of(source, tmp_path / "model"), random.Random(3)
    expected = content_of(folder, [])
    for number in range(MODEL_DAMAGES):
        paths = [path for path in sorted(folder.iterdir()) if path.name != "training.pt"]
        path = paths[number % len(paths)]
        before = path.read_bytes()
        path.write_bytes(damaged(before, chosen))
        remarks: list[str] = []
        found, reason = outcome(partial(content_of, folder, remarks))
        if reason is not None:
            assert "\n" not in reason
            assert str(folder) in reason
        else:
            assert found == expected or str(path) in remarks[0]
            assert path.suffix != ".safetensors" or path.read_bytes() == before
        path.write_bytes(before)


def content_of(folder: Path, remarks: list[str]) -> tuple[object, ...]:
    recogniser = load_model(folder, say=remarks.append)
    model: Any = recogniser.model
    state = {name: value.tobytes() for name, value in numpy_of(model.state_dict()).items()}
    texts = [json.dumps(asdict_of(one), sort_keys=True) for one in
             (model.config, model.generation_config, recogniser.extractor)]  # fmt: skip
    return state, texts, recogniser.codec.tokenizer.get_vocab(), recogniser.codec.start


def numpy_of(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in state.items()}


def asdict_of(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.to_dict()
    return {name: value for name, value in found.items() if name != "_name_or_path"}


def test_a_list_of_checksums_that_is_not_ours(begun: Path, tmp_path: Path) -> None:
    source = checkpoint.checkpoints(begun)[-1]
    folder = copy_of(source, tmp_path / "model")
    (folder / checksums.CHECKSUMS).write_text('{"model.safetensors": "abc"}')
    assert not checksums.check_model(folder)  # someone else's file of that name
    with pytest.raises(InputError, match="begin a new training with --model"):
        checksums.check_checkpoint(folder)
    for name in ("/dev/zero", "../other", "a/../../other"):
        (folder / checksums.CHECKSUMS).write_text(json.dumps({"sha256": {name: "abc"}}))
        with pytest.raises(InputError, match="is damaged"):
            checksums.check_checkpoint(folder)
    (folder / checksums.CHECKSUMS).write_text('{"sha256": ["abc"]}')
    with pytest.raises(InputError, match="is damaged"):
        checksums.check_checkpoint(folder)
    (folder / checksums.CHECKSUMS).write_text(json.dumps({"sha256": {"x" * 300: "abc"}}))
    with pytest.raises(InputError, match="x: cannot be read, File name too long"):
        checksums.check_checkpoint(folder)
    (folder / checksums.CHECKSUMS).unlink()
    (folder / checksums.CHECKSUMS).mkdir()
    with pytest.raises(InputError, match="cannot be read, Is a directory"):
        checksums.check_checkpoint(folder)


def test_an_edited_text_is_remarked_and_used(begun: Path, tmp_path: Path) -> None:
    folder = copy_of(checkpoint.checkpoints(begun)[-1], tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_length": 7}))
    with pytest.warns(UserWarning, match=re.escape(f"{path}: is not as it was written")):
        assert load_model(folder).model.generation_config.max_length == 7
    recording = tmp_path / "noise.wav"
    recording.write_bytes(wave_of(fresh()))
    result = CliRunner().invoke(app, ["transcribe", str(folder), str(recording)])
    assert result.exit_code == 0, result.output
    assert result.stderr == f"{path}: is not as it was written, but edited or damaged\n"
    (folder / checksums.CHECKSUMS).unlink()  # as of any other model folder
    assert load_model(folder).model.generation_config.max_length == 7
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot be read as a Whisper model"):
        load_model(folder)


def wave_of(given: Any) -> bytes:
    import io

    import soundfile

    file = io.BytesIO()
    soundfile.write(file, given.train[0].samples, 16_000, format="WAV")
    return file.getvalue()


def test_damaged_settings_and_metrics(whole: Path, tmp_path: Path) -> None:
    """Settings are refused, or do not matter; damaged lines of the curve are removed."""
    out, chosen = copy_of(whole, tmp_path / "out"), random.Random(4)
    for name in (SETTINGS, METRICS):
        before = (out / name).read_bytes()
        for _ in range(amount(60, 1_000)):
            (out / name).write_bytes(damaged(before, chosen))
            if name == METRICS:
                Metrics(out, STEPS, tensorboard=False)
                assert all(line["step"] <= STEPS for line in read_metrics(out))
                continue
            found, reason = outcome(partial(resumed, out, BASE))
            assert found == BASE if reason is None else str(out) in reason
        (out / name).write_bytes(before)
    assert json.loads((out / SETTINGS).read_text()) == json.loads(json.dumps(asdict(BASE)))


# ----------------------------------------------------------------------------- a lost process


def rank_of(rank: int, world: int, port: int, out: Path, shard: str, lost: int | None) -> None:
    """A process of a training, as `torchrun` starts it; `lost` is killed in step 2."""
    names: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    step = Trainer.train_step

    def killed(self: Trainer, batches: Any) -> torch.Tensor:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batches)

    if rank == lost:
        Trainer.train_step = killed  # type: ignore[method-assign]
    loop.train(BASE, out, resume=lost is None, prepared=fresh(), shard=shard)


def started(world: int, out: Path, shard: str, lost: int | None) -> list[int]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = store.port
    del store  # the port is free now, and hardly taken by another
    return [
        forked(
            partial(rank_of, rank, world, port, out, shard, lost),
            out.with_name(f"told-{rank}"),
        )
        for rank in range(world)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd has threads, which forks lack")
@pytest.mark.parametrize(("shard", "lost"), [("fsdp", 2), ("ddp", 0)][: amount(1, 2)])
def test_a_killed_process_ends_the_others(
    whole: Path, tmp_path: Path, shard: str, lost: int
) -> None:
    """The others say what happened, long before gloo's half an hour, and two continue."""
    out = tmp_path / "out"
    codes = ended(started(3, out, shard, lost), 120.0)
    assert codes[lost] == -signal.SIGKILL
    for rank in {0, 1, 2} - {lost}:
        assert codes[rank] == 1
        told = (tmp_path / f"told-{rank}").read_text()
        assert told.startswith("InputError: another process of this training has ended")
        assert told.endswith("then continue with --resume")
    assert [path.name for path in checkpoint.checkpoints(out)] == ["step-00000001"]
    assert ended(started(2, out, shard, None), 120.0) == [0, 0]
    assert_close_weights(weights(out), weights(whole), 1e-4, of_convolutions=0.01)
