"""Results of measurements as JSON, with the date, the machine and the versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import maxfactor

PACKAGES = (
    "torch",
    "triton",
    "numba",
    "numpy",
    "transformers",
    "torch-optimi",
    "bitsandbytes",
    "torchao",
    "pytorch-optimizer",
    "came-pytorch",
    "lion-pytorch",
)


def machine(device: str) -> dict[str, Any]:
    """Describe the machine, without its name."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of MaxFactor, and of related packages if installed."""
    found = {"python": platform.python_version(), "maxfactor": maxfactor.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def circumstances(device: str) -> dict[str, Any]:
    """Return the date, the machine and the versions of a measurement."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": today, "machine": machine(device), "versions": versions()}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
