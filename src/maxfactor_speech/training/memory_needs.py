"""The memory that a training will need, and which options would make it less."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import WhisperForConditionalGeneration

import maxfactor
from maxfactor_speech.activations import activation_bytes, autocast_bytes
from maxfactor_speech.errors import DeviceMemoryError
from maxfactor_speech.training import checkpoint
from maxfactor_speech.training.adapters import check_peft
from maxfactor_speech.training.model_setup import set_up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maxfactor_speech.training.preparation import Prepared
    from maxfactor_speech.training.settings import Settings

GB = 1e9
WORTH_NAMING = 0.01  # of the memory of a training
RANK = 8  # of adapters that are advised
# Bytes that torch gives to cuBLAS on newer GPUs: 32 MiB for each of its handles and streams.
CUBLAS = 96 << 20
CUBLAS_OF_LANE = 32 << 20  # more, for the second lane of batches of orthogonal matrices


@dataclass(frozen=True)
class MemoryNeeds:
    """An estimate of the memory of a training, in bytes."""

    weights: int
    gradients: int
    state: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def __str__(self) -> str:
        unit, size = self.unit
        parts = ", ".join(f"{name} {own / size:.2f}" for name, own in asdict(self).items())
        return f"about {self.total / size:.2f} {unit} ({parts})"

    @property
    def unit(self) -> tuple[str, float]:
        """The unit to show it in, and its bytes."""
        return ("GB", GB) if self.total >= GB / 10 else ("MB", GB / 1000)


def memory_needs(settings: Settings, prepared: Prepared, world: int = 1) -> MemoryNeeds:
    """Estimate the memory of one process of a training whose parameters are not sharded.

    Args:
        settings: The settings of the training.
        prepared: Its data and model; only the configuration of the model is used.
        world: The number of processes that share a batch.
    """
    config: Any = prepared.model.config
    tokens = prepared.longest_text or config.max_target_positions
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    model.model.encoder.embed_positions.requires_grad_(False)
    set_up(model, settings)
    # Lion is not known there. It keeps one value per parameter.
    name = "adamw" if settings.optimizer == "lion" else settings.optimizer
    found = maxfactor.estimate_memory(
        model, cast("maxfactor.RecipeName", name), gradient_release=settings.release_gradients
    )
    state = found.gradients if settings.optimizer == "lion" else found.state
    is_half = settings.weights == "bf16" or settings.autocast_dtype is not None
    example = activation_bytes(
        config,
        tokens,
        # Adapters take their inputs in float32.
        itemsize=2 if is_half and (settings.lora is None or settings.weights == "fp32") else 4,
        checkpointing=settings.gradient_checkpointing,
        is_half=is_half,
        trains_encoder=not settings.freeze_encoder,
    )
    active = settings.batch_size // world * example
    if settings.autocast_dtype is not None:
        active += autocast_bytes(model)
    # Released windows with few orthogonal matrices are not captured, and have one lane.
    has_lane = settings.optimizer == "quality" or (
        settings.optimizer in ("fast", "lean") and not settings.release_gradients
    )
    cublas = CUBLAS + CUBLAS_OF_LANE * has_lane
    buffers = found.borrowed + (cublas if settings.torch_device.type == "cuda" else 0)
    return MemoryNeeds(found.weights, found.gradients, state, buffers, active)


def available_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that this process has or can get; None for other devices."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    free, whole = torch.cuda.mem_get_info(index)
    limit: Any = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    return min(free + torch.cuda.memory_reserved(index), int(limit(index) * whole))


def describe_needs(needs: MemoryNeeds, available: int | None) -> str:
    """Return a line with the memory that is needed, and with that of the GPU."""
    if available is None:
        return f"memory: {needs}"
    doubt = "" if needs.total <= available else ", which is probably too little"
    return f"memory: {needs}; {available / GB:.2f} GB of the GPU are available{doubt}"


def savings(settings: Settings, prepared: Prepared, world: int = 1) -> dict[str, int]:
    """Return what each option that is not used yet would save, the largest first, in bytes."""
    half = settings.batch_size // 2
    accumulated = settings.grad_accum * 2
    smaller: dict[str, dict[str, Any]] = {
        f"--batch-size {half} --grad-accum {accumulated}": {
            "batch_size": half,
            "grad_accum": accumulated,
        }
    }
    if settings.release_gradients:  # which cannot accumulate
        smaller = {f"--batch-size {half}": {"batch_size": half}}
    options: dict[str, dict[str, Any]] = {
        "--release-gradients": {"release_gradients": True},
        "--gradient-checkpointing": {"gradient_checkpointing": True},
        **smaller,
        "--weights bf16": {"weights": "bf16"},
        "--freeze-encoder": {"freeze_encoder": True},
        f"--lora {RANK}": {"lora": settings.lora or RANK},
        "--optimizer fast": {"optimizer": "fast"},
        "--optimizer lean": {"optimizer": "lean"},
    }
    now = memory_needs(settings, prepared, world).total
    saved: dict[str, int] = {}
    for option, changes in options.items():
        try:
            other = replace(settings, **changes)
            check_peft(other)
        except ValueError:  # it does not go with the other settings
            continue
        saved[option] = now - memory_needs(other, prepared, world).total
    named = {option: size for option, size in saved.items() if size > WORTH_NAMING * now}
    return dict(sorted(named.items(), key=lambda item: -item[1]))


@contextmanager
def explained_out_of_memory(
    settings: Settings, prepared: Prepared, out: Path, world: int = 1
) -> Iterator[None]:
    """Turn torch's error into an InputError that names what would help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        failure = error
    else:
        return
    raise DeviceMemoryError(_explanation(settings, prepared, out, world)) from failure


def _explanation(settings: Settings, prepared: Prepared, out: Path, world: int) -> str:
    needs = memory_needs(settings, prepared, world)
    found, (unit, size) = savings(settings, prepared, world), needs.unit
    options = [f"{option} saves {saved / size:.2f}" for option, saved in found.items()]
    advice = f"in {unit}, {', '.join(options)}" if options else "take a smaller model"
    saved = checkpoint.checkpoints(out)
    kept = ""
    if saved:
        kept = (
            f"; {saved[-1]} is intact, and --resume takes --release-gradients and "
            "--gradient-checkpointing"
        )
    return f"out of memory: the training needs {needs}; {advice}{kept}"
