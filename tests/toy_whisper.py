"""A small multilingual Whisper as users have it, pretrained with `transformers` alone.

Words are tones, so that it learns within seconds. The same tone is another word in each language,
so the prompt matters. Everything else is as in published checkpoints: byte-level tokens, all
languages, tasks and time stamps, a feature extractor, and a generation config.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import soundfile
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
    pipeline,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from maxfactor_speech.data.audio import SAMPLE_RATE
from maxfactor_speech.data.layouts import find_data
from maxfactor_speech.data.shards import Utterance
from maxfactor_speech.training.evaluation import Example

WORDS = {"en": ["do", "re", "mi", "fa"], "de": ["uh", "oh", "eh", "ah"]}
HERTZ = (300.0, 700.0, 1500.0, 3000.0)
WORD_SECONDS = 0.3
MOST_WORDS = 4
AFTER_LANGUAGES = (
    "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>",
)  # fmt: skip


def utterance(number: int, language: str) -> Utterance:
    """One to four tones in noise, with their names."""
    random = np.random.default_rng(number)
    spoken = random.integers(len(HERTZ), size=random.integers(1, MOST_WORDS + 1))
    time = np.arange(round(WORD_SECONDS * SAMPLE_RATE)) / SAMPLE_RATE
    envelope = np.sin(np.pi * time / WORD_SECONDS) ** 0.5
    wave = np.concatenate([envelope * np.sin(2 * np.pi * HERTZ[one] * time) for one in spoken])
    wave = 8000.0 * wave + random.normal(0.0, 300.0, len(wave))
    return Utterance(wave.astype(np.int16), " ".join(WORDS[language][one] for one in spoken))


class Spoken:
    """Utterances in memory."""

    def __init__(self, language: str, count: int = 4) -> None:
        self._utterances = [utterance(number, language) for number in range(count)]
        self.lengths = np.array([len(one.samples) for one in self._utterances], np.int32)

    def __len__(self) -> int:
        return len(self._utterances)

    def __getitem__(self, number: int) -> Utterance:
        return self._utterances[number]

    def text(self, number: int) -> str:
        return self._utterances[number].text


def tokenizer(seconds: int, multilingual: bool = True) -> WhisperTokenizer:
    letters = sorted({*"abcdefghijklmnopqrstuvwxyz,.!?'", "Ġ", *map(chr, range(65, 91))})
    words = sorted({f"Ġ{word}" for own in WORDS.values() for word in own})
    pieces = dict.fromkeys(word[:end] for word in words for end in (2, 3))
    special = ["<|endoftext|>", "<|startoftranscript|>"]
    special += [f"<|{code}|>" for code in LANGUAGES] if multilingual else []
    special += AFTER_LANGUAGES if multilingual else AFTER_LANGUAGES[-3:]
    made = WhisperTokenizer(
        vocab={token: number for number, token in enumerate([*letters, *pieces, special[0]])},
        merges=[(piece[:-1], piece[-1]) for piece in pieces],
        pad_token=special[0],
        extra_special_tokens=special[1:],
    )
    made.add_tokens([f"<|{0.02 * number:.2f}|>" for number in range(50 * seconds + 1)])
    return made


def generation(words: WhisperTokenizer, multilingual: bool = True) -> GenerationConfig:
    """As in published checkpoints: neither language nor task are set."""
    number = words.convert_tokens_to_ids
    end = words.eos_token_id
    own: dict[str, Any] = {
        "max_length": 32,
        "pad_token_id": end,
        "bos_token_id": end,
        "eos_token_id": end,
        "decoder_start_token_id": number("<|startoftranscript|>"),
        "begin_suppress_tokens": [number("Ġ"), end],
        "suppress_tokens": [number(token) for token in (",", "<|startofprev|>", "<|nospeech|>")],
        "no_timestamps_token_id": number("<|notimestamps|>"),
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "is_multilingual": multilingual,
    }
    if multilingual:
        own["lang_to_id"] = {f"<|{code}|>": number(f"<|{code}|>") for code in LANGUAGES}
        own["task_to_id"] = {task: number(f"<|{task}|>") for task in ("transcribe", "translate")}
    return GenerationConfig(**own)


def config(words: WhisperTokenizer, seconds: int) -> WhisperConfig:
    end = words.eos_token_id
    return WhisperConfig(
        vocab_size=len(words), d_model=48, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_source_positions=50 * seconds, max_target_positions=32,
        pad_token_id=end, bos_token_id=end, eos_token_id=end, init_std=0.1,
        decoder_start_token_id=words.get_vocab()["<|startoftranscript|>"],
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip


def make_folder(
    folder: Path, seconds: int, steps: int, multilingual: bool = True, space: str = " "
) -> None:
    """Pretrain the usual way: padded to the extractor's length, prompt with language and task."""
    make_folders({steps: folder}, seconds, multilingual, space)


