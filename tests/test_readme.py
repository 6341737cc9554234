"""The documents: code runs, links lead somewhere, numbers are those of the results files."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
import torch

import maxfactor
from maxfactor.recipes import OWN, PUBLISHED
from studies.suite.choice import choose, geometric_mean, ratio, scores
from studies.suite.main import LONGEST_FIRST, SOME, parsed, searches_of
from studies.suite.optimizers import MORE_PEERS, OURS, PEERS
from studies.suite.report import rows_of
from studies.suite.search import CHOOSING, Known, error_of, peer_search, read_records
from studies.suite.tasks import FAMILIES, MAIN, NARROW, TASKS, tasks_in
from studies.suite.training import rate_factor
from studies.suite.trials import Trial
from studies.suite.variants import A_THIRD, floors, own_search
from toy_whisper import heard, plain_wer, record

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------- the code


class Block(NamedTuple):
    """A block of Python. Its info string may say `skip: WHY`."""

    code: str
    info: str


def python_blocks() -> Iterator[Any]:
    for path in DOCUMENTS:
        found = [match for match in FENCED.findall(path.read_text()) if match[0].startswith("py")]
        for number, (info, code) in enumerate(found, 1):
            info = info.removeprefix("python").strip()
            yield pytest.param(Block(code, info), id=f"{path.name}-{number}")


def compute_loss(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(2, 5, 16), torch.randn(2, 3, 16)).square().mean()
    return loss


@pytest.mark.parametrize("block", list(python_blocks()))
def test_code_runs(block: Block) -> None:
    """With the names that a reader has at hand: torch, maxfactor, a model and its optimizer."""
    if block.info.startswith("skip:"):
        pytest.skip(block.info.removeprefix("skip:").strip())
    assert block.info == ""
    model = torch.nn.Transformer(
        16, 2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=32, batch_first=True
    )
    names = {"torch": torch, "maxfactor": maxfactor, "compute_loss": compute_loss, "model": model}
    exec(block.code, {**names, "optimizer": maxfactor.for_model(model)})


def test_the_blocks_for_a_pretrained_whisper(toy_whispers: dict[int, Path], tmp_path: Path) -> None:
    """The first page, with a small checkpoint: what is saved does as well in the pipeline."""
    able = toy_whispers[240]
    record(tmp_path, range(5000, 5048), range(9000, 9016))
    toy, pretrained, save = (
        code for info, code in FENCED.findall(text_of("docs/index.md")) if info.startswith("py")
    )
    before_part_1, _, rest = toy.partition("# 1. ")
    after_part_1 = rest[rest.index("# 2. ") :]
    texts = (tmp_path / "train.tsv").read_text().splitlines()
    names = {
        '"openai/whisper-small"': repr(str(able)),
        '[("one.wav", "Guten Morgen."), ("two.wav", "Wie geht es dir?")]': repr(
            [(str(tmp_path / line.split("\t")[0]), line.split("\t")[1]) for line in texts]
        ),
        '"whisper-german"': repr(str(tmp_path / "whisper-german")),
    }
    code = "\n".join([before_part_1, pretrained, after_part_1, save])
    for shown, own in names.items():
        assert shown in code
        code = code.replace(shown, own)
    exec(code, {})
    before = heard(able, tmp_path, language="de", task="transcribe")
    after = heard(tmp_path / "whisper-german", tmp_path)
    assert plain_wer(before) <= 0.05
    assert plain_wer(after) <= plain_wer(before) + 0.05


# --------------------------------------------------------------------------------- the pages


def test_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as repository hosts make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path",
    [*DOCUMENTS, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))],
    ids=lambda path: path.name,
)
def test_relative_links_exist(path: Path) -> None:
    text = FENCED.sub("", path.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    links += re.findall(r"^\[[^]]+\]: (\S+)$", text, re.MULTILINE)
    for link in links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        assert not anchor or anchor in anchors(file.read_text()), link


def test_reference_links_of_the_readme_are_defined() -> None:
    text = FENCED.sub("", text_of("README.md"))
    used = set(re.findall(r"\]\[([^]]+)\]", text))
    assert used == set(re.findall(r"^\[([^]]+)\]: ", text, re.MULTILINE))


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)\)", text_of("docs/index.md")))
    assert {path.name for path in DOCUMENTS[1:]} - {"index.md"} <= linked


def test_version_is_the_same_everywhere() -> None:
    version = re.escape(maxfactor.__version__)
    newest = re.search(r"^## (\d.*)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest
    dated = re.fullmatch(rf"{version} \W (\d{{4}}-\d{{2}}-\d{{2}})", newest[1])
    assert dated
    citation = text_of("CITATION.cff")
    assert re.search(rf"^version: {version}$", citation, re.MULTILINE)
    assert f'date-released: "{dated[1]}"' in citation


# ------------------------------------------------------------------------------- the numbers


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def seeds_of(record: Any) -> Iterator[list[float]]:
    """Every list of numbers in a results file: the seeds of a row or of one of its rates."""
    if isinstance(record, dict):
        for value in record.values():
            yield from seeds_of(value)
    elif isinstance(record, list):
        if record and all(isinstance(value, float) for value in record):
            yield record
        else:
            for value in record:
                yield from seeds_of(value)


def test_seeds_and_their_means_are_in_the_results() -> None:
    """Everything of the form `mean (seed, seed, …)`, at the decimals that are shown."""
    known = set()
    for name in ("momentum_study", "digits_study", "language_study"):
        for seeds in seeds_of(results(name)):
            for decimals in (1, 2, 3):
                shown = ", ".join(f"{seed:.{decimals}f}" for seed in seeds)
                known.add((f"{mean(seeds):.{decimals}f}", shown))
    number = r"\d+\.\d+"
    said = re.sub(r"\s+", " ", page("recipe-study") + page("results"))
    quoted = re.findall(rf"({number})\*{{0,2}} \(({number}(?:, {number})+)\)", said)
    assert len(quoted) > 100
    assert [one for one in quoted if one not in known] == []


def page(name: str) -> str:
    return text_of(f"docs/{name}.md")


def test_the_main_table_is_complete() -> None:
    for row in results("momentum_study")["tables"]["main"]:
        seeds = ", ".join(f"{wer:.2f}" for wer in row["wer"])
        cells = [f"{row['lr']:g}", f"{row['wer_mean']:.2f} ({seeds})", f"{row['range']:g}"]
        cells += [f"{row['state_bytes_per_parameter']:.2f}"]
        assert f"| {row['name']} | {' | '.join(cells)} |" in page("recipe-study")


def test_the_first_look_at_other_tasks() -> None:
    """A line for each task: two recipes at three rates, and AdamW at its best rate."""
    errors: dict[tuple[str, str, float], list[float]] = {}
    for each in results("suite_first_look")["trials"]:
        trial = each["trial"]
        key = trial["task"], trial["optimizer"], trial["lr"]
        errors.setdefault(key, []).append(each["wer"] if "wer" in each else each["nats"])
    gained = {"quality": 0, "fast": 0}
    for task in MAIN:
        cells = [task]
        digits = 1 if TASKS[task].is_speech else 3
        for name, before, now in (("quality", 0.02, 0.04), ("fast", 0.04, 0.08)):
            gained[name] += errors[task, name, now] < errors[task, name, before]
            cells += [f"{errors[task, name, lr][0]:.{digits}f}" for lr in (0.02, 0.04, 0.08)]
        [(lr, found)] = [
            (lr, found)
            for (where, name, lr), found in errors.items()
            if (where, name) == (task, "adamw-98") and len(found) == 3
        ]
        cells.append(f"{mean(found):.{digits}f} at {lr:g}")
        assert f"| {' | '.join(cells)} |" in page("recipe-study")
    assert gained == {"quality": 10, "fast": 12}
    said = re.sub(r"\s+", " ", page("recipe-study"))
    assert "better on ten of the twelve tasks" in said


def test_the_least_sizes_of_small_weights() -> None:
    """A line for each task: recipes without and with least sizes, of matrices and of vectors."""
    sizes = [
        ("quality", 0.04, None), ("quality", 0.04, (0.1, 0.4)), ("quality", 0.04, (0.2, 0.8)),
        ("fast", 0.08, None), ("fast", 0.08, (0.1, 0.2)), ("fast", 0.08, (0.2, 0.4)),
        ("lean", 0.028, None), ("lean", 0.028, (0.1, 0.1)),
    ]  # fmt: skip
    gained = {"quality": 0, "fast": 0}
    for task in MAIN:
        if TASKS[task].family != "lora":
            digits = 1 if TASKS[task].is_speech else 3
            found = [
                errors_of("suite_least_sizes", task, name, lr, floors(*least) if least else {})[0]
                for name, lr, least in sizes
            ]
            gained["quality"] += found[1] < found[0]
            gained["fast"] += found[4] < found[3]
            cells = [f"{error:.{digits}f}" for error in found]
            assert f"| {task} | {' | '.join(cells)} |" in page("recipe-study")
    assert gained == {"quality": 7, "fast": 6}  # of ten: most, as the README says


@functools.cache
def suite_trials() -> Known:
    return read_records(RESULTS / "suite" / "trials.jsonl")


def reported(task: str, name: str) -> list[float]:
    """The seeds that are reported of a recipe at its own rate, or of a peer at its best."""
    known = suite_trials()
    if name in OURS:
        search = own_search(name, task, Trial)
        assert search.always is not None
        return search.errors(search.at(search.always), known)
    search = peer_search(name, task, Trial)
    return search.errors(search.best(known), known) if search.tried(known) else []


def better(task: str, *names: str) -> list[float]:
    """The better one of several settings of a peer, of those with all seeds."""
    found = [errors for name in names if len(errors := reported(task, name)) == 3]
    return min(found, key=mean)


def test_the_recipes_as_they_are_now() -> None:
    """A line for each task: recipes at their own rates, and peers at their best."""
    by_best: dict[str, float] = {}
    by_adamw: dict[str, float] = {}
    fast: dict[str, float] = {}
    lean: dict[str, float] = {}
    for task in MAIN:
        is_speech = TASKS[task].is_speech
        ours = [better(task, recipe) for recipe in OURS]
        adamw = better(task, "adamw-95", "adamw-98")
        adafactor = better(task, "adafactor")
        muon = better(task, "muon", "muon-matched")
        peers = [better(task, "soap"), better(task, "normuon"), muon, adamw, adafactor]
        cells = [shown_mean(errors, is_speech=is_speech) for errors in (*ours, *peers)]
        assert f"| {task} | {' | '.join(cells)} |" in page("results")
        for found, errors, reference in (
            (by_best, ours[0], min(map(mean, peers))),
            (by_adamw, ours[0], mean(adamw)),
            (fast, ours[1], mean(adamw)),
            (lean, ours[2], mean(adafactor)),
        ):
            found[task] = ratio(mean(errors), reference, is_speech=is_speech)
    assert sum(each < 0.99 for each in by_best.values()) == 9
    assert {task for task, each in by_best.items() if each > 1.01} == {"lora-german"}
    assert mean(better("lora-german", "soap")) < mean(better("lora-german", "quality"))
    assert all(abs(by_best[task] - 1.0) < 0.01 for task in ("llama", "wave"))
    assert all(each < 1.0 for each in fast.values())
    readme = re.sub(r"\s+", " ", text_of("README.md"))
    assert "`quality` at its default rate beat the best of five peers on [nine](" in readme
    level = "the best of them was level with it on a Llama and on a wav2vec 2.0"
    assert f"SOAP beat it in LoRA on German, and {level}" in readme
    assert "`fast` beat AdamW on all twelve" in readme
    said = re.sub(r"\s+", " ", page("results"))
    assert "ahead of the best peer on nine of the twelve tasks" in said
    speech = [task for task in MAIN if TASKS[task].is_speech]
    text = [task for task in MAIN if not TASKS[task].is_speech]
    shown = f"it makes {average(by_best, speech)} times the errors of the best peer on speech"
    assert f"{shown} (geometric mean, the worst task {worst(by_best, speech)})" in said
    fast_there = suite_trials()[Trial("wave", "fast", 0.08, CHOOSING).key]
    there = suite_trials()[Trial("wave", "quality", 0.04, CHOOSING).key]
    hard = [error_of(there), error_of(fast_there)]
    shown = "With it, `quality` has {:.0f} % on `wave` and `fast` {:.0f} %".format(*hard)
    assert shown in said
    soap = peer_search("soap", "wave", Trial)
    at_rates = sorted(error_of(suite_trials()[t.key]) for t in soap.tried(suite_trials()))
    assert f"SOAP has {at_rates[0]:.2f} %".replace("0.", ".") in said
    assert len(at_rates) == 4
    assert at_rates[1] > 1.0
    shown = f"{average(by_best, text)} times that of the best peer, the worst task"
    assert f"{shown} {worst(by_best, text)}" in said
    assert f"AdamW: {average(by_adamw, speech)} and {average(by_adamw, text)} times" in said
    for name, found, rival in (("fast", fast, "AdamW"), ("lean", lean, "Adafactor")):
        start = f"**`{name}`** makes {average(found)} times the errors of {rival} at its best"
        assert re.search(rf"{re.escape(start)}[^.]*, at worst {worst(found)} times", said)


def test_lora_on_test_data() -> None:
    """Of the two settings of AdamW the better one on each task."""
    found: dict[tuple[str, str], float] = {}
    for row in results("suite_lora")["rows"]:
        assert len(row["seeds"]) == 3
        key = row["task"], row["optimizer"].split("-")[0]
        found[key] = min(found.get(key, math.inf), row["error"])
    said = re.sub(r"\s+", " ", page("results"))
    german, cpp = ({name: found[task, name] for name in RECIPES_AND_ADAMW} for task in LORA_TASKS)
    shown = f"`quality` at its default rate has {german['quality']:.1f} % in German and"
    assert f"{shown} {cpp['quality']:.3f} nats in C++" in said
    for name in ("fast", "lean"):
        assert f"`{name}` {german[name]:.1f} % and {cpp[name]:.3f}" in said
    assert f"six rates {german['adamw']:.1f} % and {cpp['adamw']:.3f}" in said


LORA_TASKS = ("lora-german", "lora-cpp")
RECIPES_AND_ADAMW = ("quality", "fast", "lean", "adamw")


def test_what_brought_the_recipes_here() -> None:
    """`quality` before and after a change of the rule, with the same three seeds."""
    said = re.sub(r"\s+", " ", page("recipe-study"))
    assert f"hard seed of `wave` had {in_edition('wave', 5)[0]:.1f} %" in said
    wave = [in_edition("wave", edition, seeds=[CHOOSING])[0] for edition in (6, 7)]
    assert "The hard seed of `wave` went from {:.1f} to {:.1f} %".format(*wave) in said
    changed = {
        5: ("conformer", "phonemes", "bert", "llama", "lora-german"),  # gradients of equal size
        6: ("bert", "llama", "phonemes", "cpp"),  # the usual size
    }
    for edition, tasks in changed.items():
        for task in tasks:
            digits = 1 if TASKS[task].is_speech else 3
            old, new = (
                f"{mean(in_edition(task, each)):.{digits}f}".removeprefix("0")
                for each in (edition, edition + 1)
            )
            assert f"`{task}` {old} ({new})" in said


# An earlier recipe: all matrices decay by .03 of the relative step.
QUALITY = OWN["quality"]
DECAY = {"switches": maxfactor.Switches(decay_by="relative_step")}
HIDDEN = {
    name: value for name, value in QUALITY.by_kind["hidden"].items() if name != "weight_decay"
}
MEASURED = replace(
    QUALITY, common=QUALITY.common | DECAY, by_kind=QUALITY.by_kind | {"hidden": HIDDEN}
)


def test_widths_and_lengths() -> None:
    """A line for each task, and which of our recipes are ahead of AdamW."""
    known, said = suite_trials(), page("results")
    ahead: dict[str, set[str]] = {name: set() for name in OURS}
    for task in LONGEST_FIRST:
        ours = {name: mean(reported(task, name)) for name in OURS}
        adamw = peer_search("adamw-98", task, Trial)
        assert len({trial.lr for trial in adamw.tried(known)}) >= 4
        peer = mean(adamw.errors(adamw.best(known), known))
        own = own_search("quality", task, Trial)
        assert own.is_complete(known)
        assert own.always is not None
        best = own.best(known)
        factor = best.lr / own.always
        assert 0.5 <= factor <= 2.0
        assert math.exp(ours["quality"] - mean(own.errors(best, known))) < 1.05
        kind, number, *schedule = task.split("-")
        steps = f"{int(number):,}".replace(",", " ")
        row = f"width {number}" if kind == "width" else f"{steps} steps, {schedule[0]}"
        cells = [f"{error:.3f}" for error in (*ours.values(), peer)]
        cells += [f"{math.exp(ours['quality'] - peer):.2f}", f"{factor:g}"]
        assert f"| {row} | {' | '.join(cells)} |" in said
        for name in OURS:
            if ours[name] < peer:
                ahead[name].add(task)
        if task.startswith("length-32000"):
            tried = sorted(trial.lr for trial in adamw.tried(known))
            assert adamw.best(known).lr in (tried[0], tried[-1])  # as the page says
    assert ahead["quality"] == set(LONGEST_FIRST)
    wide, long = {"width-1024"}, {task for task in LONGEST_FIRST if TASKS[task].steps >= 8_000}
    assert ahead["fast"] == set(LONGEST_FIRST) - wide - long
    assert ahead["lean"] == {
        task for task in set(LONGEST_FIRST) - long if task.startswith("length")
    }


def test_more_peers() -> None:
    rows = [line for line in page("results").splitlines() if line.startswith("| ")]
    for task in SOME:
        names = ["quality", "fast", *MORE_PEERS]
        is_speech = TASKS[task].is_speech
        cells = [shown_mean(reported(task, name), is_speech=is_speech) for name in names]
        assert f"| {task} | {' | '.join(cells)} |" in rows


def test_the_decay_of_hidden_matrices() -> None:
    """Three decays with two seeds, and what is chosen where a family is left out."""
    known, tasks = suite_trials(), [task for task in MAIN if TASKS[task].family != "lora"]
    names = {".03": "quality hidden wd .03", ".06": "quality", ".1": "quality hidden wd .1"}
    options = ["choose", "--seeds", "2", "--tasks", ",".join(tasks), "--optimizers"]
    searches = searches_of(parsed([*options, ",".join([*PEERS, *names.values()])]))
    found = scores(searches, known)
    by_decay = {decay: found[f"{name} @ 0.04"] for decay, name in names.items()}
    text = page("recipe-study")
    for task in tasks:
        cells = [f"{each[task]:.2f}" for each in by_decay.values()]
        assert f"| {task} | {' | '.join(cells)} |" in text
    assert {choice.candidate for choice in choose(by_decay, FAMILIES)[1]} == {".1"}
    for each in by_decay.values():
        del each["wave"]
    cells = [f"{geometric_mean(each.values()):.3f}" for each in by_decay.values()]
    assert f"| geometric mean without `wave` | {' | '.join(cells)} |" in text
    best, choices = choose(by_decay, FAMILIES)
    assert best == ".1"
    shown = {
        each.left_out: (each.candidate, f"{each.score:.3f}", f"{each.best_score:.3f}")
        for each in choices
    }
    assert shown == {
        "speech": (".1", "0.649", "0.597"),
        "language": (".03", "0.998", "0.894"),
        "fine-tuning": (".06", "0.821", "0.760"),
    }
    for _, *both in shown.values():
        assert all(number.removeprefix("0") in text for number in both)


def test_groups_of_heads() -> None:
    known = suite_trials()
    for task in ("whisper-half", "llama", "bert", "german-few"):
        whole = Trial(task, "quality", 0.04)
        trials = [whole, replace(whole, settings={"heads_per_block": 4})]  # of six heads three
        digits = 2 if TASKS[task].is_speech else 3
        cells = [
            ", ".join(f"{error_of(known[replace(each, seed=s).key]):.{digits}f}" for s in (0, 1))
            for each in trials
        ]
        assert f"| {task} | {' | '.join(cells)} |" in page("recipe-study")


def test_the_momentum_of_adapters() -> None:
    rows = results("suite_adapters_cpu")["rows"]
    names = ("quality", "quality adapter momentum .8", "soap")
    for task, error, digits in (("lora-german", "wer", 2), ("lora-cpp", "nats", 3)):
        found = [
            [row[error] for row in rows if (row["task"], row["optimizer"]) == (task, name)]
            for name in names
        ]
        cells = [", ".join(f"{each:.{digits}f}" for each in own) or "\u2013" for own in found]
        assert f"| {task} | {' | '.join(cells)} |" in page("recipe-study")
        assert all(short < long for long, short in zip(*found[:2], strict=True))


def test_what_is_small_on_purpose() -> None:
    """Better with each seed of each narrow model."""
    known = suite_trials()
    for task in tasks_in(NARROW):
        now = Trial(task, "quality", 0.04)
        errors = [
            [error_of(known[replace(each, seed=seed).key]) for seed in (0, 1, 2)]
            for each in (replace(now, by_kind={"hidden": A_THIRD}), now)
        ]
        assert all(new < old for old, new in zip(*errors, strict=True))
        cells = [", ".join(f"{error:.3f}" for error in each) for each in errors]
        assert f"| {task} | {' | '.join(cells)} |" in page("recipe-study")


def test_the_cap_is_not_reached_in_the_table() -> None:
    """So rows with decay by the relative step may stand for the squared one."""
    for task in MAIN:
        steps = TASKS[task].steps
        rates = (0.04 * rate_factor(Trial(task, "quality", 0.04), t, steps) for t in range(steps))
        assert all(rate < t**-0.5 for t, rate in enumerate(rates, 1))


def in_edition(task: str, edition: int, seeds: Sequence[int] = (0, 1, 2)) -> list[float]:
    """The seeds of an edition of `quality`, at its own rate."""
    keys = [Trial(task, "quality", 0.04, seed=seed).key_in(edition, MEASURED) for seed in seeds]
    return [error_of(suite_trials()[key]) for key in keys]


def average(ratios: dict[str, float], tasks: Sequence[str] = MAIN) -> str:
    return f"{geometric_mean(ratios[task] for task in tasks):.2f}".removeprefix("0")


def worst(ratios: dict[str, float], tasks: Sequence[str] = MAIN) -> str:
    return f"{max(ratios[task] for task in tasks):.2f}".removeprefix("0")


def shown_mean(errors: list[float], *, is_speech: bool) -> str:
    """The mean with as many digits as the table has."""
    average = mean(errors)
    digits = (2 if average < 1.0 else 1) if is_speech else 3
    return f"{average:.{digits}f}"


def test_gradients_of_noise() -> None:
    """A line for each recipe, and what must hold: no weight vanishes, and steps become smaller."""
    rows = {(row["recipe"], row["factor"]): row["looks"] for row in results("noise")["rows"]}
    for name in ("quality", "fast", "lean"):
        first, last = rows[name, 1.0][0], rows[name, 1.0][-1]
        assert (first["step"], last["step"]) == (1_000, 20_000)
        sizes = f"{first['size']:.2f} | {last['size']:.2f}"
        moves = f"{first['move']:.4f} | {last['move']:.4f}"
        assert f"| `{name}` | {sizes} | {moves} |" in page("results")
        assert 0.5 < last["size"] < 10.0
        assert last["move"] <= 0.6 * first["move"]
    sizes_of_quality = [look["size"] for look in rows["quality", 1.0]]
    assert max(sizes_of_quality) < 1.1 * min(sizes_of_quality)
    at_ten_times = [f"{rows[name, 10.0][-1]['size']:.2f}" for name in ("quality", "fast", "lean")]
    said = re.sub(r"\s+", " ", page("results"))
    assert "after 20 000 steps are {}, {} and {}.".format(*at_ten_times) in said


def test_memory_within_8_gb() -> None:
    rows = {row["recipe"]: row for row in results("small_memory_h200")["rows"]}
    table, said = page("speed-and-memory"), re.sub(r"\s+", " ", page("whisper-8gb"))
    for name in ("lean", "fast", "quality"):
        row = rows[name]
        peak, evaluated = row["train"]["peak_gb"], row["train"]["evaluation"]["peak_gb"]
        assert peak <= row["target_gb"]
        of_four = next(each["peak_gb"] for each in row["tried"] if each["batch_size"] == 4)
        cells = f"{peak:.2f} GB | {evaluated:.2f} | {of_four:.2f} | {row['ratio']:.2f}"
        assert f"| `{name}` | {cells} |" in table
        assert not any(each["out_of_memory"] for each in row["tried"])
        assert f"{peak:.1f} GB with `{name}`" in said or name == "quality"


def test_the_largest_batches_within_8_gb() -> None:
    rows = {row["recipe"]: row for row in results("small_memory_h200_largest")["rows"]}
    said = re.sub(r"\s+", " ", page("whisper-8gb"))
    for name, row in rows.items():
        *fitting, too_large = row["tried"]
        assert too_large["out_of_memory"]
        assert not any(each["out_of_memory"] for each in fitting)
        peaks = {each["batch_size"]: each["peak_gb"] for each in fitting}
        assert row["largest"] == max(peaks)
        cells = f"{row['largest']} | {max(peaks.values()):.2f} GB | {peaks[4]:.2f} | {peaks[8]:.2f}"
        assert f"| `{name}` | {cells} |" in page("speed-and-memory")
    largest = [rows[name]["largest"] for name in ("lean", "fast", "quality")]
    of_each = "steps fitted is {} with `lean`, {} with `fast` and {} with `quality`"
    assert of_each.format(*largest) in said
    assert "two steps fitted with {}, {} and {} recordings".format(*largest) in said


def test_steps_within_8_gb() -> None:
    for row in results("small_memory_h200_steps")["rows"]:
        cells = f"{row['released']['peak_gb']:.2f} GB | {row['ratio']:.2f}"
        assert f"| `{row['recipe']}` | {cells} |" in page("speed-and-memory")
        assert row["ratio"] <= row["target_ratio"] == 1.25


def test_lanes() -> None:
    rows = results("step_kernels_h200_quality")["rows"]
    times = {(row["dtype"], row["lanes"]): f"{row['clock_ms']:.0f}" for row in rows}
    said = re.sub(r"\s+", " ", page("speed-and-memory"))
    one, two = ([times[dtype, lanes] for dtype in ("float32", "bfloat16")] for lanes in (1, 2))
    assert f"takes {two[0]} and {two[1]} ms for large-v3" in said
    assert f"one by one {one[0]} and {one[1]} ms" in said


def test_lora_on_development_data() -> None:
    said = re.sub(r"\s+", " ", page("recipe-study"))
    for file, name, lr, seeds in [
        ("suite_least_sizes", "quality", 0.04, 3),
        ("suite_first_look", "adamw-98", 0.016, 3),
        ("suite_least_sizes", "fast", 0.08, 3),
        ("suite_least_sizes", "fast", 0.16, 1),
    ]:
        german, cpp = (errors_of(file, task, name, lr) for task in ("lora-german", "lora-cpp"))
        assert len(german) == len(cpp) == seeds
        shown = rf"{mean(german):.1f} % (in German )?and {mean(cpp):.3f}"
        assert re.search(shown, said), shown


def errors_of(
    file: str, task: str, optimizer: str, lr: float, by_kind: dict[str, Any] | None = None
) -> list[float]:
    """The errors of all seeds of a trial of the suite, without other settings."""
    wanted = {"task": task, "optimizer": optimizer, "lr": lr, "by_kind": by_kind or {}}
    return [
        error_of(each)
        for each in results(file)["trials"]
        if {"by_kind": {}, **each["trial"]} == {**wanted, "seed": each["trial"]["seed"]}
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["quality"], "**`quality`** (ours, the default)"),
        (["fast"], "**`fast`** (ours)"),
        (["lean"], "**`lean`** (ours, no momentum)"),
        (["soap"], "SOAP"),
        (["normuon"], "NorMuon"),
        (["muon", "muon-matched"], "Muon (torch)"),
        (["adamw-95", "adamw-98"], "AdamW"),
        (["adafactor"], "Adafactor (torch)"),
    ],
)
def test_the_table_of_the_readme(names: list[str], shown: str) -> None:
    """Ours at their own rates, the others at the best one; state where all weights are trained."""
    rate = "default" if names[0] in OURS else "best"
    own = [
        row
        for row in results("suite_development")["rows"]
        if row["optimizer"] in names and row["rate"] == rate
    ]
    cells = []
    for task in ("whisper", "conformer", "german-few", "llama", "bert"):
        errors = [row["error"] for row in own if row["task"] == task]
        assert len(errors) == len(names)
        cells.append(f"{min(errors):.1f} %" if TASKS[task].is_speech else f"{min(errors):.2f}")
    whole = [row for row in own if row["family"] in ("speech", "language")]
    state = [row["state_bytes_per_parameter"] for row in whole]
    assert len(state) == 7 * len(names)
    [line] = [each for each in text_of("README.md").splitlines() if each.startswith(f"| {shown} |")]
    assert line.startswith(f"| {shown} | {' | '.join(cells)} | ")
    said = [float(number) for number in line.split("|")[7].split(" to ")]
    assert said[0] == pytest.approx(min(state), rel=0.15)
    assert said[-1] == pytest.approx(max(state), rel=0.15)


def test_the_preview_is_that_of_the_trials() -> None:
    """The stored tables and the picture are those of the stored runs."""
    searches = searches_of(parsed(["preview"]))
    known = suite_trials()
    rows = json.loads(json.dumps([row for each in searches for row in rows_of(each, known, known)]))
    stored = results("suite_development")
    assert stored["data"] == "development"
    assert [{k: v for k, v in row.items() if k != "ratio"} for row in stored["rows"]] == rows
    picture = text_of("docs/pictures/suite.svg")
    own = [row for row in stored["rows"] if row["optimizer"] == "quality"]
    of_quality = [row["ratio"] for row in own if row["family"] != "scale"]
    assert len(of_quality) == len(MAIN)
    assert "development data. Below 1 is better." in picture
    assert all(f"<!-- {ratio:.2f} -->" in picture for ratio in of_quality)


def test_shares_of_a_training_step() -> None:
    shown = {"published-1.0": "MaxFactor 1.0", "torch AdamW fused": "torch AdamW, fused"}
    for row in results("training_step_h200_large")["rows"]:
        name = shown.get(row["optimizer"], f"`{row['optimizer']}`")
        line = f"| {name} | {row['ms']:.1f} | {row['share']:.0%} |".replace("%", " %")
        assert line in page("speed-and-memory")


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        ("MaxFactor fused", "MaxFactor 1.0"),
        ("torch SGD fused", "torch SGD, fused, without momentum"),
        ("MaxFactor FAM unclipped fused", "FAM in int8, factored, no clip, as in `fast`"),
        ("Adafactor fused", "Adafactor (ours)"),
        ("MaxFactor FAM fused", "FAM in int8, sign_max"),
        ("torch AdamW fused", "torch AdamW, fused"),
        ("MaxFactor orthogonal fused", "all matrices orthogonal, the direction of `quality`"),
    ],
)
def test_step_times(measured: str, shown: str) -> None:
    rows = [row for row in results("step_time_h200_large")["rows"] if row["optimizer"] == measured]
    cells = []
    for row in rows:
        ms, ratio = row["gpu_ms"], row["ratio"]
        cells.append(f"{ms:.{1 if ms < 100 else 0}f}, " + f"{ratio:.{2 if ratio < 1 else 1}f}")
    line = f"| {shown} | {' | '.join(cells)} |".replace(", 1.0 ", ", 1 ")
    assert line in page("speed-and-memory")


# ------------------------------------------------------------------------ published versions


def test_the_table_of_versions_has_every_switch() -> None:
    rows = [line for line in page("published-versions").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])}
    arguments = {"d", "eps", "gamma", "lr", "weight_decay"}
    assert named == arguments | {field.name for field in fields(maxfactor.Switches)}
    for settings in PUBLISHED.values():
        assert set(settings) <= {*arguments, "switches"}
