"""Collect from a log how a run failed or was stopped.

The sources are exceptions with their rank, torchrun's summary of failures, signals, and Slurm's messages.
"""

from __future__ import annotations

import re
from signal import Signals

from parakit.logs.scraped import ErrorTrace, LoggedError

_WORDS_OF_ERRORS_WITHOUT_TRACEBACK = ("rror", "Patch '", "Segmentation", "terminate", "memory")
_WORDS_OF_SLURM = ("srun", "slurm", "CANCELLED", "OUT_OF_ME")
_WORDS = (
    *(
        *_WORDS_OF_ERRORS_WITHOUT_TRACEBACK,
        *_WORDS_OF_SLURM,
        "Traceback",
        "Unexpected result",
        "Failures:",
        "Root Cause",
        "ignal",
    ),
    *("SIG", "Exception ignored", "Terminated", "Killed", "Watchdog caught", "exiting via 9"),
    "failed (exitcode",
)
FAILURES = re.compile("|".join(map(re.escape, _WORDS)))
"""Pattern of at least one word in every line that begins a report of a failure."""

_PREFIX = re.compile(r"\s{0,8}(?:\[(?:default|rank|Rank |RANK )?(\d{1,6})\]:? ?){1,3}", re.ASCII)
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s*File "([^"]{1,500})", line (\d{1,7})(?:, in (\S{1,120}))?')
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){0,8}_?[A-Z]\w{0,80}?"
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Fault|Abort|NotFound|Failed))(?::\s?(.*))?\Z"
)
_USAGE = re.compile(r"(\S{1,200}): error: (.{1,2000})")
_TERMINATED = "terminate called after throwing"
_FATAL = re.compile(
    r"(Fatal Python error: .{1,200}|Segmentation fault.{0,40}"
    rf"|{_TERMINATED} .{{1,200}}"
    r"|cannot allocate memory for thread-local data.{0,40}"
    r"|OpenBLAS error: Memory allocation still failed.{0,80}"
    r"|torch\.OutOfMemoryError: .{1,400}|CUDA out of memory\. .{1,400}"
    r"|(?<=watchdog thread terminated with exception: )CUDA error: .{1,200})"
)
_OUT_OF_MEMORY = re.compile("out ?of ?memory", re.IGNORECASE)
_ERROR_BEFORE_TRAINING = re.compile(
    r"(Error response from daemon): (.{1,1000})|Patch '\S{1,80}' \(.{1,400}?\) expects .{1,1000}"
)
"""Errors of Docker's client and of the kit's own patches, before training starts."""
_UNEXPECTED_RESULT = re.compile(
    r"(Unexpected result \S{1,40}) on rank (\d{1,6}) at iteration #(\d{1,9}).{0,40}message='(.{1,200})'"
)
"""Report of Megatron's `rerun_state_machine`, which then exits with code 16 or 17 and no traceback."""

