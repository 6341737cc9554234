"""How a model is trained: the dtype of its weights, what is frozen, adapters, checkpointing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxfactor_speech.training.adapters import add_adapters
from maxfactor_speech.training.settings import WEIGHTS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.training.settings import Settings


def set_up(model: WhisperForConditionalGeneration, settings: Settings) -> PeftModel | None:
    """Prepare a model for training, in place; return its adapters, if it has any."""
    model.to(WEIGHTS[settings.weights])  # type: ignore[arg-type]  # a decorator has wrong types
    if settings.freeze_encoder:
        model.model.encoder.requires_grad_(False)
    adapters = None if settings.lora is None else add_adapters(model, settings)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return adapters
