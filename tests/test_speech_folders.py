"""Model folders: trained further, they do in `pipeline` what the training reports."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperFeatureExtractor, WhisperTokenizer, pipeline
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer
from typer.testing import CliRunner

from maxfactor_speech.cli import app
from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.features import extract, is_log_mel
from maxfactor_speech.data.layouts import find_data
from maxfactor_speech.errors import InputError
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.evaluation import Evaluation, Example
from maxfactor_speech.training.loop import train
from maxfactor_speech.training.metrics import read_metrics
from maxfactor_speech.training.model import encode
from maxfactor_speech.training.model_folder import load_model
from maxfactor_speech.training.optimizers import default_lr, names
from maxfactor_speech.training.preparation import prefers_space, prepare
from maxfactor_speech.training.recogniser import (
    complete_generation,
    text_normaliser,
    with_prompt,
)
from maxfactor_speech.training.settings import Settings
from maxfactor_speech.training.trainer import Trainer
from noise import weights
from toy_whisper import Spoken, heard, make_folder, plain_wer, raw_wer, record, utterance

VALIDATION = 16
resource: Any = pytest.importorskip("resource")  # limits of POSIX


@pytest.fixture(scope="module")
def toy(toy_whispers: dict[int, Path]) -> Path:
    """A multilingual Whisper for 5 s of audio that makes some mistakes."""
    return toy_whispers[100]


@pytest.fixture(scope="module")
def able(toy_whispers: dict[int, Path]) -> Path:
    """The same, trained for longer, so that it makes no mistakes."""
    return toy_whispers[240]


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An English-only Whisper whose texts begin without a space, trained a little."""
    folder = tmp_path_factory.mktemp("english") / "whisper"
    make_folder(folder, 5, 40, multilingual=False, space="")
    return folder


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings with German texts, and lists of them."""
    folder = tmp_path_factory.mktemp("spoken")
    record(folder, range(5000, 5048), range(9000, 9000 + VALIDATION))
    return folder


def settings(spoken: Path, model: Path | str, **changes: Any) -> Settings:
    base = Settings(
        data=str(spoken / "train.tsv"), validation=str(spoken / "check.tsv"), model=str(model),
        language="german", optimizer="adamw", lr=1e-3, steps=12, batch_size=8, evaluate_every=6,
    )  # fmt: skip
    return replace(base, **changes)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def evaluations(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out) if "wer" in line]


# ------------------------------------------------------------------ what the pipeline says


@pytest.fixture(scope="module")
def tuned(toy: Path, spoken: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy, trained further with the command."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    chosen = settings(spoken, toy)
    result = run(
        "train", "--model", toy, "--data", chosen.data, "--validation", chosen.validation,
        "--language", "German", "--optimizer", "adamw", "--lr", "1e-3", "--steps", "12",
        "--batch-size", "8", "--evaluate-every", "6", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    first, *_, last = evaluations(out)
    assert (
        f"before the first step: WER {first['wer']:.1%} (raw {first['raw_wer']:.1%})"
        in result.output
    )
    assert f"WER {last['wer']:.1%} (raw {last['raw_wer']:.1%})" in result.output
    assert f"best:    {out / 'best'}, WER " in result.output
    return out


def test_a_folder_trained_further_does_in_the_pipeline_what_was_reported(
    toy: Path, tuned: Path, spoken: Path
) -> None:
    before = heard(toy, spoken, language="de", task="transcribe")
    lines = evaluations(tuned)
    assert [line["step"] for line in lines] == [0, 6, 12]
    folders = {0: before, lines[-1]["best"]: heard(tuned / "best", spoken)}
    folders[12] = heard(checkpoint.checkpoints(tuned)[-1], spoken)
    for line in lines:
        if line["step"] in folders:
            pairs = folders[line["step"]]
            assert line["wer"] == plain_wer(pairs)
            assert line["raw_wer"] == raw_wer(pairs)
            assert {Example(**example) for example in line["examples"]} <= set(pairs)
    assert 0.0 < plain_wer(before) < 0.9  # there was something to keep and something to learn
    assert plain_wer(folders[12]) < plain_wer(before)
    assert plain_wer(folders[lines[-1]["best"]]) == min(line["wer"] for line in lines)


@pytest.mark.parametrize("optimizer", names())
def test_default_rates_are_a_quarter_for_trained_weights(optimizer: str) -> None:
    new, folder = Settings(optimizer=optimizer), Settings(optimizer=optimizer, model="folder")
    assert folder.peak_lr == 0.25 * new.peak_lr == 0.25 * default_lr(optimizer)
    assert replace(folder, lora=4).peak_lr == new.peak_lr  # adapters are new
    assert replace(folder, lr=0.3).peak_lr == 0.3


def test_the_default_rate_keeps_what_a_good_model_can(
    able: Path, spoken: Path, tmp_path: Path
) -> None:
    """In the domain of the model; four times the rate spoils two thirds of the words."""
    out = tmp_path / "out"
    result = run(
        "train", "--model", able, "--data", spoken / "train.tsv", "--validation",
        spoken / "check.tsv", "--language", "de", "--steps", "20", "--batch-size", "8", "--out",
        out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "learning rate: 0.01, a quarter of the default of quality" in result.output
    before, after = evaluations(out)
    words = sum(len(one.text.split()) for one in find_data(spoken / "check.tsv").train)
    assert before["wer"] * words <= 2.0
    assert (after["wer"] - before["wer"]) * words <= 2.0
    assert all(line["lr"] < 0.01 for line in read_metrics(out) if "loss" in line)
    kept = "the training did not improve on the model that it began with"
    assert (kept in result.output) == (after["best"] == 0)


def test_the_written_folder_is_complete(toy: Path, tuned: Path) -> None:
    names = {path.name for path in (tuned / "best").iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
        "processor_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    before, after = (
        json.loads((folder / "generation_config.json").read_text())
        for folder in (toy, tuned / "best")
    )
    assert (after["language"], after["task"]) == ("de", "transcribe")
    kept = ("suppress_tokens", "begin_suppress_tokens", "lang_to_id", "max_length")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    words = WhisperTokenizer.from_pretrained(tuned / "best")
    codec = load_model(tuned).codec
    assert words("uh oh").input_ids == [codec.start[0], *codec.encode("uh oh")]
    prompt = words.decode(codec.start)
    assert prompt == "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"


def test_a_model_from_scratch_is_a_folder_for_the_pipeline(spoken: Path, tmp_path: Path) -> None:
    chosen = settings(spoken, "nano", language=None, lr=3e-3, steps=30, evaluate_every=30)
    lower = tmp_path / "check.tsv"
    lines = (spoken / "check.tsv").read_text().lower().replace("!", "")
    lower.write_text("".join(f"{spoken}/{line}\n" for line in lines.splitlines()))
    train(replace(chosen, validation=str(lower)), tmp_path / "out")
    pairs = heard(tmp_path / "out" / "best", spoken)
    line = evaluations(tmp_path / "out")[-1]
    assert line["wer"] == plain_wer(pairs)
    assert len({pair.hypothesis for pair in pairs}) > 2  # it does not always say the same
    result = run("transcribe", tmp_path / "out", spoken / "9000.wav")
    assert result.output.strip() == pairs[0].hypothesis


def test_thirty_seconds_are_padded_as_the_model_was_trained(spoken: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "toy", 30, 1)
    chosen = settings(spoken, tmp_path / "toy", steps=1, batch_size=2)
    few = (spoken / "check.tsv").read_text().splitlines()[:2]
    (tmp_path / "few.tsv").write_text("".join(f"{spoken}/{line}\n" for line in few))
    result = train(replace(chosen, validation=str(tmp_path / "few.tsv")), tmp_path / "out")
    batches = result.trainer.batches()
    assert next(batches)[0].samples.shape == (2, 30 * SAMPLE_RATE)
    batches.close()
    last = checkpoint.checkpoints(tmp_path / "out")[-1]
    examples = [Example(**example) for example in evaluations(tmp_path / "out")[-1]["examples"]]
    assert sorted(examples) == sorted(heard(last, tmp_path, "few.tsv"))


# ----------------------------------------------------------------------- features and texts


@pytest.mark.parametrize("mels", [80, 128])
def test_features_are_those_of_the_extractor(mels: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=3)
    said = [utterance(number, "en").samples for number in range(3)]
    waves = [one.astype(np.float32) / 32_768.0 for one in said]
    expected = extractor(waves, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    padded = torch.stack([torch.from_numpy(np.pad(one, (0, 48_000 - len(one)))) for one in said])
    assert is_log_mel(extractor)
    torch.testing.assert_close(extract(extractor, padded), expected, atol=2e-5, rtol=0.0)
    other = WhisperFeatureExtractor(feature_size=mels, chunk_length=3, n_fft=512)
    assert not is_log_mel(other)
    expected = other(waves, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    assert torch.equal(extract(other, padded), expected)


def test_english_is_normalised_with_the_spellings_of_the_folder(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "british"
    shutil.copytree(toy, folder)
    (folder / "normalizer.json").write_text('{"colour": "color"}')
    own = with_prompt(load_model(folder), "en", None, "it")
    normalise = text_normaliser(own)
    assert isinstance(normalise, EnglishTextNormalizer)
    evaluation = Evaluation.of([Example("Colour it, Mr. Re!", "color it mister re")], normalise)
    assert (evaluation.wer, evaluation.raw_wer) == (0.0, 1.0)
    checkpoint.write(tmp_path / "again", own, {})
    assert load_model(tmp_path / "again").codec.tokenizer.english_spelling_normalizer == {
        "colour": "color"
    }
    german = text_normaliser(with_prompt(load_model(folder), "de", False, "it"))
    assert german("Uh, OH") == "uh oh"
    assert isinstance(text_normaliser(with_prompt(own, "de", True, "it")), EnglishTextNormalizer)


def test_texts_begin_as_those_that_the_model_was_trained_on(
    toy: Path, english: Path, tuned: Path
) -> None:
    multilingual = with_prompt(load_model(toy), "de", None, "it")
    assert prefers_space(multilingual, Spoken("de"))
    assert not prefers_space(load_model(english), Spoken("en"))
    assert load_model(tuned).codec.encode("uh")[3:] == multilingual.codec.encode(" uh")[3:]


# ------------------------------------------------------------------------ language and task


def test_the_language_is_that_of_the_folder_if_none_is_given(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    chosen = settings(spoken, toy, language=None)
    with pytest.raises(
        InputError, match=r"is multilingual, so give .* --language; it knows .*, de, "
    ):
        prepare(chosen)
    folder = tmp_path / "german"
    shutil.copytree(toy, folder)
    own = json.loads((toy / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**own, "language": "german"}))
    start = prepare(replace(chosen, model=str(folder))).codec.start
    assert start == prepare(settings(spoken, toy)).codec.start
    translated = prepare(settings(spoken, toy, translate=True)).codec
    assert translated.tokenizer.decode(translated.start[1:3]) == "<|de|><|translate|>"


def test_a_generation_config_of_an_older_checkpoint_is_completed(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "older"
    shutil.copytree(toy, folder)
    (folder / "generation_config.json").unlink()
    codec = prepare(settings(spoken, folder)).codec
    assert codec.start == prepare(settings(spoken, toy)).codec.start
    own = json.loads((toy / "generation_config.json").read_text())
    forced = [[1, own["lang_to_id"]["<|de|>"]], [2, own["task_to_id"]["transcribe"]]]
    (folder / "generation_config.json").write_text(
        json.dumps({**own, "forced_decoder_ids": forced})
    )
    older = json.loads((toy / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**older, "forced_decoder_ids": forced}))
    prepared = prepare(settings(spoken, folder, language=None))
    assert prepared.codec.start == codec.start
    assert "forced_decoder_ids" not in prepared.model.config.to_dict()
    (folder / "generation_config.json").write_text(json.dumps({**own, "language": "klingon"}))
    with pytest.raises(
        InputError, match=r"older: cannot be read as a Whisper model, language must"
    ):
        prepare(settings(spoken, folder))


@pytest.mark.parametrize(
    ("which", "changes", "message"),
    [
        (
            "toy",
            {"language": "klingon"},
            "does not know the language 'klingon'; it knows af, am, ",
        ),
        ("english", {"language": "de"}, "is not multilingual, so --language de is not possible"),
        ("english", {"language": None, "translate": True}, "is not multilingual and cannot transl"),
    ],
)
def test_a_language_or_task_that_the_model_does_not_know_is_refused(
    request: pytest.FixtureRequest, spoken: Path, which: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare(settings(spoken, request.getfixturevalue(which), **changes))


def test_an_english_model_has_neither_language_nor_task(english: Path, spoken: Path) -> None:
    prepared = prepare(settings(spoken, english, language="en"))
    assert prepared.codec.tokenizer.decode(prepared.codec.start) == (
        "<|startoftranscript|><|notimestamps|>"
    )


# ---------------------------------------------------------------- what a training offers


def test_a_finished_training_is_continued_with_more_steps(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    chosen = settings(spoken, toy, steps=2, evaluate_every=2)
    train(chosen, tmp_path / "out")
    again = train(replace(chosen, steps=4), tmp_path / "out", resume=True)
    assert again.step == 4
    assert [line["step"] for line in evaluations(tmp_path / "out")] == [0, 2, 4]
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["steps"] == 4


def test_a_training_ends_without_improvement_and_keeps_the_best(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    """A learning rate that destroys the model: the best one is what it started from."""
    chosen = settings(spoken, toy, lr=1.0, steps=50, evaluate_every=1, patience=2, keep=1)
    result = train(chosen, tmp_path / "out")
    assert result.step == 2
    assert result.evaluation is not None
    assert {line["best"] for line in evaluations(tmp_path / "out")} == {0}
    names = [path.name for path in checkpoint.checkpoints(tmp_path / "out")]
    assert names == ["step-00000000", "step-00000002"]
    assert heard(tmp_path / "out" / "best", spoken) == heard(toy, spoken, language="de")
    assert train(chosen, tmp_path / "out", resume=True).step == 2


def test_a_frozen_encoder_is_neither_trained_nor_differentiated(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    chosen = settings(spoken, toy, steps=2, freeze_encoder=True)
    result = train(chosen, tmp_path / "out")
    before, after = load_model(toy).model.state_dict(), weights(tmp_path / "out")
    same = {name for name, value in after.items() if torch.equal(value, before[name])}
    encoder = {name for name in after if name.startswith("model.encoder.")}
    assert same == encoder
    model = result.trainer.model
    assert encode(model, torch.zeros(1, 80, 500)).grad_fn is None  # so nothing is kept for it
    assert not [
        one for name, one in model.named_parameters() if name in encoder and one.grad is not None
    ]


def test_checkpointing_computes_the_same_with_fewer_activations(toy: Path, spoken: Path) -> None:
    kept, losses = [], []
    for checkpointing in (False, True):
        chosen = settings(spoken, toy, gradient_checkpointing=checkpointing)
        trainer = Trainer(chosen, prepare(chosen))
        batches = trainer.batches()
        [batch] = next(batches)
        batches.close()
        sizes: list[int] = []

        def count(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        features = extract(trainer.prepared.recogniser.extractor, batch.samples)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = trainer._forward(features, batch.labels)
        loss.backward()
        kept.append(sum(sizes))
        losses.append(
            [
                loss.detach(),
                *(one.grad for one in trainer.model.parameters() if one.grad is not None),
            ]
        )
    assert kept[1] < 0.6 * kept[0]
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_long_recordings_are_transcribed_with_time_stamps(
    tuned: Path, english: Path, spoken: Path, tmp_path: Path
) -> None:
    quiet = np.zeros(5 * SAMPLE_RATE, np.int16)
    parts = [utterance(number, "de").samples for number in (9001, 9002)]
    long = tmp_path / "long.wav"
    soundfile.write(long, np.concatenate([parts[0], quiet, parts[1]]), SAMPLE_RATE)
    samples, _ = soundfile.read(long, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recognise: Any = pipeline("automatic-speech-recognition", model=str(tuned / "best"))
        expected = recognise(samples, return_timestamps=True)
    result = run("transcribe", tuned, long)
    assert result.exit_code == 0, result.output
    assert result.output.split() == expected["text"].split()
    lines = run("transcribe", tuned, long, "--timestamps").output.splitlines()
    assert len(lines) == len(expected["chunks"]) >= 1
    for line, chunk in zip(lines, expected["chunks"], strict=True):
        times = ["" if time is None else f"{time:.2f}" for time in chunk["timestamp"]]
        assert line == f"{'-'.join(times)}\t{chunk['text'].strip()}"


# --------------------------------------------------------------------------- bad folders


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tokenizer.json"], r"has no tokenizer \(tokenizer.json or vocab.json\); copy it from"),
        (["processor_config.json"], r"has no feature extractor \(preprocessor_config.json or "),
        (["config.json"], "no config.json, so this is not a model folder"),
    ],
)
def test_a_folder_that_lacks_a_file_is_named(
    toy: Path, spoken: Path, tmp_path: Path, names: list[str], message: str
) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(toy, folder)
    for name in names:
        (folder / name).unlink()
    with pytest.raises(InputError, match=f"{folder}: {message}"):
        train(settings(spoken, folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_another_model_are_refused(toy: Path, spoken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(toy, folder)
    WhisperFeatureExtractor(chunk_length=30).save_pretrained(folder)
    (folder / "processor_config.json").unlink()
    with pytest.raises(
        InputError, match=r"has 3000 frames, but the model takes 500; copy the file"
    ):
        train(settings(spoken, folder), tmp_path / "out")


def test_a_folder_that_lacks_weights_is_named(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(toy, folder)
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith("fc1.weight"))
    stored[f"other.{name}"] = stored.pop(name)  # as many numbers as before
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"lacking: lacks weights of the model, such as {name}"):
        load_model(folder)


def test_texts_that_are_too_long_for_the_model_are_left_out(
    toy: Path, spoken: Path, tmp_path: Path
) -> None:
    """28 tokens besides the prompt: the end, two for the first word, one for each other."""
    lines = [f"{spoken}/5000.wav\t{'uh ' * 27}\n", f"{spoken}/5001.wav\t{'uh ' * 26}\n"]
    lines += [f"{spoken}/5002.wav\toh\n"]
    data = tmp_path / "talk.tsv"
    data.write_text("".join(lines))
    chosen = settings(spoken, toy, data=str(data), steps=1, batch_size=2)
    train(chosen, tmp_path / "out")
    [_, row] = (tmp_path / "out" / "left-out.tsv").read_text().splitlines()
    detail = f"{spoken}/5000.wav: its transcript has 29 tokens, but the model takes at most 28"
    assert row.split("\t") == [f"{spoken}/5000.wav", "too long", detail, f"{data}:1"]
    with pytest.raises(InputError, match=r"talk\.tsv:1: .*29 tokens.*; leave out --strict"):
        prepare(replace(chosen, strict=True))
    data.write_text(lines[0])
    with pytest.raises(InputError, match=r"no recordings are left; 1 of 17 .* 1 too long \(5000"):
        prepare(chosen)
    synthesised = Settings(model=str(toy), task="sentences", utterances=2, validation_utterances=2)
    with pytest.raises(InputError, match=r"texts of \d+ tokens, but the model takes at most 28"):
        prepare(synthesised, tmp_path / "cache", 1)


def test_the_overview_foresees_what_a_model_does_not_take(
    toy: Path, english: Path, spoken: Path, tmp_path: Path
) -> None:
    data = tmp_path / "talk.tsv"
    lines = [f"{spoken}/5000.wav\t{'uh ' * 27}\n", f"{spoken}/5001.wav\t{'uh ' * 26}\n"]
    lines += [f"{spoken}/{5002 + number}.wav\tuh {one}\n" for number, one in enumerate("äöä")]
    data.write_text("".join(lines))
    found = json.loads(run("data", data, "--model", toy, "--json").stdout)
    assert found["left_out"] == {"count": 1, "reasons": {"too long": 1}}
    assert found["unspelled"]["count"] == 3
    assert found["unspelled"]["characters"] == ["ä", "ö"]
    shown = " ".join(run("data", data, "--model", toy).stdout.split())
    assert "3 texts have what the model has no token for: 'ä', 'ö'" in shown
    assert "5002.wav, 5003.wav, 5004.wav" in shown
    # An English-only model has a shorter prompt; a new model is made for the texts.
    for model in (english, "nano"):
        other = json.loads(run("data", data, "--model", model, "--json").stdout)
        assert other["left_out"]["count"] == 0
    result = run("data", data, "--model", tmp_path / "nothing")
    assert (result.exit_code, "nothing: no such folder" in result.stderr) == (2, True)


def test_the_overview_needs_no_weights(toy: Path, spoken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "light"
    shutil.copytree(toy, folder)
    (folder / "model.safetensors").unlink()
    assert run("data", spoken / "train.tsv", "--model", folder).exit_code == 0
    (folder / "tokenizer.json").write_text("{}")
    result = run("data", spoken / "train.tsv", "--model", folder)
    assert result.exit_code == 2
    assert f"{folder}: cannot be read as a Whisper model" in result.stderr


def test_speech_is_synthesised_in_the_language_of_the_folder(toy: Path, tmp_path: Path) -> None:
    """English if it has none; a multilingual model knows more than there are texts for."""
    chosen = Settings(model=str(toy), utterances=2, validation_utterances=2)
    codec = prepare(chosen, tmp_path / "cache", 1).codec
    assert codec.tokenizer.decode(codec.start[1:2]) == "<|en|>"
    folder = tmp_path / "french"
    shutil.copytree(toy, folder)
    own = json.loads((toy / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**own, "language": "french"}))
    message = r"french: language must be one of en, de, es, got 'fr'; give --data in that language"
    with pytest.raises(InputError, match=message):
        prepare(replace(chosen, model=str(folder)))


def test_a_model_without_a_task_or_start(toy: Path) -> None:
    given = load_model(toy)
    given.generation.task_to_id = {"transcribe": given.generation.task_to_id["transcribe"]}
    with pytest.raises(InputError, match="toy: does not know the task 'translate'; it knows trans"):
        with_prompt(given, "de", True, "toy")
    given.generation.decoder_start_token_id = None
    complete_generation(given.model, given.codec.tokenizer)
    assert given.generation.decoder_start_token_id == given.codec.start[0]


def test_letters_without_a_token_are_named(toy: Path, spoken: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign.tsv").write_text(f"{spoken}/5000.wav\tdo ré\n{spoken}/5001.wav\tmi\n")
    chosen = settings(spoken, toy, data=str(tmp_path / "foreign.tsv"))
    with pytest.raises(InputError, match=r"5000.wav: the model has no token for 'é' in 'do ré'; "):
        train(chosen, tmp_path / "out")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The system refuses to write more to a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [4_000, 60_000, 300_000])
def test_a_full_disk_keeps_the_previous_checkpoint(tuned: Path, tmp_path: Path, size: int) -> None:
    """Whichever file does not fit: the tokenizer, the weights, or the state of the optimizer."""
    out = tmp_path / "out"
    shutil.copytree(tuned, out, symlinks=True)
    before = weights(out)
    chosen = replace(Settings(**json.loads((out / "settings.json").read_text())), steps=18)
    with file_size_limit(size), pytest.raises(InputError, match="cannot be written"):
        train(chosen, out, resume=True)
    last = checkpoint.checkpoints(out)[-1]
    assert last.name == "step-00000012"
    for name, value in weights(out).items():
        assert torch.equal(value, before[name])
    assert not list(out.rglob("*.partial"))
    assert load_model(out / "best").language == "de"
