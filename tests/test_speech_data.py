"""Texts, synthesis, recordings, features, shards and batches."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor

from maxfactor_speech.data import audio, corpus, shards, synthesis
from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.batches import (
    Batch,
    Order,
    Padding,
    all_features,
    collate,
    evaluation_batches,
    seconds_needed,
    training_batches,
)
from maxfactor_speech.data.espeak import DATA_VARIABLE, LIBRARY_VARIABLE, Espeak, Location
from maxfactor_speech.data.features import draw_stretches, log_mel, mel_filters, spec_augment
from maxfactor_speech.data.layouts import find_data
from maxfactor_speech.data.recordings import RecordedUtterances, Recording, split_recordings
from maxfactor_speech.data.screening import screen
from maxfactor_speech.data.shards import ShardedUtterances, Utterance
from maxfactor_speech.data.synthesis import Script, SpeechRequest
from maxfactor_speech.data.tokens import IGNORED, Codec
from maxfactor_speech.errors import InputError

LANGUAGES = ("en", "de", "es")


def tone(hertz: float, rate: int, seconds: float = 0.5) -> audio.Wave:
    """Fades in and out, as a sound that stops at once has no bandwidth to keep."""
    time = np.arange(round(rate * seconds)) / rate
    fade = np.sin(np.pi * time / seconds) ** 2
    return (0.5 * fade * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


# ------------------------------------------------------------------------------- corpus


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", corpus.TASKS)
def test_texts_depend_only_on_seed_and_number(task: str, language: str) -> None:
    first = list(corpus.texts(task, 50, language, seed=1))
    assert first[7:9] == [corpus.draw(task, number, language, seed=1) for number in (7, 8)]
    assert first != list(corpus.texts(task, 50, language, seed=2))


@pytest.mark.parametrize("task", corpus.TASKS)
def test_validation_has_no_text_of_training(task: str) -> None:
    train = {text for seed in (0, 1) for text in corpus.texts(task, 3000, seed=seed)}
    validation = set(corpus.texts(task, 1000, split="validation", seed=2))
    assert len(validation) > 300
    assert not train & validation


def test_there_are_twenty_thousand_sentences() -> None:
    sentences = list(corpus.texts("sentences", 25_000))
    assert len(set(sentences)) > 24_500
    assert len({word for text in sentences for word in text.split()}) > 300
    lengths = Counter(len(text.split()) for text in sentences)
    assert min(lengths) == 3
    assert max(lengths) <= 8


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", corpus.TASKS)
def test_alphabet_covers_every_text(task: str, language: str) -> None:
    unit = "words" if task == "digits" else "characters"
    codec = Codec.build(corpus.alphabet(task, language), unit)  # type: ignore[arg-type]
    for text in corpus.texts(task, 500, language):
        assert not codec.missing(text)
        assert codec.decode(codec.encode(text)) == text
        assert len(text.split()) <= 8


@pytest.mark.parametrize(("task", "language"), [("songs", "en"), ("digits", "fr")])
def test_unknown_task_or_language_is_refused(task: str, language: str) -> None:
    with pytest.raises(ValueError, match=r"songs|fr"):
        Script(task, language)


# -------------------------------------------------------------------------------- audio


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("hertz", [50.0, 440.0, 3_500.0])
def test_resampling_keeps_a_tone(rate: int, hertz: float) -> None:
    resampled = audio.resample(tone(hertz, rate), rate, SAMPLE_RATE)
    expected = tone(hertz, SAMPLE_RATE)
    assert resampled.shape == expected.shape
    np.testing.assert_allclose(resampled, expected, atol=2e-4)


def test_resampling_removes_frequencies_above_nyquist() -> None:
    resampled = audio.resample(tone(9_000.0, 48_000), 48_000, SAMPLE_RATE)
    assert np.abs(resampled).max() < 1e-3


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_stereo_of_another_rate_is_read_as_16_khz_mono(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"stereo.{suffix}"
    left, right = tone(440.0, 44_100), np.zeros(22_050, np.float32)
    soundfile.write(path, np.stack([left, right], axis=1), 44_100)
    wave = audio.read(path)
    assert wave.dtype == np.float32
    assert len(wave) == audio.samples_in(path) == 8_000
    tolerance = 0.02 if suffix == "ogg" else 2e-4  # OGG loses some
    np.testing.assert_allclose(wave, tone(440.0, SAMPLE_RATE) / 2, atol=tolerance)


def test_unreadable_audio_is_named(tmp_path: Path) -> None:
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"this is no audio")
    empty = tmp_path / "empty.wav"
    soundfile.write(empty, np.zeros(0, np.float32), SAMPLE_RATE)
    for path, reason in [
        (tmp_path / "missing.wav", "no such file"),
        (tmp_path, "is a folder"),
        (noise, "cannot be read as audio"),
        (empty, "contains no audio"),
    ]:
        with pytest.raises(InputError, match=reason) as caught:
            audio.read(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


def test_audio_of_unknown_length_is_named(tmp_path: Path) -> None:
    path = tmp_path / "piped.flac"
    soundfile.write(path, tone(440.0, SAMPLE_RATE), SAMPLE_RATE)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0  # the 36 bits of STREAMINFO that count the samples
    content[22:26] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"piped\.flac: the header gives no length"):
        audio.samples_in(path)


# ----------------------------------------------------------------------------- features


@pytest.mark.parametrize("mels", [80, 128])
def test_features_are_whispers_own(mels: int) -> None:
    random = np.random.default_rng(0)
    waves = random.normal(0, 0.1, (3, 2 * SAMPLE_RATE)).astype(np.float32)
    waves[1, 9_000:] = 0.0
    waves[2] = 0.0  # silence throughout
    extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=2)
    expected = extractor(list(waves), sampling_rate=SAMPLE_RATE, return_tensors="pt")
    features = log_mel(torch.from_numpy(waves), mels)
    torch.testing.assert_close(features, expected["input_features"], atol=1e-5, rtol=1e-5)


def test_mel_filters_are_whispers_own() -> None:
    expected = torch.from_numpy(WhisperFeatureExtractor().mel_filters.T).float()
    torch.testing.assert_close(mel_filters(), expected, atol=1e-7, rtol=1e-5)


def test_16_bit_samples_are_scaled_to_one() -> None:
    samples = torch.randint(-3000, 3000, (2, 3200), dtype=torch.int16)
    torch.testing.assert_close(log_mel(samples), log_mel(samples / 32768.0))


def test_spec_augment_masks_stretches() -> None:
    features = torch.rand(64, 80, 300) + 1.0
    masked, again = (
        spec_augment(features, draw_stretches(64, torch.Generator().manual_seed(0)))
        for _ in range(2)
    )
    hidden = masked == 0.0
    assert torch.equal(masked, again)
    assert torch.equal(masked[~hidden], features[~hidden])
    assert (features >= 1.0).all()  # the input is as it was
    frames, bands = hidden.all(dim=1).sum(dim=1), hidden.all(dim=2).sum(dim=1)
    assert frames.max() <= 2 * 31
    assert bands.max() <= 2 * 17
    assert frames.float().std() > 1.0  # others for each utterance
    # Every hidden value lies in a whole band or in a whole frame.
    assert torch.equal(hidden, hidden.all(dim=1)[:, None, :] | hidden.all(dim=2)[:, :, None])


# ----------------------------------------------------------------------------- synthesis


@pytest.fixture(scope="module")
def espeak() -> Espeak:
    return Espeak(Location.find())


@pytest.mark.parametrize("voice", ["gmw/en-US+f2", "gmw/en+f3", "gmw/de+m7", "roa/es", "en+croak"])
def test_an_utterance_does_not_depend_on_those_before(espeak: Espeak, voice: str) -> None:
    utterance = SpeechRequest("one two three", voice, 170, 50, 20.0, 1)
    first = synthesis.render(utterance, espeak)
    espeak.say("something altogether different", "gmw/en-GB-scotland+f5", 200, 90)
    espeak.phonemes(["something"], "roa/es")
    second = synthesis.render(utterance, espeak)
    np.testing.assert_array_equal(first.samples, second.samples)


def test_phonemes_of_words(espeak: Espeak) -> None:
    words = ["knight", "", "one, two"]
    assert espeak.phonemes(words, "gmw/en-US") == ["n'aIt", "", "w,Vn t'u:"]
    with pytest.raises(InputError, match="no voice 'nobody'"):
        espeak.phonemes(words, "nobody")


def test_every_part_of_a_request_is_heard(espeak: Espeak) -> None:
    base = SpeechRequest("one two three", "gmw/en-US", 170, 50, 20.0, 1)
    sounds = [synthesis.render(base, espeak).samples.tobytes()]
    for change in (
        {"text": "one two four"},
        {"voice": "gmw/en+f3"},
        {"rate": 200},
        {"pitch": 80},
        {"snr": 10.0},
        {"seed": 2},
    ):
        changed = SpeechRequest(**{**base.__dict__, **change})
        sounds.append(synthesis.render(changed, espeak).samples.tobytes())
    assert len(set(sounds)) == len(sounds)


@pytest.mark.parametrize("snr", [10.0, 30.0])
def test_noise_has_the_requested_level(espeak: Espeak, snr: float) -> None:
    clean, noisy = (
        synthesis.render(SpeechRequest("one two three", "gmw/en-US", 170, 50, level, 1), espeak)
        for level in (200.0, snr)
    )
    speech = clean.samples.astype(np.float64)
    noise = noisy.samples - speech
    assert 10 * np.log10(np.mean(speech**2) / np.mean(noise**2)) == pytest.approx(snr, abs=0.5)


def test_every_voice_exists(espeak: Espeak) -> None:
    for voice in {voice for voices in synthesis.VOICES.values() for voice in voices}:
        samples, rate = espeak.say("ja", voice, 170, 50)
        assert rate == 22_050
        assert len(samples) > 2_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_the_callback_is_not_lost(number: signal.Signals) -> None:
    """ctypes drops what a callback raises, and the synthesis went on."""

    class Interrupted(Espeak):
        def _collect(self, samples: Any, count: int, events: Any) -> int:
            signal.raise_signal(number)
            return super()._collect(samples, count, events)

    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Interrupted(Location.find()).say("one two", "gmw/en-US", 180, 50)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_unknown_voice_is_refused(espeak: Espeak) -> None:
    with pytest.raises(InputError, match="no voice 'nobody'"):
        espeak.say("hello", "nobody", 170, 50)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "/nowhere/libespeak-ng.so")
    with pytest.raises(InputError, match=r"/nowhere/libespeak-ng.so: no such file"):
        Location.find()


def test_wrong_data_is_named(tmp_path: Path) -> None:
    location = Location(Location.find().library, str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path}: espeak-ng cannot use this data folder"):
        Espeak(location).say("hello", "gmw/en", 170, 50)


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesis, "SHARD_SIZE", 4)  # this process cuts the pieces
    script = Script("digits", seed=5)
    ready: list[int] = []
    alone = synthesis.synthesise(script, 10, tmp_path / "alone", 1, progress=ready.append)
    several = synthesis.synthesise(script, 10, tmp_path / "several", 2)
    assert ready == [4, 4, 2]
    assert [path.name for path in alone.paths] == [path.name for path in several.paths]
    for one, other in zip(alone.paths, several.paths, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert [alone.text(number) for number in range(10)] == list(corpus.texts("digits", 10, seed=5))


def test_cached_speech_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script("digits")
    [path] = synthesis.synthesise(script, 3, tmp_path, 1).paths
    monkeypatch.setattr(synthesis, "render", None)  # whoever calls it now fails
    assert synthesis.synthesise(script, 3, tmp_path, 1).paths == [path]
    monkeypatch.undo()
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])  # damaged
    synthesis.synthesise(script, 3, tmp_path, 1)
    assert path.read_bytes() == whole


def test_a_full_disk_is_reported_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="the disk is full"):
        synthesis.synthesise(Script("digits"), 2, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- shards


def many_shards(folder: Path, count: int) -> ShardedUtterances:
    utterance = np.ones(200, np.int16)
    paths = [folder / f"{number}.safetensors" for number in range(count)]
    for number, path in enumerate(paths):
        shards.write_shard(path, [Utterance(utterance * (number % 100), f"text {number}")] * 50)
    return ShardedUtterances(paths)


def test_shards_return_what_was_written(tmp_path: Path) -> None:
    spoken = [Utterance(np.arange(n, dtype=np.int16), f"höre {n}") for n in (5, 1, 7)]
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    shards.write_shard(paths[0], spoken[:2])
    shards.write_shard(paths[1], spoken[2:])
    data = ShardedUtterances(paths)
    assert [int(length) for length in data.lengths] == [5, 1, 7]
    for number, expected in enumerate(spoken):
        assert data.text(number) == data[number].text == expected.text
        np.testing.assert_array_equal(data[number].samples, expected.samples)
    with pytest.raises(IndexError):
        data[3]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks = []
    for count in (80, 320):
        data = many_shards(tmp_path / str(count), count)
        for number in range(0, len(data), 25):  # whatever is made once
            data[number]
        tracemalloc.start()
        for number in range(len(data)):
            data[number]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(data._open) == shards.OPEN_AT_ONCE
        assert data.lengths.nbytes == 4 * len(data)
    assert peaks[1] < peaks[0] + 20_000  # bytes, for four times as many utterances


# ------------------------------------------------------------------------------- batches


class Made:
    """Utterances of given lengths, each with its number as its samples."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Utterance:
        return Utterance(np.full(self.lengths[number], number + 1, np.int16), self.text(number))

    def text(self, number: int) -> str:
        return "ab"[number % 2] * (1 + number % 5)


