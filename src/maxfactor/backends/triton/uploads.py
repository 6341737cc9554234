"""Copies from the host to the device that do not wait for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Uploads:
    """Copies tables to one device.

    A CUDA graph reads the host memory again at every replay, so what is copied during a capture is
    kept alive here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._captured: list[Tensor] = []

    def to_device(self, values: object, dtype: torch.dtype) -> Tensor:
        """Copy a table to the device."""
        host = torch.as_tensor(values, dtype=dtype, device="cpu")
        if self.device.type != "cuda" or host.numel() == 0:
            return host.to(self.device)
        host = host.pin_memory()
        if is_capturing(self.device):
            self._captured.append(host)
        return host.to(self.device, non_blocking=True)

    def write(self, target: Tensor, values: Tensor) -> None:
        """Overwrite a table on the device with values of the host.

        Torch uses pinned memory again only after the copy from it has run.
        """
        if self.device.type == "cuda":
            values = values.pin_memory()
            if is_capturing(self.device):
                self._captured.append(values)
        target.copy_(values, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
