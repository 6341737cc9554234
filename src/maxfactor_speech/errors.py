"""Errors that the command reports in one line instead of a traceback."""

from __future__ import annotations

import errno
import re

FULL = "the disk is full"


class InputError(ValueError):
    """The user's input cannot be used. The message is one line and names the input."""


class DivergedError(InputError):
    """The loss is no longer finite, so the training cannot continue."""


class DeviceMemoryError(InputError):
    """The device has too little memory for the training."""


def failure_reason(error: BaseException) -> str:
    """Return the first line of an error's text; a full disk is named, with the remedy."""
    text = str(getattr(error, "strerror", None) or error) or type(error).__name__
    is_full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
    return f"{FULL}; free some space" if is_full else text.splitlines()[0]


def download_hint(model: str) -> str:
    """Return how to get a model that is named as on the Hugging Face Hub; "" for other names."""
    if re.fullmatch(r"whisper-[\w.-]+", model):
        model = f"openai/{model}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return ""
    folder = model.split("/")[1]
    return (
        f"models are not downloaded: for one of the Hugging Face Hub, run `hf download {model} "
        f"--local-dir {folder}`, then give the folder {folder}"
    )