def test_an_epoch_has_every_utterance_once() -> None:
    lengths = np.random.default_rng(0).integers(100, 1000, 103).astype(np.int32)
    order = Order(lengths, 10, seed=3)
    assert order.per_epoch == 10
    for epoch in range(3):
        numbers = np.concatenate([order[epoch * 10 + place] for place in range(10)])
        assert len(set(numbers)) == 100
    assert not np.array_equal(order[0], order[10])  # another epoch, another order


def test_order_depends_only_on_the_seed() -> None:
    lengths = np.arange(100, dtype=np.int32)
    one, same, other = (Order(lengths, 8, seed) for seed in (1, 1, 2))
    later = same[57]  # asked for out of turn
    assert np.array_equal(one[57], later)
    assert not all(np.array_equal(one[n], other[n]) for n in range(12))


def test_bucketing_saves_padding() -> None:
    lengths = np.random.default_rng(0).integers(100, 1000, 5000).astype(np.int32)
    order = Order(lengths, 16, seed=0)
    batches = [lengths[order[number]] for number in range(order.per_epoch)]
    padded = sum(16 * int(batch.max()) for batch in batches)
    assert padded < 1.02 * sum(int(batch.sum()) for batch in batches)
    longest = [int(batch.max()) for batch in batches]
    assert longest != sorted(longest)  # but not one after the other by length


