"""The device tables of parameter groups: settings, seeds and learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maxfactor.backends.triton.settings_rows import (
    rate_address,
    rate_value,
    seed_of,
    settings_row,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.triton.uploads import Uploads
    from maxfactor.settings import Hyper


class GroupTables:
    """Settings and seeds are uploaded once, learning rates whenever one of them changed."""

    def __init__(self, hypers: Sequence[Hyper], uploads: Uploads) -> None:
        self._uploads = uploads
        self.settings = uploads.to_device([*map(settings_row, hypers)], torch.float32)
        self.seed_keys = uploads.to_device([*map(seed_of, hypers)], torch.int32)
        self._rates = torch.zeros(len(hypers), dtype=torch.float32, device=uploads.device)
        self._values: list[float] = []
        own = self._rates.data_ptr()
        addresses = [rate_address(hyper) for hyper in hypers]
        # Where the kernels find each group's rate: the user's tensor, or ours.
        self.rate_addresses = [at or own + 4 * group for group, at in enumerate(addresses)]

    def update_rates(self, hypers: Sequence[Hyper]) -> None:
        """Upload the learning rates that the host knows."""
        values = [rate_value(hyper) for hyper in hypers]
        if values != self._values:
            uploaded = self._uploads.to_device(values, torch.float32)
            self._rates.copy_(uploaded, non_blocking=True)
            self._values = values
