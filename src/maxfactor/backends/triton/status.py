"""Which steps were skipped because a gradient was not finite.

The kernels decide and count on the device. The host reads the counters one step later, without
waiting for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maxfactor.backends.guard import LIMIT, BadGradients, bad_gradients, given_up, refused
from maxfactor.backends.triton.kernels.layout import Counter
from maxfactor.backends.triton.uploads import is_capturing

if TYPE_CHECKING:
    from collections.abc import Sequence


class StepStatus:
    """Counters of skipped steps, and the marks of gradients that were not finite.

    Args:
        names: The parameters' names, in the order of the kernels.
        device: The parameters' device.
        previous: The status of a predecessor, whose counters are carried on.
        waits: Wait for the counters of the previous step. Ranks need it: all must give up after
            the same step, else those that go on wait for the others forever.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        previous: StepStatus | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.device, self._names, self._waits = device, list(names), waits
        # (Counter,) int32 and (tensors,) int32, written by the kernels.
        self.counters = torch.zeros(len(Counter), dtype=torch.int32, device=device)
        if previous is not None:
            self.counters = previous.counters
        self.nonfinite_marks = torch.zeros(len(names), dtype=torch.int32, device=device)
        self._report = torch.zeros(len(Counter), dtype=torch.int32, device="cpu")
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._report = self._report.pin_memory()

    @property
    def skipped(self) -> int:
        """How many steps were skipped; reading it waits for the device."""
        return int(self.counters[Counter.SKIPPED].item())  # asked for by the user

    def bad(self) -> BadGradients | None:
        """The gradients that stopped the last step; reading it waits."""
        marks = self.nonfinite_marks.tolist()  # asked for by the user, or on the way to an error
        return bad_gradients(zip(self._names, marks, strict=True))

    def check_skipped(self) -> None:
        """Raise after too many skipped steps in a row; waits for the device."""
        self._report.copy_(self.counters)  # asked for by the user
        self._event = None
        self.raise_if_given_up()

    def raise_if_skipped(self) -> None:
        """Raise if the step was skipped; waits for the device, as nonfinite="raise" asks for."""
        if (bad := self.bad()) is not None:
            raise refused(bad)

    def request_report(self) -> None:
        """Start copying the counters to the host; the next step looks whether they arrived."""
        if is_capturing(self.device):
            return
        self._report.copy_(self.counters, non_blocking=True)
        if self.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self.raise_if_given_up()

    def raise_if_given_up(self) -> None:
        """Raise if the last report counts too many skipped steps in a row."""
        if self._event is not None and self._waits:
            self._event.synchronize()  # long past, unless the host is far ahead
        if self._event is not None and not self._event.query():
            return
        in_a_row = int(self._report[Counter.IN_A_ROW])
        if in_a_row >= LIMIT:
            bad = self.bad() or BadGradients([])
            self._report.zero_()
            self.counters[Counter.IN_A_ROW] = 0
            raise given_up(in_a_row, bad)