def test_utterances_repeat_if_they_do_not_fill_a_batch() -> None:
    order = Order(np.array([5, 6, 7], np.int32), 8, seed=0)
    assert len(order[0]) == 8
    assert set(order[0]) == {0, 1, 2}


def test_collating_pads_with_silence() -> None:
    data = Made([100, 321, 640])
    batch = collate(data, [0, 1])
    assert batch.samples.shape == (2, 640)  # a multiple of two frames
    assert batch.samples[0].sum() == 100
    assert (batch.samples[0, 100:] == 0).all()
    assert batch.texts == ["a", "bb"]
    assert collate(data, [0], 1600).samples.shape == (1, 1600)
    with pytest.raises(ValueError, match="640 samples"):
        collate(data, [2], 320)


def test_batches_resume_at_any_number() -> None:
    data, codec = Made(list(range(400, 480))), Codec.build("ab")
    order = Order(data.lengths, 6, seed=0)

    def take(first: int, count: int) -> list[Batch]:
        batches = training_batches(data, codec, order, first)
        taken = [next(batches) for _ in range(count)]
        batches.close()
        return taken

    for one, other in zip(take(0, 20)[15:], take(15, 5), strict=True):
        assert torch.equal(one.samples, other.samples)
        assert torch.equal(one.labels, other.labels)


