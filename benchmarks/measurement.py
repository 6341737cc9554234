"""What every benchmark needs: the machine in words, the bytes of state, a clock, a JSON file.

The first three are those of `maxfactor bench`. Nothing here needs the extra packages of the speech
application.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maxfactor_speech.bench.contenders import Several
from maxfactor_speech.bench.results import circumstances
from maxfactor_speech.bench.shapes import MODELS, Shape, elements, shapes
from maxfactor_speech.bench.step_time import WARM_UP
from maxfactor_speech.bench.step_time import main as time_steps
from maxfactor_speech.state_size import state_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

__all__ = [
    "MODELS",
    "RESULTS",
    "Record",
    "Shape",
    "circumstances",
    "elements",
    "every_kind",
    "milliseconds",
    "shapes",
    "state_bytes_per_parameter",
    "time_steps",
    "write_json",
]

Record = dict[str, Any]  # a part of a JSON file

RESULTS = Path(__file__).resolve().parent / "results"


def state_bytes_per_parameter(optimizers: Sequence[Optimizer], parameters: int) -> float:
    """Bytes of all tensors in the optimizers' states, each counted once, per parameter."""
    return state_bytes(Several(*optimizers)) / parameters


def every_kind() -> nn.Module:
    """A model with every kind of layer that `for_model` knows, except a head."""
    return nn.Sequential(nn.Embedding(9, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 4))


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of a call after a warm-up, including the wait for the device."""
    times = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[WARM_UP:])


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write JSON with every list of plain values on one line."""
    text = json.dumps(record, indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}]*\]", lambda match: re.sub(r"\n *", " ", match[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
