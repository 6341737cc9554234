"""Checkpoints of a training: whole or not at all, the last few kept.

A checkpoint is a folder that `transformers` can read, with `training.pt` beside the weights: what
is needed to go on as if nothing had happened. Where parameters are cut, the state of the optimizer
is in a folder of `torch.distributed.checkpoint` instead, which any number of processes can read.
"""

from __future__ import annotations

import errno
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

from maxfactor_speech.data.audio import InputError
from maxfactor_speech.training.model import POSITIONS_PER_SECOND, Codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

FOLDER = "checkpoints"
TRAINING = "training.pt"
PARTS, STATE = "optimizer", "optimizer"  # the folder, and what it is called in there
PARTIAL = ".partial"


def partial_folder(out: Path, step: int) -> Path:
    """Where the checkpoint of a step is while it is written."""
    return out / FOLDER / f"step-{step:08d}{PARTIAL}"


def whole_folder(partial: Path) -> Path:
    """Where it is when it is whole."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def begin(partial: Path) -> None:
    """Make the folder of a checkpoint that is not whole yet."""
    with _writing(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def write(
    partial: Path,
    model: WhisperForConditionalGeneration,
    codec: Codec,
    training: dict[str, Any],
) -> None:
    """Write a model and what is needed to go on into a checkpoint that was begun."""
    with _writing(partial):
        _write(partial, model, codec, training)


def write_parts(
    partial: Path, model: nn.Module, optimizers: Sequence[Optimizer], group: ProcessGroup
) -> None:
    """Write the state of optimizers whose parameters are cut: each process writes its part."""
    state = get_optimizer_state_dict(model, optimizers)
    with _writing(partial):
        save_distributed({STATE: state}, checkpoint_id=partial / PARTS, process_group=group)


def finish(partial: Path, keep: int) -> None:
    """Declare a checkpoint whole, and remove those before the last `keep`."""
    folder = whole_folder(partial)
    with _writing(partial):
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    for old in checkpoints(partial.parents[1])[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """Leave nothing behind where writing fails, and say why it did."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, CheckpointException) as error:
        # torch.save turns a full disk into a RuntimeError.
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{whole_folder(partial)}: cannot be written, {_reason(error)}") from error


def checkpoints(out: Path) -> list[Path]:
    """The whole checkpoints of a training, oldest first."""
    found = (out / FOLDER).glob("step-*")
    return sorted(path for path in found if not path.name.endswith(PARTIAL))


def load_training(folder: Path) -> dict[str, Any]:
    """What `save` was given to go on from."""
    path = folder / TRAINING
    try:
        training: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make torch and pickle raise anything
        reason = _reason(error) if isinstance(error, OSError) else "it is damaged"
        raise InputError(
            f"{path}: cannot be read, {reason}; delete this folder to go on from the one before it"
        ) from error
    return training


def load_parts(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], group: ProcessGroup | None
) -> None:
    """Read what `write_parts` wrote, on any number of processes.

    Args:
        folder: Of the checkpoint.
        model: The model, whole or cut.
        optimizers: Its optimizers, which take the state.
        group: The processes that cut it; None where each has the whole.
    """
    state = {STATE: get_optimizer_state_dict(model, optimizers)}
    where, alone = folder / PARTS, group is None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
            load_distributed(state, checkpoint_id=where, process_group=group, no_dist=alone)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise InputError(f"{where}: cannot be read, {_reason(error)}") from error
    set_optimizer_state_dict(model, optimizers, state[STATE])


def load_whole(model: nn.Module, optimizers: Sequence[Optimizer], whole: Sequence[Any]) -> None:
    """Give optimizers of a model that is cut the states of one that was not."""
    names = {param: name for name, param in model.named_parameters()}
    for optimizer, saved in zip(optimizers, whole, strict=True):
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
    """The folder of a Whisper: the last checkpoint of a training, or the one that is given."""
    source = checkpoints(folder)[-1] if checkpoints(folder) else folder
    if not (source / "config.json").is_file():
        raise InputError(f"{folder}: no config.json, so this is not the folder of a model")
    try:
        kind = json.loads((source / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{folder}: cannot be read as a Whisper, {_reason(error)}") from error
    if kind != "whisper":
        raise InputError(f"{folder}: holds a model of type {kind!r}, only 'whisper' will do")
    return source


def load_model(folder: Path) -> tuple[WhisperForConditionalGeneration, Codec]:
    """Read a Whisper and its tokenizer from a folder: a checkpoint, a training, or any other."""
    source = find_model(folder)
    try:
        with _quiet():
            model = WhisperForConditionalGeneration.from_pretrained(
                source, local_files_only=True, dtype=torch.float32
            )
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: cannot be read as a Whisper, {_reason(error)}") from error
    # Sinusoids, which Whisper never trains; reading them from a file makes them trainable.
    model.model.encoder.embed_positions.requires_grad_(False)
    return model, Codec.of(tokenizer)


def _write(
    folder: Path,
    model: WhisperForConditionalGeneration,
    codec: Codec,
    training: dict[str, Any],
) -> None:
    with _quiet():
        model.save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    seconds = model.config.max_source_positions // POSITIONS_PER_SECOND
    WhisperFeatureExtractor(
        feature_size=model.config.num_mel_bins, chunk_length=seconds
    ).save_pretrained(folder)
    with (folder / TRAINING).open("wb") as file:
        torch.save(training, file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `transformers` from drawing bars of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]  # of the first process that failed
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
    return "the disk is full" if full else text
