"""The kit's ledgers over one iteration: the same that watch real runs, begun and ended by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.ledger import WatchedTimer
from megatron_patches.registry import Patch, Replacement
from tools.ledger.communication import CommunicationLedger
from tools.ledger.memory import MemoryLedger
from tools.ledger.process_groups import CallWatcher
from tools.ledger.timeline import Span, Timeline
from tools.records.measurements import RankCommunication, RankMemory


class IterationWatch:
    """Counts calls and live bytes of the only iteration."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._timeline = Timeline()
        self._calls = CommunicationLedger()
        self._memory = MemoryLedger(self._timeline)
        self._watcher = CallWatcher(self._calls, self._timeline, self._memory.received)
        self._spans: tuple[Span, ...] = ()
        self.parameters = 0

    @property
    def communication(self) -> RankCommunication:
        """Calls from `train_step` to the end of logging, as an iteration of a real run counts."""
        return self._calls.communication(self._rank)

    @property
    def held(self) -> RankMemory:
        """Live bytes at the fullest moment."""
        assert self._memory.result is not None
        return self._memory.result

    @property
    def in_flight(self) -> int:
        """Most forwards that were waiting for their backward at once."""
        waiting = most = 0
        for span in self._spans:
            waiting += _STEPS.get(span.name, 0)
            most = max(most, waiting)
        return most

    def patch(self) -> Patch:
        """Megatron's timers name the phases, `train_step` begins the iteration, what follows ends it."""
        self._watcher.install()
        return Patch(
            name="dry_run_ledger",
            reason="one iteration is all there is",
            needed=lambda context: True,
            replacements=(
                Replacement("megatron.core.timers:Timers.__call__", self._watch_timers),
                Replacement("megatron.training.training:train_step", self._watch_step),
                Replacement(
                    "megatron.training.training:checkpoint_and_decide_exit", self._end_iteration
                ),
            ),
        )

    def _watch_timers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(timers: Any, name: str, *args: Any, **kwargs: Any) -> WatchedTimer:
            return WatchedTimer(original(timers, name, *args, **kwargs), name, self._timeline)

        return call

    def _watch_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(
            forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # A step on empty gradients first: Adam's state exists in every iteration but the first.
            optimizer.step()
            self.parameters = sum(p.numel() for chunk in model for p in chunk.parameters())
            self._calls.forget()
            self._timeline.keep_spans()
            self._memory.start(self._rank, 1, model, optimizer)
            try:
                return original(forward, data, model, optimizer, *args, **kwargs)
            finally:
                self._memory.stop()

        return train_step

    def _end_iteration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
            phases = self._timeline.take()
            self._calls.end_iteration(phases, self._timeline.clock)
            self._spans = self._timeline.take_spans()
            return original(*args, **kwargs)

        return checkpoint_and_decide_exit


_STEPS = {"forward-compute": 1, "backward-compute": -1}
