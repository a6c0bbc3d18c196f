"""Record communication, memory, time and routing of one rank.

`Recorder` is the only object that a backend needs. The backend marks iterations and spans, and the recorder
writes the rank's record.
"""

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
"""The iteration whose memory is measured.

The first iteration has no optimizer state before its end. The second has it and is still warm-up. While the loss
scale of fp16 falls, updates are skipped; then the first iteration with optimizer state is measured as well.
"""

TRACED_ITERATION = 4
"""The iteration whose spans are kept for `trace.json`."""
PROCESSOR_ITERATIONS = 10_000
"""The number of last iterations whose processor time is kept one by one."""

WRITE_EVERY = 100
"""Iterations between two writes of the record. A killed rank leaves the record of the last write."""


class Recorder:
    """The measurements of one rank from its first iteration on. Without a folder, nothing is measured."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._iteration = 0
        self._alternates = bool(os.environ.get(variables.LEDGER_ALTERNATE))
        self._communication = CommunicationLog()
        self._spans: tuple[Span, ...] = ()
        self._processor: deque[float] = deque(maxlen=PROCESSOR_ITERATIONS)
        self._processor_start = 0.0
        self.timeline = Timeline()
        self.memory = MemoryAccounting(self.timeline)
        self._measures_memory = False
        self._awaits_optimizer_state = False
        self._routing = RoutingLog()
        self._watcher = CallWatcher(self._communication, self.timeline, self.memory.note_received)
        self.last: IterationFigures | None = None
        """Figures of the last iteration; None if it was a warm-up, was slowed down, or was not measured."""

    @classmethod
    def create_from_environment(cls) -> Recorder:
        """Return a recorder that writes to the folder in `KIT_LEDGER`; without it one that does nothing.

        The rank is that of `RANK`; 0 without it.
        """
        folder = os.environ.get(variables.LEDGER)
        return cls(Path(folder) if folder else None, int(os.environ.get("RANK", "0")))

    def install(self) -> None:
        """Start to observe calls and routers in this process, and write the record when it exits."""
        if self._folder is None:
            return
        self._watcher.install()
        self._routing.install()
        atexit.register(self._write)

    def begin_iteration(self, models: Any, optimizer: Any) -> None:
        """End the previous iteration, including its logging, and begin the next one.

        Args:
            models: The model's chunks.
            optimizer: Megatron's or the native backend's optimizer.
        """
        if self._folder is None:
            return
        is_first = self._iteration == 0
        if is_first:
            self.timeline.use_clock(clock_for_model(models[0]))
        phase_ns = self.timeline.take_phase_nanoseconds()
        if not is_first:
            self._close_iteration(phase_ns)
        self._communication.drop_calls()
        self._processor_start = time.thread_time()
        self._iteration += 1
        self._activate()
        self._measures_memory = self._must_measure_memory(optimizer)
        if self._measures_memory:
            self.memory.start(self._rank, self._iteration, models, optimizer)

    def _activate(self) -> None:
        """Switch the counting of calls and spans on for the iteration that begins, or off if it is not counted."""
        # With alternation, the odd iterations run uncounted and show what counting costs.
        is_counted = not (self._alternates and self._iteration % 2 == 1)
        self._watcher.active = is_counted
        self.timeline.set_active(is_counted)
        if self._iteration == TRACED_ITERATION:
            self.timeline.start_keeping_spans()

    def _close_iteration(self, phase_ns: dict[Phase, int]) -> None:
        """Add the present iteration to the measurements, and write the record every WRITE_EVERY iterations."""
        if self._iteration == TRACED_ITERATION:
            call_spans = self._communication.call_spans(self.timeline.clock)
            self._spans = (*self.timeline.take_spans(), *call_spans)
        self._count_iteration(phase_ns)
        self._watcher.forget_pending()
        if self._iteration % WRITE_EVERY == 0:
            self._write()

    def end_step(self) -> None:
        """End the optimizer step. Logging and evaluation may follow before the next iteration."""
        self.memory.stop()
        self._routing.end_iteration(self._iteration)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure the time of the `with` block as a span. `name` is the name of one of Megatron's timers."""
        if self._folder is None:
            yield
            return
        self.timeline.begin(name)
        yield
        self.timeline.end(name)

    def _count_iteration(self, phase_ns: dict[Phase, int]) -> None:
        """Add the iteration that ends to the communication log, and store its processor time.

        The first iteration is a warm-up, in which the ranks make additional calls. The iteration whose memory
        is measured is not timed, because measuring makes it slower. An iteration in which the watcher was not
        active is not counted.
        """
        self.last = None
        if not self._watcher.active:
            return
        if self._iteration == 1:
            self._communication.end_warm_up()
        elif self._measures_memory:
            self._communication.end_untimed_iteration()
        else:
            self.last = self._communication.end_iteration(phase_ns, self.timeline.clock)
            self._processor.append(time.thread_time() - self._processor_start)

    def _must_measure_memory(self, optimizer: Any) -> bool:
        """Return True for MEMORY_ITERATION, and for the first iteration with optimizer state after it.

        Call this once per iteration: it notes whether a later iteration must be measured.
        """
        is_memory_iteration = self._iteration == MEMORY_ITERATION
        if not is_memory_iteration and not self._awaits_optimizer_state:
            return False
        has_state = has_optimizer_state(optimizer)
        self._awaits_optimizer_state = not has_state
        return is_memory_iteration or has_state

    def _write(self) -> None:
        """Write the rank's record so far to the folder, which is made if it does not exist."""
        rank_time = self._communication.steady_time(self._rank)
        record = RankRecord(
            rank=self._rank,
            communication=self._communication.steady_communication(self._rank),
            time=replace(rank_time, processor_seconds=tuple(self._processor)),
            memory=self.memory.result,
            spans=self._spans,
            routing=self._routing.result(self._rank),
        )
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / f"rank{self._rank}.json", msgspec.json.encode(record))