def make_folders(
    folders: dict[int, Path], seconds: int, multilingual: bool = True, space: str = " "
) -> None:
    """Pretrain once, and save a folder after each of these numbers of steps."""
    torch.manual_seed(0)
    words = tokenizer(seconds, multilingual)
    extractor = WhisperFeatureExtractor(chunk_length=seconds)
    model = WhisperForConditionalGeneration(config(words, seconds))
    model.generation_config = generation(words, multilingual)
    for step in pretrain(model, words, extractor, max(folders), space):
        if step in folders:
            words.language = words.task = None
            words.set_prefix_tokens()
            model.save_pretrained(folders[step])
            WhisperProcessor(extractor, words).save_pretrained(folders[step])


def pretrain(
    model: WhisperForConditionalGeneration,
    words: WhisperTokenizer,
    extractor: WhisperFeatureExtractor,
    steps: int,
    space: str,
    batch: int = 8,
) -> Iterator[int]:
    """Train, and yield the number of steps so far."""
    yield 0
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    languages = list(WORDS) if "<|de|>" in words.get_vocab() else ["en"]
    for step in range(steps):
        language = languages[step % len(languages)]
        spoken = [utterance(batch * step + one, language) for one in range(batch)]
        waves = [one.samples.astype(np.float32) / 32_768.0 for one in spoken]
        features = extractor(waves, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        if len(languages) > 1:
            words.set_prefix_tokens(language=language, task="transcribe")
        rows = words([space + one.text for one in spoken], padding=True, return_tensors="pt")
        labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)[:, 1:]
        loss = model(input_features=features, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield step + 1


def record(folder: Path, train: Iterable[int], check: Iterable[int]) -> None:
    """Write recordings with German texts and two lists of them; one has capitals and marks."""
    for name, numbers in {"train": train, "check": check}.items():
        lines = []
        for number in numbers:
            said = utterance(number, "de")
            soundfile.write(folder / f"{number}.wav", said.samples, SAMPLE_RATE)
            text = f"{said.text.capitalize()}!" if name == "check" else said.text
            lines.append(f"{number}.wav\t{text}\n")
        (folder / f"{name}.tsv").write_text("".join(lines))


def heard(folder: Path, spoken: Path, name: str = "check.tsv", **options: Any) -> list[Example]:
    """What transformers' pipeline writes, one recording at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recognise: Any = pipeline("automatic-speech-recognition", model=str(folder))
        pairs = []
        for one in find_data(spoken / name).train:
            samples, _ = soundfile.read(one.path, dtype="float32")
            found = recognise(samples, generate_kwargs=options) if options else recognise(samples)
            pairs.append(Example(one.text, " ".join(found["text"].split())))
    return pairs


def raw_wer(pairs: list[Example]) -> float:
    return float(jiwer.wer([one.reference for one in pairs], [one.hypothesis for one in pairs]))


def plain_wer(pairs: list[Example]) -> float:
    """Without upper case and punctuation, as Whisper's normaliser has it for German."""
    return raw_wer([Example(one.reference.lower().strip("!"), one.hypothesis) for one in pairs])
