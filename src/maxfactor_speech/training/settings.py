"""The settings of a training: checked, stored in `settings.json`, and the learning-rate schedule.

Reference:
    Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, arXiv:1608.03983
    (the cosine schedule).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from maxfactor_speech.data import corpus
from maxfactor_speech.data.tokens import language_code
from maxfactor_speech.errors import InputError
from maxfactor_speech.training.model import SIZES
from maxfactor_speech.training.optimizers import PEERS, default_lr

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

SETTINGS = "settings.json"
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_UTTERANCES = 24_000  # synthesised by default
SEEDS = 2**63  # torch and numpy both take smaller seeds
COUNTS = (
    "utterances",
    "validation_utterances",
    "steps",
    "batch_size",
    "grad_accum",
    "evaluate_every",
    "keep",
    "patience",
    "lora",
)
# When a training is resumed. The last two take less memory and compute the same.
MAY_CHANGE = ("steps", "patience", "release_gradients", "gradient_checkpointing")


@dataclass(frozen=True)
class Settings:
    """Everything that determines the result of a training.

    Args:
        task: "digits" or "sentences", synthesised; unused if `data` is given.
        language: Code or name of the spoken language. Of synthesised speech: "en", "de" or "es".
            None is the language that a model folder is set to, or else "en" for synthesised speech.
        data: Recordings in one of the layouts of `find_data`; None synthesises speech.
        validation: The same for validation; None is the part of `data` for validation, or else
            one in twenty of it.
        strict: Whether to refuse recordings that cannot be used, instead of leaving them out.
        utterances: How many to synthesise; None is the number that is used, at most 24 000.
        validation_utterances: How many to synthesise for validation.
        model: "nano", "tiny" or "base" with random weights, or the folder of a model.
        translate: Whether the texts of `data` are English translations, for a multilingual model;
            None is the task that its folder is set to.
        freeze_encoder: Whether to train only the decoder.
        optimizer: A recipe of MaxFactor, or "adamw", "adafactor", "muon", "lion".
        lr: The peak learning rate; None is the optimizer's default, or a quarter of it for the
            weights of a model folder.
        weight_decay: For matrices; None is the optimizer's default.
        schedule: After warm-up: "cosine" or "linear" to zero, or "constant".
        warmup: Fraction of the steps over which the learning rate rises.
        clip: Norm that gradients are clipped to; None is the optimizer's default, 0 disables it.
        steps: Steps of the optimizer.
        batch_size: Utterances per forward pass.
        grad_accum: Forward passes per step.
        dtype: Of autocast: "bf16" or "fp16"; "fp32" disables autocast. Unused if `weights` is
            "bf16".
        weights: Of the weights: "fp32", or "bf16", which is then also that of the arithmetic.
            Weights in bf16 are written with stochastic rounding.
        device: "auto", "cpu", "cuda", …
        seed: Of weights, order and augmentation; synthesised speech does not depend on it.
        spec_augment: Whether to mask stretches of the features.
        cuda_graphs: On a GPU, whether to launch each pass as one graph. Batches are then padded
            to few shapes.
        evaluate_every: Steps between evaluations, and between checkpoints.
        keep: Checkpoints to keep, besides the best.
        patience: Evaluations without improvement after which the training ends; None never ends
            it early.
        gradient_checkpointing: Whether to recompute activations in the backward pass, which takes
            less memory and more time.
        release_gradients: Whether to use and free each gradient during the backward pass.
        lora: Rank of adapters for attention and feed-forward layers of a model folder; the model
            itself is then not trained. None trains the model.
        lora_alpha: The adapters' product is added `lora_alpha / lora` times; None is twice `lora`.
    """

    task: str = "digits"
    language: str | None = None
    data: str | None = None
    validation: str | None = None
    strict: bool = False
    utterances: int | None = None
    validation_utterances: int = 256
    model: str = "nano"
    translate: bool | None = None
    freeze_encoder: bool = False
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
    patience: int | None = None
    gradient_checkpointing: bool = False
    weights: str = "fp32"
    release_gradients: bool = False
    lora: int | None = None
    lora_alpha: float | None = None

    def __post_init__(self) -> None:
        corpus.check(self.task, "en" if self.data is not None else self.spoken_language("en"))
        default_lr(self.optimizer)
        self._require(self.schedule in SCHEDULES, "schedule", f"one of {', '.join(SCHEDULES)}")
        self._require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        for name in COUNTS:
            value = getattr(self, name)
            is_count = type(value) is int and value >= 1
            self._require(value is None or is_count, name, "a whole number of at least 1")
        self._require(0.0 <= self.warmup < 1.0, "warmup", "at least 0 and less than 1")
        self._require(self.lr is None or 0.0 < self.lr < math.inf, "lr", "finite and positive")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            is_valid = value is None or 0.0 <= value < math.inf
            self._require(is_valid, name, "finite and not negative (0 disables it)")
        self._require(0 <= self.seed < SEEDS, "seed", "at least 0 and less than 2^63")
        if self.validation is not None and self.data is None:
            raise ValueError(f"validation must be given with data, got only {self.validation!r}")
        if self.translate and self.data is None:
            raise ValueError("translate must be given with data, recordings with English texts")
        self._require(not self.strict or self.data is not None, "strict", "given with data")
        if self.device != "auto":
            parse_device(self.device)
        self._require(self.weights in WEIGHTS, "weights", f"one of {', '.join(WEIGHTS)}")
        self._check_adapters()
        self._check_weights()
        self._check_release()

    def _check_adapters(self) -> None:
        alpha = self.lora_alpha
        self._require(alpha is None or self.lora is not None, "lora_alpha", "given with lora")
        is_valid = alpha is None or 0.0 < alpha < math.inf
        self._require(is_valid, "lora_alpha", "finite and positive")
        if self.lora is not None and self.model in SIZES:
            raise ValueError(
                f"lora must be given with the folder of a model, got {self.lora} with model "
                f"{self.model!r}, whose random weights are nothing to adapt"
            )

    def _check_weights(self) -> None:
        if self.weights == "fp32":
            return
        if self.dtype == "fp16":
            raise ValueError(
                f"dtype must be bf16 with weights {self.weights}, got 'fp16'; leave it out"
            )
        if self.optimizer in PEERS and self.lora is None:
            raise ValueError(
                f"weights must be fp32 with optimizer {self.optimizer}, got {self.weights!r}: it "
                "rounds to nearest, so small updates would be lost; choose quality, fast or lean, "
                "which round stochastically, or lora, whose adapters stay in fp32"
            )

    def _check_release(self) -> None:
        """Refuse what needs all gradients at once."""
        if not self.release_gradients:
            return
        conflict = None
        if self.optimizer in PEERS:
            conflict = f"optimizer {self.optimizer}; choose quality, fast or lean"
        elif self.grad_accum > 1:
            conflict = f"grad_accum {self.grad_accum}, since each gradient is used at once"
        elif self.clip:
            conflict = f"clip {self.clip}, since the norm of all gradients is never known"
        elif self.dtype == "fp16":
            conflict = "dtype fp16, which scales gradients; use bf16"
        if conflict is not None:
            raise ValueError(f"release_gradients cannot be used with {conflict}")

    def _require(self, is_valid: bool, name: str, requirement: str) -> None:
        if not is_valid:
            raise ValueError(f"{name} must be {requirement}, got {getattr(self, name)!r}")

    @property
    def peak_lr(self) -> float:
        """The given learning rate, or the default."""
        return default_lr(self.optimizer, self.is_fine_tuning) if self.lr is None else self.lr

    @property
    def is_fine_tuning(self) -> bool:
        """Whether weights of a model folder are trained; adapters are new, so theirs are not."""
        return self.model not in SIZES and self.lora is None

    def spoken_language(self, default: str) -> str:
        """Return the code of the spoken language."""
        name = default if self.language is None else self.language
        try:
            return language_code(name)
        except ValueError:
            return name  # for the message of whoever does not know it

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None without autocast, which weights in bf16 do not need."""
        return DTYPES[self.dtype] if self.weights == "fp32" else None

    @property
    def adapter_alpha(self) -> float:
        """The given `lora_alpha`, or its default."""
        return 2.0 * (self.lora or 0) if self.lora_alpha is None else self.lora_alpha

    @property
    def utterance_count(self) -> int:
        """The number of utterances to synthesise for training."""
        used = self.steps * self.batch_size * self.grad_accum
        return min(used, MOST_UTTERANCES) if self.utterances is None else self.utterances

    @property
    def torch_device(self) -> torch.device:
        """The device to train on; "auto" is a GPU if there is one."""
        if self.device != "auto":
            return find_device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse_device(name: str) -> torch.device:
    """Return the device of a name, whether or not this machine has it."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device must be cpu, cuda, cuda:1, …, got {name!r}") from error


def find_device(name: str) -> torch.device:
    """Return the device of a name; raise InputError if torch cannot use it here."""
    device = parse_device(name)
    if device.type == "cuda":  # counted without initialising CUDA, which a worker may need to do
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise InputError(f"device {name}: torch finds {found} CUDA devices; use --device cpu")
        return device
    try:
        torch.ones(1, device=device).item()  # waits for the device: the only way to test it
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise InputError(f"device {name}: torch cannot use it here; use --device cpu") from error
    return device


def configure_cublas() -> None:
    """Choose the setting of cuBLAS that deterministic algorithms require.

    torch reads it at the first matrix product of a process on a GPU, so it comes before that.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _cosine(progress: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * progress)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,  # noqa: ARG005
}


