"""Measure the time of one rank: clocks, named spans, and the phases that spans belong to.

Spans are nested as the program nests them. If a GPU computes, a time is an event on its stream. Events are read
after the iteration, so that no span synchronises the device. This module does not import torch at its top,
because the launcher reads the ranks' files, which hold spans.
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
"""A point in time that a clock recorded: nanoseconds of the host, or an event of the device."""


class HostClock:
    """The clock of ranks that compute on the host."""

    def now(self) -> TimeMark:
        """Return the present time: nanoseconds since the machine started."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait until all recorded times can be read. Those of the host always can."""

    def to_nanoseconds(self, mark: TimeMark) -> int:
        """Return a recorded time on the host's clock, which all ranks of a machine share."""
        return int(mark)


class DeviceClock:
    """The clock of ranks that compute on a GPU. A time is the moment at which the current stream reaches an event.

    Recording an event does not synchronize the device. Events are read after the iteration, when Megatron has
    waited for the device anyway to print the loss.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self.synchronize()

    def now(self) -> TimeMark:
        """Record an event on the current stream and return it."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for the device, and record one point in time on the device's and on the host's clock."""
        self._device.synchronize()
        self._anchor = self.now()
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def to_nanoseconds(self, mark: TimeMark) -> int:
        """Return the time of an event in nanoseconds on the host's clock.

        The event must have happened before the last `synchronize`.
        """
        return self._anchor_ns + int(1e6 * self._anchor.elapsed_time(mark))


Clock = HostClock | DeviceClock


def clock_for_model(model: torch.nn.Module) -> Clock:
    """Return the clock of the device that holds a model's parameters; without parameters the host's."""
    import torch

    parameter = next(model.parameters(), None)
    is_on_gpu = parameter is not None and parameter.device.type == "cuda"
    return DeviceClock(torch.cuda) if is_on_gpu else HostClock()


@dataclass(frozen=True)
class Span:
    """A named interval of a rank's time, on the clock that all ranks of a machine share."""

    name: str
    category: str
    start_ns: int
    end_ns: int


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
"""Phases by the names of Megatron's timers (schedules, p2p, finalize_model_grads, training), 0.15 to 0.19."""


@functools.cache
def phase_of_timer(name: str) -> Phase:
    """Return the phase that one of Megatron's timers measures; OTHER for an unknown timer."""
    if name.startswith("optimizer"):
        return Phase.OPTIMIZER
    if name.endswith(("-send", "-recv")):
        return Phase.PIPELINE
    return _PHASES.get(name, Phase.OTHER)


class Timeline:
    """The present phase of a rank, and the time in each phase since the times were last read.

    The time of a span does not include the spans inside it, so the times of the phases add up to the total
    time.
    """

    def __init__(self) -> None:
        self.phase = Phase.OTHER
        """The phase of the innermost span. A span of phase OTHER inherits the phase around it."""
        self._open: list[tuple[str, Phase, TimeMark]] = []
        self._active = True
        self._finished: list[tuple[str, TimeMark, TimeMark]] | None = None
        self.use_clock(HostClock())

    def use_clock(self, clock: Clock) -> None:
        """Measure with another clock from here on; drop open spans and the time so far."""
        self.clock = clock
        self._open.clear()
        self.phase = Phase.OTHER
        self._phase_starts = [(self.phase, clock.now())]

    def set_active(self, active: bool) -> None:
        """Switch the recording of spans on or off; a change drops open spans and the time so far."""
        if active is not self._active:
            self._active = active
            self.use_clock(self.clock)

    def begin(self, name: str) -> None:
        """Begin a span under the name of one of Megatron's timers."""
        if not self._active:
            return
        now = self.clock.now()
        self._open.append((name, self.phase, now))
        phase = phase_of_timer(name)
        if phase is not Phase.OTHER:
            self._enter_phase(phase, now)

    def end(self, name: str) -> None:
        """End the span `name` and all open spans inside it. If no such span is open, do nothing."""
        is_open = any(name == open_name for open_name, _, _ in self._open)
        if not self._active or not is_open:
            return
        now = self.clock.now()
        ended_name = None
        while ended_name != name:
            ended_name, phase_around, start = self._open.pop()
            if self._finished is not None:
                self._finished.append((ended_name, start, now))
        self._enter_phase(phase_around, now)

    def start_keeping_spans(self) -> None:
        """Keep the spans that end from now on, until `take_spans`."""
        self._finished = []

    def take_spans(self) -> tuple[Span, ...]:
        """Return the stored spans, and stop storing spans. The clock must be synchronized."""
        to_nanoseconds = self.clock.to_nanoseconds
        finished, self._finished = self._finished or [], None
        return tuple(
            Span(name, phase_of_timer(name).value, to_nanoseconds(start), to_nanoseconds(end))
            for name, start, end in finished
        )

    def take_phase_nanoseconds(self) -> dict[Phase, int]:
        """Synchronize the clock, and return the nanoseconds in each phase since the last call."""
        nanoseconds: dict[Phase, int] = {}
        # The end of the last interval is read with the others, so it is recorded before the clock waits.
        self._phase_starts.append((self.phase, self.clock.now()))
        self.clock.synchronize()
        for (phase, start), (_, end) in itertools.pairwise(self._phase_starts):
            duration_ns = self.clock.to_nanoseconds(end) - self.clock.to_nanoseconds(start)
            nanoseconds[phase] = nanoseconds.get(phase, 0) + duration_ns
        del self._phase_starts[:-1]
        return nanoseconds

    def _enter_phase(self, phase: Phase, now: TimeMark) -> None:
        """Set the phase, and record its start if it is another one."""
        if phase is not self.phase:
            self.phase = phase
            self._phase_starts.append((phase, now))
