"""The suite of benchmarks/: every task trains, rates are searched, families are left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from maxfactor.rule import newton_schulz
from measurement import RESULTS
from studies.side_by_side import Workers
from studies.suite import main as suite
from studies.suite import noise, optimizers, speech_data
from studies.suite.choice import choose, ratio, scores
from studies.suite.optimizers import ALL_PEERS, MORE_PEERS, OURS, PEERS, make_optimizers
from studies.suite.report import missing, report, rows_of, scale
from studies.suite.search import Durations, Search, peer_search
from studies.suite.tasks import FAMILIES, MAIN, TASKS, UNSEEN, tasks_in
from studies.suite.texts import python_source, split_of, words
from studies.suite.training import perform
from studies.suite.trials import Trial, base_trial
from studies.suite.variants import own_search, variant_search

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and the models that fine-tuning begins with."""
    folder = tmp_path_factory.mktemp("suite")
    speech_data.synthesise(folder, workers=1, quick=True)
    for task in ("whisper", "llama"):
        perform(base_trial(task, quick=True), folder, CPU)
    return folder


def test_there_are_ten_tasks_in_five_families() -> None:
    assert len(MAIN) >= 10
    assert len(FAMILIES) >= 5
    assert {TASKS[task].family for task in MAIN} | {"scale"} == set(FAMILIES)


@pytest.mark.parametrize("task", [*MAIN, *tasks_in(UNSEEN)])
def test_every_task_trains(task: str, cache: Path) -> None:
    record, test = perform(Trial(task, "fast", 0.02, quick=True), cache, CPU)
    assert not record["is_nan"]
    assert record["steps"] == 4
    measure = "wer" if TASKS[task].is_speech else "nats"
    assert test[measure] > 0.0
    if TASKS[task].base:
        assert f"old_{measure}" in record


@pytest.mark.parametrize("name", ALL_PEERS)
def test_every_peer_trains(name: str, cache: Path) -> None:
    share = ALL_PEERS[name].shares[0]
    trial = Trial("llama", name, ALL_PEERS[name].rates_for("language")[1], share=share, quick=True)
    first, _ = perform(Trial("llama", name, 1e-12, share=share, quick=True), cache, CPU)
    record, _ = perform(trial, cache, CPU)
    assert record["nats"] < first["nats"]


def test_no_text_is_in_two_splits() -> None:
    assert not set(words("dev")) & set(words("test"))
    assert not set(words("train")) & set(words("test"))
    assert len(python_source("test")) > 100_000
    for name in speech_data.SETS:
        dev, test = (set(speech_data.texts_of(name, split, 200)) for split in ("dev", "test"))
        assert dev
        assert not dev & test
        assert all(split_of(text, halves=True) == "dev" for text in dev)


class Errors(dict[str, Any]):
    """Records of a search, whose errors are a function of rate, share and seed."""

    def run(self, search: Search, error: Any) -> int:
        """Run what is due until nothing is; return the number of trials."""
        count = 0
        while due := search.due(self):
            for trial in due:
                self[trial.key] = {
                    "key": trial.key, "nats": error(trial), "ms_per_step": 1.0,
                    "is_nan": trial.lr == 0.8, "diverged": trial.lr == 0.8,
                    "state_bytes_per_parameter": 1.0,
                }  # fmt: skip
                count += 1
        return count


def test_a_search_finds_rate_and_share() -> None:
    def error(trial: Trial) -> float:
        return abs(math.log2(trial.lr / 0.16)) + abs(trial.share - 0.2) + 0.01 * trial.seed

    known, search = Errors(), peer_search("muon", "llama", Trial)
    assert max(search.rates) < 0.16  # so the search has to go on beyond it
    known.run(search, error)
    best = search.best(known)
    assert (best.lr, best.share) == (0.16, 0.2)
    assert len(search.errors(best, known)) == 3
    assert search.is_complete(known)


def test_recipes_are_run_at_their_own_rate_with_all_seeds() -> None:
    known, search = Errors(), own_search("quality", "llama", Trial)
    known.run(search, lambda trial: trial.lr)
    assert search.always is not None
    assert len(search.errors(search.at(search.always), known)) == 3
    assert [rate / search.always for rate in search.rates] == [0.25, 0.5, 1.0, 2.0, 4.0, 10.0]
    assert search.best(known).lr == min(search.rates)


