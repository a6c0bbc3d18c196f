"""Content of a training log as data classes.

Units are in the names of fields. Values that a log does not state are None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parakit.logs.iterations import Iteration, IterationTable


class Fact:
    """Base class of everything that a line states besides iterations."""


@dataclass(frozen=True)
class Generation(Fact):
    """Versions of a trainer that print in the same way, as far as the log itself shows it."""

    trainer: str = ""
    name: str = ""
    averages_second_line: bool = False
    """True if the numbers of the second line after a start are means that include the first iteration."""


@dataclass(frozen=True)
class ParameterCount(Fact):
    """Number of parameters of a model-parallel rank."""

    tensor_rank: int
    pipeline_rank: int
    parameters: int


@dataclass(frozen=True)
class MemoryReading(Fact):
    """Memory of a rank in MiB, as its allocator reports it."""

    rank: int
    after_iterations: int | None
    allocated_mib: float
    max_allocated_mib: float
    reserved_mib: float
    max_reserved_mib: float
    device_used_mib: float | None = None


@dataclass(frozen=True)
class TheoreticalMemory(Fact):
    """Megatron's estimate of its memory, in MB as printed."""

    weight_and_optimizer_mb: float
    activation_mb: float | None
    total_mb: float | None


@dataclass(frozen=True)
class TheoreticalParameters(Fact):
    """Megatron's estimate of its parameters, by the label in the log."""

    label: str
    billions: float


@dataclass(frozen=True)
class Timer(Fact):
    """Milliseconds of one timer, in one line or as the mean over all lines."""

    name: str
    count: int
    """Number of lines with the timer."""
    min_ms: float
    """Time of the fastest rank."""
    max_ms: float
    """Time of the slowest rank. Both times are equal if the log prints only one."""


@dataclass(frozen=True)
class Validation(Fact):
    """Losses of an evaluation. The iteration is None for the evaluation after training."""

    iteration: int | None
    losses: dict[str, float]
    on: str = ""
    """Description of the evaluation as printed: `iteration 50 on test set`."""


@dataclass(frozen=True)
class CheckpointEvent(Fact):
    """A checkpoint that was written or loaded."""

    action: str
    """`saving`, `saved` or `loaded`."""
    iteration: int | None


@dataclass(frozen=True)
class ArgumentList(Fact):
    """Beginning of a list of arguments, and how to read the list."""

    end: re.Pattern[str]
    """Pattern in the line that ends the list."""
    read: Callable[[str], tuple[str, str] | None]
    """Function that returns name and value of a line of the list as text; None for another line."""


@dataclass(frozen=True)
class MoreArgument(Fact):
    """An argument outside of the list of arguments. It is ignored if the log has no list."""

    name: str
    value: str


@dataclass(frozen=True)
class PrintedArgument(Fact):
    """An argument that a trainer without a list of arguments prints in a sentence."""

    name: str
    value: str


@dataclass(frozen=True)
class StepAhead(Fact):
    """Number of the step to which the next line without a number belongs."""

    number: int
    total: int


@dataclass(frozen=True)
class NumbersAhead(Fact):
    """Numbers of an iteration that are printed on a separate line before the iteration's own line."""

    complete: Callable[[Any, Mapping[str, str], dict[str, Any]], Iteration | None]
    """Function that returns the iteration with these numbers; None if the numbers belong to a later line.

    Its arguments are a `ParsedIteration`, the log's arguments, and a dict in which the calls since one start can
    store values."""


@dataclass(frozen=True)
class Ending(Fact):
    """Reason why training stops, as the log states it."""

    reason: str


@dataclass(frozen=True)
class Remark(Fact):
    """A line between iterations that may explain why their time changes. Repeated lines are left out."""

    text: str
    after: int = 0
    """Number of the last iteration before the line."""


@dataclass(frozen=True)
class LoggedError:
    """One error of a log."""

    kind: str
    """Class of the exception, or another name if there is none (`Signal`, `usage`)."""
    message: str
    rank: int | None
    """Rank that reported the error; None if unknown."""
    secondary: bool
    """True if the error follows from another one (a lost connection), or is the launcher's summary."""


@dataclass(frozen=True)
class ErrorTrace:
    """All errors in a log, with the rank and the exit code of the root cause."""

    errors: tuple[LoggedError, ...] = ()
    root_cause_rank: int | None = None
    """Rank in torchrun's `Root Cause (first observed failure)`; None if there is none."""
    root_cause_exit_code: int | None = None
    interrupted_by: str | None = None
    """Signal, key or scheduler that ended the run; None if nothing did."""
    root_cause_local_rank: int | None = None
    """Rank on its machine of the process that failed, if torchrun's line on it is all that the log has.

    None if torchrun lists the ranks, or if the log has no such line."""


@dataclass(frozen=True)
class ScrapedLog:
    """One training run of a log. A file with several runs gives one object per run, numbered in `part`."""

    path: str
    part: int = 1
    parts: int = 1
    generation: Generation = Generation()
    iterations: IterationTable = field(default_factory=IterationTable)
    """Iterations in order. No iteration comes twice: after a restart the later line counts."""
    restarts: tuple[int, ...] = ()
    """Number of the first iteration after each restart."""
    replaced: IterationTable = field(default_factory=IterationTable)
    """Lines of iterations before a restart that the run trained again after the restart."""
    parameters: tuple[ParameterCount, ...] = ()
    memory: tuple[MemoryReading, ...] = ()
    theoretical_memory: TheoreticalMemory | None = None
    theoretical_parameters_billions: dict[str, float] = field(default_factory=dict)
    timers: tuple[Timer, ...] = ()
    validation: tuple[Validation, ...] = ()
    checkpoints: tuple[CheckpointEvent, ...] = ()
    remarks: tuple[Remark, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    """Printed arguments by name, as text."""
    log_interval: int | None = None
    """Iterations per line, by the arguments, else by the lines themselves."""
    exit_reason: str | None = None
    """Reason of the end: `exiting program at iteration 25`, `after training is done`; None if not stated."""
    trace: ErrorTrace = ErrorTrace()
    other_trainer: str | None = None
    """Trainer whose logs are not read, and why. Set only if the log has no iteration line."""
    first_seen: str | None = None
    """Time stamp of the first iteration line, as printed; None without stamps."""
    notes: tuple[str, ...] = ()

    @property
    def is_megatron(self) -> bool:
        """True if the log has lines of Megatron or of another trainer whose logs are read."""
        return bool(self.iterations or self.parameters or self.arguments or self.memory)