def lr_factor(settings: Settings, step: int) -> float:
    """Return the learning rate of step 0, 1, … as a fraction of the peak."""
    warmup = round(settings.warmup * settings.steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return SCHEDULES[settings.schedule]((step - warmup) / max(1, settings.steps - warmup))


def read_settings(out: Path) -> Settings:
    """Return the settings that the training in a folder was started with."""
    path = out / SETTINGS
    if not path.exists():
        raise InputError(f"{out}: contains no training to resume; start one without --resume")
    try:
        saved = json.loads(path.read_text())
        known = {field.name for field in fields(Settings)}
        return Settings(**{name: value for name, value in saved.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: cannot be read, {error}") from error


def check_same(out: Path, settings: Settings, may_differ: Collection[str] = ()) -> None:
    """Raise InputError if the training in a folder was started with other settings."""
    before = read_settings(out)
    for field in fields(Settings):
        old, new = getattr(before, field.name), getattr(settings, field.name)
        if old != new and field.name not in may_differ:
            raise InputError(
                f"{out}: was started with {field.name}={old!r}, cannot resume with {new!r}; "
                f"choose another --out, and --model {out} to start from these weights"
            )


def resumed(out: Path, settings: Settings) -> Settings:
    """Return the settings to resume a training with; those in `MAY_CHANGE` may be new.

    The schedule is that of the new number of steps, from the current step on. Synthesised speech
    stays the same, although by default its amount depends on the number of steps.
    """
    check_same(out, settings, MAY_CHANGE)
    before = read_settings(out)
    if settings.steps != before.steps and settings.data is None:
        return replace(settings, utterances=before.utterance_count)
    return settings