def test_batches_are_padded_to_few_shapes() -> None:
    data = Made([400 * n for n in range(1, 13)])
    codec = Codec.build("ab")
    padding = Padding(samples=1600, tokens=8, most_samples=4160, most_tokens=20)
    batches = training_batches(data, codec, Order(data.lengths, 2, seed=0), 0, padding=padding)
    seen = [next(batches) for _ in range(6)]
    batches.close()
    assert {batch.samples.shape[1] for batch in seen} <= {1600, 3200, 4160, 4800}
    assert {batch.labels.shape[1] for batch in seen} == {8}
    for batch in seen:
        assert (batch.labels == IGNORED).any(dim=1).all()
    assert padding.width(3900) == 4160
    assert padding.width(4800) == 4800  # what the data has is never cut
    assert (Padding().width(321), Padding().length(7)) == (640, 7)


def test_features_of_a_whole_set(tmp_path: Path) -> None:
    data = synthesis.synthesise(Script("digits"), 5, tmp_path, 1)
    seconds = seconds_needed(data)
    features, texts = all_features(data, seconds, at_once=2)
    assert features.shape == (5, 80, 100 * seconds)
    assert texts == [data.text(number) for number in range(5)]
    one = collate(data, [3], seconds * SAMPLE_RATE)
    torch.testing.assert_close(features[3:4], log_mel(one.samples))
    batches = list(evaluation_batches(data, 2))
    assert sorted(text for _, batch in batches for text in batch) == sorted(texts)


