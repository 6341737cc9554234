"""The device tables of parameter groups: settings, seeds and learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maxfactor.backends.triton.settings_rows import (
    fixed_settings,
    rate_address,
    rate_value,
    seed_of,
    settings_row,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor.backends.step_io import GroupStep
    from maxfactor.backends.triton.uploads import Uploads


class GroupTables:
    """Settings and seeds are uploaded once, learning rates whenever one of them changed."""

    def __init__(self, groups: Sequence[GroupStep], uploads: Uploads) -> None:
        self._uploads = uploads
        self._fixed, self._fitting = [*map(fixed_settings, groups)], groups
        self.settings = uploads.to_device([*map(settings_row, groups)], torch.float32)
        self.seed_keys = uploads.to_device([*map(seed_of, groups)], torch.int32)
        self._rates = torch.zeros(len(groups), dtype=torch.float32, device=uploads.device)
        self._values: list[float] = []
        own = self._rates.data_ptr()
        addresses = [rate_address(group) for group in groups]
        # Where the kernels find each group's rate: the user's tensor, or ours.
        self.rate_addresses = [at or own + 4 * index for index, at in enumerate(addresses)]

    def fit(self, groups: Sequence[GroupStep]) -> bool:
        """Whether the groups have these settings; windows ask for the same ones one by one."""
        if groups is not self._fitting:
            if [*map(fixed_settings, groups)] != self._fixed:
                return False
            self._fitting = groups
        return True

    def update_rates(self, groups: Sequence[GroupStep]) -> None:
        """Upload the learning rates that the host knows."""
        values = [rate_value(group) for group in groups]
        if values != self._values:
            host = torch.tensor(values, dtype=torch.float32, device="cpu")
            self._uploads.write(self._rates, host)
            self._values = values
