"""The training runs of a log, as `scrape` prints them and `parakit.read_logs` returns them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parakit.artifacts.run import StatusRecord
from parakit.formatting.presented import PresentedTable
from parakit.formatting.terminal import say
from parakit.logs.diagnosis import classify_log
from parakit.logs.iterations import Iteration, IterationTable
from parakit.logs.runs import describe_folder
from parakit.logs.scrape import scrape_runs
from parakit.logs.scraped import ScrapedLog

if TYPE_CHECKING:
    from rich.console import Console

_FIELDS_AS_STORED = (
    *("parameters", "memory", "theoretical_parameters_billions", "theoretical_memory", "timers"),
    *("validation", "checkpoints", "exit_reason", "notes"),
)


class UnreadableLogError(ValueError):
    """Error of a log that cannot be read; the message says why."""


@dataclass(frozen=True, repr=False)
class TrainingLog(PresentedTable):
    """One training run of a log, and how the run ended. A file may hold several runs."""

    log: ScrapedLog
    status: StatusRecord

    @property
    def iterations(self) -> IterationTable:
        """Iterations in order, with loss, milliseconds and all other printed numbers."""
        return self.log.iterations

    @property
    def sentence(self) -> str:
        """Path, status, number of iterations and the reason of a failure in one line."""
        reason = f": {self.status.reason}" if self.status.reason else ""
        count = len(self.iterations)
        return f"{self.log.path}: {self.status.status.value}, {count} iterations{reason}"

    def show(self, console: Console) -> None:
        """Print the sentence, as `parakit report scrape` does."""
        say(console, self.sentence)

    def to_dict(self) -> dict[str, Any]:
        """Return what `parakit report scrape --json` prints. Values that the log does not state are None.

        An iteration has only the numbers that its line states. NaN and infinity become None.
        """
        return {
            "path": self.log.path,
            "part": self.log.part,
            "parts": self.log.parts,
            "status": self.status.status.value,
            "reason": self.status.reason,
            "rank": self.status.rank,
            "dialect": self.log.generation.name,
            "iterations": list(self.to_rows()),
            "restarts": list(self.log.restarts),
        } | {name: msgspec.to_builtins(getattr(self.log, name)) for name in _FIELDS_AS_STORED}

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per iteration with the numbers of its line. NaN and infinity become None."""
        return [_to_row(iteration) for iteration in self.iterations]


def read_training_logs(path: Path) -> tuple[TrainingLog, ...]:
    """Read every training run of a log file, in order.

    Raises:
        UnreadableLogError: The file cannot be read.
    """
    if path.is_dir():
        raise UnreadableLogError(describe_folder(path))
    try:
        logs = scrape_runs(path)
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}; check the path."
        raise UnreadableLogError(reason) from None
    return tuple(TrainingLog(log, classify_log(log)) for log in logs)


def _to_row(iteration: Iteration) -> dict[str, Any]:
    """Return the numbers of an iteration's line by name. NaN and infinity become None, and unset fields are missing."""
    row: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(iteration).items():
        if value is None or value is False:
            continue
        is_not_finite = isinstance(value, float) and not math.isfinite(value)
        row[name] = None if is_not_finite else value
    return row
