"""A rank's time: the clock that reads it, named spans nested as the program nests them, their phases.

Where a GPU computes, a moment is an event on its stream, read after the iteration; no span costs a
synchronisation. No torch at import: the launcher reads the ranks' files, which hold spans.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parakit.costs import Phase

if TYPE_CHECKING:
    import torch

TimeMark = Any
"""A moment: nanoseconds of the host, or an event of the device."""


class HostClock:
    """Of ranks that compute on the host: makes marks cheaply, and converts them to times later."""

    def now(self) -> TimeMark:
        """Nanoseconds since the machine started."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait until every mark made so far can be read: nothing to wait for."""

    def to_nanoseconds(self, mark: TimeMark) -> int:
        """A mark that has settled, on the host's clock, which all ranks of a machine share."""
        return int(mark)


class DeviceClock:
    """The clock of ranks that compute on a GPU: a mark is the moment its current stream reaches it.

    Events cost no synchronisation; they are read after the iteration, when Megatron has waited for the
    device anyway to print the loss.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self.synchronize()

    def now(self) -> TimeMark:
        """An event on the current stream."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for the device, and record one moment on both clocks."""
        self._device.synchronize()
        self._anchor = self.now()
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def to_nanoseconds(self, mark: TimeMark) -> int:
        """Relative to the moment recorded last; an earlier mark gives an earlier time."""
        return self._anchor_ns + int(1e6 * self._anchor.elapsed_time(mark))


Clock = HostClock | DeviceClock


def clock_for_model(model: torch.nn.Module) -> Clock:
    """The clock of the device that holds a model's parameters."""
    import torch

    parameter = next(model.parameters(), None)
    on_device = parameter is not None and parameter.device.type == "cuda"
    return DeviceClock(torch.cuda) if on_device else HostClock()


@dataclass(frozen=True)
class Span:
    """One piece of a rank's time, on the clock that all ranks of a machine share."""

    name: str
    category: str
    start_ns: int
    end_ns: int


# Megatron's own timer names (schedules, p2p, finalize_model_grads, training), 0.15 to 0.19.
_PHASES = {
    "batch-generator": Phase.DATA,
    "forward-compute": Phase.FORWARD,
    "backward-compute": Phase.BACKWARD,
    "all-grads-sync": Phase.GRADIENT_SYNC,
    "embedding-grads-all-reduce": Phase.GRADIENT_SYNC,
    "conditional-embedder-grads-all-reduce": Phase.GRADIENT_SYNC,
    "non-tensor-parallel-grads-all-reduce": Phase.GRADIENT_SYNC,
    "params-all-gather": Phase.OPTIMIZER,
}


@functools.cache
def phase_of_timer(name: str) -> Phase:
    """The phase that a timer's name belongs to."""
    if name.startswith("optimizer"):
        return Phase.OPTIMIZER
    if name.endswith(("-send", "-recv")):
        return Phase.PIPELINE
    return _PHASES.get(name, Phase.OTHER)


class Timeline:
    """The phase a rank is in, and the time in each phase since the last `take`.

    A span's own time is its length without the spans inside it, so phases sum to the whole.
    """

    def __init__(self) -> None:
        self.phase = Phase.OTHER
        """The innermost span's; a span that has none inherits the one around it."""
        self._open: list[tuple[str, Phase, TimeMark]] = []
        self._active = True
        self._finished: list[tuple[str, TimeMark, TimeMark]] | None = None
        self.use_clock(HostClock())

    def use_clock(self, clock: Clock) -> None:
        """Use another clock; open spans are dropped."""
        self.clock = clock
        self._open.clear()
        self.phase = Phase.OTHER
        self._changes = [(self.phase, clock.now())]

    def set_active(self, active: bool) -> None:
        """Record spans from here on or not; open spans are dropped when that changes."""
        if active is not self._active:
            self._active = active
            self.use_clock(self.clock)

    def begin(self, name: str) -> None:
        """Enter a span."""
        if not self._active:
            return
        now = self.clock.now()
        self._open.append((name, self.phase, now))
        phase = phase_of_timer(name)
        if phase is not Phase.OTHER:
            self._enter(phase, now)

    def end(self, name: str) -> None:
        """Leave a span; spans still open inside it end with it, a name that is not open does nothing."""
        if not self._active or all(name != open_name for open_name, _, _ in self._open):
            return
        now = self.clock.now()
        last = None
        while last != name:
            last, around, start = self._open.pop()
            if self._finished is not None:
                self._finished.append((last, start, now))
        self._enter(around, now)

    def start_keeping_spans(self) -> None:
        """Keep the spans that end from now on."""
        self._finished = []

    def take_spans(self) -> tuple[Span, ...]:
        """The kept spans, once the clock has settled; later ones are not kept."""
        read = self.clock.to_nanoseconds
        finished, self._finished = self._finished or [], None
        return tuple(
            Span(name, phase_of_timer(name).value, read(start), read(end))
            for name, start, end in finished
        )

    def take_phase_nanoseconds(self) -> dict[Phase, int]:
        """Nanoseconds in each phase since the last call, once the clock has settled."""
        taken: dict[Phase, int] = {}
        # The last mark is read with the others, so it must have settled too.
        self._changes.append((self.phase, self.clock.now()))
        self.clock.synchronize()
        for (phase, start), (_, end) in itertools.pairwise(self._changes):
            spent = self.clock.to_nanoseconds(end) - self.clock.to_nanoseconds(start)
            taken[phase] = taken.get(phase, 0) + spent
        del self._changes[:-1]
        return taken

    def _enter(self, phase: Phase, now: TimeMark) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._changes.append((phase, now))