_FAILED_RANK = re.compile(r"rank\s{1,12}: (\d{1,6}) \(local_rank")
_FAILED_EXIT = re.compile(r"exitcode\s{1,12}: (-?\d{1,4})(?: \(pid: (\d{1,9})\))?")
_FAILED_PROCESS = re.compile(
    r"failed \(exitcode: (-?\d{1,4})\) local_rank: (\d{1,6}) \(pid: (\d{1,9})\)"
)
"""torchrun's line on the first process that failed on its machine. A list of all failed ranks may follow."""
_SIGNAL = re.compile(
    r"got signal: (\d{1,3})|exiting program after receiving (SIG[A-Z]{2,8})"
    r"|[Rr]eceived (?:Signals\.)?(?:(SIG[A-Z]{2,8})|(\d{1,2})) death signal"
    r"|[Rr]eceived (SIG(?:TERM|INT|HUP|USR1|USR2)): \d{1,2}\b"
    r"|\A\s*(?:\S{1,200}: line \d{1,7}: +\d{1,9} )?(Terminated)\b"
)
_SHELL_KILLED = re.compile(r"\A\s*(?:\S{1,200}: line \d{1,7}: +\d{1,9} )?Killed\b")
_CANCELLED = re.compile(
    r"(?:JOB|STEP) \S{1,60} (?:ON \S{1,200} )?CANCELLED AT \S{1,40}( DUE TO [A-Z ]{1,40})?"
)
_SLURM_STOPPED = {
    "DUE TO TIME LIMIT": "Slurm at the job's time limit",
    "DUE TO PREEMPTION": "Slurm, which preempted the job",
    "": "Slurm: the job or its step was cancelled",
}
_SLURM_OUT_OF_MEMORY = re.compile(
    r"oom[-_]kill event|task \d{1,7}: Out Of Memory|tasks [\d,-]{1,200}: Out Of Memory|OUT_OF_MEMORY"
    r"|killed by the cgroup out-of-memory handler"
)
_SLURM_NODE_FAILED = re.compile(r"DUE TO NODE FAILURE|srun: error: Node failure on (\S{1,200})")
_SLURM_TASK_FAILED = re.compile(r"srun: error: \S{1,200}: tasks? \S{1,200}: Exited with exit code")
SCHEDULER = "Slurm"
"""Kind of an error that the cluster's scheduler reports. Errors of ranks follow from it."""
_CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|communicator was aborted|collective operation timeout|recvValue failed|ncclRemoteError"
    r"|Socket Timeout|failed to recv|Rank \d+ successfully reached monitoredBarrier"
    r"|NCCL error|heartbeat monitor",
    re.IGNORECASE,
)
_NCCL_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\((?:SeqNum=(\d{1,12}), )?"
    r"OpType=(\w{1,40}),.{0,200}?ran for (\d{1,12}) milliseconds"
)
NCCL_TIMEOUT = "NCCL timeout"
"""Kind of an error that NCCL's watchdog reports.

The device then continues with data that it did not receive, until the watchdog ends the process. A NaN in between
follows from the timeout."""
_ENDED_BY_TORCHRUN = re.compile(
    r"Unable to shutdown process (\d{1,9}) via 15, forcefully exiting via 9"
)
_LAUNCHER_KINDS = ("ChildFailedError", "SignalException", "RendezvousClosedError")
_WRAPPING_KINDS = (*_LAUNCHER_KINDS, "CheckpointException")
"""Kinds of errors that report another error, such as torch's on a checkpoint that a rank could not read."""
_EPILOGUE = ("Failures:", "Root Cause (first observed failure):")
_HOST_MEMORY = (
    "the job used more host memory than Slurm gave it (out of memory); ask for more (--mem=)"
)
_SIGKILL = 9
_KILLING_SIGNALS = (4, 7, 8, 9, 11)
"""Signals by which a rank fails or the kernel kills it. torchrun ends the other ranks with SIGTERM."""
_MAX_ERRORS = 256
_MAX_MESSAGE = 2000


