"""`maxfactor memory`: the memory of a training with each optimizer, and the cards that it fits.

Weights, gradients, state and borrowed buffers come from `maxfactor.estimate_memory`, activations
from the formula in `activations`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import maxfactor
from maxfactor_speech.activations import activation_bytes, autocast_bytes
from maxfactor_speech.bench.shapes import MODELS, Whisper
from maxfactor_speech.errors import InputError, download_hint, failure_reason
from maxfactor_speech.training.folder_checks import on_meta, read_config

if TYPE_CHECKING:
    from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CARDS = (8, 12, 16, 24, 40, 48, 80)  # GiB
CONTEXT = 600 * 2**20  # bytes that CUDA, its libraries and fragmentation take, about
HEAD = 64  # width of an attention head of Whisper
SIZES = {
    **{name.removeprefix("whisper-"): sizes for name, sizes in MODELS.items() if name != "quick"},
    **dict.fromkeys(("large", "large-v1", "large-v2"), Whisper(1280, 32)),
    **dict.fromkeys(("large-v3-turbo", "turbo"), MODELS["whisper-large-v3"]),
    # English alone; a token less.
    **{
        f"{name}.en": replace(MODELS[f"whisper-{name}"], vocabulary=51_864)
        for name in ("tiny", "base", "small", "medium")
    },
}
TURBO_LAYERS = 4  # of the decoder
# Where transformers lists the class for a type of model, if a config names none.
CLASSES = ("SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CTC", "MASKED_LM")
# Label, name for `estimate_memory`, and whether the weights stay in float32 under autocast.
ROWS = (
    ("quality", "quality", False),
    ("fast", "fast", False),
    ("lean", "lean", False),
    ("AdamW, weights in fp32", "adamw", True),
    ("AdamW 8-bit", "adamw-8bit", False),
    ("Adafactor", "adafactor", False),
    ("Muon + AdamW", "muon", False),
)
RELEASABLE = maxfactor.RECIPES


@dataclass(frozen=True)
class Row:
    """The memory of a training with one optimizer, in bytes."""

    optimizer: str
    weights: int
    gradients: int
    state: int
    borrowed: int
    activations: int

    @property
    def total(self) -> int:
        """All of it, with what CUDA itself takes."""
        parts = self.weights + self.gradients + self.state + self.borrowed
        return parts + self.activations + CONTEXT

    @property
    def cards(self) -> list[int]:
        """The sizes of the cards that it fits, in GiB."""
        return [card for card in CARDS if self.total <= card * 2**30]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "total": self.total, "cards": self.cards}


def memory_table(
    model: str,
    dtype: str = "bf16",
    batch_size: int = 1,
    tokens: int = 448,
    checkpointing: bool = False,
    release: bool = False,
) -> list[Row]:
    """Return a row for each optimizer.

    Args:
        model: A size of Whisper, such as "large-v3", or a folder with a model of transformers.
        dtype: Of weights and activations: "fp32", "bf16" or "fp16".
        batch_size: Examples per batch, recordings of 30 seconds for a speech model.
        tokens: Tokens of text per example.
        checkpointing: Whether activations are computed again in backward.
        release: Whether gradients are released in backward, where the optimizer can.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    for name, value in (("--batch-size", batch_size), ("--tokens", tokens)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    built = _build(model)
    size, is_half = DTYPES[dtype].itemsize, dtype != "fp32"
    active = batch_size * activation_bytes(built.config, tokens, size, checkpointing, is_half)
    rows = []
    for label, name, in_float32 in ROWS:
        found = maxfactor.estimate_memory(
            built,
            cast("maxfactor.RecipeName", name),
            torch.float32 if in_float32 else DTYPES[dtype],
            gradient_release=release and name in RELEASABLE,
        )
        own = active + (autocast_bytes(built) if in_float32 and is_half else 0)
        rows.append(Row(label, found.weights, found.gradients, found.state, found.borrowed, own))
    return rows


def _build(model: str) -> nn.Module:
    """Build the model on the meta device."""
    import transformers

    if (Path(model) / "config.json").is_file():
        return _of_folder(Path(model))
    name = model.removeprefix("openai/").removeprefix("whisper-")
    if name in SIZES:
        return on_meta(transformers.WhisperForConditionalGeneration, _whisper_config(name))
    hint = "" if Path(model).exists() else download_hint(model)
    raise InputError(
        f"{model} is neither a size of Whisper ({', '.join(SIZES)}) nor a folder with a "
        "config.json" + (f"; {hint}" if hint else "")
    )


def _of_folder(folder: Path) -> nn.Module:
    import transformers

    name = _class_name(read_config(folder))
    try:
        kind: Any = getattr(transformers, str(name), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise InputError(
                f"{folder}/config.json names no known architecture, but {name!r}; set model_type "
                "to one of transformers, such as whisper, and architectures to its class"
            )
        # Code in the folder is not run, and nobody is asked whether to.
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return on_meta(kind, config)
    except InputError:
        raise
    except Exception as error:  # wrong types and numbers make transformers raise anything
        raise InputError(f"{folder} cannot be read: {failure_reason(error)}") from error


def _class_name(config: dict[str, Any]) -> str:
    """Return the class of a config, or else the usual one for its type; "" if it has none."""
    from transformers.models.auto import modeling_auto

    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    kind = str(config.get("model_type"))
    found = (getattr(modeling_auto, f"MODEL_FOR_{one}_MAPPING_NAMES", {}) for one in CLASSES)
    return str(next((names[kind] for names in found if kind in names), ""))


def _whisper_config(name: str) -> Any:
    import transformers

    size = SIZES[name]
    heads, hidden = size.width // HEAD, 4 * size.width
    return transformers.WhisperConfig(
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=TURBO_LAYERS if name.endswith("turbo") else size.layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=hidden,
        decoder_ffn_dim=hidden,
        num_mel_bins=size.mel_bins,
        vocab_size=size.vocabulary,
    )
