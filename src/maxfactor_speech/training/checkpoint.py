"""Checkpoints of a training: written completely or not at all; only the last few are kept.

A folder gets its name when everything in it is on the disk, and loses it before it is deleted. So a
process may be killed at any time, and a folder with the name of a checkpoint is complete.

A checkpoint is a model folder that `transformers` can load, with tokenizer, feature extractor and
generation config. `training.pt` beside the weights holds everything else that is needed to resume.
Adapters are merged into the weights, and are in the folder `adapter` by themselves. If parameters
are sharded, the optimizer state is in a folder of `torch.distributed.checkpoint` instead, which any
number of processes can load.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from contextlib import contextmanager, suppress
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

from maxfactor_speech.atomic import sync_folder
from maxfactor_speech.errors import FULL, InputError, failure_reason
from maxfactor_speech.training.adapters import save_adapters
from maxfactor_speech.training.checksums import write_checksums
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
NAME = re.compile(r"step-\d+")
BEST = "best"  # in the folder of a training, a link to its best checkpoint
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # the disk, or what the user may store on it
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
    """Create the folder of a checkpoint, and delete what a killed process left."""
    with _writing(partial):
        for left in partial.parent.glob(f"*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
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


def finish(partial: Path) -> None:
    """Write the checksums of a checkpoint, and rename it to its final name."""
    folder = final_folder(partial)
    with _writing(partial):
        write_checksums(partial)
        _delete(folder)  # of the same step, if there is one
        partial.replace(folder)
        sync_folder(folder.parent)


def tidy(out: Path, keep: int, best: int | None) -> None:
    """Link the best checkpoint, and delete old ones.

    Args:
        out: The folder of the training.
        keep: How many of the last checkpoints to keep.
        best: The step of the best checkpoint, which is kept, too; None if none was evaluated.
    """
    kept = None if best is None else final_folder(partial_folder(out, best))
    if kept is not None and kept.is_dir():
        try:
            _link(out / BEST, kept)
        except OSError as error:
            raise InputError(f"{out / BEST}: cannot be written, {_reason(error)}") from error
    for old in checkpoints(out)[:-keep]:
        if old != kept:
            _delete(old)


def _delete(folder: Path) -> None:
    """Delete a checkpoint, which loses its name first; if it cannot be deleted, it stays."""
    with suppress(OSError):
        gone = folder.with_name(f"{folder.name}.deleted{PARTIAL}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.replace(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _link(link: Path, folder: Path) -> None:
    """Make a relative link to a folder, in place of an earlier one; a copy if links are refused."""
    target = os.path.relpath(folder, link.parent)
    if link.is_symlink() and str(link.readlink()) == target:
        return
    partial = link.with_name(f"{link.name}{PARTIAL}")
    _remove(partial)
    try:
        try:
            partial.symlink_to(target, target_is_directory=True)
        except (OSError, NotImplementedError) as error:  # Windows allows links only to some users
            if getattr(error, "errno", None) in NO_ROOM:
                raise
            shutil.copytree(folder, partial)
        if not link.is_symlink():
            _remove(link)  # a folder cannot be replaced at once
        partial.replace(link)
    except OSError:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    """Remove a link, or a folder with everything in it."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


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
        reason = _reason(error)
        raise InputError(
            f"{final_folder(partial)}: cannot be written, {reason}"
            + (_continuation(partial.parent.parent) if reason.startswith(FULL) else "")
        ) from error


def _continuation(out: Path) -> str:
    """Return how a training goes on when the disk has room again."""
    saved = checkpoints(out)
    kept = f" from {saved[-1].name}, which is kept" if saved else ""
    return f", then continue with --resume{kept}"


def checkpoints(out: Path) -> list[Path]:
    """Return the complete checkpoints of a training, oldest first."""
    found = (out / FOLDER).glob("step-*")
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=step_of)


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
    # On a full disk torch.save raises its own error while it handles that of the system.
    hidden = error.__context__
    return failure_reason(hidden if isinstance(hidden, OSError) else error)
