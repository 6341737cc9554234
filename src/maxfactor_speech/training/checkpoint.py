"""Checkpoints of a training: written completely or not at all; only the last few are kept.

A checkpoint is a model folder that `transformers` can load, with tokenizer, feature extractor and
generation config. `training.pt` beside the weights holds everything else that is needed to resume.
Adapters are merged into the weights, and are in the folder `adapter` by themselves. If parameters
are sharded, the optimizer state is in a folder of `torch.distributed.checkpoint` instead, which any
number of processes can load.
"""

from __future__ import annotations

import json
import os
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
from transformers import WhisperProcessor
from transformers.utils import logging

from maxfactor_speech.errors import InputError, failure_reason
from maxfactor_speech.training.adapters import save_adapters
from maxfactor_speech.training.sharded_files import CheckedPlanner, check_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from peft import PeftModel
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from maxfactor_speech.training.recogniser import Recogniser

FOLDER = "checkpoints"
TRAINING = "training.pt"
SHARDED_STATE, STATE_KEY = "optimizer", "optimizer"  # the folder, and the key in it
PARTIAL = ".partial"
BEST = "best"  # in the folder of a training, a link to its best checkpoint
FAILURES = (OSError, SafetensorError, RuntimeError, CheckpointException)
SPELLINGS = "normalizer.json"  # Whisper's list of English spellings, for error rates


def partial_folder(out: Path, step: int) -> Path:
    """Return the folder of a checkpoint while it is being written."""
    return out / FOLDER / f"step-{step:08d}{PARTIAL}"


def final_folder(partial: Path) -> Path:
    """Return the folder of a checkpoint when it is complete."""
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint."""
    return int(folder.name.removeprefix("step-"))


def begin(partial: Path) -> None:
    """Create the folder of a checkpoint that is to be written."""
    with _writing(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def write(partial: Path, recogniser: Recogniser, training: dict[str, Any]) -> None:
    """Write a model folder, and the state of its training."""
    tokenizer, extractor = recogniser.codec.tokenizer, recogniser.extractor
    with _writing(partial):
        with quiet():
            recogniser.model.save_pretrained(partial)
        WhisperProcessor(extractor, tokenizer).save_pretrained(partial)
        extractor.save_pretrained(partial)  # where other programs look for it
        if tokenizer.english_spelling_normalizer is not None:  # the tokenizer does not save it
            spellings = json.dumps(tokenizer.english_spelling_normalizer, ensure_ascii=False)
            (partial / SPELLINGS).write_text(spellings, encoding="utf-8")
        with (partial / TRAINING).open("wb") as file:
            torch.save(training, file)


def write_adapters(partial: Path, adapters: PeftModel) -> None:
    """Write adapters to a folder beside the model that they are merged into."""
    with _writing(partial):
        save_adapters(adapters, partial)


def write_sharded_state(
    partial: Path, model: nn.Module, optimizers: Sequence[Optimizer], group: ProcessGroup
) -> None:
    """Write the optimizer state of sharded parameters: each process writes its shards."""
    state = get_optimizer_state_dict(model, optimizers)
    with _writing(partial):
        save_distributed(
            {STATE_KEY: state}, checkpoint_id=partial / SHARDED_STATE, process_group=group
        )


def finish(partial: Path, keep: int, best: int | None) -> None:
    """Rename a complete checkpoint to its final name, link the best one, and delete old ones.

    Args:
        partial: The complete checkpoint.
        keep: How many of the last checkpoints to keep.
        best: The step of the best checkpoint, which is kept, too; None if none was evaluated.
    """
    folder, out = final_folder(partial), partial.parents[1]
    kept = folder if best is None else final_folder(partial_folder(out, best))
    with _writing(partial):
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        if best is not None and kept.is_dir():
            _link(out / BEST, kept)
    for old in checkpoints(out)[:-keep]:
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)


def _link(link: Path, folder: Path) -> None:
    """Make a relative link to a folder, in place of an earlier one; a copy if links are refused."""
    partial = link.with_name(f"{link.name}{PARTIAL}")
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(os.path.relpath(folder, link.parent), target_is_directory=True)
        partial.replace(link)
    except (OSError, NotImplementedError):  # Windows allows links only to some users
        shutil.rmtree(link, ignore_errors=True)
        shutil.copytree(folder, link)


@contextmanager
def _writing(partial: Path) -> Iterator[None]:
    """Delete the partial checkpoint if writing fails, and raise InputError with the reason."""
    try:
        yield
    except Exception as error:
        # On a full disk torch.save raises RuntimeError, and tokenizers a bare Exception.
        shutil.rmtree(partial, ignore_errors=True)
        if not (isinstance(error, FAILURES) or type(error) is Exception):
            raise
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
    check_metadata(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended
            load_distributed(
                state,
                checkpoint_id=path,
                planner=CheckedPlanner(),
                process_group=group,
                no_dist=is_alone,
            )
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


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the progress bars and remarks of `transformers`."""
    was_enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_enabled:
            logging.enable_progress_bar()


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]  # of the first process that failed
    return failure_reason(error)
