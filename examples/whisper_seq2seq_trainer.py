"""Fine-tune a Whisper with Seq2SeqTrainer: `python examples/whisper_seq2seq_trainer.py`.

The script is the usual one for AdamW plus one line, which is marked. The checkpoint is a toy that
is built here, and its words are tones. docs/trainers.md says more: the Trainer clips gradients
unless you set `max_grad_norm=0`, and `Trainer` itself takes `ForModel`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import maxfactor

START, END, FIRST_WORD, HERTZ = 0, 1, 2, (300.0, 700.0, 1500.0, 3000.0)


def make_checkpoint(folder: Path) -> None:
    """A folder like those of published models, with random weights."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.1,
        max_source_positions=50, max_target_positions=8, pad_token_id=END, bos_token_id=START,
        eos_token_id=END, decoder_start_token_id=START, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)


def recordings(folder: Path, count: int) -> list[dict[str, Any]]:
    """Two tones in noise each, and their tokens."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    random, time = np.random.default_rng(0), np.arange(8000) / 16_000
    found = []
    for _ in range(count):
        spoken = random.integers(len(HERTZ), size=2)
        wave = np.concatenate([np.sin(2 * np.pi * HERTZ[one] * time) for one in spoken])
        wave += 0.1 * random.normal(size=len(wave))
        features = extractor(wave, sampling_rate=16_000).input_features[0]
        found.append({"input_features": features, "labels": [*(FIRST_WORD + spoken), END]})
    return found


def make_trainer(folder: Path, out: Path, steps: int) -> Seq2SeqTrainer:
    """A Trainer that saves a checkpoint half-way."""
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    data: Any = recordings(folder, 64)
    arguments = Seq2SeqTrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=16, warmup_steps=2, use_cpu=True,
        logging_steps=max(1, steps // 6), save_steps=steps // 2, report_to="none",
    )  # fmt: skip
    return Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:16],
        optimizers=(maxfactor.for_model(model), None),  # <- instead of AdamW
    )


def main(folder: Path, steps: int = 60) -> tuple[Seq2SeqTrainer, Seq2SeqTrainer]:
    """Train, then train the second half again from the checkpoint; return both Trainers."""
    make_checkpoint(folder / "toy-whisper")
    trainer = make_trainer(folder / "toy-whisper", folder / "out", steps)
    trainer.train()
    resumed = make_trainer(folder / "toy-whisper", folder / "out", steps)
    resumed.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{steps // 2}"))
    for name, each in (("trained", trainer), ("resumed half-way", resumed)):
        print(f"{name}: loss {each.evaluate()['eval_loss']:.6f} on the recordings")
    return trainer, resumed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
