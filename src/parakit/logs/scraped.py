"""What a training log says, as data. Units are in the names; what a log does not say is None."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parakit.logs.iterations import Iteration, IterationTable


class Fact:
    """One thing that a line says beside iterations."""


@dataclass(frozen=True)
class Generation(Fact):
    """Versions of a trainer that print alike, as far as a log itself shows it."""

    trainer: str = ""
    name: str = ""
    averages_second_line: bool = False
    """Whether the second line after a start still contains the first iteration."""


@dataclass(frozen=True)
class ParameterCount(Fact):
    """Parameters of a model-parallel rank."""

    tensor_rank: int
    pipeline_rank: int
    parameters: int


@dataclass(frozen=True)
class MemoryReading(Fact):
    """The allocator's own figures, in MiB."""

    rank: int
    after_iterations: int | None
    allocated_mib: float
    max_allocated_mib: float
    reserved_mib: float
    max_reserved_mib: float
    device_used_mib: float | None = None


@dataclass(frozen=True)
class TheoreticalMemory(Fact):
    """Megatron's own estimate, in MB as printed."""

    weight_and_optimizer_mb: float
    activation_mb: float | None
    total_mb: float | None


@dataclass(frozen=True)
class TheoreticalParameters(Fact):
    """The same of parameters, under the words of the log."""

    what: str
    billions: float


@dataclass(frozen=True)
class Timer(Fact):
    """One timer, in milliseconds: as a line has it, or the means of all."""

    name: str
    count: int
    """How often it was printed."""
    min_ms: float
    """Time of the fastest rank."""
    max_ms: float
    """Of the slowest; both are equal where only it is printed."""


@dataclass(frozen=True)
class Validation(Fact):
    """An evaluation; the iteration is None for the one after training."""

    iteration: int | None
    losses: dict[str, float]
    on: str = ""
    """`iteration 50 on test set`, as the log puts it."""


@dataclass(frozen=True)
class CheckpointEvent(Fact):
    """A checkpoint that was written or loaded."""

    action: str
    """`saving`, `saved` or `loaded`."""
    iteration: int | None


@dataclass(frozen=True)
class ArgumentList(Fact):
    """A list of arguments begins."""

    end: re.Pattern[str]
    """In the line that ends it."""
    read: Callable[[str], tuple[str, str] | None]
    """Name and value in one of its lines, as text."""


@dataclass(frozen=True)
class MoreArgument(Fact):
    """One that the list of arguments leaves out; it counts only where there is a list."""

    name: str
    value: str


@dataclass(frozen=True)
class NumbersAhead(Fact):
    """Numbers of an iteration to come, in a line of their own before its line."""

    complete: Callable[[Any, Mapping[str, str], dict[str, Any]], Iteration | None]
    """The iteration with them, of a `FoundIteration`, the arguments and what earlier calls of one start
    stored; None: they wait for another line."""


@dataclass(frozen=True)
class Ending(Fact):
    """Training says why it stops."""

    reason: str


@dataclass(frozen=True)
class Remark(Fact):
    """A line between iterations that may say why their time changes; each only where it is first."""

    text: str
    after: int = 0
    """The last iteration before it."""


@dataclass(frozen=True)
class LoggedError:
    """One error line and where it came from."""

    kind: str
    """The exception's class, or a name for what has none (`Signal`, `usage`)."""
    message: str
    rank: int | None
    secondary: bool
    """Follows from another rank's failure (a lost connection), or is the launcher's summary."""


@dataclass(frozen=True)
class ErrorTrace:
    """What a log says about failure."""

    errors: tuple[LoggedError, ...] = ()
    root_cause_rank: int | None = None
    """torchrun's `Root Cause (first observed failure)`."""
    root_cause_exit_code: int | None = None
    interrupted_by: str | None = None
    """The signal or key that ended the run."""


@dataclass(frozen=True)
class ScrapedLog:
    """One training run out of a log. A file that holds several gives several, by `part`."""

    path: str
    part: int = 1
    parts: int = 1
    generation: Generation = Generation()
    iterations: IterationTable = field(default_factory=IterationTable)
    """In order, each iteration once: after a restart the later line counts."""
    restarts: tuple[int, ...] = ()
    """First iteration after each restart."""
    replaced: IterationTable = field(default_factory=IterationTable)
    """Lines of iterations that a restart trained again, as they were before it."""
    parameters: tuple[ParameterCount, ...] = ()
    memory: tuple[MemoryReading, ...] = ()
    theoretical_memory: TheoreticalMemory | None = None
    theoretical_parameters_billions: dict[str, float] = field(default_factory=dict)
    timers: tuple[Timer, ...] = ()
    validation: tuple[Validation, ...] = ()
    checkpoints: tuple[CheckpointEvent, ...] = ()
    remarks: tuple[Remark, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    """Printed arguments, as text."""
    log_interval: int | None = None
    exit_reason: str | None = None
    """`exiting program at iteration 25`, `after training is done`, …; None: the log just ends."""
    trace: ErrorTrace = ErrorTrace()
    other_trainer: str | None = None
    """A trainer whose log is not read, and why, where there is no iteration line."""
    first_seen: str | None = None
    """Time stamp of the first iteration line, as printed."""
    notes: tuple[str, ...] = ()

    @property
    def is_megatron(self) -> bool:
        """Whether anything in the log is Megatron's, or of another trainer that is read."""
        return bool(self.iterations or self.parameters or self.arguments or self.memory)
