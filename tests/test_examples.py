"""The touch tones: what they sound like, how errors are counted; and that the scripts run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import touch_tones
import touch_tones_study
from touch_tones import CONTESTANTS, KEYS, RATE, Line, Plan, edit_distance, make_calls, synthesize

# The standard's table (ITU-T Q.23), in Hz.
STANDARD = {
    "1": (697, 1209),
    "2": (697, 1336),
    "3": (697, 1477),
    "4": (770, 1209),
    "5": (770, 1336),
    "6": (770, 1477),
    "7": (852, 1209),
    "8": (852, 1336),
    "9": (852, 1477),
    "*": (941, 1209),
    "0": (941, 1336),
    "#": (941, 1477),
}
CLEAR = Line(
    digits=(1, 1), press=(0.5, 0.5), gap=(0.1, 0.1), loudness=(-3.0, 0.0), detuning=0, snr=(30, 30)
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("key", STANDARD)
def test_a_key_sounds_as_its_two_tones(key: str) -> None:
    wave = synthesize(torch.tensor([[KEYS.index(key) + 1]]), generator(), CLEAR)[0]
    spectrum = torch.fft.rfft(wave[RATE // 10 : 6 * RATE // 10]).abs()
    hertz = torch.fft.rfftfreq(RATE // 2, 1 / RATE)
    peaks = []
    for _ in range(2):
        peaks.append(float(hertz[spectrum.argmax()]))
        spectrum[(hertz - peaks[-1]).abs() < 30] = 0.0
    assert sorted(peaks) == pytest.approx(STANDARD[key], abs=2.0)  # the transform's resolution


def test_it_is_quiet_between_the_presses() -> None:
    wave = synthesize(torch.tensor([[5], [0]]), generator(), CLEAR)
    noise, tone = wave[0, : RATE // 10], wave[0, RATE // 10 : 6 * RATE // 10]
    ratio = tone.square().mean() / noise.square().mean()
    assert 10 * ratio.log10() == pytest.approx(30, abs=1)  # dB
    assert not wave[1].any()  # no key, no tone and no noise


def test_calls_follow_from_the_seed() -> None:
    first, again, other = (make_calls(8, generator(seed), Line()) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not torch.equal(first.spectrogram, other.spectrogram)
    assert first.keys.count_nonzero(1).tolist() == first.lengths.tolist()
    assert {3, 6} <= set(make_calls(64, generator(), Line()).lengths.tolist()) <= {3, 4, 5, 6}


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("", "12", 2),
        ("12", "", 2),
        ("123", "123", 0),
        ("123", "193", 1),
        ("123", "13", 1),
        ("13", "123", 1),
        ("12", "21", 2),
        ("0123", "1230", 2),
        ("kitten", "sitting", 3),
    ],
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_error_rate_is_over_all_digits() -> None:
    assert touch_tones.error_rate([("12345", "12345"), ("678", "68"), ("90", "9011")]) == 0.3


def test_training_follows_from_the_seed() -> None:
    plan = Plan(steps=3, batch=2, held_out=4, report_every=1)
    losses = []
    for _ in range(2):
        run = touch_tones.train(CONTESTANTS["adafactor"], plan, report=lambda _: None)
        losses.append([point.loss for point in run.curve])
    assert losses[0] == losses[1]


def test_the_demo_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    touch_tones.main(["--steps", "3", "--lr", "0.02"])
    shown, complaints = capsys.readouterr()
    assert "MaxFactor, lr 0.02\n" in shown
    assert re.search(r"^MaxFactor +3 +\d+\.\d +\d+\.\d% +0\.16$", shown, re.MULTILINE)
    assert re.search(r"^AdamW +3 +\d+\.\d +\d+\.\d% +8\.00$", shown, re.MULTILINE)
    assert re.search(r"^MaxFactor: dialled [\d*#]+ +heard", shown, re.MULTILINE)
    assert not complaints


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_the_demo_refuses_steps(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        touch_tones.main(["--steps", steps])
    assert "--steps" in capsys.readouterr().err


def test_the_quick_study_writes_its_files(tmp_path: Path) -> None:
    touch_tones_study.main(["--quick", "--out", str(tmp_path)])
    text = (tmp_path / "touch_tones.json").read_text()
    picture = (tmp_path / "touch_tones.svg").read_text()
    record = json.loads(text)
    assert set(record) == {
        *("command", "date", "machine", "versions"),
        *("task", "search_seeds", "seeds", "optimizers"),
    }
    assert [row["name"] for row in record["optimizers"]] == [
        "MaxFactor 1.0",
        "MaxFactor 1.0, no decay",
        "maxfactor.Adafactor",
        "torch.optim.Adafactor",
        "torch.optim.AdamW",
    ]
    for row in record["optimizers"]:
        assert row["lr"] in row["grid"]
        assert row["error_min"] <= row["error_mean"] <= row["error_max"]
        assert len(row["search"]) == len(row["grid"]) == len(row["runs"]) == 1
        curve = row["runs"][0]["curve"]
        assert set(curve) == {"step", "loss", "error", "lr", "seconds"}
        assert curve["step"] == [10, 20]
    for private in (str(tmp_path), str(touch_tones_study.ROOT)):
        assert private not in text
        assert private not in picture
    assert "<svg" in picture
    assert "dc:date" not in picture


def torchrun(ranks: int, *arguments: str) -> str:
    """What `examples/fsdp2.py` prints, over several processes."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", str(ranks), "examples/fsdp2.py", *arguments]
    path = os.pathsep.join(sys.path)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    done = subprocess.run(
        command, cwd=root, env=environment, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_shards_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    """Also on another number of ranks than they were saved from."""
    pattern = r"loss ([\d.]+) to ([\d.]+)\nnext step: loss ([\d.]+), from the checkpoint ([\d.]+)"
    first = torchrun(2, "--steps", "12", "--checkpoint", str(tmp_path))
    start, end, then, again = map(float, re.findall(pattern, first)[0])
    assert then == again
    assert end < start - 0.5
    second = torchrun(1, "--steps", "1", "--checkpoint", str(tmp_path))
    assert "loaded" in second
    went_on, _, then, again = map(float, re.findall(pattern, second)[0])
    assert then == again
    assert went_on < start - 0.5
