"""The benchmarks run, and what they write can be published."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shapes
import speech_data
import step_time
import training_step


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short copy, and one thread: the tests run side by side."""
    monkeypatch.setattr(step_time, "COPY_ELEMENTS", 1 << 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("model", "tensors", "millions"),
    [
        ("whisper-tiny", 167, 37.8),
        ("whisper-base", 245, 72.6),
        ("whisper-small", 479, 241.7),
        ("whisper-medium", 947, 763.9),
        ("whisper-large-v3", 1259, 1543.5),
    ],
)
def test_shapes(model: str, tensors: int, millions: float) -> None:
    """The numbers of transformers' models, where the output head is the token embedding."""
    found = shapes.shapes(model)
    assert len(found) == tensors
    assert round(shapes.elements(found) / 1e6, 1) == millions
    assert "proj_out.weight" not in found
    assert "model.encoder.layers.0.self_attn.k_proj.bias" not in found


def test_an_unknown_model() -> None:
    with pytest.raises(ValueError, match="unknown model 'whisper-huge'; known models: whisper-"):
        shapes.shapes("whisper-huge")


def test_step_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What runs everywhere and fast, in two dtypes."""
    out = tmp_path / "results" / "quick.json"
    words = ["plain", "MaxFactor foreach", "torch AdamW", "SGD", "torch Muon"]
    step_time.main(
        ["--quick", "--dtype", "float32", "bfloat16", "--out", str(out), "--optimizers", *words]
    )
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (row["optimizer"], row["dtype"]): row for row in result["rows"]
    }
    for dtype in ("float32", "bfloat16"):
        for name in ("MaxFactor plain", "MaxFactor foreach", "torch AdamW fused", "torch SGD"):
            assert rows[name, dtype]["wall_ms"] > 0.0
            assert name in printed
        assert rows["torch AdamW fused", dtype]["ratio"] == 1.0
    assert rows["torch AdamW", "float32"]["state_bytes_per_parameter"] == pytest.approx(8, abs=0.01)
    assert rows["torch SGD", "float32"]["state_bytes_per_parameter"] == 0.0
    assert {"date", "machine", "versions", "arguments", "parameters"} <= result.keys()
    text = out.read_text()
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert str(tmp_path) not in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_step_time_on_a_gpu() -> None:
    words = ["MaxFactor", "torch AdamW"]
    result = step_time.main(["--quick", "--device", "cuda", "--optimizers", *words])
    for row in result["rows"]:
        assert row["gpu_ms"] > 0.0
        assert row["extra_bytes_per_parameter"] >= 0.0
    assert {"MaxFactor plain", "MaxFactor foreach", "torch AdamW fused"} <= {
        row["optimizer"] for row in result["rows"]
    }


def test_a_package_that_is_missing_is_left_out_with_the_reason() -> None:
    contender = step_time.named("theirs", "no_such_package", "Adam")
    model = shapes.shapes("quick")
    report = step_time.measure([contender], model, "float32", "cpu", repeats=1)
    assert report.rows == []
    assert report.skipped == {
        "theirs (float32)": "ModuleNotFoundError: No module named 'no_such_package'"
    }


def test_a_filter_that_matches_nothing() -> None:
    with pytest.raises(SystemExit, match=r"no optimizer has one of .*'MaxFactor plain'"):
        step_time.chosen(["nonsense"])


def test_state_is_counted_once() -> None:
    shared = torch.zeros(10)

    class Optimizer:
        def __init__(self) -> None:
            self.state = {0: {"a": shared, "b": shared}, 1: [torch.zeros(5, dtype=torch.int8), 3]}

        def step(self) -> None:
            """Nothing to do."""

    assert step_time.state_bytes(Optimizer()) == 45


def test_speech_data_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    cache = str(tmp_path / "cache")
    speech_data.main(["--utterances=60", "--batches=2", "--cache", cache, "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    assert row["utterances"] == 60
    assert row["times_real_time_per_core"] > 0
    assert {"own_megabytes", "mapped_megabytes"} <= row.keys()


def test_share_of_a_training_step(tmp_path: Path) -> None:
    report = training_step.main(["--quick", "--out", str(tmp_path / "share.json")])
    assert json.loads((tmp_path / "share.json").read_text())["rows"] == report["rows"]
    assert [row["optimizer"] for row in report["rows"]] == [
        "1.0", "lean", "fam", "speech", "torch AdamW fused",
    ]  # fmt: skip
    assert all(0.0 < row["share"] < 1.0 for row in report["rows"])
