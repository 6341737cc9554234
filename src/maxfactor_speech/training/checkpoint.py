"""Checkpoints of a training: written completely or not at all; only the last few are kept.

A checkpoint is a model folder that `transformers` can load. `training.pt` beside the weights holds
everything else that is needed to resume. If parameters are sharded, the optimizer state is in a
folder of `torch.distributed.checkpoint` instead, which any number of processes can load.
"""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.utils import logging

from maxfactor_speech.data.tokens import Codec
from maxfactor_speech.errors import InputError, failure_reason
from maxfactor_speech.training.model import longest_audio

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

FOLDER = "checkpoints"
TRAINING = "training.pt"
SHARDED_STATE, STATE_KEY = "optimizer", "optimizer"  # the folder, and the key in it
PARTIAL = ".partial"


def partial_folder(out: Path, step: int) -> Path:
    """Return the folder of a checkpoint while it is being written."""
    return out / FOLDER / f"step-{step:08d}{PARTIAL}"


def final_folder(partial: Path) -> Path:
    """Return the folder of a checkpoint when it is complete."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def begin(partial: Path) -> None:
    """Create the folder of a checkpoint that is to be written."""
    with _writing(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def write(
    partial: Path,
    model: WhisperForConditionalGeneration,
    codec: Codec,
    training: dict[str, Any],
) -> None:
    """Write a model, its tokenizer, and the state of its training."""
    with _writing(partial):
        with _without_progress_bars():
            model.save_pretrained(partial)
        codec.tokenizer.save_pretrained(partial)
        WhisperFeatureExtractor(
            feature_size=model.config.num_mel_bins, chunk_length=longest_audio(model)
        ).save_pretrained(partial)
        with (partial / TRAINING).open("wb") as file:
            torch.save(training, file)


def write_sharded_state(
    partial: Path, model: nn.Module, optimizers: Sequence[Optimizer], group: ProcessGroup
) -> None:
    """Write the optimizer state of sharded parameters: each process writes its shards."""
    state = get_optimizer_state_dict(model, optimizers)
    with _writing(partial):
        save_distributed(
            {STATE_KEY: state}, checkpoint_id=partial / SHARDED_STATE, process_group=group
        )


def finish(partial: Path, keep: int) -> None:
    """Rename a complete checkpoint to its final name, and delete all but the last `keep`."""
    folder = final_folder(partial)
    with _writing(partial):
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    for old in checkpoints(partial.parents[1])[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """Delete the partial checkpoint if writing fails, and raise InputError with the reason."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        # RuntimeError: torch.save raises it on a full disk.
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{final_folder(partial)}: cannot be written, {_reason(error)}") from error


def checkpoints(out: Path) -> list[Path]:
    """Return the complete checkpoints of a training, oldest first."""
    found = (out / FOLDER).glob("step-*")
    return sorted(path for path in found if not path.name.endswith(PARTIAL))


def load_training(folder: Path) -> dict[str, Any]:
    """Return the training state that `write` was given."""
    path = folder / TRAINING
    try:
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make torch and pickle raise anything
        reason = _reason(error) if isinstance(error, OSError) else "the file is damaged"
        raise InputError(
            f"{path}: cannot be read, {reason}; delete its folder to resume from the checkpoint "
            "before it"
        ) from error
    return training


def load_sharded_state(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], group: ProcessGroup | None
) -> None:
    """Load the state that `write_sharded_state` wrote, into any number of processes.

    Args:
        folder: The checkpoint.
        model: The model, sharded or not.
        optimizers: Its optimizers, which receive the state.
        group: The processes that hold the shards; None if the model is not sharded.
    """
    state = {STATE_KEY: get_optimizer_state_dict(model, optimizers)}
    path, is_alone = folder / SHARDED_STATE, group is None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended
            load_distributed(state, checkpoint_id=path, process_group=group, no_dist=is_alone)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise InputError(f"{path}: cannot be read, {_reason(error)}") from error
    set_optimizer_state_dict(model, optimizers, state[STATE_KEY])


def load_full_state(
    model: nn.Module, optimizers: Sequence[Optimizer], saved_states: Sequence[Any]
) -> None:
    """Load the optimizer states of an unsharded model into the optimizers of a sharded one."""
    names = {param: name for name, param in model.named_parameters()}
    for optimizer, saved in zip(optimizers, saved_states, strict=True):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        groups = [
            {**group, "params": [names[params[i]] for i in group["params"]]}
            for group in saved["param_groups"]
        ]
        state = {names[params[i]]: own for i, own in saved["state"].items()}
        set_optimizer_state_dict(
            model,
            optimizer,
            {"state": state, "param_groups": groups},
            options=StateDictOptions(full_state_dict=True),
        )


def find_model(folder: Path) -> Path:
    """Return the model folder in a training's folder (the last checkpoint), or the folder itself.

    Raises:
        InputError: If it contains no Whisper model.
    """
    source = checkpoints(folder)[-1] if checkpoints(folder) else folder
    if not (source / "config.json").is_file():
        raise InputError(f"{folder}: no config.json, so this is not a model folder")
    try:
        kind = json.loads((source / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise _not_whisper(folder, error) from error
    if kind != "whisper":
        raise InputError(f"{folder}: contains a model of type {kind!r}, only 'whisper' is allowed")
    return source


def load_model(folder: Path) -> tuple[WhisperForConditionalGeneration, Codec]:
    """Load a Whisper and its tokenizer from a model folder, a checkpoint, or a training."""
    source = find_model(folder)
    try:
        with _without_progress_bars():
            model = WhisperForConditionalGeneration.from_pretrained(
                source, local_files_only=True, dtype=torch.float32
            )
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _not_whisper(folder, error) from error
    # Whisper never trains the encoder's sinusoids, but loading makes them trainable.
    model.model.encoder.embed_positions.requires_grad_(False)
    return model, Codec.of(tokenizer)


def _not_whisper(folder: Path, error: Exception) -> InputError:
    return InputError(f"{folder}: cannot be read as a Whisper model, {_reason(error)}")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of `transformers`."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]  # of the first process that failed
    return failure_reason(error)
