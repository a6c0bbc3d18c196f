"""Read a log file in one pass: `scrape_log` for one run, `scrape_runs` for files with several runs.

A restart from a checkpoint repeats iterations: the later lines count, and the restart is noted. A start from the
first iteration is another run. Memory is bounded for every file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from parakit.logs.dialects import LineFormat, ParsedIteration, load_dialects
from parakit.logs.failures import FAILURES
from parakit.logs.layouts import LayoutReader, LogBlock
from parakit.logs.lines import LineSplitter, TornLines, unwrap_json
from parakit.logs.pieces import DAMAGED, open_log
from parakit.logs.run_builder import RunBuilder
from parakit.logs.scraped import ScrapedLog

_SHORTEST = 8
"""Characters of the shortest line that is read."""
_MIN_PLAIN_LINES = 4
"""Fewest plain iteration lines that are stored together. Fewer lines are read faster one by one."""
_STARTS = re.compile("|".join(start for dialect in load_dialects() for start in dialect.starts))
"""Pattern of lines with which training starts."""


def scrape_log(path: Path) -> ScrapedLog:
    """Read the last run of a log.

    Raises:
        OSError: The file cannot be read.
    """
    return scrape_runs(path)[-1]


def scrape_runs(path: Path) -> tuple[ScrapedLog, ...]:
    """Read every run of a log, in order.

    Raises:
        OSError: The file cannot be read.
    """
    damages: list[str] = []
    formats, pieces = open_log(path, damages.append)
    scraper = _Scraper(formats)
    for piece in pieces:
        feed = scraper.feed_block if piece.whole else scraper.feed_lines
        feed(piece.data, piece.numbers)
    runs = scraper.finish()
    return tuple(
        run.build(
            str(path),
            part=number,
            parts=len(runs),
            # A cut ends the last run. Other damage can be anywhere in the file.
            notes=damages if number == len(runs) or DAMAGED in damages else (),
        )
        for number, run in enumerate(runs, start=1)
    )


def make_event_pattern() -> re.Pattern[bytes]:
    """Return a pattern for lines that may state more than an iteration's numbers."""
    marks = {reader.mark for dialect in load_dialects() for reader in dialect.events if reader.mark}
    mark_pattern = "|".join(map(re.escape, sorted(marks)))
    return re.compile(f"{mark_pattern}|{_STARTS.pattern}|{FAILURES.pattern}".encode())


class _Scraper:
    """Reader of a log. It decides to which run each line belongs, and a `RunBuilder` stores the line's content."""

    def __init__(self, formats: tuple[LineFormat, ...]) -> None:
        self._formats = formats
        self._layouts = LayoutReader(make_event_pattern())
        self._layouts.format = formats[0] if len(formats) == 1 else None
        self._splitter = LineSplitter()
        self._torn = TornLines()
        self._last_number = 1
        self._done: list[RunBuilder] = []
        self._run = RunBuilder()
        self._pending: RunBuilder | None = None
        """Lines since a new start in the file. The next iteration shows whether it is a resume or another run."""

    def feed_lines(self, data: bytes, numbers: Sequence[int]) -> None:
        """Read the lines of some bytes one by one; `numbers` are their numbers in the file."""
        for index, part in self._splitter.feed(data):
            for line in self._torn.join(part):
                self._feed(line, numbers[index])
        self._last_number = numbers[-1]

    def feed_block(self, data: bytes, numbers: Sequence[int]) -> None:
        """Read complete lines. Consecutive plain iteration lines are stored together."""
        block = self._layouts.block(data, numbers)
        for first, behind, plain in block.sections():
            if plain and behind - first >= _MIN_PLAIN_LINES:
                for line in self._torn.flush():
                    self._feed(line, block.numbers[first])
                self._feed_plain(block, first, behind)
            else:
                self.feed_lines(block.text(first, behind), block.numbers[first:behind])

    def finish(self) -> list[RunBuilder]:
        """Read the unfinished lines at the end, and return the builders of all runs in order."""
        for line in (*self._torn.flush(), *self._splitter.finish()):
            # The last number of an iteration may be cut off if no line end follows.
            may_be_cut = any(format_.opening.search(line) for format_ in self._formats)
            self._feed(f"{line}…" if may_be_cut else line, self._last_number)
        if self._pending is not None:
            self._continue_run()
        return [*self._done, self._run]

    def _feed_plain(self, block: LogBlock, first: int, behind: int) -> None:
        """Store the plain iteration lines of a block from index `first` to `behind` (exclusive).

        After a start or a pause, lines are read one by one until the run needs no marks on its lines any more.
        """
        numbers = block.columns.values["iteration"]
        # If a number does not rise, training has started again, which is decided line by line.
        does_not_rise = np.diff(numbers[first:behind]) <= 0
        restarts = first + 1 + np.flatnonzero(does_not_rise)
        for start, stop in pairwise([first, *restarts.tolist(), behind]):
            settled = self._feed_until_settled(block, start, stop)
            if settled < stop:
                self._run.add_iterations(block.columns.select(slice(settled, stop)))

    def _feed_until_settled(self, block: LogBlock, start: int, stop: int) -> int:
        """Read lines of a block one by one until the run needs no marks on its lines; return the next line's index.

        The result is `stop` if all lines from `start` on were read.
        """
        numbers = block.columns.values["iteration"]
        for index in range(start, stop):
            if self._pending is None and self._run.is_settled_before(int(numbers[index])):
                return index
            self.feed_lines(block.text(index, index + 1), block.numbers[index : index + 1])
        return stop

    def _feed(self, line: str, number: int) -> None:
        """Read one line, whose number in the file is `number`.

        Lines after a start of training go to a new builder (`_pending`), until the next iteration shows whether they
        belong to the current run or to another one.
        """
        if len(line) < _SHORTEST:
            return
        if line.startswith("{"):
            line = unwrap_json(line)
        if self._pending is None and self._run.iterations.last and _STARTS.search(line):
            self._pending = RunBuilder()
        for line_format in self._formats:
            iterations = line_format.find(line) if line_format.word in line else []
            if iterations:
                # All iteration lines of a log have one format, so the others are not tried any more.
                self._formats = (line_format,)
                self._layouts.format = line_format
                self._add_iterations(iterations, number)
                break
        builder = self._pending or self._run
        builder.feed(line)

    def _add_iterations(self, iterations: Sequence[ParsedIteration], number: int) -> None:
        """Add the iterations of one line to the run that they belong to. Iterations without a number are left out."""
        builder = self._pending or self._run
        for iteration in iterations:
            completed = builder.complete_iteration(iteration)
            if completed is not None:
                self._choose_run(completed.iteration.iteration)
                self._run.add_iteration(completed, number)

    def _choose_run(self, iteration: int) -> None:
        """Set `_run` to the run that an iteration belongs to.

        An iteration whose number does not fall belongs to the current run, unless the log shows a start before it.
        After a start, or if the number falls, the current run goes on if the number is above the run's first
        number: the run was restarted. Otherwise a new run begins.
        """
        first, last = self._run.iterations.first, self._run.iterations.last
        if self._pending is None and (last is None or iteration >= last.iteration):
            return
        if first is None or iteration > first:
            self._continue_run()
            return
        self._done.append(self._run)
        self._run, self._pending = self._pending or RunBuilder(), None

    def _continue_run(self) -> None:
        """Treat the pending start, or a start that the log does not show, as a restart of the run."""
        self._run.restart(self._pending)
        self._pending = None