@pytest.mark.parametrize(
    ("name", "rows"), [("quality heads one by one", 32), ("quality groups of 4 heads", 96)]
)
def test_variants_with_blocks(name: str, rows: int) -> None:
    """At the recipe's own rate, with all seeds if asked for; six heads are groups of three."""
    [search] = suite.searches_of(
        suite.parsed(["ours", "--optimizers", name, "--tasks", "llama"]),
    )
    assert search.rates == (own_search("quality", "llama", Trial).always,)
    assert search.seeds == (1, 2, 3)
    [optimizer] = make_optimizers(search.trial, nn.TransformerEncoderLayer(192, 6, 8))
    blocks = [group["blocks"] for group in optimizer.param_groups if group["blocks"]]
    assert blocks == [("columns", rows), ("rows", rows)]


def test_long_trainings_have_one_seed() -> None:
    options = ["--optimizers", "quality hidden wd .1,fast,adamw-98", "--tasks"]
    for task, seeds in (("length-2000-cosine", (1, 2, 3)), ("length-32000-cosine", (0,))):
        found = suite.searches_of(suite.parsed(["ours", *options, task]))
        assert [search.seeds for search in found] == [seeds] * 3


def test_the_best_rate_of_the_default_recipe_is_looked_for_at_every_scale() -> None:
    """Over a factor of 16, so that it may turn out to be far from the default."""
    for task in suite.LONGEST_FIRST:
        own = own_search("quality", task, Trial)
        assert [rate / own.rates[0] for rate in own.rates] == [1.0, 2.0, 4.0, 8.0, 16.0]
        assert own.rates[2] == own.always
        assert own_search("fast", task, Trial).rates == (0.08,)


def test_the_longest_trainings_begin_first() -> None:
    searches = suite.searches_of(suite.parsed(["all", "--quick"]))
    assert TASKS[searches[0].trial.task].steps == max(spec.steps for spec in TASKS.values())


def test_how_long_a_trial_takes() -> None:
    slow = {"task": "llama", "optimizer": "fast"}
    records: list[dict[str, Any]] = [{"trial": slow, "seconds": each} for each in (8.0, 10.0)]
    records.append({"trial": {**slow, "optimizer": "soap"}, "seconds": 30.0})
    records.append({"trial": {"task": "bert", "optimizer": "fast"}, "seconds": None})
    durations = Durations(records)
    assert durations.of(Trial("llama", "fast", 0.08)) == 10.0  # the longest
    durations.add({"trial": {**slow, "iteration": "float32"}, "seconds": 20.0})
    assert durations.of(Trial("llama", "fast", 0.08)) == 10.0
    assert durations.of(Trial("llama", "fast", 0.08, iteration="float32")) == 20.0
    assert durations.of(Trial("llama", "soap", 0.003)) == 30.0
    assert durations.of(Trial("llama", "lion", 0.003)) == 30.0  # the slowest that is known
    assert durations.of(Trial("llama", "fast", 0.08, quick=True)) == 0.0
    assert durations.of(Trial("bert", "fast", 0.08)) == 0.0


def test_nothing_begins_that_would_not_be_done_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a minute left, a task is left out whose trials take two."""
    given: list[str] = []

    def work(_: object, pending: Any, *__: object) -> bool:
        given.extend(trial.task for trial in pending())
        return True

    monkeypatch.setattr(Workers, "work", work)
    for file in ("trials", "test"):
        trial = {"task": "llama", "optimizer": "adamw-98", "quick": True}
        record = {"key": file, "trial": trial, "seconds": 120.0}
        lines = [json.dumps({**record, "key": "of both"}), json.dumps(record)]
        (tmp_path / f"{file}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    options = ["peers", "--optimizers", "adamw-98", "--tasks", "llama,bert", "--quick"]
    suite.main([*options, "--minutes", "1", "--out", str(tmp_path)])
    assert set(given) == {"bert"}
    assert "raise --minutes" not in capsys.readouterr().out
    given.clear()
    for minutes in ("1", "2"):  # two minutes are over when the data are there
        one = [*options[:-3], "--tasks", "llama", "--quick", "--minutes", minutes]
        suite.main([*one, "--out", str(tmp_path)])
        assert given == []
        said = capsys.readouterr().out
        assert "the shortest trial that is left takes 120 s: raise --minutes" in said
        assert "not complete" in said


def test_an_iteration_in_float32(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is what the recipe has anyway, so trainings agree but for rounding."""
    plain, in_float32 = (
        Trial("llama", "quality", 0.04, iteration=iteration, quick=True)
        for iteration in ("", "float32")
    )
    assert plain.key != in_float32.key
    assert "float32" in str(in_float32)
    calls = mock.Mock(wraps=optimizers.in_float32)
    monkeypatch.setattr(optimizers, "in_float32", calls)
    records, counts = [], []
    for trial in (plain, in_float32):
        records.append(perform(trial, cache, CPU)[0])
        counts.append(calls.call_count)
    assert counts[0] == 0 < counts[1]
    assert torch.get_float32_matmul_precision() == "highest"
    assert records[0]["nats"] == pytest.approx(records[1]["nats"], abs=1e-4)
    y = torch.randn(3, 5, 7, dtype=torch.float64)
    assert newton_schulz.newton_schulz is not optimizers.in_float32
    with optimizers.iteration_of(in_float32):
        assert newton_schulz.newton_schulz is optimizers.in_float32
        for each in (y, y.mT):
            found = newton_schulz.newton_schulz(each)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), iterated(each), atol=1e-5, rtol=1e-4)