class ErrorCollector:
    """Collector of the errors in a log. `feed` gets every line of a run, and `trace` returns the errors."""

    def __init__(self) -> None:
        self._errors: list[LoggedError] = []
        self._frames: dict[int | None, str] = {}
        """Innermost frame so far (file and line) of each open traceback, by rank; empty before its first frame."""
        self._sources: dict[int | None, str] = {}
        """Source code of that frame, by rank; empty until the line with the code, which follows the frame's line."""
        self._in_epilogue = False
        self._ignored = False
        """True if Python ignores the next exception."""
        self._listed_rank: int | None = None
        self._failures: list[tuple[int | None, int]] = []
        """Ranks and exit codes that torchrun lists."""
        self._failed_processes: list[tuple[int | None, int]] = []
        """Local ranks and exit codes of processes that torchrun reports as failed, before its list."""
        self._ended_by_torchrun: set[str] = set()
        """Process numbers of ranks that torchrun killed."""
        self._timed_out: set[int | None] = set()
        self._interrupted_by: str | None = None
        self._killed_by_shell = False
        self._task_failed = False

    def feed(self, line: str) -> None:
        """Read one line of the run, and collect the failure that it reports."""
        if self._frames:
            self._follow_traceback(line)
        # Most lines report nothing, so they are only searched for the words of failures.
        if not self._in_epilogue and not any(word in line for word in _WORDS):
            return
        if _TRACEBACK in line:
            rank, _ = _split_prefix(line)
            if len(self._frames) < _MAX_ERRORS:
                self._frames[rank] = ""
        elif any(word in line for word in _WORDS_OF_ERRORS_WITHOUT_TRACEBACK):
            self._feed_error_without_traceback(line)
        else:
            self._feed_unexpected_result(line)
        if "Watchdog caught" in line:
            self._feed_timeout(line)
        self._feed_torchrun(line)
        self._feed_signal(line)
        if any(word in line for word in _WORDS_OF_SLURM):
            self._feed_slurm(line)
        if _SHELL_KILLED.search(line):
            self._killed_by_shell = True
        if "Exception ignored in" in line:
            self._ignored = True

    def trace(self) -> ErrorTrace:
        """Return the errors in the lines so far, with the rank and the exit code of the root cause."""
        # torchrun looks for dead ranks ten times a second, and lists the root cause last. Of ranks that it
        # finds together it takes the lowest. A rank that a signal killed is the cause, because the others
        # only lost their connection to it.
        rank, code = _find_root_cause(self._failures)
        local_rank = None
        if code is None:
            # A log that was cut off has no list of failed ranks.
            local_rank, code = _find_root_cause(self._failed_processes)
        if code is None and self._killed_by_shell:
            code = -_SIGKILL
        return ErrorTrace(tuple(self._errors), rank, code, self._interrupted_by, local_rank)

    def _follow_traceback(self, line: str) -> None:
        """Read a line that may belong to the open traceback of its rank.

        Indented lines are the frame's file and line, and then its source code. The first other line that names an
        exception ends the traceback and is stored as an error.
        """
        rank, text = _split_prefix(line)
        if rank not in self._frames:
            return
        if text[:1].isspace():
            self._read_frame(rank, text)
            return
        match = _EXCEPTION.match(text.rstrip())
        if not match:
            return
        location, source = self._frames.pop(rank), self._sources.pop(rank, "")
        kind, message = match[1].rsplit(".", 1)[-1], (match[2] or "").strip()
        if kind == "KeyboardInterrupt":
            self._note_interruption(kind)
            return
        if not message and location:
            message = f"in {location}"
            if source.startswith("assert "):
                message = f"{source.removeprefix('assert ')} does not hold, {message}"
        self._add_error(kind, message, rank, kind in _WRAPPING_KINDS)

    def _read_frame(self, rank: int | None, text: str) -> None:
        """Read an indented line of a rank's traceback: the file and line of a frame, or the frame's source code."""
        frame = _FRAME.match(text)
        if frame:
            self._frames[rank] = f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}"
            self._sources[rank] = ""
        elif not self._sources.get(rank):
            self._sources[rank] = text.strip()

    def _feed_unexpected_result(self, line: str) -> None:
        """Read the report of an unexpected result, such as a loss that is NaN, with its rank and iteration."""
        match = _UNEXPECTED_RESULT.search(line)
        if match:
            kind, rank, iteration, message = match.groups()
            self._add_error(kind, f"{message}, at iteration {iteration}", rank=int(rank))

    def _feed_signal(self, line: str) -> None:
        """Read a line on a signal that the run got."""
        match = _SIGNAL.search(line)
        if not match:
            return
        # Each form of the line has its own group of the pattern.
        text = next(group for group in match.groups() if group)
        name = text.replace("Terminated", "SIGTERM")
        if name.isdecimal():
            name = signal_name(int(name)) or f"signal {name}"
        self._note_interruption(name)

    def _feed_error_without_traceback(self, line: str) -> None:
        """Read a line with an error that has no Python traceback, such as a wrong option."""
        usage = _USAGE.search(line) if ": error: " in line else None
        if usage and usage[1].endswith(".py"):
            script = usage[1].rsplit("/", 1)[-1]
            rank, _ = _split_prefix(line)
            self._add_error("usage", f"{script}: {usage[2]}", rank)
            return
        early = _ERROR_BEFORE_TRAINING.search(line)
        if early:
            # Docker's error has its kind and message as groups; the error of a patch has neither.
            self._add_error(early[1] or "PatchError", early[2] or early[0], None)
            return
        fatal = _FATAL.search(line)
        if fatal:
            self._add_fatal_error(fatal[1], line)

    def _add_fatal_error(self, text: str, line: str) -> None:
        """Add an error that a program reports as fatal, unless its message was read before."""
        message = text.split(": ", 1)[-1]
        is_reported = any(message in error.message for error in self._errors)
        if not is_reported:
            kind = "OutOfMemoryError" if _OUT_OF_MEMORY.search(text) else "fatal"
            rank, _ = _split_prefix(line)
            self._add_error(kind, text.removeprefix("torch.OutOfMemoryError: "), rank)

    def _feed_slurm(self, line: str) -> None:
        """Read a message of Slurm: an error, a failed task, or the cancellation of the job."""
        if _SLURM_OUT_OF_MEMORY.search(line):
            self._add_error(SCHEDULER, _HOST_MEMORY, None)
            return
        node_failure = _SLURM_NODE_FAILED.search(line)
        if node_failure:
            node = node_failure[1]
            self._add_error(SCHEDULER, f"node {node} failed" if node else "a node failed", None)
        elif _SLURM_TASK_FAILED.search(line):
            self._task_failed = True
        elif not self._task_failed:
            # After a failed task Slurm cancels the step as a consequence.
            self._feed_cancellation(line)

    def _feed_cancellation(self, line: str) -> None:
        """Note that Slurm cancelled the job, if the line says so, and why."""
        match = _CANCELLED.search(line)
        if match:
            reason = (match[1] or "").strip()
            default = f"Slurm {reason.lower()}".strip()
            self._note_interruption(_SLURM_STOPPED.get(reason, default))

    def _note_interruption(self, by: str) -> None:
        """Note the first signal, key or scheduler that stopped the run, unless an error came before."""
        if self._interrupted_by is None and all(error.secondary for error in self._errors):
            self._interrupted_by = by

    def _feed_timeout(self, line: str) -> None:
        """Read a report of NCCL's watchdog on a call that timed out. Only the first report of each rank counts."""
        rank, text = _split_prefix(line)
        match = _NCCL_TIMEOUT.search(text)
        if match is None or rank in self._timed_out:
            return
        sequence_number, operation, milliseconds = match.groups()
        number_text = f" no. {sequence_number}" if sequence_number else ""
        message = f"it waited {int(milliseconds) / 1000:.0f} s in {operation}{number_text}"
        if self._errors and self._errors[-1].message.startswith(_TERMINATED):
            # The line before only says that C++ terminated, and this line says why.
            self._errors.pop()
        has_other_cause = any(
            error.kind != NCCL_TIMEOUT for error in self._errors if not error.secondary
        )
        self._add_error(NCCL_TIMEOUT, message, rank, has_other_cause)
        self._timed_out.add(rank)

    def _feed_torchrun(self, line: str) -> None:
        """Read a line of torchrun: part of its list of failed ranks, or the message that it killed a process."""
        if self._in_epilogue:
            self._feed_epilogue(line)
        elif line.strip() in _EPILOGUE:
            self._in_epilogue = True
        elif match := _ENDED_BY_TORCHRUN.search(line):
            self._ended_by_torchrun.add(match[1])
        elif match := _FAILED_PROCESS.search(line):
            is_ended = match[3] in self._ended_by_torchrun
            if not is_ended and len(self._failed_processes) < _MAX_ERRORS:
                self._failed_processes.append((int(match[2]), int(match[1])))

    def _feed_epilogue(self, line: str) -> None:
        """Read a line of torchrun's list: a rank, then its exit code and process number."""
        if rank := _FAILED_RANK.search(line):
            self._listed_rank = int(rank[1])
            return
        exit_code = _FAILED_EXIT.search(line)
        if exit_code is None or exit_code[2] in self._ended_by_torchrun:
            return
        if len(self._failures) < _MAX_ERRORS:
            self._failures.append((self._listed_rank, int(exit_code[1])))

    def _add_error(
        self, kind: str, message: str, rank: int | None, secondary: bool = False
    ) -> None:
        """Add an error. `secondary` is True if the error is the consequence of another error.

        An error also counts as secondary if Python ignores it, if it comes after a timeout of NCCL, or if its message
        reports a lost connection.
        """
        is_after_timeout = bool(self._timed_out) and kind not in (NCCL_TIMEOUT, SCHEDULER)
        secondary = secondary or self._ignored or is_after_timeout
        secondary = secondary or bool(_CONSEQUENCE.search(message[:_MAX_MESSAGE]))
        self._ignored = False
        if len(self._errors) < _MAX_ERRORS:
            self._errors.append(LoggedError(kind, message[:_MAX_MESSAGE], rank, secondary))


def _find_root_cause(failures: list[tuple[int | None, int]]) -> tuple[int | None, int | None]:
    """Return the rank and the exit code of the failure that caused the others; None for both without failures.

    It is the first failure by a killing signal, or else the last one.
    """
    for rank, code in failures:
        if -code in _KILLING_SIGNALS:
            return rank, code
    return failures[-1] if failures else (None, None)


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGTERM` for 15; empty for a number that is no signal."""
    return Signals(number).name if number in Signals else ""


def _split_prefix(line: str) -> tuple[int | None, str]:
    """Return the rank in a prefix such as `[default1]:` or `[rank1]: `, and the text after the prefix.

    Without prefix the rank is None.
    """
    match = _PREFIX.match(line)
    return (int(match[1]), line[match.end() :]) if match else (None, line)
