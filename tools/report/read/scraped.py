"""What a Megatron log says, as data. Units are in the names; what a log does not say is None."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tools.report.read.iterations import IterationTable


class Dialect(StrEnum):
    """Families of log formats, as far as a log itself shows the difference."""

    UNKNOWN = ""
    SECONDS = "0.7 to 0.15"
    """Time stamps in seconds; the first line comes with the log interval."""
    MICROSECONDS = "0.16 to 0.18"
    """Time stamps in microseconds; iteration 1 is always printed, without resetting its timer."""
    MICROSECONDS_GTP = "0.19"
    """As 0.16; parameters are listed by (tensor, gtp_weight_remat, pipeline)."""

    @property
    def averages_second_line(self) -> bool:
        """Whether the second line after a start still contains the first iteration."""
        return self in (Dialect.MICROSECONDS, Dialect.MICROSECONDS_GTP)


@dataclass(frozen=True)
class ParameterCount:
    """`> number of parameters on (tensor, pipeline) model parallel rank`."""

    tensor_rank: int
    pipeline_rank: int
    parameters: int


@dataclass(frozen=True)
class MemoryReading:
    """`[Rank r] (after N iterations) memory (MB)`: the allocator's own figures, in MiB."""

    rank: int
    after_iterations: int | None
    allocated_mib: float
    max_allocated_mib: float
    reserved_mib: float
    max_reserved_mib: float
    device_used_mib: float | None = None


@dataclass(frozen=True)
class TheoreticalMemory:
    """Megatron's own estimate, in MB as printed."""

    weight_and_optimizer_mb: float
    activation_mb: float | None
    total_mb: float | None


@dataclass(frozen=True)
class TimerSummary:
    """One timer over a log: means of what was printed, in milliseconds."""

    name: str
    count: int
    min_ms: float
    """Mean of the fastest rank's time."""
    max_ms: float
    """Mean of the slowest rank's time."""


@dataclass(frozen=True)
class Validation:
    """` validation loss at …`; the iteration is None for the evaluation after training."""

    iteration: int | None
    losses: dict[str, float]
    on: str = ""
    """`iteration 50 on test set`, as the log puts it."""


@dataclass(frozen=True)
class CheckpointEvent:
    """A checkpoint that was written or loaded."""

    action: str
    """`saving`, `saved` or `loaded`."""
    iteration: int | None


@dataclass(frozen=True)
class Remark:
    """A line between iterations that may say why their time changes; each only where it is first."""

    after: int
    """The last iteration before it."""
    text: str


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
    dialect: Dialect = Dialect.UNKNOWN
    iterations: IterationTable = field(default_factory=IterationTable)
    """In order, each iteration once: after a restart the later line counts."""
    restarts: tuple[int, ...] = ()
    """First iteration after each restart."""
    replaced_iterations: int = 0
    """Lines that a later restart repeated."""
    parameters: tuple[ParameterCount, ...] = ()
    memory: tuple[MemoryReading, ...] = ()
    theoretical_memory: TheoreticalMemory | None = None
    theoretical_parameters_billions: dict[str, float] = field(default_factory=dict)
    timers: tuple[TimerSummary, ...] = ()
    validation: tuple[Validation, ...] = ()
    checkpoints: tuple[CheckpointEvent, ...] = ()
    remarks: tuple[Remark, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    """Megatron's printed arguments, as text."""
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
        """Whether anything in the log is Megatron's."""
        return bool(self.iterations or self.parameters or self.arguments or self.memory)
