"""Named spans of a rank's time, nested as the program nests them, and the phase each belongs to."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from tools.ledger.clock import Clock, HostClock, Mark
from tools.records.measurements import Phase


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
def phase_of(name: str) -> Phase:
    """The phase that a timer's name stands for."""
    if name.startswith("optimizer"):
        return Phase.OPTIMIZER
    if name.endswith(("-send", "-recv")):
        return Phase.PIPELINE
    return _PHASES.get(name, Phase.OTHER)


class Timeline:
    """Where a rank is now, and how long it was in each phase since the last `take`.

    A span's own time is its length without the spans inside it, so phases sum to the whole.
    """

    def __init__(self) -> None:
        self.phase = Phase.OTHER
        """The innermost span's; a span that has none inherits the one around it."""
        self._open: list[tuple[str, Phase, Mark]] = []
        self._active = True
        self._finished: list[tuple[str, Mark, Mark]] | None = None
        self.use(HostClock())

    def use(self, clock: Clock) -> None:
        """Tell the time by another clock; spans that are open are forgotten."""
        self.clock = clock
        self._open.clear()
        self.phase = Phase.OTHER
        self._changes = [(self.phase, clock.mark())]

    def watch(self, active: bool) -> None:
        """Whether spans are noted from here on; those that are open are forgotten when that changes."""
        if active is not self._active:
            self._active = active
            self.use(self.clock)

    def begin(self, name: str) -> None:
        """Enter a span."""
        if not self._active:
            return
        now = self.clock.mark()
        self._open.append((name, self.phase, now))
        phase = phase_of(name)
        if phase is not Phase.OTHER:
            self._enter(phase, now)

    def end(self, name: str) -> None:
        """Leave a span; spans inside it that were left open end with it, unknown names do nothing."""
        if not self._active or all(name != open_name for open_name, _, _ in self._open):
            return
        now = self.clock.mark()
        last = None
        while last != name:
            last, around, start = self._open.pop()
            if self._finished is not None:
                self._finished.append((last, start, now))
        self._enter(around, now)

    def keep_spans(self) -> None:
        """Keep the spans that end from now on."""
        self._finished = []

    def take_spans(self) -> tuple[Span, ...]:
        """The spans kept, once the clock has settled; later ones are not kept."""
        read = self.clock.nanoseconds
        finished, self._finished = self._finished or [], None
        return tuple(
            Span(name, phase_of(name).value, read(start), read(end))
            for name, start, end in finished
        )

    def take(self) -> dict[Phase, int]:
        """Nanoseconds in each phase since the last call, once the clock has settled."""
        taken: dict[Phase, int] = {}
        # The last mark is read with the others, so it must have settled too.
        self._changes.append((self.phase, self.clock.mark()))
        self.clock.settle()
        for (phase, start), (_, end) in itertools.pairwise(self._changes):
            spent = self.clock.nanoseconds(end) - self.clock.nanoseconds(start)
            taken[phase] = taken.get(phase, 0) + spent
        del self._changes[:-1]
        return taken

    def _enter(self, phase: Phase, now: Mark) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._changes.append((phase, now))
