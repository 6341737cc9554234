"""The benchmarks run, and what they write can be published."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jiwer
import pytest
import torch
from maxfactor_speech.model import loss_of
from typer.testing import CliRunner

import digits_study
import fam_pictures
import gpu_busy
import language_study
import maxfactor
import momentum_study
import speech_data
import speech_runs
import training_step
from maxfactor_speech.bench import shapes, step_time
from maxfactor_speech.cli import app
from momentum_tables import TABLES, Entry, entries_of, entry
from momentum_variants import variant


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


def test_the_command_names_itself_and_is_quick_on_request() -> None:
    run = CliRunner().invoke
    wrong = run(app, ["bench", "--quick", "--repeats", "0"])
    assert wrong.exit_code == 2
    assert "maxfactor bench: error: --repeats must be at least 1, got 0" in wrong.stderr
    assert wrong.stderr.startswith("usage: maxfactor bench [OPTIONS]")
    right = run(app, ["bench", "--quick", "--optimizers", "AdamW"])
    assert right.exit_code == 0, right.output
    assert "quick: " in right.output


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


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    options = "--model quick --repeats 1 --optimizers AdamW --dtype float32 --dtype bfloat16"
    result = CliRunner().invoke(app, ["bench", *options.split(), "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert {"torch AdamW", "torch AdamW fused"} <= {row["optimizer"] for row in rows}


def test_speech_data_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    cache = str(tmp_path / "cache")
    speech_data.main(["--utterances=60", "--batches=2", "--cache", cache, "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    assert row["utterances"] == 60
    assert row["times_real_time_per_core"] > 0
    assert {"own_megabytes", "mapped_megabytes"} <= row.keys()


def test_how_busy_a_gpu_is(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    gpu_busy.main(["--quick", "--cache", str(tmp_path), "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    assert row["steps_per_second"] > 0.0
    assert row["audio_seconds_per_second"] > row["steps_per_second"]
    assert row["busy"] is None  # a CPU has no kernels to look at


def test_time_with_a_kernel_counts_once() -> None:
    overlapping = [(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.0, 2.0)]
    assert gpu_busy.covered(overlapping) == 4.0
    assert gpu_busy.covered([]) == 0.0


def test_share_of_a_training_step(tmp_path: Path) -> None:
    report = training_step.main(["--quick", "--out", str(tmp_path / "share.json")])
    assert json.loads((tmp_path / "share.json").read_text())["rows"] == report["rows"]
    assert [row["optimizer"] for row in report["rows"]] == [
        "1.0", "lean", "fam", "speech", "torch AdamW fused",
    ]  # fmt: skip
    assert all(0.0 < row["share"] < 1.0 for row in report["rows"])


def test_fam_pictures(tmp_path: Path) -> None:
    """Two short trainings, what FAM saw of each matrix, and all pictures."""
    out = tmp_path / "pictures"
    fam_pictures.main(["--quick", "--out", str(out), "--cache", str(tmp_path / "cache")])
    text = (out / "fam_spectrum.json").read_text()
    result = json.loads(text)
    one, several = result["trainings"]
    assert (one["bands"], several["bands"]) == (1, 8)
    for training in (one, several):
        parts = [matrix["part"] for matrix in training["matrices"].values()]
        assert list(dict.fromkeys(parts)) == list(fam_pictures.PARTS.values())
        for matrix in training["matrices"].values():
            for beta, rho in zip(matrix["beta"], matrix["rho"], strict=True):
                assert len(beta) == len(training["steps"])
                for step, at, coherence in zip(training["steps"], beta, rho, strict=True):
                    expected = 0.9 if step < 20 else min(max(1 - coherence, 0.5), 0.98)
                    assert at == pytest.approx(expected, abs=2e-3)  # three digits are kept
            assert len(matrix["power"]) == training["bands"]
    pictures = {path.stem: path.read_text() for path in out.glob("*.svg")}
    assert pictures.keys() == {"coherence", "beta", "bands", "rates", "main"}
    assert all(picture.rstrip().endswith("</svg>") for picture in pictures.values())
    fam_pictures.main(["--draw", "--out", str(out)])  # the same numbers, the same files
    assert {path.stem: path.read_text() for path in out.glob("*.svg")} == pictures
    assert {"date", "machine", "versions", "command"} <= result.keys()
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text


def in_this_process(work: Callable[[Any], Any], runs: list[Any], _jobs: int) -> Iterator[Any]:
    return map(work, runs)


def test_digits_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, then a third: those that were not run again stay as they are."""
    out = tmp_path / "digits.json"
    where = ["--out", str(out), "--cache", str(tmp_path / "cache")]
    digits_study.main(["--quick", "--only", "lean, clip.* 1(,|$)", "--jobs", "1", *where])
    text = out.read_text()
    result = json.loads(text)
    assert [row["lr"] for row in result["rows"]] == [0.01, 0.01]
    assert all(len(row["wer"]) == 1 for row in result["rows"])
    assert "| lean, clip of the update at 1 | 0.01 |" in capsys.readouterr().out
    assert {"date", "machine", "versions", "command"} <= result.keys()
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text
    # Once in processes is enough.
    monkeypatch.setattr(digits_study, "in_processes", in_this_process)
    digits_study.main(["--quick", "--only", "lean, clip.* 1.5", "--jobs", "1", *where])
    again = json.loads(out.read_text())["rows"]
    assert again[::2] == result["rows"]  # what was not run stays
    assert again[1]["name"] == "lean, clip of the update at 1.5"


