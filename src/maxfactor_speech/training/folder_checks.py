"""What a model folder may say, looked at before anything is built or loaded from it.

Weights are numbers, and the other files are JSON: nothing in a folder is run as code. Its numbers
decide how much memory is taken, so absurd ones are refused here.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import torch

from maxfactor_speech.errors import InputError, failure_reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn
    from transformers import WhisperForConditionalGeneration

CONFIG = "config.json"
ADAPTERS = "adapter_config.json"
LARGEST_JSON = 64 * 2**20  # bytes; the vocabularies of published models have 3
LARGEST_NUMBER = 10**8  # in a config
# Names of entries that count modules, each of which is built, or that multiply activations.
MOST = {re.compile("(layers?|experts|depths?)$"): 1000, re.compile("beams?$"): 100}
# The entries of a feature extractor, which computes its filters from them when it is built.
EXTRACTOR_LIMITS = {
    "feature_size": 1024,
    "sampling_rate": 768_000,
    "hop_length": 2**16,
    "chunk_length": 3600,
    "n_fft": 2**16,
}
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
COUNTS = re.compile("_(length|new_tokens|beams|sequences|index)$")
TOKENS = ("suppress_tokens", "begin_suppress_tokens", "lang_to_id", "task_to_id")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder.

    Raises:
        InputError: If it is none. The message names the file.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise InputError(f"{path}: has {size / 2**20:.0f} MiB, too large for a model folder")
        found = json.loads(path.read_text(encoding="utf-8"))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read, {failure_reason(error)}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: must be a JSON object, got {type(found).__name__}")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model folder; refuse absurd numbers, and code of others."""
    config = read_json(folder / CONFIG)
    for name, value in _entries(config):
        _check_number(folder / CONFIG, name, value)
    for name, value in _implementations(config):
        if "/" in json.dumps(value):  # it may be a name, or names by the parts of the model
            raise InputError(
                f"{folder / CONFIG}: {name} names code of others, {value!r}, which is not run; "
                "delete the entry"
            )
    if (folder / ADAPTERS).is_file():
        raise InputError(
            f"{folder}: has {ADAPTERS}, so a part of the model is elsewhere; give a folder into "
            "which the adapters are merged"
        )
    return config


def _implementations(config: Any) -> Iterator[tuple[str, Any]]:
    """Entries such as "attn_implementation", at any depth, with all that they hold."""
    inner = config if isinstance(config, list) else []
    if isinstance(config, dict):
        yield from ((name, own) for name, own in config.items() if name.endswith("implementation"))
        inner = list(config.values())
    for value in inner:
        yield from _implementations(value)


def check_extractor(path: Path) -> None:
    """Raise InputError if a feature extractor's file has numbers that it cannot be built with."""
    content = read_json(path)
    nested = content.get("feature_extractor")
    for part in (content, nested if isinstance(nested, dict) else {}):
        for name, most in EXTRACTOR_LIMITS.items():
            value = part.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InputError(f"{path}: {name} must be between 1 and {most}, got {value!r}")


def check_weights(folder: Path, model: nn.Module) -> None:
    """Raise InputError if a folder has fewer bytes of weights than its model has parameters.

    Args:
        folder: The folder.
        model: The model of its config, on the meta device.
    """
    files = [path for pattern in WEIGHTS for path in folder.glob(pattern) if path.is_file()]
    if not files:
        raise InputError(
            f"{folder}: has no weights (model.safetensors); download the model again, or copy them "
            "from where the folder comes from"
        )
    size = sum(path.stat().st_size for path in files)
    parameters = sum(param.numel() for param in set(model.parameters()))
    if parameters > size:
        raise InputError(
            f"{folder}: cannot be read as a Whisper model: {CONFIG} describes a model of "
            f"{parameters} parameters, but the weights have {size} bytes; one of the files is "
            "incomplete or belongs to another model"
        )


def check_generation(folder: Path, model: WhisperForConditionalGeneration) -> None:
    """Raise InputError if a generation config has absurd numbers, or tokens the model lacks."""
    path, size = folder / "generation_config.json", int(model.config.vocab_size)
    content = model.generation_config.to_dict()
    for name, value in content.items():
        if COUNTS.search(name) and not (value is None or type(value) is int):
            raise InputError(f"{path}: {name} must be a whole number, got {value!r}")
        if name in TOKENS or name.endswith("_token_id"):
            _check_tokens(path, name, value, size)
    for name, value in _entries(content):
        _check_number(path, name, value)


def _check_tokens(path: Path, name: str, value: Any, size: int) -> None:
    tokens = list(value.values()) if isinstance(value, dict) else value
    for token in tokens if isinstance(tokens, list) else [tokens]:
        lowest = -1 if name == "suppress_tokens" else 0  # -1: Whisper's own list
        if token is not None and not (type(token) is int and lowest <= token < size):
            raise InputError(
                f"{path}: {name} has the token {str(token)[:40]}, but the model has {size} tokens; "
                "copy the file from the model that this one was made from"
            )


def on_meta(kind: Any, config: Any) -> nn.Module:
    """Build a model without memory for its weights."""
    with torch.device("meta"):
        built: nn.Module = kind(config)
    return built


def _check_number(path: Path, name: str, value: object) -> None:
    most = next((most for names, most in MOST.items() if names.search(name)), LARGEST_NUMBER)
    if isinstance(value, int) and abs(value) > most:
        raise InputError(f"{path}: {name} must be at most {most}, got {str(value)[:40]}")


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an object and of those inside it; each value of a list."""
    stack: list[tuple[str, Any]] = list(content.items())
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack += [(str(key), own) for key, own in value.items()]
        elif isinstance(value, list):
            stack += [(name, own) for own in value]
        else:
            yield name, value
