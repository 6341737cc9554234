"""What decides a training: its settings, checked, in a file beside it, and the rate they give."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from maxfactor.checks import check_count, check_positive, check_share
from maxfactor_speech.data import corpus
from maxfactor_speech.data.audio import InputError
from maxfactor_speech.training.optimizers import default_lr

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SETTINGS = "settings.json"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_UTTERANCES = 24_000  # synthesised unless asked for more
SEEDS = 2**63  # what torch and numpy both take
COUNTS = (
    "utterances",
    "validation_utterances",
    "steps",
    "batch_size",
    "grad_accum",
    "evaluate_every",
    "keep",
)


@dataclass(frozen=True)
class Settings:
    """All that decides what a training computes.

    Args:
        task: "digits" or "sentences", synthesised; left aside where `data` is given.
        language: "en", "de" or "es", of the task.
        data: Folder in LibriSpeech's layout, or TSV or JSONL file of path and text.
        validation: The same for validation; None keeps one in twenty of `data` back.
        utterances: How many to synthesise; None takes as many as are used, 24 000 at most.
        validation_utterances: How many to synthesise for validation.
        model: "nano", "tiny" or "base", with random weights, or the folder of a model.
        optimizer: A recipe of ours, or "adamw", "adafactor", "muon", "lion".
        lr: The highest rate; None takes the optimizer's own.
        weight_decay: Of matrices; None takes the optimizer's own.
        schedule: After the warm-up, "cosine" or "linear" to zero, or "constant".
        warmup: Share of the steps over which the rate rises.
        clip: Norm that gradients are clipped to; None takes the optimizer's own, 0 none.
        steps: Of the optimizer.
        batch_size: Utterances to a forward pass.
        grad_accum: Forward passes to a step.
        dtype: Of autocast: "fp32" for none, "bf16" or "fp16".
        device: "auto", "cpu", "cuda", …
        seed: Of weights, order and augmentation; what is synthesised stays the same.
        spec_augment: Whether to blank out stretches of the features.
        cuda_graphs: On a GPU, whether to launch whole passes at once, of batches that are filled
            up to few shapes.
        evaluate_every: Steps between evaluations, and between checkpoints.
        keep: How many checkpoints to keep.
    """

    task: str = "digits"
    language: str = "en"
    data: str | None = None
    validation: str | None = None
    utterances: int | None = None
    validation_utterances: int = 256
    model: str = "nano"
    optimizer: str = "quality"
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.1
    clip: float | None = None
    steps: int = 500
    batch_size: int = 16
    grad_accum: int = 1
    dtype: str = "fp32"
    device: str = "auto"
    seed: int = 0
    spec_augment: bool = False
    cuda_graphs: bool = True
    evaluate_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        corpus.check(self.task, self.language)
        default_lr(self.optimizer)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("dtype", self.dtype, DTYPES)
        for name in COUNTS:
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        check_share("warmup", self.warmup)
        if self.lr is not None:
            check_positive("lr", self.lr)
        _check_not_negative("weight_decay", self.weight_decay, "0 is none")
        _check_not_negative("clip", self.clip, "0 is no clipping")
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed must lie in [0, 2^63), got {self.seed}")
        if self.validation is not None and self.data is None:
            raise ValueError(f"validation must come with data, got {self.validation!r} alone")
        if self.device != "auto":
            parse_device(self.device)

    @property
    def rate(self) -> float:
        """The highest learning rate: the one given, or the optimizer's own."""
        return default_lr(self.optimizer) if self.lr is None else self.lr

    @property
    def utterance_count(self) -> int:
        """How many utterances to synthesise for training."""
        used = self.steps * self.batch_size * self.grad_accum
        return min(used, MOST_UTTERANCES) if self.utterances is None else self.utterances

    @property
    def torch_device(self) -> torch.device:
        """The device to train on; "auto" is a GPU where there is one."""
        if self.device != "auto":
            return find_device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse_device(name: str) -> torch.device:
    """The device of a name, which need not be there."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device must be cpu, cuda, cuda:1, …, got {name!r}") from error


def find_device(name: str) -> torch.device:
    """The device of a name, which must be there and compute."""
    device = parse_device(name)
    if device.type == "cuda":  # asked without starting it: a process of its own may use it
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise InputError(f"device {name}: torch finds {found} CUDA devices; use --device cpu")
        return device
    try:
        torch.ones(1, device=device).item()  # whether it computes at all, before anything waits
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise InputError(f"device {name}: torch cannot use it here; use --device cpu") from error
    return device


def _cosine(share: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * share)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": lambda share: 1.0 - share,
    "constant": lambda share: 1.0,  # noqa: ARG005
}


def rate_factor(settings: Settings, step: int) -> float:
    """The share of the highest rate that step 0, 1, … is taken with."""
    warmup = round(settings.warmup * settings.steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return SCHEDULES[settings.schedule]((step - warmup) / max(1, settings.steps - warmup))


def read_settings(out: Path) -> Settings:
    """The settings that a folder's training was started with."""
    path = out / SETTINGS
    if not path.exists():
        raise InputError(f"{out}: holds no training to go on with; without --resume one begins")
    try:
        saved = json.loads(path.read_text())
        known = {field.name for field in fields(Settings)}
        return Settings(**{name: value for name, value in saved.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read, {error}") from error


def check_same(out: Path, settings: Settings) -> None:
    """Refuse settings that are not those a folder's training was started with."""
    before = read_settings(out)
    for field in fields(Settings):
        old, new = getattr(before, field.name), getattr(settings, field.name)
        if old != new:
            raise InputError(
                f"{out}: was started with {field.name}={old!r}, cannot go on with {new!r}; "
                f"another --out begins anew, with --model {out} from the weights it has"
            )


def _check_not_negative(name: str, value: float | None, zero: str) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{name} must be finite and not negative, {zero}, got {value}")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
