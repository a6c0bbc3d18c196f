"""Named spans of a rank's time, nested as the program nests them, and the phase each belongs to."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tools.measurements import Phase


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
        self._open: list[tuple[str, Phase, int]] = []
        self._since = time.perf_counter_ns()
        self._phase_ns: dict[Phase, int] = {}
        self.spans: list[Span] | None = None
        """Finished spans, while somebody wants them."""

    @property
    def phase(self) -> Phase:
        """The innermost span's phase; a span that has none inherits the one around it."""
        return next((p for _, p, _ in reversed(self._open) if p is not Phase.OTHER), Phase.OTHER)

    def begin(self, name: str) -> None:
        """Enter a span."""
        now = self._account()
        self._open.append((name, phase_of(name), now))

    def end(self, name: str) -> None:
        """Leave a span; spans inside it that were left open end with it, unknown names do nothing."""
        if all(name != open_name for open_name, _, _ in self._open):
            return
        now = self._account()
        while self._open:
            last, phase, start = self._open.pop()
            if self.spans is not None:
                self.spans.append(Span(last, phase.value, start, now))
            if last == name:
                return

    def take(self) -> dict[Phase, int]:
        """Nanoseconds in each phase since the last call."""
        self._account()
        taken, self._phase_ns = self._phase_ns, {}
        return taken

    def _account(self) -> int:
        now = time.perf_counter_ns()
        self._phase_ns[self.phase] = self._phase_ns.get(self.phase, 0) + now - self._since
        self._since = now
        return now