def test_language_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported transformers already."""
    monkeypatch.setattr(language_study, "in_processes", in_this_process)
    out = tmp_path / "language.json"
    language_study.main(["--quick", "--only", "lean", "--jobs", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    [row] = result["rows"]
    assert 0.0 < row["bits"][0] < 10.0  # an untrained one has about 8
    assert "| lean | 0.01 |" in capsys.readouterr().out
    assert {"date", "machine", "versions", "command", "bytes"} <= result.keys()
    assert str(tmp_path) not in out.read_text()


def test_what_the_language_study_runs_next() -> None:
    """All rates, one beyond the edge where the best lies, then the other seeds."""
    rates = language_study.RATES["lean"]
    done: dict[language_study.Run, dict[str, float]] = {}
    first = language_study.missing("lean", done)
    assert first == [language_study.Run("lean", lr) for lr in rates]
    done |= {run: {"bits": 1.0 / run.lr} for run in first}
    beyond = language_study.Run("lean", 2.0 * rates[-1])
    assert language_study.missing("lean", done) == [beyond]
    done[beyond] = {"bits": 99.0}
    seeds = [language_study.Run("lean", rates[-1], seed) for seed in (1, 2)]
    assert language_study.missing("lean", done) == seeds
    done |= {run: {"bits": 1.0} for run in seeds}
    assert language_study.missing("lean", done) == []


def test_the_recipes_of_the_digits_study() -> None:
    rows = {row.name: row for row in digits_study.ROWS}
    assert len(rows) == len(digits_study.ROWS)
    changed = digits_study.changed_recipe(
        rows["fam, memory up to 0.88, norms and biases at a quarter of the rate"]
    )
    assert changed.settings("vector", 0.08)["lr"] == 0.02
    assert changed.settings("hidden", 0.08)["lr"] == 0.08
    assert changed.settings("hidden")["momentum"] == maxfactor.FAM(beta_max=0.88)
    shorter = digits_study.changed_recipe(rows["speech, memory of 0.8"])
    assert shorter.settings("hidden")["momentum"] == 0.8
    assert shorter.settings("hidden")["direction"] == "orthogonal"
    assert shorter.settings("vector", 0.08)["lr"] == 0.08  # as at first
    clipped = digits_study.changed_recipe(rows["lean, clip of the update at 1.5"])
    assert clipped.settings("hidden")["d"] == 1.5
    assert clipped.settings("vector", 0.08)["lr"] == 0.08
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for name, momentum in (("muon", 0.95), ("muon, memory of 0.9", 0.9)):
        with digits_study.changed(rows[name]):
            assert torch.optim.Muon([weight]).defaults["momentum"] == momentum


def test_a_filter_of_one_number() -> None:
    """A constant comes through as it is, from the first step on; so do a memory's means."""
    assert fam_pictures.filtered([2.0] * 5, rho=0.3) == pytest.approx([2.0] * 5)
    [first, second] = fam_pictures.filtered([0.0, 1.0], rho=0.5)
    assert (first, second) == pytest.approx((0.0, 0.95 * 2 / 3 + 0.05))


