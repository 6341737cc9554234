"""The tasks: what each one trains, how long, and to which family it belongs."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from measurement import Record
    from studies.suite.texts import Split
    from studies.suite.trials import Trial

LORA = "lora"  # the option with the rank of the adapters
SCALE = "scale"  # the family of one task in several widths and lengths
NARROW = "narrow"  # the family of tasks that chose what counts as small on purpose
UNSEEN = "unseen"  # the family of tasks on which nothing is chosen


@dataclass(frozen=True)
class Spec:
    """A task.

    Args:
        family: Settings are chosen on some families and reported on the others.
        kind: Module and class of the task, such as "speech_tasks.WhisperTask".
        steps: Of the optimizer.
        options: Sizes, and what else the class reads.
        base: The task whose model, trained by AdamW, this one begins with.
        schedule: "cosine" to zero after a warm-up of a tenth, or "constant" after it.
        jobs: How many small trainings it counts for on a GPU.
    """

    family: str
    kind: str
    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    schedule: str = "cosine"
    jobs: int = 1

    @property
    def is_speech(self) -> bool:
        """Whether errors are counted in words; else in nats."""
        return self.kind.startswith("speech_tasks")

    @property
    def hears(self) -> set[str]:
        """The sets of speech that it needs: its own, and that of the model it begins with."""
        own = {self.options["speech"]} if "speech" in self.options else set[str]()
        needs_english = self.is_speech and (self.base is not None or not own)
        return own | ({"english"} if needs_english else set())


WHISPER = {"width": 192, "layers": 2, "batch": 48}
LLAMA = {"width": 192, "layers": 3, "context": 256, "batch": 32}
BERT = {"width": 192, "layers": 3, "context": 128, "batch": 32}
SMALL_LLAMA = {"width": 128, "layers": 2, "context": 128, "batch": 16}
GERMAN = {**WHISPER, "speech": "german", "batch": 32}
CPP = {**LLAMA, "source": "cpp"}
DIGITS = {"speech": "digits", "utterances": 2_000, "batch": 16}
BYTES = {"width": 96, "context": 96, "batch": 12}
WIDTHS = (128, 256, 512, 1024)
LENGTHS = (500, 2_000, 8_000, 32_000)

TASKS: dict[str, Spec] = {
    "whisper": Spec("speech", "speech_tasks.WhisperTask", 900, WHISPER),
    "whisper-half": Spec("speech", "speech_tasks.WhisperTask", 450, WHISPER),
    "conformer": Spec(
        "speech", "speech_tasks.ConformerTask", 800, {"width": 144, "layers": 3, "batch": 32}
    ),
    "wave": Spec(
        "speech",
        "speech_tasks.WaveTask",
        800,
        {"width": 144, "layers": 3, "batch": 24, "speech": "digits"},
    ),
    "llama": Spec("language", "language_tasks.LlamaTask", 800, LLAMA),
    "bert": Spec("language", "language_tasks.BertTask", 800, BERT),
    "phonemes": Spec(
        "language", "language_tasks.PhonemeTask", 800, {"width": 128, "layers": 2, "batch": 64}
    ),
    "german-few": Spec(
        "fine-tuning", "speech_tasks.WhisperTask", 120, {**GERMAN, "utterances": 500}, "whisper"
    ),
    "german-many": Spec("fine-tuning", "speech_tasks.WhisperTask", 240, GERMAN, "whisper"),
    "cpp": Spec("fine-tuning", "language_tasks.LlamaTask", 200, CPP, "llama"),
    "lora-german": Spec("lora", "speech_tasks.WhisperTask", 240, {**GERMAN, LORA: 8}, "whisper"),
    "lora-cpp": Spec("lora", "language_tasks.LlamaTask", 200, {**CPP, LORA: 8}, "llama"),
    **{
        f"width-{width}": Spec(
            SCALE,
            "language_tasks.LlamaTask",
            500,
            {**SMALL_LLAMA, "width": width, "layers": 4, "batch": 32},
            jobs=1 + (width > 256) + 2 * (width > 512),
        )
        for width in WIDTHS
    },
    **{
        f"length-{steps}-{schedule}": Spec(
            SCALE, "language_tasks.LlamaTask", steps, SMALL_LLAMA, schedule=schedule
        )
        for steps in LENGTHS
        for schedule in ("cosine", "constant")
    },
    "llama-narrow": Spec(
        NARROW,
        "language_tasks.LlamaTask",
        500,
        {**SMALL_LLAMA, "width": 64, "layers": 4, "batch": 32},
    ),
    "bert-narrow": Spec(
        NARROW,
        "language_tasks.BertTask",
        800,
        {"width": 64, "layers": 3, "context": 64, "batch": 16},
    ),
    "t5-narrow": Spec(
        NARROW,
        "language_tasks.PhonemeTask",
        800,
        {"width": 64, "layers": 2, "head": 16, "batch": 32},
    ),
    "gpt2": Spec(UNSEEN, "unseen_tasks.BytesTask", 800, {**BYTES, "model": "gpt2"}),
    "mixtral": Spec(UNSEEN, "unseen_tasks.BytesTask", 500, {**BYTES, "model": "mixtral"}),
    "mamba": Spec(UNSEEN, "unseen_tasks.BytesTask", 200, {**BYTES, "model": "mamba"}),
    "lstm": Spec(UNSEEN, "unseen_tasks.BytesTask", 1_000, {**BYTES, "model": "lstm"}),
    "vit": Spec(
        UNSEEN, "unseen_tasks.LettersTask", 2_000, {"model": "vit", "width": 64, "batch": 32}
    ),
    "resnet": Spec(
        UNSEEN, "unseen_tasks.LettersTask", 800, {"model": "resnet", "width": 16, "batch": 32}
    ),
    "keyword": Spec(UNSEEN, "unseen_tasks.KeywordTask", 1_500, {**DIGITS, "width": 64}),
    "matching": Spec(UNSEEN, "unseen_tasks.MatchingTask", 600, {"width": 64, "batch": 64}),
    "recurrent": Spec(UNSEEN, "speech_tasks.RecurrentTask", 400, {**DIGITS, "width": 96}),
}
FAMILIES = tuple(
    dict.fromkeys(s.family for s in TASKS.values() if s.family not in (NARROW, UNSEEN))
)
MAIN = tuple(name for name, s in TASKS.items() if s.family in FAMILIES and s.family != SCALE)
QUICK_STEPS = 4


def tasks_in(family: str) -> list[str]:
    """The names of a family's tasks."""
    return [name for name, spec in TASKS.items() if spec.family == family]


