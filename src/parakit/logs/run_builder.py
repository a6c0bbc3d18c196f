"""Build the `ScrapedLog` of one run from the lines of a log."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from parakit.logs.dialects import ParsedIteration, load_dialects
from parakit.logs.failures import ErrorCollector
from parakit.logs.iterations import Columns, Iteration, IterationTable, TableBuilder
from parakit.logs.lines import make_printable
from parakit.logs.scraped import (
    ArgumentList,
    CheckpointEvent,
    Ending,
    Fact,
    Generation,
    MemoryReading,
    MoreArgument,
    NumbersAhead,
    ParameterCount,
    PrintedArgument,
    Remark,
    ScrapedLog,
    StepAhead,
    TheoreticalMemory,
    TheoreticalParameters,
    Timer,
    Validation,
)

MAX_ITERATIONS = 2_000_000
_MAX_FACTS = 20_000
"""Most facts of one kind that are stored."""
_MAX_NAMES = 2_000
_MAX_REMARKS = 200
_MAX_REMARK = 120
_MAX_NOTED_RESTARTS = 20
_MAX_LINES_OF_INTERVAL = 1000
"""First lines of a run whose distances show how many iterations there are per line."""
_STAMP = re.compile(r"^[\s\d:.,/T\[\]+-]{8,40}(?=[A-Za-z])")
_FIGURES_OF_ITERATION = attrgetter(
    "iteration", "elapsed_ms", "lm_loss", "consumed_samples", "grad_norm"
)
"""Numbers that are equal in two lines only if one line was printed twice."""
_KEYS: dict[type[Any], Callable[[Any], Any]] = {
    ParameterCount: lambda count: (count.tensor_rank, count.pipeline_rank),
    TheoreticalMemory: lambda _: "",
    Ending: lambda _: "",
    TheoreticalParameters: lambda parameters: parameters.label,
    MoreArgument: lambda argument: argument.name,
    PrintedArgument: lambda argument: argument.name,
}
"""Functions that return the key of a fact. Of facts with one key the last counts; other kinds have no key."""


def _find_log_interval(arguments: Mapping[str, str], iterations: IterationTable) -> int | None:
    """Return the number of iterations per line: as printed, or else the usual distance of the first lines.

    None means that no argument states the interval and that there are fewer than two lines.
    """
    printed_interval = arguments.get("log_interval", "")
    if printed_interval.isdecimal():
        return int(printed_interval)
    distances = np.diff(iterations.numbers[:_MAX_LINES_OF_INTERVAL]).tolist()
    if not distances:
        return None
    [(usual_interval, _)] = Counter(distances).most_common(1)
    return int(usual_interval)


class RunBuilder:
    """Builder of one run of a log. It gets the run's lines and iterations, and `build` returns the run."""

    def __init__(self) -> None:
        dialects = load_dialects()
        readers = chain.from_iterable(dialect.events for dialect in dialects)
        self._event_readers = [(reader.mark, reader.read) for reader in readers]
        self._unread_trainers = list(chain.from_iterable(dialect.unread for dialect in dialects))
        self.iterations = TableBuilder()
        self._lines_since_start = 0
        self._paused = False
        self._restarts: list[int] = []
        self._restarting = False
        self._first_again: set[tuple[object, ...]] = set()
        self._generation = Generation()
        self._first_seen: str | None = None
        self._facts: dict[type[Any], dict[object, Any]] = defaultdict(dict)
        # Timers of the first lines after a start count only if no others follow. From Megatron 0.16 on they are
        # not reset either, so those of the second line hold two iterations.
        self._early_timers: dict[str, tuple[int, float, float]] = {}
        self._timers: dict[str, tuple[int, float, float]] = {}
        self._remarks: dict[str, Remark] = {}
        self._list: ArgumentList | None = None
        self._listed: dict[str, str] = {}
        self._ahead: NumbersAhead | None = None
        self._stored_ahead: dict[str, Any] = {}
        """What completing functions of a dialect keep from one block to the next, such as the units of counts."""
        self._step_ahead: StepAhead | None = None
        self._are_numbered = False
        """True if an iteration without a number of its own got the number of an earlier line."""
        self._trainer: str | None = None
        self._errors = ErrorCollector()
        self._overflow = False

    def is_settled_before(self, iteration: int) -> bool:
        """Return True if an iteration follows the last one in order and needs no mark, such as after a pause."""
        last = self.iterations.last
        needs_mark = self._restarting or self._paused or self._lines_since_start < 2
        needs_mark = needs_mark or self._ahead is not None or self._list is not None
        return not needs_mark and last is not None and iteration > last.iteration

    def restart(self, pending: RunBuilder | None = None) -> None:
        """Record that training of this run starts again; the ending that was read before no longer counts.

        Args:
            pending: Builder that has read the lines since the new start. Its errors replace those before the start,
                which the run survived; its arguments and other facts are added. None if the log shows no start.
        """
        self._lines_since_start = 0
        self._restarting = True
        self._facts.pop(Ending, None)
        if pending is None:
            self._stored_ahead = {}
            return
        # The counters of blocks start again, so those of the earlier start must not be continued.
        self._stored_ahead = pending._stored_ahead
        self._errors = pending._errors
        for facts in pending._facts.values():
            for fact in facts.values():
                self._store(fact)
        self._listed |= pending._listed

    def complete_iteration(self, line: ParsedIteration) -> ParsedIteration | None:
        """Return an iteration, completed with numbers from earlier lines or from the arguments.

        An iteration that needs no such numbers is returned unchanged. None means that it needs them and there are
        none.
        """
        if line.by_order:
            return self._number_by_order(line)
        if line.by_arguments:
            counted = line.by_arguments(self._listed)
            return line._replace(iteration=counted) if counted else None
        completed = None
        if self._ahead:
            completed = self._ahead.complete(line, self._listed, self._stored_ahead)
        if completed is None and line.at_ms is None:
            return line
        self._ahead = None
        return line._replace(iteration=completed) if completed else None

    def _number_by_order(self, line: ParsedIteration) -> ParsedIteration | None:
        """Return an iteration whose line has no number, with the number of an earlier line or else the next number.

        None means that earlier iterations got their numbers from lines before them, and this iteration has no such
        line.
        """
        step, self._step_ahead = self._step_ahead, None
        last = self.iterations.last.iteration if self.iterations.last else 0
        if step is not None and step.number > last:
            self._are_numbered = True
            number, total = step.number, step.total
        elif self._are_numbered:
            return None
        else:
            number, total = last + 1, None
        iteration = msgspec.structs.replace(
            line.iteration, iteration=number, total_iterations=total
        )
        return line._replace(iteration=iteration)

    def add_iteration(self, line: ParsedIteration, log_line: int) -> None:
        """Store an iteration. If several iterations have the same number, the last one is used.

        At most MAX_ITERATIONS are stored. A line with the same figures as the line before is ignored, unless training
        started again between them. `log_line` is the number of the line in the file.
        """
        if len(self.iterations) >= MAX_ITERATIONS:
            self._overflow = True
            return
        iteration = line.iteration
        if self._first_seen is None:
            self._first_seen = line.stamp or None
        if not self._generation.name:
            self._generation = line.generation
        figures = _FIGURES_OF_ITERATION(iteration)
        if self._restarting:
            self._record_restart(iteration)
        else:
            last = self.iterations.last
            if last is not None and _FIGURES_OF_ITERATION(last) == figures:
                return
        self._lines_since_start += 1
        self.iterations.append(self._mark_iteration(iteration), log_line)
        self._paused = False

    def _record_restart(self, iteration: Iteration) -> None:
        """Record that training started again with this iteration.

        After a restart the same iteration can print the same figures as before. A log may also repeat lines word for
        word, and a start that was recorded before then counts once.
        """
        figures = _FIGURES_OF_ITERATION(iteration)
        if figures not in self._first_again:
            self._restarts.append(iteration.iteration)
        self._first_again.add(figures)
        self._restarting = False

    def _mark_iteration(self, iteration: Iteration) -> Iteration:
        """Return the iteration with marks, if it is one of the first two after a start or the first after a pause.

        All other iterations are returned as parsed.
        """
        if self._lines_since_start > 2 and not self._paused:
            return iteration
        is_first = self._lines_since_start == 1
        is_second = self._lines_since_start == 2
        return msgspec.structs.replace(
            iteration,
            first_of_start=is_first,
            averaged=is_second and self._generation.averages_second_line,
            after_pause=self._paused and not is_first,
        )

    def add_iterations(self, lines: Columns) -> None:
        """Store several iterations with rising numbers, all higher than the last number.

        At most MAX_ITERATIONS are stored in total.
        """
        room = MAX_ITERATIONS - len(self.iterations)
        if room < lines.count:
            self._overflow = True
            lines = lines.select(slice(max(room, 0)))
        if lines.count:
            self._lines_since_start += lines.count
            self.iterations.extend(lines)

    def feed(self, line: str) -> None:
        """Read everything that a line states, apart from iterations."""
        self._errors.feed(line)
        if self._list is not None:
            if self._list.end.search(line):
                self._list = None
            else:
                argument = self._list.read(line)
                if argument and len(self._listed) < _MAX_NAMES:
                    name, value = argument
                    self._listed[name] = value
        has_begun = self.iterations.last is not None
        for mark, read in self._event_readers:
            if mark in line and (mark or has_begun):
                for fact in read(line):
                    self._take_fact(fact)
        if not has_begun and self._trainer is None:
            for trainer, reason, pattern in self._unread_trainers:
                if pattern.search(line):
                    self._trainer = f"{trainer}, of which no iteration is read: {reason}"
                    break

    def build(self, path: str, part: int, parts: int, notes: Sequence[str] = ()) -> ScrapedLog:
        """Return everything that was stored of the run.

        `path` is the log's path, `part` the run's number in the log, and `parts` the number of runs.
        `notes` are added to the run's own notes.
        """
        iterations, replaced = self.iterations.build()
        iterations = iterations.derive_times()
        arguments = self._join_arguments()
        parameters = sorted(self._list_facts(ParameterCount), key=_KEYS[ParameterCount])
        return ScrapedLog(
            path=path,
            part=part,
            parts=parts,
            generation=self._generation,
            iterations=iterations,
            restarts=tuple(self._restarts),
            replaced=replaced,
            parameters=tuple(parameters),
            memory=self._list_facts(MemoryReading),
            theoretical_memory=next(iter(self._list_facts(TheoreticalMemory)), None),
            theoretical_parameters_billions={
                fact.label: fact.billions for fact in self._list_facts(TheoreticalParameters)
            },
            timers=self._average_timers(),
            validation=self._list_facts(Validation),
            checkpoints=self._list_facts(CheckpointEvent),
            remarks=tuple(self._remarks.values()),
            arguments=arguments,
            other_trainer=None if iterations else self._trainer,
            log_interval=_find_log_interval(arguments, iterations),
            exit_reason=next((fact.reason for fact in self._list_facts(Ending)), None),
            trace=self._errors.trace(),
            first_seen=self._first_seen,
            notes=(*self._list_notes(), *notes),
        )

    def _join_arguments(self) -> dict[str, str]:
        """Return the printed arguments by name. Arguments outside of the list count only if there is a list."""
        arguments = {fact.name: fact.value for fact in self._list_facts(PrintedArgument)}
        if self._listed:
            arguments |= self._listed
            arguments |= {fact.name: fact.value for fact in self._list_facts(MoreArgument)}
        return arguments

    def _average_timers(self) -> tuple[Timer, ...]:
        """Return the mean of each timer. A timer of the first lines after a start has a mean if no others follow."""
        timers = []
        for name, (count, low, high) in (self._early_timers | self._timers).items():
            timers.append(Timer(name, count, low / count, high / count))
        return tuple(timers)

    def _list_notes(self) -> list[str]:
        """Return a sentence per restart, at most _MAX_NOTED_RESTARTS, and one on lines beyond MAX_ITERATIONS."""
        notes = [
            f"restarted at iteration {first}; of repeated iterations the later line counts"
            for first in self._restarts[:_MAX_NOTED_RESTARTS]
        ]
        if self._overflow:
            notes.append(f"only the first {MAX_ITERATIONS} iterations were read")
        return notes

    def _take_fact(self, fact: Fact) -> None:
        """Store a fact. A timer is added to its sum, and some facts change the state of the builder instead."""
        match fact:
            case Timer():
                self._add_timer(fact)
            case Remark():
                self._add_remark(fact)
            case Generation():
                self._generation = fact
            case ArgumentList():
                self._list = fact
            case NumbersAhead():
                self._ahead = fact
            case StepAhead():
                self._step_ahead = fact
            case _:
                self._store(fact)
                # A checkpoint is loaded before training, which is no pause.
                is_save = isinstance(fact, CheckpointEvent) and fact.action != "loaded"
                self._paused |= is_save or isinstance(fact, Validation)

    def _add_timer(self, timer: Timer) -> None:
        """Add a timer to the sums of its name. At most _MAX_NAMES names are kept."""
        num_early_lines = 2 if self._generation.averages_second_line else 1
        is_settled = self._lines_since_start > num_early_lines
        timers = self._timers if is_settled else self._early_timers
        if timer.name in timers or len(timers) < _MAX_NAMES:
            count, low, high = timers.get(timer.name, (0, 0.0, 0.0))
            timers[timer.name] = (count + 1, low + timer.min_ms, high + timer.max_ms)

    def _add_remark(self, remark: Remark) -> None:
        """Keep a remark with the number of the last iteration; a remark before the first iteration is dropped.

        A line that a log repeats with other numbers explains nothing about later iterations, so the first is kept.
        """
        last = self.iterations.last
        text = _STAMP.sub("", make_printable(remark.text)).strip()[:_MAX_REMARK]
        if last is None or not text or len(self._remarks) >= _MAX_REMARKS:
            return
        text_without_numbers = re.sub(r"\d+", "0", text)
        self._remarks.setdefault(text_without_numbers, Remark(text, last.iteration))

    def _store(self, fact: Fact) -> None:
        """Store a fact. Of facts with one key the last counts; at most _MAX_FACTS of a kind are stored."""
        kind = type(fact)
        facts = self._facts[kind]
        key = _KEYS[kind](fact) if kind in _KEYS else len(facts)
        if key in facts or len(facts) < _MAX_FACTS:
            facts[key] = fact

    def _list_facts[F: Fact](self, kind: type[F]) -> tuple[F, ...]:
        """Return the stored facts of one kind in the order of the log."""
        return tuple(self._facts[kind].values())
