"""A log file to data, in one pass: `scrape_log` for one run, `scrape_runs` for files with several.

A restart from a checkpoint repeats iterations: the later line counts and the restart is noted.
A start from the first iteration on is another run.
"""

from __future__ import annotations

from pathlib import Path

from tools.report.read.builder import RunBuilder
from tools.report.read.errors import ErrorCollector
from tools.report.read.iteration_line import (
    MARK,
    find_iterations,
    iterations_in,
    time_stamp,
    usual_iteration,
)
from tools.report.read.lines import read_lines
from tools.report.read.scraped import ErrorTrace, ScrapedLog

__all__ = ["find_iterations", "scrape_log", "scrape_runs"]

_SHORTEST = 8
"""Characters of the shortest line that can say anything."""
_STARTS = ("--- arguments ---", "before the start of training step")


def scrape_log(path: Path) -> ScrapedLog:
    """Scrape a log; of several runs in one file, the last.

    Raises:
        OSError: The file cannot be read.
    """
    return scrape_runs(path)[-1]


def scrape_runs(path: Path) -> tuple[ScrapedLog, ...]:
    """Scrape every run of a log file, in order; raises as `scrape_log`."""
    scraper = _Scraper()
    for line in read_lines(path):
        scraper.feed(line)
    runs = scraper.finish()
    return tuple(
        run.build(str(path), number, len(runs), trace)
        for number, (run, trace) in enumerate(runs, start=1)
    )


class _Scraper:
    """Decides which run a line belongs to; `RunBuilder` keeps what the line says."""

    def __init__(self) -> None:
        self._done: list[tuple[RunBuilder, ErrorTrace]] = []
        self._run = RunBuilder()
        self._pending: RunBuilder | None = None
        self._errors = ErrorCollector()
        self._pending_errors: ErrorCollector | None = None

    def feed(self, line: str) -> None:
        usual = usual_iteration(line)
        if usual is not None:
            self._place(usual[0].iteration)
            self._run.add_iteration(*usual)
        else:
            self._feed_other(line)

    def finish(self) -> list[tuple[RunBuilder, ErrorTrace]]:
        if self._pending is not None:
            self._join()
        return [*self._done, (self._run, self._errors.trace())]

    def _feed_other(self, line: str) -> None:
        if len(line) < _SHORTEST:
            return
        if self._pending is None and self._run.has_iterations and any(s in line for s in _STARTS):
            # A start inside the file: a resume or another run, the next iteration line tells.
            self._pending, self._pending_errors = RunBuilder(), ErrorCollector()
        if MARK in line:
            for found, position in iterations_in(line):
                self._place(found.iteration)
                self._run.add_iteration(found, time_stamp(line[max(0, position - 64) : position]))
        (self._pending or self._run).feed(line)
        (self._pending_errors or self._errors).feed(line)

    def _place(self, iteration: int) -> None:
        if self._pending is not None:
            if self._run.starts_over(iteration):
                self._done.append((self._run, self._errors.trace()))
                self._run, self._errors = self._pending, self._pending_errors or ErrorCollector()
                self._pending = self._pending_errors = None
            else:
                self._join()
        elif self._run.goes_back(iteration):
            if self._run.starts_over(iteration):
                self._done.append((self._run, self._errors.trace()))
                self._run, self._errors = RunBuilder(), ErrorCollector()
            else:
                self._run.restart()

    def _join(self) -> None:
        """The pending start went on with the run before it."""
        if self._pending is not None and self._pending_errors is not None:
            self._run.restart(self._pending)
            self._errors = self._pending_errors  # What ended the earlier start is no longer news.
        self._pending = self._pending_errors = None
