"""One run of a log, line by line, to a `ScrapedLog`."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import msgspec

from tools.report.read import events
from tools.report.read.iterations import Columns, Iteration, IterationTable, TableBuilder
from tools.report.read.scraped import (
    CheckpointEvent,
    Dialect,
    ErrorTrace,
    MemoryReading,
    ParameterCount,
    Remark,
    ScrapedLog,
    TheoreticalMemory,
    TimerSummary,
    Validation,
)

MAX_ITERATIONS = 2_000_000
_STEP_TIME_ROUNDING = 0.0051
"""Seconds; the time has two decimals there."""
_MAX_EVENTS = 20_000
_MAX_NAMES = 2_000
_MAX_REMARKS = 200


class RunBuilder:
    """Feed it the lines of one run; `build` gives the result."""

    def __init__(self) -> None:
        self._iterations = TableBuilder()
        self._lines_since_start = 0
        self._paused = False
        self._restarts: list[int] = []
        self._restarting = False
        self._first_again: set[tuple[object, ...]] = set()
        self._dialect = Dialect.UNKNOWN
        self._first_seen: str | None = None
        self._parameters: dict[tuple[int, int], ParameterCount] = {}
        self._memory: list[MemoryReading] = []
        self._theoretical: TheoreticalMemory | None = None
        self._billions: dict[str, float] = {}
        # Timers of the lines after a start count only where no settled ones follow: from 0.16 on
        # they are not reset either, and the second line's hold two iterations.
        self._early_timers: dict[str, tuple[int, float, float]] = {}
        self._timers: dict[str, tuple[int, float, float]] = {}
        self._validation: list[Validation] = []
        self._checkpoints: list[CheckpointEvent] = []
        self._remarks: dict[str, Remark] = {}
        self._arguments: dict[str, str] = {}
        self._in_arguments = False
        self._zero_stage: str | None = None
        self._step_time: tuple[float, float] | None = None
        self._trainer: str | None = None
        self._exit: str | None = None
        self._overflow = False

    @property
    def has_iterations(self) -> bool:
        """Whether an iteration line was seen."""
        return len(self._iterations) > 0

    def goes_back(self, iteration: int) -> bool:
        """Whether an iteration of this number repeats an earlier one."""
        last = self._iterations.last
        return last is not None and iteration < last.iteration

    def starts_over(self, iteration: int) -> bool:
        """Whether an iteration of this number is at or before this run's first."""
        first = self._iterations.first
        return first is not None and iteration <= first

    def is_settled_before(self, iteration: int) -> bool:
        """Whether an iteration of this number follows the last one, and nothing marks it."""
        last = self._iterations.last
        marked = (
            self._restarting
            or self._paused
            or self._step_time is not None
            or self._lines_since_start < 2
        )
        return not marked and last is not None and iteration > last.iteration

    def restart(self, pending: RunBuilder | None = None) -> None:
        """Note that training starts again; take over what the new start has printed so far."""
        self._lines_since_start = 0
        self._restarting = True
        self._exit = None
        if pending is None:
            return
        self._parameters |= pending._parameters
        self._memory += pending._memory
        self._theoretical = pending._theoretical or self._theoretical
        self._billions |= pending._billions
        self._validation += pending._validation
        self._zero_stage = pending._zero_stage or self._zero_stage
        self._checkpoints += pending._checkpoints
        self._arguments |= pending._arguments
        self._exit = pending._exit

    def add_iteration(
        self, found: Iteration, stamp: tuple[str, bool] | None, log_line: int
    ) -> None:
        """Keep an iteration of a line of the file; of two with one number the later counts."""
        if len(self._iterations) >= MAX_ITERATIONS:
            self._overflow = True
            return
        self._note_stamp(stamp)
        # After a restart the same iteration can print the same figures: that is not a line printed
        # twice, which only follows itself.
        last = self._iterations.last
        again = last is not None and found.iteration == last.iteration and not self._restarting
        self._note_restart(found)
        if last is not None and again and _figures(last) == _figures(found):
            return
        self._lines_since_start += 1
        # Only these few lines are changed, so that the bulk is stored as parsed.
        if self._lines_since_start <= 2 or self._paused:
            found = self._flag(found)
        self._paused = False
        found = found if self._step_time is None else self._with_rate(found)
        self._iterations.append(found, log_line)

    def add_iterations(self, lines: Columns) -> None:
        """Keep lines that follow the last one with rising numbers."""
        room = MAX_ITERATIONS - len(self._iterations)
        if room < lines.count:
            self._overflow = True
            lines = lines.part(0, max(room, 0))
        if lines.count:
            self._lines_since_start += lines.count
            self._iterations.extend(lines)

    def feed(self, line: str) -> None:
        """Look at one line for everything but iterations."""
        if self._in_arguments:
            self._feed_argument(line)
        if "MB" in line or "(GB)" in line:
            self._feed_memory(line)
        if "parameters" in line:
            self._feed_parameters(line)
        if "zero_optimization_stage" in line:
            self._zero_stage = events.zero_stage(line) or self._zero_stage
        if "Step Time" in line:
            self._step_time = events.step_time(line)
        if self._trainer is None and not self.has_iterations:
            self._trainer = events.other_trainer(line)
        if ".:" in line or "time (ms)" in line:
            self._feed_timer(line)
        if "validation" in line and len(self._validation) < _MAX_EVENTS:
            self._feed_validation(line)
        if "checkpoint" in line and len(self._checkpoints) < _MAX_EVENTS:
            self._feed_checkpoint(line)
        if self.has_iterations and len(self._remarks) < _MAX_REMARKS:
            self._feed_remark(line)
        if "xiting" in line or "after training is done" in line:
            self._exit = events.exit_reason(line) or self._exit
        if "--- arguments ---" in line:
            self._in_arguments = True

    def build(self, path: str, part: int, parts: int, trace: ErrorTrace) -> ScrapedLog:
        """The run as data."""
        iterations, replaced = self._iterations.build()
        return ScrapedLog(
            path=path,
            part=part,
            parts=parts,
            dialect=self._dialect,
            iterations=iterations,
            restarts=tuple(self._restarts),
            replaced_iterations=replaced,
            parameters=tuple(self._parameters[key] for key in sorted(self._parameters)),
            memory=tuple(self._memory),
            theoretical_memory=self._theoretical,
            theoretical_parameters_billions=self._billions,
            timers=tuple(
                TimerSummary(name, count, low / count, high / count)
                for name, (count, low, high) in (self._early_timers | self._timers).items()
            ),
            validation=tuple(self._validation),
            checkpoints=tuple(self._checkpoints),
            remarks=tuple(self._remarks.values()),
            arguments=self._all_arguments(),
            other_trainer=None if iterations else self._trainer,
            log_interval=self._log_interval(iterations),
            exit_reason=self._exit,
            trace=trace,
            first_seen=self._first_seen,
            notes=self._notes(),
        )

    def _note_stamp(self, stamp: tuple[str, bool] | None) -> None:
        if stamp is None:
            return
        self._first_seen = self._first_seen or stamp[0]
        if self._dialect is Dialect.UNKNOWN:
            self._dialect = Dialect.MICROSECONDS if stamp[1] else Dialect.SECONDS

    def _note_restart(self, found: Iteration) -> None:
        if self._restarting:
            # Lines that a log repeats word for word, however often, tell of one restart.
            if _figures(found) not in self._first_again:
                self._restarts.append(found.iteration)
            self._first_again.add(_figures(found))
            self._restarting = False

    def _flag(self, found: Iteration) -> Iteration:
        first = self._lines_since_start == 1
        return msgspec.structs.replace(
            found,
            first_of_start=first,
            averaged=self._lines_since_start == 2 and self._dialect.averages_second_line,
            after_pause=self._paused and not first,
        )

    def _feed_argument(self, line: str) -> None:
        if "end of arguments" in line:
            self._in_arguments = False
        elif (found := events.argument(line)) and len(self._arguments) < _MAX_NAMES:
            self._arguments[found[0]] = found[1]

    def _feed_memory(self, line: str) -> None:
        if len(self._memory) < _MAX_EVENTS:
            self._memory += events.memory_readings(line)
        if "Theoretical" in line:
            self._theoretical = events.theoretical_memory(line) or self._theoretical

    def _feed_parameters(self, line: str) -> None:
        for count in events.parameter_counts(line):
            if len(self._parameters) < _MAX_EVENTS:
                self._parameters[count.tensor_rank, count.pipeline_rank] = count
        if "(tensor, gtp" in line:
            self._dialect = Dialect.MICROSECONDS_GTP
        if "billions" in line and len(self._billions) < _MAX_NAMES:
            self._billions |= events.parameters_in_billions(line)

    def _feed_timer(self, line: str) -> None:
        settled = self._lines_since_start > (2 if self._dialect.averages_second_line else 1)
        timers = self._timers if settled else self._early_timers
        for name, fastest, slowest in events.timers(line):
            if name in timers or len(timers) < _MAX_NAMES:
                count, low, high = timers.get(name, (0, 0.0, 0.0))
                timers[name] = (count + 1, low + fastest, high + slowest)

    def _feed_validation(self, line: str) -> None:
        if found := events.validation(line):
            self._validation.append(found)
            self._paused = True

    def _feed_checkpoint(self, line: str) -> None:
        if found := events.checkpoint(line):
            self._checkpoints.append(found)
            self._paused = self._paused or found.action != "loaded"

    def _feed_remark(self, line: str) -> None:
        text = None if " iteration " in line else events.remark(line)
        if text and self._iterations.last is not None:
            # What a log says again and again is no news of a later iteration.
            found = Remark(self._iterations.last.iteration, text)
            self._remarks.setdefault(re.sub(r"\d+", "0", text), found)

    def _log_interval(self, iterations: IterationTable) -> int | None:
        if self._arguments.get("log_interval", "").isdigit():
            return int(self._arguments["log_interval"])
        numbers = [line.iteration for line in iterations[:1000]]
        steps = Counter(b - a for a, b in pairwise(numbers))
        return steps.most_common(1)[0][0] if steps else None

    def _all_arguments(self) -> dict[str, str]:
        """Megatron's, and the ZeRO stage that only DeepSpeed's own list has."""
        if not self._arguments or self._zero_stage is None:
            return self._arguments
        return {**self._arguments, "zero_optimization_stage": self._zero_stage}

    def _with_rate(self, found: Iteration) -> Iteration:
        """Megatron-Bridge prints the rate in a line of its own, which names the same time."""
        (seconds, rate), self._step_time = self._step_time or (0.0, 0.0), None
        same = abs((found.elapsed_ms or 0.0) / 1000 - seconds) <= _STEP_TIME_ROUNDING
        if seconds and same and found.throughput_tflops_per_gpu is None:
            return msgspec.structs.replace(found, throughput_tflops_per_gpu=rate)
        return found

    def _notes(self) -> tuple[str, ...]:
        notes = [
            f"restarted at iteration {first}; of repeated iterations the later line counts"
            for first in self._restarts[:20]
        ]
        if self._overflow:
            notes.append(f"only the first {MAX_ITERATIONS} iterations were read")
        return tuple(notes)


def _figures(found: Iteration) -> tuple[object, ...]:
    """What no two lines have in common, unless they are one line printed twice."""
    return (
        found.iteration,
        found.elapsed_ms,
        found.lm_loss,
        found.consumed_samples,
        found.grad_norm,
    )