class Task:
    """A model, the loss of each step, and its errors on unseen data.

    Args:
        spec: The task.
        trial: Seed, and whether everything is tiny.
        cache: Folder of data, and of models to begin with.
        device: Where the model is.
    """

    measure: str
    fits_graph = False  # whether a CUDA graph can hold the loss and its gradients
    model: Any

    def __init__(self, spec: Spec, trial: Trial, cache: Path, device: torch.device) -> None:
        self.spec, self.trial, self.cache, self.device = spec, trial, cache, device
        self.steps = QUICK_STEPS if trial.quick else spec.steps

    def size(self, name: str, quick: int) -> int:
        """A size of the task; a tiny one to test the program."""
        return quick if self.trial.quick else int(self.spec.options[name])

    def with_base(self, model: Any) -> Any:
        """The model, with the weights that it begins with."""
        if self.spec.base is not None:
            path = base_path(self.cache, self.spec.base, self.trial.quick)
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model

    def loss(self, step: int, at: Tensor) -> Tensor:
        """The loss of a step, whose number is also a tensor (1,) on the device."""
        raise NotImplementedError

    def evaluate(self, split: Split) -> Record:
        """Errors on unseen data."""
        raise NotImplementedError


def adapted(model: Any, names: list[str]) -> Any:
    """The model with LoRA adapters of rank 8 by PEFT; nothing else is trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=names))


def base_path(cache: Path, task: str, quick: bool) -> Path:
    """Where the model is stored that fine-tuning begins with."""
    return cache / f"base-{task}{'-quick' if quick else ''}.pt"


def make_task(trial: Trial, cache: Path, device: torch.device) -> Task:
    """The task of a trial, with a new model."""
    spec = TASKS[trial.task]
    module, name = spec.kind.split(".")
    task: Task = getattr(import_module(f"studies.suite.{module}"), name)(spec, trial, cache, device)
    return task
