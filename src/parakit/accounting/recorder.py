"""The one object a backend uses: it marks iterations and spans, and writes the rank's file."""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from parakit.accounting.collect import RankRecord
from parakit.accounting.communication import CommunicationLog, IterationFigures
from parakit.accounting.memory import MemoryAccounting
from parakit.accounting.model_state import has_optimizer_state
from parakit.accounting.process_groups import CallWatcher
from parakit.accounting.routing import RoutingLog
from parakit.accounting.timeline import Span, Timeline, clock_for_model
from parakit.artifacts.io import write_atomically
from parakit.config import variables
from parakit.costs import Phase

MEMORY_ITERATION = 2
"""The first iteration has no optimizer state before its end; this one is still warm-up. While fp16's
loss scale falls updates are skipped, so the first iteration that has the state is measured as well."""

TRACED_ITERATION = 4
PROCESSOR_ITERATIONS = 10_000
"""The last ones, whose processor time is kept one by one."""

WRITE_EVERY = 100
"""Iterations; a killed rank leaves a file with what it had counted by then."""


class Recorder:
    """Counts for one rank from its first iteration on; without a folder it does nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._iteration = 0
        self._alternates = bool(os.environ.get(variables.LEDGER_ALTERNATE))
        self._communication = CommunicationLog()
        self._spans: tuple[Span, ...] = ()
        self._processor: deque[float] = deque(maxlen=PROCESSOR_ITERATIONS)
        self._began_processor = 0.0
        self.timeline = Timeline()
        self.memory = MemoryAccounting(self.timeline)
        self._measures_memory = False
        self._awaits_state = False
        self._routing = RoutingLog()
        self._watcher = CallWatcher(self._communication, self.timeline, self.memory.note_received)
        self.last: IterationFigures | None = None
        """Of the last iteration that ended; None while it makes calls or takes time of its own."""

    @classmethod
    def create_from_environment(cls) -> Recorder:
        """A recorder for the folder that `KIT_LEDGER` names, if it names one."""
        folder = os.environ.get(variables.LEDGER)
        return cls(Path(folder) if folder else None, int(os.environ.get("RANK", "0")))

    def install(self) -> None:
        """Begin to count in this process."""
        if self._folder is None:
            return
        self._watcher.install()
        self._routing.install()
        atexit.register(self._write)

    def begin_iteration(self, models: Any, optimizer: Any) -> None:
        """An optimizer step begins; the iteration before it, with its logging, ends here."""
        if self._folder is None:
            return
        if not self._iteration:
            self.timeline.use_clock(clock_for_model(models[0]))
        phases = self.timeline.take_phase_nanoseconds()
        if self._iteration:
            clock = self.timeline.clock
            if self._iteration == TRACED_ITERATION:
                self._spans = (*self.timeline.take_spans(), *self._communication.call_spans(clock))
            self._count(phases)
            self._watcher.forget_pending()
            if self._iteration % WRITE_EVERY == 0:
                self._write()
        self._communication.drop_calls()
        self._began_processor = time.thread_time()
        self._iteration += 1
        self._watcher.active = not (self._alternates and self._iteration % 2)
        self.timeline.set_active(self._watcher.active)
        if self._iteration == TRACED_ITERATION:
            self.timeline.start_keeping_spans()
        self._measures_memory = self._is_for_memory(optimizer)
        if self._measures_memory:
            self.memory.start(self._rank, self._iteration, models, optimizer)

    def end_step(self) -> None:
        """The optimizer step is done; logging and evaluation may follow before the next."""
        self.memory.stop()
        self._routing.end_iteration(self._iteration)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of an iteration, under the name of one of Megatron's timers."""
        if self._folder is None:
            yield
            return
        self.timeline.begin(name)
        yield
        self.timeline.end(name)

    def _count(self, phases: dict[Phase, int]) -> None:
        """Megatron agrees on more in its first iteration; measuring memory only costs time."""
        self.last = None
        if not self._watcher.active:
            return
        if self._iteration == 1:
            self._communication.end_warm_up()
        elif self._measures_memory:
            self._communication.end_untimed_iteration()
        else:
            self.last = self._communication.end_iteration(phases, self.timeline.clock)
            self._processor.append(time.thread_time() - self._began_processor)

    def _is_for_memory(self, optimizer: Any) -> bool:
        first = self._iteration == MEMORY_ITERATION
        if first or self._awaits_state:
            awaited, self._awaits_state = self._awaits_state, not has_optimizer_state(optimizer)
            return first or (awaited and not self._awaits_state)
        return False

    def _write(self) -> None:
        ledger = RankRecord(
            self._rank,
            self._communication.steady_communication(self._rank),
            replace(
                self._communication.steady_time(self._rank),
                processor_seconds=tuple(self._processor),
            ),
            self.memory.result,
            self._spans,
            self._routing.result(self._rank),
        )
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / f"rank{self._rank}.json", msgspec.json.encode(ledger))