# --------------------------------------------------------------------------------- files


def recording(path: Path, seconds: float = 0.5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(300.0, 8_000, seconds), 8_000)
    return path


def test_lists_are_read_literally(tmp_path: Path) -> None:
    """Quotation marks are text, one line is one recording, an accent belongs to its letter."""
    for name in ("a.wav", "b.wav"):
        recording(tmp_path / name)
    listing = tmp_path / "list.tsv"
    listing.write_bytes('\ufeffpath\ttext\na.wav\t"hello\n\nb.wav\tcafe\u0301\r\n'.encode())
    texts = [one.text for one in find_data(listing).train]
    assert texts == ['"hello', "caf\u00e9"]
    entries = tmp_path / "list.jsonl"
    entries.write_text('{"path": "a.wav", "text": "one\u2028two"}\n', encoding="utf-8")
    assert [one.text for one in find_data(entries).train] == ["one two"]
    listing.write_text("a.wav\tone\n\nb.wav\n")
    with pytest.raises(InputError, match=r"list\.tsv:3: must be a path, a tab"):
        find_data(listing)


def test_lists_and_folders_are_read(tmp_path: Path) -> None:
    recording(tmp_path / "12" / "7" / "12-7-0000.flac")
    (tmp_path / "12" / "7" / "12-7.trans.txt").write_text("12-7-0000 HELLO  WORLD\n")
    audio_path = recording(tmp_path / "a.wav")
    (tmp_path / "list.tsv").write_text("path\ttext\na.wav\tHello world\n")
    (tmp_path / "bare.tsv").write_text("a.wav\tHello world\n")
    (tmp_path / "list.jsonl").write_text(
        json.dumps({"path": str(audio_path), "text": "Hello world"}) + "\n\n"
    )
    [found] = find_data(tmp_path).train
    assert found.text == "hello world"
    for name in ("list.tsv", "bare.tsv", "list.jsonl"):
        assert find_data(tmp_path / name).train == [Recording(audio_path, "Hello world")]
    data = RecordedUtterances(screen([found]).kept)
    assert [int(length) for length in data.lengths] == [8_000]
    assert len(data[0].samples) == 8_000
    assert data[0].text == data.text(0) == "hello world"


def test_a_text_is_never_both_trained_on_and_held_out() -> None:
    found = [Recording(Path(f"{n}.wav"), f"text {n // 2}") for n in range(400)]
    train, validation = split_recordings(found)
    assert 5 <= len(validation) <= 50
    assert not {one.text for one in train} & {one.text for one in validation}
    with pytest.raises(InputError, match="only 2 recordings of 1 texts, too few"):
        split_recordings(found[:2])


def test_settings_of_synthesis_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pitch must be \(low, high\), got \(70, 30\)"):
        Script("digits", pitch=(70, 30))
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        synthesis.synthesise(Script("digits"), 0, tmp_path)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Order(np.array([5], np.int32), 0, seed=0)


def test_the_default_cache_is_where_the_system_has_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert synthesis.default_cache() == tmp_path / "maxfactor" / "speech"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert synthesis.default_cache() == tmp_path / "home" / ".cache" / "maxfactor" / "speech"


def test_shards_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """Though they are open: memory maps are not sent, but opened again."""
    data = many_shards(tmp_path, 2)
    expected = data[70]
    again = pickle.loads(pickle.dumps(data))
    assert again[70].text == expected.text
    np.testing.assert_array_equal(again[70].samples, expected.samples)
    assert data[70].text == expected.text


def test_audio_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.wav"
    with pytest.raises(InputError, match=r"none/a\.wav: cannot be written, "):
        audio.write(path, np.zeros(100, np.int16))


def test_where_espeak_is_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given, in the environment, or in a package; a missing one is named with the remedy."""
    found = Location.find()
    assert Location.find(found.library, found.data) == found
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(InputError, match=r"espeak-ng is not installed; run `pip install espeakng"):
        Location.find()
    monkeypatch.setenv(LIBRARY_VARIABLE, found.library)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert Location.find() == Location(found.library, str(tmp_path))
