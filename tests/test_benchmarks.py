"""The benchmarks run, and what they write can be published."""

from __future__ import annotations

import copy
import json
import math
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jiwer
import pytest
import torch
from typer.testing import CliRunner

import maxfactor
from figures import fam_pictures, report_picture
from maxfactor_speech.bench import contenders, shapes, step_time
from maxfactor_speech.cli import app
from maxfactor_speech.state_size import state_bytes
from maxfactor_speech.training.optimizers import names as optimizer_names
from measurement import RESULTS, Record, milliseconds, write_json
from speech_application import Comparison, Prepared, Settings, Trainer, loss_of, task_codec
from studies import fam_spectrum, momentum_study, speech_task
from studies.digits_task import DigitsTask, digits
from studies.entries import Entry, entry
from studies.momentum_tables import FILES, TABLES, entries_of
from studies.runs import PEERS, Run, group_settings, key_of, make_optimizers, quick
from studies.speech_task import FeatureSets
from studies.summary import (
    Results,
    due,
    markdown,
    merged,
    read_runs,
    smooth_range,
    summary,
    usable_range,
)
from studies.training import Training, perform, prepare_speech
from timing import (
    gpu_busy,
    newton_schulz,
    sharded_step,
    small_memory,
    step_kernels,
    telemetry,
    training_step,
)


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
    names = "quality,quality heads 1,adamw,maxfactor plain,MaxFactor foreach,torch AdamW fused"
    names += ",torch SGD"
    step_time.main(
        ["--quick", "--dtype", "float32", "bfloat16", "--out", str(out), "--optimizers", names]
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
    assert rows["adamw", "float32"]["state_bytes_per_parameter"] == pytest.approx(8, abs=0.01)
    assert rows["quality", "float32"]["state_bytes_per_parameter"] < 1.5
    assert rows["quality heads 1", "bfloat16"]["wall_ms"] > 0.0
    assert rows["torch SGD", "float32"]["state_bytes_per_parameter"] == 0.0
    assert {"date", "machine", "versions", "arguments", "parameters"} <= result.keys()
    text = out.read_text()
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert str(tmp_path) not in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_step_time_on_a_gpu() -> None:
    names = "quality,adamw,MaxFactor plain,MaxFactor foreach,torch AdamW fused"
    result = step_time.main(["--quick", "--device", "cuda", "--optimizers", names])
    for row in result["rows"]:
        assert row["gpu_ms"] > 0.0
        assert row["extra_bytes_per_parameter"] >= 0.0
    assert {"MaxFactor plain", "MaxFactor foreach", "torch AdamW fused"} <= {
        row["optimizer"] for row in result["rows"]
    }


def test_a_package_that_is_missing_is_left_out_with_the_reason() -> None:
    contender = contenders.named("theirs", "no_such_package", "Adam")
    model = shapes.shapes("quick")
    report = step_time.measure([contender], model, "float32", "cpu", repeats=1)
    assert report.rows == []
    assert report.skipped == {
        "theirs (float32)": "ModuleNotFoundError: No module named 'no_such_package'"
    }


def test_the_command_names_itself_and_is_quick_on_request() -> None:
    run = CliRunner().invoke
    wrong = run(app, ["bench", "--quick", "--repeats", "0"])
    assert wrong.exit_code == 2
    assert "maxfactor bench: error: --repeats must be at least 1, got 0" in wrong.stderr
    assert wrong.stderr.startswith("usage: maxfactor bench [OPTIONS]")
    right = run(app, ["bench", "--quick", "--optimizers", "adamw"])
    assert right.exit_code == 0, right.output
    assert "quick: " in right.output


def test_the_names_are_those_of_compare() -> None:
    assert [one.name for one in contenders.chosen(optimizer_names())] == optimizer_names()
    assert len(contenders.chosen(["all"])) == len(contenders.CONTENDERS)
    assert [one.name for one in contenders.chosen([])] == list(contenders.DEFAULT)
    wrong = CliRunner().invoke(app, ["bench", "--quick", "--optimizers", "quality,adam"])
    assert wrong.exit_code == 2
    for known in (*optimizer_names(), "MaxFactor plain", "torch AdamW fused"):
        assert known in wrong.stderr


def test_recipes_are_measured_with_the_groups_of_a_real_whisper() -> None:
    model = step_time.problem(shapes.shapes("quick"), torch.float32, "cpu")
    assert [name for name, _ in model.named_parameters()] == list(shapes.shapes("quick"))
    groups = maxfactor.for_model(model).param_groups
    kinds = {group["kind"]: len(group["params"]) for group in groups}
    # Two layers with 10 + 6 matrices; the head is tied to one of the three embeddings.
    assert kinds == {"hidden": 16, "conv": 2, "embedding": 3, "vector": 29}


def test_without_the_fused_adamw_the_ratio_is_to_adamw() -> None:
    model = shapes.shapes("quick")
    report = step_time.measure(
        contenders.chosen(["torch SGD", "adamw"]), model, "float32", "cpu", repeats=1
    )
    sgd, adamw = report.rows
    assert adamw.ratio == 1.0
    assert sgd.ratio == pytest.approx(sgd.wall_ms / adamw.wall_ms)


def test_state_is_counted_once() -> None:
    shared = torch.zeros(10)

    class Optimizer:
        def __init__(self) -> None:
            self.state = {0: {"a": shared, "b": shared}, 1: [torch.zeros(5, dtype=torch.int8), 3]}

        def step(self) -> None:
            """Nothing to do."""

    assert state_bytes(Optimizer()) == 45


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    options = "--model quick --repeats 1 --dtype float32 --dtype bfloat16 --optimizers"
    names = "torch AdamW, torch AdamW fused"
    result = CliRunner().invoke(app, ["bench", *options.split(), names, "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert {"torch AdamW", "torch AdamW fused"} <= {row["optimizer"] for row in rows}


def test_how_busy_a_gpu_is(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    gpu_busy.main(["--quick", "--cache", str(tmp_path), "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    assert row["steps_per_second"] > 0.0
    assert row["audio_seconds_per_second"] > row["steps_per_second"]
    assert row["busy"] is None  # a CPU has no kernels to look at


def test_small_memory(tmp_path: Path) -> None:
    out = tmp_path / "small.json"
    small_memory.main(["--quick", "--recipes", "fast", "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    assert row["train"]["out_of_memory"] is None
    assert row["train"]["ms_per_step"] > 0.0
    times = [row[name]["ms_per_step"] for name in ("released", "plain")]
    assert min(times) > 0.0
    assert row["ratio"] == round(times[0] / times[1], 3)
    assert len(row["released"]["step_ms"]) == len(row["plain"]["step_ms"]) == 2
    assert row["largest"] == 2
    check_publishable(out.read_text(), tmp_path)


def test_where_the_time_of_steps_in_small_memory_goes(tmp_path: Path) -> None:
    out = tmp_path / "small.json"
    options = ["--quick", "--parts", "steps", "--profile", "--recipes", "lean", "--out", str(out)]
    small_memory.main(options)
    [row] = json.loads(out.read_text())["rows"]
    assert not {"train", "largest"} & row.keys()
    released, plain = (row[name]["profile"] for name in ("released", "plain"))
    assert released["calls"]["take"]["calls"] >= released["calls"]["step_window"]["calls"] > 0
    assert plain["calls"]["_step_all"]["calls"] == 1
    assert min(released["ms_without_optimizer"]) > 0.0
    assert released["operations"]
    assert released["python_in_hooks"]
    check_publishable(out.read_text(), tmp_path)


def test_sharded_step(tmp_path: Path) -> None:
    out = tmp_path / "sharded.json"
    sharded_step.main(["--quick", "--ranks", "1", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [0, 1, 2]
    assert all(row["wall_ms"] > 0.0 for row in rows)
    check_publishable(out.read_text(), tmp_path)


def test_time_with_a_kernel_counts_once() -> None:
    overlapping = [(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.0, 2.0)]
    assert gpu_busy.covered(overlapping) == 4.0
    assert gpu_busy.covered([]) == 0.0


def test_a_warm_up_is_not_timed() -> None:
    calls: list[int] = []
    assert milliseconds(lambda: calls.append(1), "cpu", repeats=2) >= 0.0
    assert len(calls) == step_time.WARM_UP + 2


def test_lists_are_written_on_one_line(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "a.json", {"a": [1, 2], "b": {"c": [{"d": [3]}]}})
    text = (tmp_path / "new" / "a.json").read_text()
    assert json.loads(text) == {"a": [1, 2], "b": {"c": [{"d": [3]}]}}
    assert '"a": [ 1, 2 ]' in text


def test_share_of_a_training_step(tmp_path: Path) -> None:
    report = training_step.main(["--quick", "--out", str(tmp_path / "share.json")])
    assert json.loads((tmp_path / "share.json").read_text())["rows"] == report["rows"]
    assert [row["optimizer"] for row in report["rows"]] == [
        "published-1.0", "lean", "fast", "quality", "torch AdamW fused",
    ]  # fmt: skip
    assert all(0.0 < row["share"] < 1.0 for row in report["rows"])


def test_cost_of_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "RECIPES", ("lean", "fast"))
    report = telemetry.main(["--quick", "--out", str(tmp_path / "cost.json")])
    assert json.loads((tmp_path / "cost.json").read_text())["rows"] == report["rows"]
    found = [(row["dtype"], row["recipe"]) for row in report["rows"]]
    assert found == [(d, r) for d in ("float32", "bfloat16") for r in ("lean", "fast")]
    assert all(row["same_weights"] for row in report["rows"])


def test_kernels_of_a_step(tmp_path: Path) -> None:
    options = ["--quick", "--recipes", "lean", "--out", str(tmp_path / "kernels.json")]
    report = step_kernels.main(options)
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"] == report["rows"]
    assert [row["dtype"] for row in report["rows"]] == ["float32", "bfloat16"]
    for row in report["rows"]:
        names = {each["kernel"]: each["calls"] for each in row["kernels"]}
        assert names["Optimizer.step#MaxFactor.step"] == 1.0
        assert "aten::sum" in names


def test_spectrum_and_pictures(tmp_path: Path) -> None:
    """Two short trainings, what FAM saw of each matrix, and all pictures."""
    spectrum, cache = tmp_path / "spectrum.json", tmp_path / "cache"
    fam_spectrum.main(["--quick", "--out", str(spectrum), "--cache", str(cache)])
    text = spectrum.read_text()
    result = json.loads(text)
    one, several = result["trainings"]
    assert (one["bands"], several["bands"]) == (1, 8)
    for training in (one, several):
        parts = [matrix["part"] for matrix in training["matrices"].values()]
        assert list(dict.fromkeys(parts)) == list(fam_spectrum.PARTS.values())
        for matrix in training["matrices"].values():
            for beta, rho in zip(matrix["beta"], matrix["rho"], strict=True):
                assert len(beta) == len(training["steps"])
                for step, at, coherence in zip(training["steps"], beta, rho, strict=True):
                    expected = 0.9 if step < 20 else min(max(1 - coherence, 0.5), 0.98)
                    assert at == pytest.approx(expected, abs=2e-3)  # three digits are stored
            assert len(matrix["power"]) == training["bands"]
    check_publishable(text, tmp_path)
    drawn = []
    for out in (tmp_path / "first", tmp_path / "again"):  # the same numbers, the same files
        fam_pictures.main(["--spectrum", str(spectrum), "--out", str(out)])
        drawn.append({path.stem: path.read_text() for path in out.glob("*.svg")})
    assert drawn[0].keys() == {"coherence", "beta", "bands", "rates", "main"}
    assert all(picture.rstrip().endswith("</svg>") for picture in drawn[0].values())
    assert drawn[0] == drawn[1]


def check_publishable(text: str, folder: Path) -> None:
    """The machine is described, and nothing says whose it is."""
    for part in ('"date"', '"machine"', '"versions"'):
        assert part in text
    for private in (socket.gethostname(), str(Path.home()), str(folder)):
        assert private not in text


def test_the_momentum_of_one_number() -> None:
    """A constant stays as it is, from the first step on."""
    assert fam_pictures.averaged([2.0] * 5, rho=0.3) == pytest.approx([2.0] * 5)
    [first, second] = fam_pictures.averaged([0.0, 1.0], rho=0.5)
    assert (first, second) == pytest.approx((0.0, 0.95 * 2 / 3 + 0.05))


def study(out: Path, table: str, *more: str) -> None:
    options = ["--quick", "--jobs", "1", "--out", str(out), "--results", str(out / "results")]
    momentum_study.main([table, *options, *more])


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


LEAN = ("lean", "lean, clip of the update at 1")


@pytest.mark.usefixtures("forked_workers")
def test_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of three tasks from the data to the report, interrupted and resumed."""
    study(tmp_path, "bands", "--only", "1 band", "--stage", "search")
    path = tmp_path / "bands.jsonl"
    found = lines(path)
    assert [run["run"]["lr"] for run in found] == [0.04, 0.08]
    for run in found:
        assert run["steps_taken"] == 6
        assert run["mode"] == "eager"
        assert run["wer"] > 0.0
        assert 0.0 < run["loss"] < 5.0
        assert 1.0 < run["state_bytes_per_parameter"] < 2.0

    path.write_text(path.read_text() + '{"run": {"optimizer": "fast", "lr"')  # cut off by a crash
    study(tmp_path, "bands", "--only", "1 band", "--minutes", "0")  # no time for the others
    assert len(Results.read(tmp_path).done) == 2
    study(tmp_path, "bands", "--only", "1 band", "--stage", "search")  # nothing is left to do
    assert len(Results.read(tmp_path).done) == 2

    results, device = Results.read(tmp_path), torch.device("cpu")
    sets = FeatureSets(tmp_path / "cache", device)
    for table, measure in (("digits", "wer"), ("language", "bits")):
        [row] = [row for row in entries_of(table, is_quick=True) if row.name in LEAN]
        prepare_speech([row.run], tmp_path / "cache", 1)
        record = perform(row.at(0.02), tmp_path / "cache", device, sets, "whole")
        assert record[measure] > 0.0
        results.add(table, record)

    capsys.readouterr()
    study(tmp_path, "report")
    printed = capsys.readouterr().out
    for shown in ("| 1 band * | ", "| lean, clip of the update at 1 * | ", "| lean * | "):
        assert shown in printed
    text = (tmp_path / "results" / "momentum_study.json").read_text()
    assert [row["name"] for row in json.loads(text)["tables"]["bands"]] == ["1 band"]
    runs = lines(tmp_path / "results" / "momentum_study_runs.jsonl")
    assert [run["key"] for run in runs] == [run["key"] for run in found]
    assert runs[0]["groups"]["hidden"]["d"] == "inf"
    check_publishable(text, tmp_path)


def test_digits_are_trained_as_by_the_command(tmp_path: Path) -> None:
    """Stored rows were measured with the loop of `maxfactor train`; error rates differ now."""
    run, device = quick(Run("lean", lr=0.02, task="digits")), torch.device("cpu")
    task = DigitsTask(run, tmp_path, device)
    prepared = Prepared(*digits(run, tmp_path), copy.deepcopy(task.model), task_codec("digits"))
    training = Training(run, task, device)
    training.run("eager")
    settings = Settings(
        optimizer="lean", lr=run.lr, steps=run.steps, batch_size=run.batch, device="cpu"
    )
    trainer = Trainer(settings, prepared)
    batches = trainer.batches()
    losses = [float(trainer.train_step(next(batches))) for _ in range(run.steps)]
    batches.close()
    assert training.losses.tolist() == losses
    assert 0.0 <= task.measured()["wer"] < 1000.0


def test_stored_rows_follow_from_stored_runs() -> None:
    """Every table of the documents, except rows whose code is in an earlier commit."""
    results = Results(RESULTS, read_runs(RESULTS / "momentum_study_runs.jsonl"))
    stored = json.loads((RESULTS / "momentum_study.json").read_text())["tables"]
    for table in FILES["momentum_study"]:
        computed = [row for entry in entries_of(table) if (row := summary(entry, results))["tried"]]
        expected = [row for row in stored[table] if "commit" not in row]
        assert json.loads(json.dumps(computed)) == expected


@pytest.mark.parametrize("file", ["digits_study", "language_study"])
def test_stored_rows_belong_to_the_table(file: str) -> None:
    stored = json.loads((RESULTS / f"{file}.json").read_text())["tables"]
    for table, rows in stored.items():
        names = [row["name"] for row in rows if "commit" not in row]
        assert sorted(names) == sorted(row.name for row in entries_of(table))
        assert markdown(rows).count("|\n") >= len(rows)


def test_a_report_leaves_other_rows_as_they_are() -> None:
    stored = [{"name": "a", "lr": 1}, {"name": "b", "lr": 2}]
    assert merged(stored, [{"name": "b", "lr": 3}, {"name": "c"}]) == [
        {"name": "a", "lr": 1}, {"name": "b", "lr": 3}, {"name": "c"},
    ]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_tables(table: str) -> None:
    """Names and runs are all different, and each makes an optimizer that steps."""
    rows = entries_of(table)
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.run.key for row in rows}) == len(rows)
    for row in rows:
        again = Run(**json.loads(json.dumps(row.run.described)))
        assert again == row.run
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.Linear(6, 5))
        optimizers, _ = make_optimizers(row.run, model, torch.device("cpu"))
        model(torch.randn(3, 2, 8)).square().mean().backward()
        before = [param.detach().clone() for param in model.parameters()]
        for optimizer in optimizers:
            optimizer.step()
        for param, old in zip(model.parameters(), before, strict=True):
            assert not torch.equal(param, old)
            assert param.isfinite().all()


def test_a_run_is_known_by_its_settings() -> None:
    """Not by how they are written: two tables share a run."""
    run = Run("fast", lr=0.02)
    assert replace(run, settings={"weight_decay": 0.01, "d": math.inf}).key == run.key
    assert replace(run, settings={"scale": "current"}).key != run.key
    for other in (replace(run, lr=0.01), replace(run, seed=1), replace(run, batch=8)):
        assert other.key != run.key
    assert replace(run, settings={"momentum_dtype": "fp32"}).key != run.key
    assert key_of(run.described, group_settings(run)) == run.key  # as a stored run is found
    changed = group_settings(run)
    changed["hidden"]["weight_decay"] = 0.5
    assert key_of(run.described, changed) != run.key  # another recipe is another run


def recipe_groups(table: str, lr: float = 0.01, **how: bool) -> dict[str, dict[str, Record]]:
    """The settings of the rows that are recipes, by name and kind of layer."""
    rows = [row for row in entries_of(table, **how) if row.run.optimizer not in PEERS]
    return {row.name: group_settings(row.at(lr)) for row in rows}


def test_rows_have_the_decay_that_they_were_measured_with() -> None:
    """Before 0.2.0 recipes decayed by `lr`; rows that are about decay keep theirs."""
    stored = recipe_groups("main")
    now = recipe_groups("main", recipe_decay=True)
    assert stored["quality"]["hidden"]["weight_decay"] == 0.1
    assert "decay_by" not in stored["quality"]["hidden"]  # by lr
    own = group_settings(Run("quality", lr=0.01))
    assert now["quality"]["hidden"] == {**own["hidden"], "scale": "initial"}
    assert now["quality"]["conv"]["scale"] == "initial"  # sizes stay as they were measured
    for name in ("quality", "fast", "lean"):  # ... and so do the directions of convolutions
        assert group_settings(Run(name, lr=0.01))["conv"]["direction"] == "orthogonal"
        assert now[name]["conv"]["direction"] == "factored"
    assert now["lean"] == stored["lean"]
    decays = {row.name: row.run.settings for row in entries_of("quality", recipe_decay=True)}
    assert decays["weight decay 0.2"] == {
        "weight_decay": 0.2,
        "switches": {"decay_by": "lr"},
        "eps": [1e-10, 1e-3],
    }


def test_a_kind_comes_before_the_others() -> None:
    """Also when its name does, since a key sorts them."""
    others: dict[str, Any] = {"lr_share": 0.5, "scale": "current"}
    run = Run("fast", 0.04, by_kind={"others": others, "conv": {"lr_share": 2.0}})
    groups = group_settings(run)
    rates = {kind: group["lr"] for kind, group in groups.items()}
    assert rates == {"hidden": 0.04, "conv": 0.08, "embedding": 0.02, "vector": 0.02}
    assert "scale" not in groups["conv"]  # "current" is not written
    assert groups["hidden"]["scale"] == "initial"


def test_rows_of_the_digits_table() -> None:
    rows = recipe_groups("digits", lr=0.08)
    changed = rows["fast, memory up to 0.88, norms and biases at a quarter of the rate"]
    assert {kind: group["lr"] for kind, group in changed.items()} == {
        "hidden": 0.08, "conv": 0.08, "embedding": 0.08, "vector": 0.02,
    }  # fmt: skip
    assert changed["hidden"]["momentum"] == asdict(maxfactor.FAM(beta_max=0.88))
    shorter = rows["quality, memory of 0.8"]
    assert shorter["hidden"]["momentum"] == 0.8
    assert shorter["hidden"]["direction"] == "orthogonal"
    assert shorter["vector"]["lr"] == 0.08
    assert rows["lean, clip of the update at 1.5"]["hidden"]["d"] == 1.5


@pytest.mark.parametrize(("settings", "momentum"), [({}, 0.95), ({"momentum": 0.9}, 0.9)])
def test_settings_of_muon(settings: dict[str, Any], momentum: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    run = Run("muon", 0.02, settings=settings)
    [muon, _], _ = make_optimizers(run, model, torch.device("cpu"))
    assert muon.param_groups[0]["momentum"] == momentum


def test_all_seeds_choose_among_rates_that_have_them() -> None:
    row = entry("fast", "fast", (0.02, 0.04, 0.08))
    results = Results(Path())
    wers = {0.02: (9.0,), 0.04: (1.0, 8.0, 9.0), 0.08: (2.0, 3.0, 4.0)}
    for lr, found in wers.items():
        for seed, wer in enumerate(found):
            known = {"wer": wer, "loss": None, "nan": False, "ms_per_step": 1.0}
            results.done[row.at(lr, seed).key] = known | {"state_bytes_per_parameter": 1.0}
    assert summary(row, results)["lr"] == 0.08


def done(row: Entry, wers: dict[float, float]) -> Results:
    results = Results(Path())
    for lr, wer in wers.items():
        results.done[row.at(lr).key] = {"wer": wer, "loss": wer / 10}
    return results


def test_the_best_rate_gets_all_seeds() -> None:
    row = replace(entries_of("main")[0], search=1, seeds=3)
    assert row.rates == (0.005, 0.01, 0.02, 0.04)
    results = done(row, {0.005: 9.0, 0.01: 8.0, 0.02: 7.0})
    assert [run.lr for run in due([row], results, "all")] == [0.04]
    results = done(row, {0.005: 9.0, 0.01: 8.0, 0.02: 7.0, 0.04: 8.0})
    runs = due([row], results, "all")
    assert [(run.lr, run.seed) for run in runs] == [(0.02, 1), (0.02, 2)]
    assert due([row], results, "search") == []


def test_three_seeds_choose_a_rate() -> None:
    """By their mean, and then no rate is added at the edge."""
    row = replace(entries_of("main")[0], rates=(0.01, 0.02), search=3, seeds=4)
    results = done(row, {0.01: 1.0, 0.02: 2.0})
    runs = due([row], results, "all")
    assert [(run.lr, run.seed) for run in runs] == [(0.01, 1), (0.02, 1), (0.01, 2), (0.02, 2)]
    for seed, wers in ((1, {0.01: 8.0, 0.02: 2.0}), (2, {0.01: 8.0, 0.02: 2.0})):
        for lr, wer in wers.items():
            run = row.at(lr, seed)
            results.done[run.key] = {"wer": wer, "loss": 0.1}
    assert [(run.lr, run.seed) for run in due([row], results, "all")] == [(0.02, 3)]


def test_a_best_rate_at_the_edge_calls_for_another() -> None:
    row = replace(entries_of("main")[0], search=1)
    results = done(row, {0.005: 9.0, 0.01: 8.0, 0.02: 7.0, 0.04: 6.0})
    assert [run.lr for run in due([row], results, "search")] == [0.08]
    results = done(row, {0.005: 97.0, 0.01: 98.0, 0.02: 99.0, 0.04: 100.0})  # learns nothing
    assert due([row], results, "search") == []


def test_the_usable_range() -> None:
    tried = {0.01: 10.0, 0.02: 8.0, 0.04: 9.9, 0.08: 10.1}
    assert usable_range({lr: [wer] for lr, wer in tried.items()}) == 4.0


def test_the_range_by_a_curve() -> None:
    """Errors that are a parabola, both axes logarithmic, and one rate that is far off."""
    errors = {lr: math.exp(0.5 * math.log(lr / 0.03) ** 2) for lr in (0.01, 0.02, 0.04, 0.08)}
    tried = {lr: [wer] for lr, wer in {**errors, 0.4: 90.0}.items()}
    apart = math.exp(math.sqrt(math.log(1.25) / 0.5))
    expected = pytest.approx((0.03 / apart, 0.03 * apart), rel=0.01)
    assert smooth_range(tried) == expected
    del tried[0.04]
    assert smooth_range(tried) is None


def test_the_picture_of_a_terminal(tmp_path: Path) -> None:
    comparison = Comparison(report_picture.SETTINGS, report_picture.OPTIMIZERS)
    for name in report_picture.OPTIMIZERS:
        folder = tmp_path / "runs" / comparison.run(name, None, 0).folder
        folder.mkdir(parents=True)
        pace = {"loss": 1.25, "lr": 0.0375, "effective_lr": 0.01, "steps_per_second": 2.0}
        lines: list[dict[str, float]] = [{"step": 0, "seconds": 0.0, "wer": 1.0}]
        for step in range(10, 401, 10):
            lines.append({"step": step, "seconds": step / 5, **pace})
        lines.insert(10, {"step": 90, "seconds": 18.0, "wer": 0.432})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    report_picture.draw_terminal(tmp_path, tmp_path / "terminal.svg")
    text = (tmp_path / "terminal.svg").read_text().replace("&#160;", " ")
    assert text.count("170/400") == 2  # the two that run, after 35 s
    for part in (
        "1: quality",
        "2: fast",
        "loss 1.250  WER 43.2%  lr 0.0375",
        "00:45",
    ):  # at 90 steps in 17.5 s
        assert part in text
    assert "@font-face" not in text


def test_pictures_are_small() -> None:
    images = [report_picture.IMAGES / name for name in ("report.png", "terminal.svg")]
    assert all(one.stat().st_size < 200_000 for one in images)


def test_word_errors() -> None:
    references = ["a b c", "a b", "one two three four", "x"]
    hypotheses = ["a c", "", "one tow three for five", "y x z"]
    pairs = zip(references, hypotheses, strict=True)
    found = sum(speech_task.edits(a.split(), b.split()) for a, b in pairs)
    assert found / 10 == pytest.approx(jiwer.wer(references, hypotheses))


def test_the_loss_reads_nothing_on_the_host(tmp_path: Path) -> None:
    """Or it could not be computed without values."""
    run = quick(Run("adamw", lr=0.002))
    speech = speech_task.training_speech(run)
    speech_task.synthesise([speech], tmp_path, 1)
    data = speech_task.load_features(speech, tmp_path, torch.device("cpu"))
    model = speech_task.new_model(run, tmp_path, torch.device("cpu"))
    on_meta = [x.to("meta") for x in (data.features, data.labels)]
    model.to("meta")  # type: ignore[arg-type]  # mistaken by a decorator's types
    loss_of(model, *on_meta).backward()


def test_newton_schulz(tmp_path: Path) -> None:
    """All parts are measured; in the interpreter only the digits mean something."""
    newton_schulz.main(["--quick", "--heads-per-block", "1", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert not any("error" in row for row in found["tiles"])
    assert found["total"]["tflop"] == pytest.approx(
        sum(row["tflop"] for row in found["iteration"]), rel=1e-12
    )
    assert max(row["ours_error"] for row in found["spread"]) < 1e-4
    assert [row["shape"] for row in found["iteration"]] == [[12, 24], [24, 12], [16, 48]]
    assert newton_schulz.in_blocks(newton_schulz.HIDDEN, newton_schulz.ATTENTION, 4) == {
        (256, 1280): 5 * 288, (1280, 256): 5 * 96, (5120, 1280): 64, (1280, 5120): 64
    }  # fmt: skip


def test_the_readme_names_every_result_and_picture() -> None:
    """And every command in it is one of the scripts."""
    text = (RESULTS.parent / "README.md").read_text()
    pictures = RESULTS.parent.parent / "docs" / "pictures"
    for path in (*RESULTS.iterdir(), *pictures.iterdir()):
        assert f"`{path.name}`" in text
    for script in set(re.findall(r"(?:timing|studies|figures)/\w+\.py", text)):
        assert (RESULTS.parent / script).exists()
    for table in TABLES:
        assert re.search(rf"[ ,`]{table}[ ,`]", text)


def test_several_optimizers_are_measured_as_one() -> None:
    """Muon for matrices and AdamW for the rest: each parameter moves, all states are counted."""
    [contender] = contenders.chosen(["torch Muon + AdamW"])
    model = step_time.problem(shapes.shapes("quick"), torch.float32, "cpu")
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = contender.make(model)
    assert state_bytes(optimizer) == 0
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(param, old)
    matrices = sum(param.numel() for param in model.parameters() if param.ndim == 2)
    others = [param.numel() for param in model.parameters() if param.ndim != 2]
    assert state_bytes(optimizer) == 4 * (matrices + 2 * sum(others) + len(others))


def test_a_gpu_is_asked_for_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        step_time.main(["--quick", "--device", "cuda"])
    assert "torch finds no CUDA device; use --device cpu" in capsys.readouterr().err


def test_wrapped_tensors_are_counted_once(one_rank: None) -> None:
    """A DTensor is what it wraps."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    whole = torch.zeros(10, 3)

    state = {0: {"moment": distribute_tensor(whole, mesh), "parts": [torch.zeros(5)]}}
    optimizer = SimpleNamespace(state=state)
    assert state_bytes(optimizer) == 4 * (30 + 5)
    assert state_bytes(optimizer, optimizer) == 4 * (30 + 5)
