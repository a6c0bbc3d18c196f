"""What time it is for a rank's work: the host's clock, or events that its device reaches in turn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Mark = Any
"""A moment as its clock knows it: nanoseconds, or an event of the device."""


class Clock(Protocol):
    """Makes marks that cost little, and reads them later."""

    def mark(self) -> Mark:
        """Now."""

    def settle(self) -> None:
        """Wait until every mark made so far can be read."""

    def nanoseconds(self, mark: Mark) -> int:
        """A mark that has settled, on the host's clock, which all ranks of a machine share."""


class HostClock:
    """Where the host computes."""

    def mark(self) -> Mark:
        """Nanoseconds since the machine started."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Nothing to wait for."""

    def nanoseconds(self, mark: Mark) -> int:
        """The mark itself."""
        return int(mark)


class DeviceClock:
    """Where a GPU computes: a mark is the moment its current stream comes to it.

    Events cost no synchronisation; they are read after the iteration, when Megatron has waited for the
    device anyway to print the loss.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self.settle()

    def mark(self) -> Mark:
        """An event on the current stream."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Let the device finish, and note one moment on both clocks."""
        self._device.synchronize()
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def nanoseconds(self, mark: Mark) -> int:
        """Counted from the moment noted last; marks before it lie before it."""
        return self._anchor_ns + int(1e6 * self._anchor.elapsed_time(mark))


def clock_of(model: torch.nn.Module) -> Clock:
    """The clock of the device that holds a model's parameters."""
    # Here, because the launcher gathers the ranks' files and must start without torch.
    import torch

    parameter = next(model.parameters(), None)
    on_device = parameter is not None and parameter.device.type == "cuda"
    return DeviceClock(torch.cuda) if on_device else HostClock()
