"""Low-rank adapters by PEFT: added to a Whisper, merged into it for a while, saved and loaded.

Reference:
    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maxfactor_speech.errors import InputError, failure_reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from peft import PeftModel
    from transformers import WhisperForConditionalGeneration

    from maxfactor_speech.training.settings import Settings

ADAPTER = "adapter"  # the folder in a checkpoint
WEIGHTS_FILE = "adapter_model.safetensors"
LAYERS = "q_proj|k_proj|v_proj|out_proj|fc1|fc2"  # of attention and feed-forward


def check_peft(settings: Settings) -> None:
    """Raise InputError if adapters are wanted and PEFT is missing."""
    if settings.lora is not None and find_spec("peft") is None:
        raise InputError(f"--lora {settings.lora} needs the package peft: `pip install peft`")


def add_adapters(model: WhisperForConditionalGeneration, settings: Settings) -> PeftModel:
    """Freeze a model, and add adapters in float32 to its layers; with a frozen encoder, to half.

    The model is changed in place. What is returned wraps it, and knows how to save the adapters.
    """
    from peft import LoraConfig, get_peft_model

    assert settings.lora is not None
    part = "decoder" if settings.freeze_encoder else "(encoder|decoder)"
    config = LoraConfig(
        r=settings.lora,
        lora_alpha=settings.adapter_alpha,  # type: ignore[arg-type]  # fractions work as well
        target_modules=rf"model\.{part}\.layers\..*\.({LAYERS})",
    )
    torch.manual_seed(settings.seed)
    return get_peft_model(model, config)


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Turn a model with adapters into an ordinary one that does the same, for a while.

    The weights before are kept on the host, because subtracting the adapters would not restore
    them exactly.
    """
    from peft.tuners.lora import LoraLayer

    found: list[tuple[str, Any]] = [
        (name, one) for name, one in model.named_modules() if isinstance(one, LoraLayer)
    ]
    kept: list[tuple[nn.Module, str, Any, torch.Tensor]] = []
    try:
        for name, layer in found:
            parent, _, own = name.rpartition(".")
            place, base = model.get_submodule(parent), layer.get_base_layer()
            kept.append((place, own, layer, base.weight.detach().to("cpu", copy=True)))
            base.weight.data.copy_(base.weight.float() + _product(layer))
            setattr(place, own, base)
        yield
    finally:
        for place, own, layer, before in kept:
            layer.get_base_layer().weight.data.copy_(before)
            setattr(place, own, layer)


@torch.no_grad()
def _product(layer: Any) -> torch.Tensor:
    [name] = layer.active_adapters
    delta: torch.Tensor = layer.get_delta_weight(name)
    return delta.float()


def save_adapters(adapters: PeftModel, folder: Path) -> None:
    """Write the adapters to the folder of a checkpoint, as `PeftModel.from_pretrained` reads."""
    # Otherwise PEFT may ask a hub whether the vocabulary was changed.
    adapters.save_pretrained(str(folder / ADAPTER), save_embedding_layers=False)


def load_adapters(adapters: PeftModel, folder: Path) -> None:
    """Load what `save_adapters` wrote."""
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER / WEIGHTS_FILE
    try:
        set_peft_model_state_dict(adapters, load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise InputError(
            f"{path}: cannot be read, {failure_reason(error)}; delete {folder} to resume from the "
            "checkpoint before it"
        ) from error
