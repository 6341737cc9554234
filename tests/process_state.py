"""What a test may change in its process, and has to put back."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
# Set by pytest in each phase of a test, and by packages when they are imported.
NOT_OURS = (
    "PYTEST_",
    "PYTORCH_NVML_",
    "KMP_",
    "OMP_",
    "TOKENIZERS_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "HF_",
    "MPL",
)


def process_state() -> dict[str, Any]:
    """The state that all tests share, by the name that an error shows."""
    return {
        "the folder": _folder(),
        "os.environ": {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)},
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET"),
        "handlers of signals": [*map(_handler, SIGNALS)],
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradient mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "torch's process group": dist.is_available() and dist.is_initialized(),
    }


def _handler(number: signal.Signals) -> object:
    """The handler of a signal. That of pytest-timeout counts as none: it goes when a test fails."""
    found = signal.getsignal(number)
    return signal.SIG_DFL if getattr(found, "__module__", None) == "pytest_timeout" else found


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  # the plain text, compared below
    except FileNotFoundError:
        return "(deleted)"


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each difference."""
    found = []
    for name, old in before.items():
        new = after[name]
        if isinstance(old, dict):
            keys = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
            found += [f"{name}[{k!r}]: {old.get(k)!r} before, {new.get(k)!r} after" for k in keys]
        elif old != new:
            found.append(f"{name}: {old!r} before, {new!r} after")
    return found