def study(out: Path, table: str, *more: str) -> None:
    momentum_study.main(
        [table, "--quick", "--jobs", "1", "--out", str(out), "--json", str(out / "all.json"), *more]
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_momentum_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of a table from the speech to the report, stopped in between and gone on with."""
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

    path.write_text(path.read_text() + '{"run": {"optimizer": "fam", "lr"')  # cut off by a crash
    study(tmp_path, "bands", "--only", "1 band", "--minutes", "0")  # no time for the others
    assert len(momentum_study.Results.read(tmp_path).done) == 2
    study(tmp_path, "bands", "--only", "1 band", "--stage", "search")  # which is all done
    assert len(momentum_study.Results.read(tmp_path).done) == 2

    capsys.readouterr()
    study(tmp_path, "report")
    assert "| 1 band * | " in capsys.readouterr().out
    text = (tmp_path / "all.json").read_text()
    written = json.loads(text)
    assert [row["name"] for row in written["tables"]["bands"]] == ["1 band"]
    runs = lines(tmp_path / "all_runs.jsonl")
    assert [run["key"] for run in runs] == [run["key"] for run in found]
    assert runs[0]["groups"]["hidden"]["d"] == "inf"
    assert {"date", "machine", "versions"} <= written["machine"].keys()
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("table", TABLES)
def test_tables(table: str) -> None:
    """Names and runs are all different, and each makes an optimizer that steps."""
    rows = entries_of(table)
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.run.key for row in rows}) == len(rows)
    for row in rows:
        again = speech_runs.Run(**json.loads(json.dumps(asdict(row.run))))
        assert again.key == row.run.key
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.Linear(6, 5))
        with variant(row.run.variant):
            optimizers, _ = speech_runs.make_optimizers(row.run, model, torch.device("cpu"))
            model(torch.randn(3, 2, 8)).square().mean().backward()
            before = [param.detach().clone() for param in model.parameters()]
            for optimizer in optimizers:
                optimizer.step()
        for param, old in zip(model.parameters(), before, strict=True):
            assert not torch.equal(param, old)
            assert param.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        *("exact_clip", "random_basis", "row_groups", "cautious", "calm_decay"),
        *("unwhitened", "half_whitened", "equal_values", "even_rows"),
    ],
)
def test_a_variant_makes_a_difference(name: str) -> None:
    recipe = "fam" if name in ("random_basis", "row_groups") else "speech"
    settings = {"momentum": asdict(maxfactor.FAM(bands=4, warmup=1))} if recipe == "fam" else {}
    weights = []
    for own in (None, name):
        torch.manual_seed(0)
        hidden = torch.nn.Linear(6, 7)
        model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), hidden, torch.nn.Linear(7, 5))
        run = speech_runs.Run(recipe, lr=0.02, variant=own, settings=settings)
        with variant(own):
            [optimizer], _ = speech_runs.make_optimizers(run, model, torch.device("cpu"))
            for _ in range(5):
                loss = model(torch.randn(3, 2, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(hidden.weight.detach())
    assert weights[1].isfinite().all()
    assert not torch.allclose(weights[0], weights[1], rtol=1e-4)


def test_a_run_is_known_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what they are called: two tables share it, and another recipe is another run."""
    run = speech_runs.Run("fam", lr=0.02)
    explicit = replace(
        run, settings={"momentum": asdict(maxfactor.FAM(beta_max=0.84)), "scale": "current"}
    )
    assert run.key == explicit.key
    for other in (replace(run, lr=0.01), replace(run, seed=1), replace(run, batch=8)):
        assert other.key != run.key
    assert replace(run, settings={"momentum_dtype": "fp32"}).key != run.key
    key = run.key
    recipe = maxfactor.recipes.BY_KIND["fam"]
    changed = replace(recipe, common={**recipe.common, "weight_decay": 0.5})
    monkeypatch.setitem(maxfactor.recipes.BY_KIND, "fam", changed)
    speech_runs.run_key.cache_clear()
    assert run.key != key
    speech_runs.run_key.cache_clear()


def test_a_kind_comes_before_the_others() -> None:
    """Also when its name does, since a key sorts them."""
    others: dict[str, Any] = {"lr_share": 0.5, "scale": "initial"}
    run = speech_runs.Run("fam", 0.04, by_kind={"others": others, "conv": {"lr_share": 2.0}})
    groups = speech_runs.group_settings(run)
    rates = {kind: group["lr"] for kind, group in groups.items()}
    assert rates == {"hidden": 0.04, "conv": 0.08, "embedding": 0.02, "vector": 0.02}
    assert groups["conv"]["scale"] == "initial"
    assert "scale" not in groups["hidden"]


def test_all_seeds_choose_among_rates_that_have_them() -> None:
    row = entry("fam", "fam", (0.02, 0.04, 0.08))
    results = momentum_study.Results(Path())
    wers = {0.02: (9.0,), 0.04: (1.0, 8.0, 9.0), 0.08: (2.0, 3.0, 4.0)}
    for lr, found in wers.items():
        for seed, wer in enumerate(found):
            known = {"wer": wer, "loss": None, "nan": False, "ms_per_step": 1.0}
            results.done[row.at(lr, seed).key] = known | {"state_bytes_per_parameter": 1.0}
    assert momentum_study.summary(row, results)["lr"] == 0.08


def done(row: Entry, wers: dict[float, float]) -> momentum_study.Results:
    results = momentum_study.Results(Path())
    for lr, wer in wers.items():
        results.done[row.at(lr).key] = {"wer": wer, "loss": wer / 10}
    return results


def test_the_best_rate_gets_all_seeds() -> None:
    row = replace(entries_of("main")[0], search=1, seeds=3)
    assert row.rates == (0.005, 0.01, 0.02, 0.04)
    results = done(row, {0.005: 9.0, 0.01: 8.0, 0.02: 7.0})
    assert [run.lr for run in momentum_study.due([row], results, "all")] == [0.04]
    results = done(row, {0.005: 9.0, 0.01: 8.0, 0.02: 7.0, 0.04: 8.0})
    runs = momentum_study.due([row], results, "all")
    assert [(run.lr, run.seed) for run in runs] == [(0.02, 1), (0.02, 2)]
    assert momentum_study.due([row], results, "search") == []


def test_three_seeds_choose_a_rate() -> None:
    """By their mean, and then no rate is added at the edge."""
    row = replace(entries_of("main")[0], rates=(0.01, 0.02), search=3, seeds=4)
    results = done(row, {0.01: 1.0, 0.02: 2.0})
    runs = momentum_study.due([row], results, "all")
    assert [(run.lr, run.seed) for run in runs] == [(0.01, 1), (0.02, 1), (0.01, 2), (0.02, 2)]
    for seed, wers in ((1, {0.01: 8.0, 0.02: 2.0}), (2, {0.01: 8.0, 0.02: 2.0})):
        for lr, wer in wers.items():
            run = row.at(lr, seed)
            results.done[run.key] = {"wer": wer, "loss": 0.1}
    assert [(run.lr, run.seed) for run in momentum_study.due([row], results, "all")] == [(0.02, 3)]


def test_a_best_rate_at_the_edge_calls_for_another() -> None:
    row = replace(entries_of("main")[0], search=1)
    results = done(row, {0.005: 9.0, 0.01: 8.0, 0.02: 7.0, 0.04: 6.0})
    assert [run.lr for run in momentum_study.due([row], results, "search")] == [0.08]
    results = done(row, {0.005: 97.0, 0.01: 98.0, 0.02: 99.0, 0.04: 100.0})  # learns nothing
    assert momentum_study.due([row], results, "search") == []


def test_the_usable_range() -> None:
    tried = {0.01: 10.0, 0.02: 8.0, 0.04: 9.9, 0.08: 10.1}
    assert momentum_study.usable_range({lr: [{"wer": wer}] for lr, wer in tried.items()}) == 4.0


def test_the_range_by_a_curve() -> None:
    """Errors that are a parabola, both axes logarithmic, and one rate that is far off."""
    errors = {lr: math.exp(0.5 * math.log(lr / 0.03) ** 2) for lr in (0.01, 0.02, 0.04, 0.08)}
    tried = {lr: [{"wer": wer}] for lr, wer in {**errors, 0.4: 90.0}.items()}
    apart = math.exp(math.sqrt(math.log(1.25) / 0.5))
    expected = pytest.approx((0.03 / apart, 0.03 * apart), rel=0.01)
    assert momentum_study.smooth_range(tried) == expected
    del tried[0.04]
    assert momentum_study.smooth_range(tried) is None


def test_word_errors() -> None:
    references = ["a b c", "a b", "one two three four", "x"]
    hypotheses = ["a c", "", "one tow three for five", "y x z"]
    pairs = zip(references, hypotheses, strict=True)
    found = sum(speech_runs.edits(a.split(), b.split()) for a, b in pairs)
    assert found / 10 == pytest.approx(jiwer.wer(references, hypotheses))


def test_the_loss_reads_nothing_on_the_host(tmp_path: Path) -> None:
    """Or it could not be computed without values."""
    run = speech_runs.quick(speech_runs.Run("adamw", lr=0.002))
    speech_runs.prepare([run.training], tmp_path, 1)
    data = speech_runs.load_features(run.training, tmp_path, torch.device("cpu"))
    model = speech_runs.new_model(run, tmp_path, torch.device("cpu"))
    on_meta = [x.to("meta") for x in (data.features, data.labels)]
    model.to("meta")  # type: ignore[arg-type]  # mistaken by a decorator's types
    loss_of(model, *on_meta).backward()


def test_row_groups_of_one_are_fam() -> None:
    run = entries_of("bands")[0].run
    moved = []
    for name in (None, "row_groups"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(70, 6), torch.nn.Linear(6, 5))
        with variant(name):
            [optimizer], _ = speech_runs.make_optimizers(run, model, torch.device("cpu"))
            for _ in range(25):
                optimizer.zero_grad()
                model(torch.randn(3, 70)).square().mean().backward()
                optimizer.step()
        moved.append([param.detach() for param in model.parameters()])
    torch.testing.assert_close(moved[0], moved[1])


def test_an_unknown_variant() -> None:
    with pytest.raises(ValueError, match=r"variant must be random_basis, .* got 'odd'"):
        variant("odd")
