"""A log file to data, in one pass: `scrape_log` for one run, `scrape_runs` for files with several.

A restart from a checkpoint repeats iterations: the later line counts and the restart is noted.
A start from the first iteration on is another run. Memory is bounded, whatever the file holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from parakit.logs.dialects import LineFormat, load_dialects
from parakit.logs.failures import FAILURES
from parakit.logs.layouts import LayoutReader, LogBlock
from parakit.logs.lines import LineSplitter, TornLines, unwrap_json
from parakit.logs.pieces import open_log
from parakit.logs.run_builder import RunBuilder
from parakit.logs.scraped import ScrapedLog

_SHORTEST = 8
"""Characters of the shortest line with information."""
_MIN_TOGETHER = 4
"""Lines; fewer are read faster one by one."""
_STARTS = re.compile("|".join(start for each in load_dialects() for start in each.starts))


def scrape_log(path: Path) -> ScrapedLog:
    """Scrape a log; of several runs in one file, the last.

    Raises:
        OSError: The file cannot be read.
    """
    return scrape_runs(path)[-1]


def scrape_runs(path: Path) -> tuple[ScrapedLog, ...]:
    """Scrape every run of a log file, in order; raises as `scrape_log`."""
    formats, pieces = open_log(path)
    scraper = _Scraper(formats)
    for piece in pieces:
        feed = scraper.feed_block if piece.whole else scraper.feed_lines
        feed(piece.data, piece.numbers)
    runs = scraper.finish()
    return tuple(
        run.build(str(path), number, len(runs)) for number, run in enumerate(runs, start=1)
    )


def make_event_pattern() -> re.Pattern[bytes]:
    """What a line holds that may say more than an iteration's numbers."""
    marks = {reader.mark for each in load_dialects() for reader in each.events if reader.mark}
    words = "|".join(map(re.escape, sorted(marks)))
    return re.compile(f"{words}|{_STARTS.pattern}|{FAILURES.pattern}".encode())


class _Scraper:
    """Decides which run a line belongs to; `RunBuilder` keeps what the line says."""

    def __init__(self, formats: tuple[LineFormat, ...]) -> None:
        self._formats = formats
        self._layouts = LayoutReader(make_event_pattern())
        self._layouts.format = formats[0] if len(formats) == 1 else None
        self._splitter = LineSplitter()
        self._torn = TornLines()
        self._last = 1
        self._done: list[RunBuilder] = []
        self._run = RunBuilder()
        self._pending: RunBuilder | None = None
        """A start inside the file: of a resume or of another run, the next iteration line decides."""

    def feed_lines(self, data: bytes, numbers: Sequence[int]) -> None:
        """Look at each line of some bytes; they stand in these lines of the file."""
        for place, line in self._splitter.feed(data):
            for each in self._torn.joined(line):
                self._feed(each, numbers[place])
        self._last = numbers[-1]

    def feed_block(self, data: bytes, numbers: Sequence[int]) -> None:
        """Look at whole lines; those that are plain iterations are taken together."""
        block = self._layouts.block(data, numbers)
        for first, behind, plain in block.runs():
            if plain and behind - first >= _MIN_TOGETHER:
                for line in self._torn.left():
                    self._feed(line, block.numbers[first])
                self._feed_plain(block, first, behind)
            else:
                self.feed_lines(block.text(first, behind), block.numbers[first:behind])

    def finish(self) -> list[RunBuilder]:
        for line in (*self._torn.left(), *self._splitter.finish()):
            # An iteration's last number that no line's end follows may be cut.
            cut = any(each.opening.search(line) for each in self._formats)
            self._feed(f"{line}…" if cut else line, self._last)
        if self._pending is not None:
            self._join()
        return [*self._done, self._run]

    def _feed_plain(self, block: LogBlock, first: int, behind: int) -> None:
        numbers = block.columns.values["iteration"]
        # Where a number does not rise something happens, which is seen line by line.
        breaks = first + 1 + np.flatnonzero(np.diff(numbers[first:behind]) <= 0)
        for start, stop in pairwise([first, *breaks.tolist(), behind]):
            begin = start
            while begin < stop and not (
                self._pending is None and self._run.is_settled_before(int(numbers[begin]))
            ):
                self.feed_lines(block.text(begin, begin + 1), block.numbers[begin : begin + 1])
                begin += 1
            if begin < stop:
                self._run.add_iterations(block.columns.select(slice(begin, stop)))

    def _feed(self, line: str, number: int) -> None:
        if len(line) < _SHORTEST:
            return
        if line.startswith("{"):
            line = unwrap_json(line)
        if self._pending is None and self._run.iterations.last and _STARTS.search(line):
            self._pending = RunBuilder()
        for each in self._formats:
            if each.word in line and (found := each.find(line)):
                self._formats, self._layouts.format = (each,), each
                for one in filter(None, map((self._pending or self._run).completed, found)):
                    self._place(one.iteration.iteration)
                    self._run.add_iteration(one, number)
                break
        (self._pending or self._run).feed(line)

    def _place(self, iteration: int) -> None:
        """Decide whether an iteration goes on with the run, starts it again, or begins another."""
        first, last = self._run.iterations.first, self._run.iterations.last
        if self._pending is None and (last is None or iteration >= last.iteration):
            return
        if first is None or iteration > first:
            self._join()
            return
        self._done.append(self._run)
        self._run, self._pending = self._pending or RunBuilder(), None

    def _join(self) -> None:
        """The pending start, or one that the log does not show, continued the run before it."""
        self._run.restart(self._pending)
        self._pending = None
