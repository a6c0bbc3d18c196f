"""One run of a log, line by line, to a `ScrapedLog`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from parakit.logs.dialects import ParsedIteration, load_dialects
from parakit.logs.failures import ErrorCollector
from parakit.logs.iterations import Columns, TableBuilder
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
    Remark,
    ScrapedLog,
    TheoreticalMemory,
    TheoreticalParameters,
    Timer,
    Validation,
)

MAX_ITERATIONS = 2_000_000
_MAX_FACTS = 20_000
"""Of a kind."""
_MAX_NAMES = 2_000
_MAX_REMARKS = 200
_MAX_REMARK = 120
_STAMP = re.compile(r"^[\s\d:.,/T\[\]+-]{8,40}(?=[A-Za-z])")
_FIGURES = attrgetter("iteration", "elapsed_ms", "lm_loss", "consumed_samples", "grad_norm")
"""What no two lines have in common, unless they are one line printed twice."""
_KEYS: dict[type[Any], Callable[[Any], Any]] = {
    ParameterCount: lambda count: (count.tensor_rank, count.pipeline_rank),
    TheoreticalMemory: lambda _: "",
    Ending: lambda _: "",
    TheoreticalParameters: lambda parameters: parameters.label,
    MoreArgument: lambda argument: argument.name,
}
"""Of facts with one key the later counts; of other kinds each does."""


class RunBuilder:
    """Feed it the lines of one run; `build` gives the result."""

    def __init__(self) -> None:
        self._event_readers = [
            (one.mark, one.read) for each in load_dialects() for one in each.events
        ]
        self._unread = [one for each in load_dialects() for one in each.unread]
        self.iterations = TableBuilder()
        self._lines_since_start = 0
        self._paused = False
        self._restarts: list[int] = []
        self._restarting = False
        self._first_again: set[tuple[object, ...]] = set()
        self._generation = Generation()
        self._first_seen: str | None = None
        self._facts: dict[type[Any], dict[object, Any]] = defaultdict(dict)
        # Timers of the lines after a start count only where no settled ones follow: from 0.16 on
        # they are not reset either, and the second line's hold two iterations.
        self._early_timers: dict[str, tuple[int, float, float]] = {}
        self._timers: dict[str, tuple[int, float, float]] = {}
        self._remarks: dict[str, Remark] = {}
        self._list: ArgumentList | None = None
        self._listed: dict[str, str] = {}
        self._ahead: NumbersAhead | None = None
        self._stored_ahead: dict[str, Any] = {}
        self._trainer: str | None = None
        self._errors = ErrorCollector()
        self._overflow = False

    def is_settled_before(self, iteration: int) -> bool:
        """Whether an iteration of this number follows the last one, and nothing marks it."""
        last = self.iterations.last
        marked = self._restarting or self._paused or self._lines_since_start < 2
        marked = marked or self._ahead is not None or self._list is not None
        return not marked and last is not None and iteration > last.iteration

    def restart(self, pending: RunBuilder | None = None) -> None:
        """Note that training starts again; take over what the new start has printed so far."""
        self._lines_since_start = 0
        self._restarting = True
        self._facts.pop(Ending, None)
        # Counts of the new start need not follow those of the one before.
        self._stored_ahead = pending._stored_ahead if pending else {}
        if pending is None:
            return
        self._errors = pending._errors  # What ended the earlier start is no longer news.
        for facts in pending._facts.values():
            for fact in facts.values():
                self._keep(fact)
        self._listed |= pending._listed

    def completed(self, line: ParsedIteration) -> ParsedIteration | None:
        """An iteration with what lines before it say; None of one that needs it and has none."""
        if line.by_arguments:
            counted = line.by_arguments(self._listed)
            return line._replace(iteration=counted) if counted else None
        found = None
        if self._ahead:
            found = self._ahead.complete(line, self._listed, self._stored_ahead)
        if found is None and line.at_ms is None:
            return line
        self._ahead = None
        return line._replace(iteration=found) if found else None

    def add_iteration(self, line: ParsedIteration, log_line: int) -> None:
        """Keep an iteration of a line of the file; of two with one number the later counts."""
        if len(self.iterations) >= MAX_ITERATIONS:
            self._overflow = True
            return
        found = line.iteration
        self._first_seen = self._first_seen or line.stamp or None
        self._generation = self._generation if self._generation.name else line.generation
        figures, last = _FIGURES(found), self.iterations.last
        if self._restarting:
            # Lines that a log repeats word for word, however often, tell of one restart; after one the
            # same iteration can print the same figures, which elsewhere is a line printed twice.
            if figures not in self._first_again:
                self._restarts.append(found.iteration)
            self._first_again.add(figures)
            self._restarting = False
        elif last is not None and _FIGURES(last) == figures:
            return
        self._lines_since_start += 1
        # Only these few lines are changed, so that the bulk is stored as parsed.
        if self._lines_since_start <= 2 or self._paused:
            first = self._lines_since_start == 1
            found = msgspec.structs.replace(
                found,
                first_of_start=first,
                averaged=self._lines_since_start == 2 and self._generation.averages_second_line,
                after_pause=self._paused and not first,
            )
        self._paused = False
        self.iterations.append(found, log_line)

    def add_iterations(self, lines: Columns) -> None:
        """Keep lines that follow the last one with rising numbers."""
        room = MAX_ITERATIONS - len(self.iterations)
        if room < lines.count:
            self._overflow = True
            lines = lines.select(slice(max(room, 0)))
        if lines.count:
            self._lines_since_start += lines.count
            self.iterations.extend(lines)

    def feed(self, line: str) -> None:
        """Look at one line for everything but iterations."""
        self._errors.feed(line)
        if self._list is not None:
            if self._list.end.search(line):
                self._list = None
            elif (found := self._list.read(line)) and len(self._listed) < _MAX_NAMES:
                self._listed[found[0]] = found[1]
        began = self.iterations.last is not None
        for mark, read in self._event_readers:
            if mark in line and (mark or began):
                for fact in read(line):
                    self._take(fact)
        if not began and self._trainer is None:
            for trainer, why, only in self._unread:
                if only.search(line):
                    self._trainer = f"{trainer}, of which no iteration is read: {why}"
                    break

    def build(self, path: str, part: int, parts: int) -> ScrapedLog:
        """The run as data."""
        iterations, replaced = self.iterations.build()
        iterations = iterations.with_times()
        notes = [
            f"restarted at iteration {first}; of repeated iterations the later line counts"
            for first in self._restarts[:20]
        ]
        if self._overflow:
            notes.append(f"only the first {MAX_ITERATIONS} iterations were read")
        # Those that the list of arguments leaves out count only if there is one.
        more = {found.name: found.value for found in self._all(MoreArgument)}
        arguments = self._listed | more if self._listed else {}
        given = arguments.get("log_interval", "")
        steps = Counter(np.diff(iterations.numbers[:1000]).tolist())
        usual = steps.most_common(1)[0][0] if steps else None
        return ScrapedLog(
            path=path,
            part=part,
            parts=parts,
            generation=self._generation,
            iterations=iterations,
            restarts=tuple(self._restarts),
            replaced=replaced,
            parameters=tuple(sorted(self._all(ParameterCount), key=_KEYS[ParameterCount])),
            memory=self._all(MemoryReading),
            theoretical_memory=next(iter(self._all(TheoreticalMemory)), None),
            theoretical_parameters_billions={
                found.label: found.billions for found in self._all(TheoreticalParameters)
            },
            timers=tuple(
                Timer(name, count, low / count, high / count)
                for name, (count, low, high) in (self._early_timers | self._timers).items()
            ),
            validation=self._all(Validation),
            checkpoints=self._all(CheckpointEvent),
            remarks=tuple(self._remarks.values()),
            arguments=arguments,
            other_trainer=None if iterations else self._trainer,
            log_interval=int(given) if given.isdecimal() else usual,
            exit_reason=next((found.reason for found in self._all(Ending)), None),
            trace=self._errors.trace(),
            first_seen=self._first_seen,
            notes=tuple(notes),
        )

    def _take(self, fact: Fact) -> None:
        match fact:
            case Timer():
                second = 2 if self._generation.averages_second_line else 1
                settled = self._lines_since_start > second
                timers = self._timers if settled else self._early_timers
                if fact.name in timers or len(timers) < _MAX_NAMES:
                    count, low, high = timers.get(fact.name, (0, 0.0, 0.0))
                    timers[fact.name] = (count + 1, low + fact.min_ms, high + fact.max_ms)
            case Remark():
                last = self.iterations.last
                text = _STAMP.sub("", make_printable(fact.text)).strip()[:_MAX_REMARK]
                if last is not None and text and len(self._remarks) < _MAX_REMARKS:
                    # What a log says again and again is no news of a later iteration.
                    plain = re.sub(r"\d+", "0", text)
                    self._remarks.setdefault(plain, Remark(text, last.iteration))
            case Generation():
                self._generation = fact
            case ArgumentList():
                self._list = fact
            case NumbersAhead():
                self._ahead = fact
            case _:
                self._keep(fact)
                # A checkpoint is loaded before training.
                wrote = isinstance(fact, CheckpointEvent) and fact.action != "loaded"
                self._paused |= wrote or isinstance(fact, Validation)

    def _keep(self, fact: Fact) -> None:
        kind = type(fact)
        kept = self._facts[kind]
        key = _KEYS[kind](fact) if kind in _KEYS else len(kept)
        if key in kept or len(kept) < _MAX_FACTS:
            kept[key] = fact

    def _all[F: Fact](self, kind: type[F]) -> tuple[F, ...]:
        return tuple(self._facts[kind].values())