def iterated(y: torch.Tensor) -> torch.Tensor:
    """The same by singular values, in float64."""
    u, values, v = torch.linalg.svd(y, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for a, b, c in newton_schulz.COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    found: torch.Tensor = u @ torch.diag_embed(values) @ v
    return found


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown optimizer 'quality heads'; variants: quality, "):
        suite.searches_of(suite.parsed(["ours", "--optimizers", "quality heads"]))


def test_a_family_that_is_left_out_has_no_say() -> None:
    found = {
        "steady": {"whisper": 1.0, "llama": 1.0, "cpp": 1.0},
        "for speech": {"whisper": 0.2, "llama": 1.1, "cpp": 1.1},
    }
    best, choices = choose(found, FAMILIES)
    assert best == "for speech"
    assert {each.left_out: each.candidate for each in choices} == {
        "speech": "steady",
        "language": "for speech",
        "fine-tuning": "for speech",
    }
    [speech] = [each for each in choices if each.left_out == "speech"]
    assert (speech.score, speech.best_score) == pytest.approx((1.0, 0.2))


def test_ratios() -> None:
    assert ratio(5.75, 3.75, is_speech=True) == 1.5  # with a quarter of a per cent added to both
    assert ratio(1.1, 1.0, is_speech=False) == pytest.approx(math.exp(0.1))


def test_scores_and_the_report(tmp_path: Path) -> None:
    known, test = Errors(), Errors()
    searches = [peer_search(name, "llama", Trial) for name in PEERS]
    searches.append(own_search("fast", "llama", Trial))
    for search in searches:
        worse = 0.2 if search.name == "fast" else 0.1 * (search.name != "soap")
        known.run(search, lambda trial, worse=worse: 1.0 + worse + 0.01 * trial.seed)
        test.run(search, lambda trial, worse=worse: 2.0 + worse + 0.01 * trial.seed)
    found = scores(searches, known)
    assert found["fast @ 0.08"]["llama"] == pytest.approx(math.exp(0.2))
    out, picture = tmp_path / "suite.json", tmp_path / "suite.svg"
    record = report(searches, known, test, "cpu", out, picture)
    assert record["data"] == "test"
    [row] = [r for r in record["rows"] if r["optimizer"] == "fast" and r["rate"] == "default"]
    assert row["error"] == pytest.approx(2.22)
    assert row["ratio"] == pytest.approx(math.exp(0.2), abs=1e-4)
    assert json.loads(out.read_text())["rows"] == record["rows"]
    assert "SOAP" in picture.read_text()
    assert "test data. Below 1 is better." in picture.read_text()
    again = report(searches, known, known, "cpu", out, picture)
    assert again["data"] == "development"
    assert {row["error"] for row in again["rows"]} != {row["error"] for row in record["rows"]}
    against = {(each["by"], each["group"]): each for each in record["comparisons"]}
    assert set(against) == {
        (by, group) for by in ("itself", "adamw-95 or adamw-98") for group in ("text", "all")
    }
    assert against["itself", "all"]["mean"] == pytest.approx(1.0)
    assert record["tenfold"] == [{"optimizer": "fast", "tasks": 1, "nan": 1, "diverged": 1}]
    of_adamw = against["adamw-95 or adamw-98", "text"]
    assert of_adamw["worst"] == pytest.approx(math.exp(0.1), abs=1e-4)
    assert (of_adamw["worst_task"], of_adamw["tasks"]) == ("llama", 1)


def test_a_lucky_seed_is_no_reference() -> None:
    """Of a peer whose other seeds have not been run, and of a peer when one seed is compared."""
    known = Errors()
    whole, half = peer_search("soap", "llama", Trial), peer_search("muon", "llama", Trial)
    own = own_search("quality", "llama", Trial)
    for search in (whole, own):
        known.run(search, lambda trial: 2.0 + trial.seed)
    for rate in half.rates:
        known |= {half.at(rate).key: {"nats": 0.0}}
    found = scores([whole, half, own], known)
    assert found["quality @ 0.04"]["llama"] == pytest.approx(1.0)
    options = suite.parsed(["choose", "--tasks", "llama", "--optimizers", "soap,quality"])
    assert [search.seeds for search in suite.searches_of(options)] == [(0,), (0,)]


def test_what_is_not_complete_is_not_reported() -> None:
    """No best rate of a recipe before all have been run, and no mean of fewer seeds."""
    known, own = Errors(), own_search("quality", "llama", Trial)
    known.run(own, lambda trial: trial.lr)
    assert [row["rate"] for row in rows_of(own, known, known)] == ["default", "best"]
    del known[own.at(max(own.rates)).key]
    [row] = rows_of(own, known, known)
    assert (row["rate"], row["lr"]) == ("default", own.always)
    assert own.always is not None
    best = {"task": "llama", "optimizer": "quality", "rate": "best", "row": False}
    assert missing(own, known, known) == [best]
    del known[own.at(own.always, seed=2).key]
    assert rows_of(own, known, known) == []
    assert missing(own, known, known) == [{**best, "rate": "default"}, best]


def test_peers_that_may_not_be_at_their_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are shown, marked, on development data; test data stay unread."""
    known, peer = Errors(), peer_search("soap", "llama", Trial)
    variant = variant_search("quality hidden wd .1", "llama", Trial, (1, 2, 3))
    assert variant is not None
    for search in (peer, variant):
        known.run(search, lambda trial: 1.0 + abs(trial.lr - 0.003))
    options = ["--tasks", "llama", "--optimizers", "soap,quality hidden wd .1"]
    options += ["--out", str(tmp_path)]
    asked: list[str] = []

    def read(path: Path) -> Errors:
        asked.append(path.name)
        return known

    monkeypatch.setattr(suite, "read_records", read)
    whole = (RESULTS / "suite_development.json").read_bytes()
    suite.main(["report", *options])
    assert asked == ["trials.jsonl", "test.jsonl"]
    assert (tmp_path / "suite_test.json").exists()
    assert "quality hidden wd .1" in (tmp_path / "suite_test.svg").read_text()
    assert "missing" not in capsys.readouterr().out
    del known[peer.at(max(peer.rates)).key]
    asked.clear()
    with pytest.raises(SystemExit, match="peers are not at their best: soap on llama"):
        suite.main(["report", *options])
    assert asked == ["trials.jsonl"]
    suite.main(["preview", *options])
    said = "missing: soap on llama at its best rate, its best rate may be another"
    assert said in capsys.readouterr().out
    record = json.loads((tmp_path / "suite_development.json").read_text())
    assert [line["optimizer"] for line in record["missing"]] == ["soap"]
    assert (RESULTS / "suite_development.json").read_bytes() == whole


def test_the_report_of_widths_and_lengths() -> None:
    known, test = Errors(), Errors()
    searches = [
        own_search("quality", "width-128", Trial),
        peer_search("adamw-98", "width-128", Trial),
    ]
    for search in searches:  # the best rate of ours is twice its own
        worse = 0.0 if search.name == "quality" else 0.3
        for errors in (known, test):
            errors.run(search, lambda trial, worse=worse: 1.0 + worse + abs(trial.lr - 0.08))
    rows = [row for search in searches for row in rows_of(search, known, test)]
    searches.append(own_search("fast", "width-128", Trial))  # at its own rate alone
    for errors in (known, test):
        errors.run(searches[-1], lambda _: 1.0)
    rows += rows_of(searches[-1], known, test)
    [line, of_fast] = scale(rows)
    assert set(of_fast) == {"task", "optimizer", "by_adamw"}
    assert line["best_rate"] == pytest.approx(2.0)
    assert line["by_itself"] == pytest.approx(math.exp(0.04), abs=1e-3)
    assert line["by_adamw"] < 1.0


def test_word_errors_near_zero() -> None:
    """One wrong word of three thousand is not infinitely worse than none."""
    assert ratio(0.03, 0.0, is_speech=True) == pytest.approx(1.12)
    assert ratio(10.0, 5.0, is_speech=True) == pytest.approx(2.0, rel=0.03)


def test_all_of_it() -> None:
    """What the report needs, each once: peers and recipes everywhere, more on three tasks."""
    searches = suite.searches_of(suite.parsed(["all", "--quick"]))
    assert searches == suite.searches_of(suite.parsed(["report", "--quick"]))
    found = [(each.name, each.trial.task) for each in searches]
    assert len(set(found)) == len(found)
    assert {(name, task) for name in PEERS for task in MAIN} < set(found)
    assert {(name, task) for name in OURS for task in (*MAIN, *suite.LONGEST_FIRST)} < set(found)
    for name in MORE_PEERS:
        assert len({task for other, task in found if other == name}) >= 3
    assert ("adamw-98", "length-32000-constant") in found


def test_unseen_tasks_choose_nothing() -> None:
    """They are in no table of the others, and in a report of their own."""
    unseen = tasks_in(UNSEEN)
    for table in ("all", "choice", "choose", "preview", "report"):
        assert not {s.trial.task for s in suite.searches_of(suite.parsed([table]))} & set(unseen)
    assert all(variant_search("quality hidden wd .1", task, Trial) is None for task in unseen)
    searches = suite.searches_of(suite.parsed(["all", "--tasks", UNSEEN]))
    assert searches == suite.searches_of(suite.parsed(["report", "--tasks", UNSEEN]))
    found = {(each.name, each.trial.task) for each in searches}
    assert found == {(name, task) for name in (*OURS, *suite.FEWER_PEERS) for task in unseen}
    assert all(each.seeds == (1, 2, 3) for each in searches)
    assert len(tasks_in(UNSEEN)) >= 8


def test_the_report_of_unseen_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of its own, by the machine that trained them alone."""
    known = Errors()
    searches = suite.searches_of(suite.parsed(["report", "--tasks", UNSEEN]))
    for search in searches:
        known.run(search, lambda trial: 1.0 + abs(trial.lr - 0.003))
    for record in known.values():
        record |= {"machine": "CPU", "trial": {"task": "gpt2"}, "wer": record["nats"]}
    known["other"] = {"machine": "GPU", "trial": {"task": "llama"}}
    monkeypatch.setattr(suite, "read_records", lambda _: known)
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(suite, "PICTURES", tmp_path / "pictures")
    suite.main(["report", "--tasks", UNSEEN, "--out", str(tmp_path / "runs")])
    found = json.loads((tmp_path / "results" / "suite_unseen_test.json").read_text())
    assert found["trained_on"] == ["CPU"]
    assert found["missing"] == []
    groups = {each["group"]: each["tasks"] for each in found["means"]}
    assert groups == {"speech": 1, "text": len(tasks_in(UNSEEN)) - 1, "all": len(tasks_in(UNSEEN))}
    assert "recurrent" in (tmp_path / "pictures" / "suite_unseen.svg").read_text()


def test_a_family_that_is_not_known() -> None:
    with pytest.raises(SystemExit, match=r"unknown task 'vision'; .*, speech, .*, unseen"):
        suite.searches_of(suite.parsed(["all", "--tasks", "vision"]))


@pytest.mark.usefixtures("forked_workers")
def test_the_command(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In worker processes; the errors on test data are stored apart; a second run does nothing."""
    given = ["ours", "--optimizers", "lean", "--tasks", "llama", "--quick", "--jobs", "1"]
    given += ["--out", str(tmp_path), "--cache", str(cache)]
    suite.main(given)
    assert "llama lean lr 0.04 seed 3: " in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    sealed = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert len(lines) == len(sealed) >= 7
    assert not any("test" in line for line in lines)
    suite.main(given)
    assert "seed 3: " not in capsys.readouterr().out
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in sealed[1:]))
    suite.main(given)  # what has no error on test data is run again
    again = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["key"] for line in again[len(lines) :]] == [sealed[0]["key"]]


def test_noise(tmp_path: Path) -> None:
    noise.main(["--steps", "80", "--out", str(tmp_path / "noise.json")])
    rows = json.loads((tmp_path / "noise.json").read_text())["rows"]
    assert len(rows) == 6
    assert all(0.1 < look["size"] < 100.0 for row in rows for look in row["looks"])
