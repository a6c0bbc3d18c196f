"""How a run failed or was stopped: exceptions with their rank, torchrun's epilogue, signals, Slurm."""

from __future__ import annotations

import re
from signal import Signals

from parakit.logs.scraped import ErrorTrace, LoggedError

_UNTRACED = ("rror", "Patch '", "Segmentation", "terminate", "memory")
_OF_SLURM = ("srun", "slurm", "CANCELLED", "OUT_OF_ME")
_WORDS = (
    *(*_UNTRACED, *_OF_SLURM, "Traceback", "Unexpected result", "Failures:", "Root Cause", "ignal"),
    *("SIG", "Exception ignored", "Terminated", "Killed", "Watchdog caught", "exiting via 9"),
)
FAILURES = re.compile("|".join(map(re.escape, _WORDS)))
"""What every line holds that begins to tell of a failure."""

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
    r"|torch\.OutOfMemoryError: .{1,400}|CUDA out of memory\. .{1,400}"
    r"|(?<=watchdog thread terminated with exception: )CUDA error: .{1,200})"
)
_OUT_OF_MEMORY = re.compile("out ?of ?memory", re.IGNORECASE)
_OUTSIDE = re.compile(
    r"(Error response from daemon): (.{1,1000})|Patch '\S{1,80}' \(.{1,400}?\) expects .{1,1000}"
)
"""What Docker's client and the kit's own patches say before anything trains."""
_UNEXPECTED_RESULT = re.compile(
    r"(Unexpected result \S{1,40}) on rank (\d{1,6}) at iteration #(\d{1,9}).{0,40}message='(.{1,200})'"
)
"""Megatron's `rerun_state_machine`, which then ends with exit code 16 or 17 and no traceback."""

_FAILED_RANK = re.compile(r"rank\s{1,12}: (\d{1,6}) \(local_rank")
_FAILED_EXIT = re.compile(r"exitcode\s{1,12}: (-?\d{1,4})(?: \(pid: (\d{1,9})\))?")
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
"""Kind of an error that the cluster's scheduler reports; what the ranks say follows from it."""
_SECONDARY = re.compile(
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
"""Kind of an error that NCCL's watchdog reports. The device then goes on with what was not received,
until the watchdog ends the process: a NaN in between is no news."""
_ENDED_BY_TORCHRUN = re.compile(
    r"Unable to shutdown process (\d{1,9}) via 15, forcefully exiting via 9"
)
_LAUNCHER_KINDS = ("ChildFailedError", "SignalException", "RendezvousClosedError")
_EPILOGUE = ("Failures:", "Root Cause (first observed failure):")
_HOST_MEMORY = (
    "the job used more host memory than Slurm gave it (out of memory); ask for more (--mem=)"
)
_SIGKILL = 9
_KILLING = (4, 7, 8, 9, 11)
"""Signals that a rank dies of by itself or by the kernel; torchrun ends the others with SIGTERM."""
_MAX_ERRORS = 256
_MAX_MESSAGE = 2000


class ErrorCollector:
    """Feed it every line; `trace()` is what was found."""

    def __init__(self) -> None:
        self._errors: list[LoggedError] = []
        self._frames: dict[int | None, str] = {}
        self._sources: dict[int | None, str] = {}
        """The innermost frame's line of code, by the rank whose traceback is open."""
        self._in_epilogue = False
        self._ignored = False
        self._listed_rank: int | None = None
        self._failures: list[tuple[int | None, int]] = []
        self._ended_by_torchrun: set[str] = set()
        self._timed_out: set[int | None] = set()
        self._interrupted_by: str | None = None
        self._killed_by_shell = False
        self._task_failed = False

    def feed(self, line: str) -> None:
        """Look at one line."""
        if self._frames:
            self._follow_traceback(line)
        if not self._in_epilogue and not any(map(line.__contains__, _WORDS)):
            return
        if _TRACEBACK in line:
            rank, _ = _split_prefix(line)
            if len(self._frames) < _MAX_ERRORS:
                self._frames[rank] = ""
        elif any(word in line for word in _UNTRACED):
            self._feed_untraced(line)
        elif found := _UNEXPECTED_RESULT.search(line):
            self._add(found[1], f"{found[4]}, at iteration {found[3]}", int(found[2]), False)
        if "Watchdog caught" in line:
            self._feed_timeout(line)
        self._feed_torchrun(line)
        if found := _SIGNAL.search(line):
            name = next(filter(None, found.groups())).replace("Terminated", "SIGTERM")
            if name.isdecimal():
                name = signal_name(int(name)) or f"signal {name}"
            self._note_interruption(name)
        if any(word in line for word in _OF_SLURM):
            self._feed_slurm(line)
        if _SHELL_KILLED.search(line):
            self._killed_by_shell = True
        self._ignored = self._ignored or "Exception ignored in" in line

    def trace(self) -> ErrorTrace:
        """What was found in the lines so far."""
        # torchrun looks ten times a second, and of ranks found dead together it names the lowest; one
        # that a signal killed is the cause, because the others only lost their connection to it. Else
        # the root cause is listed last.
        killed = next(((r, code) for r, code in self._failures if -code in _KILLING), None)
        last = self._failures[-1] if self._failures else (None, None)
        rank, code = killed or last
        if code is None and self._killed_by_shell:
            code = -_SIGKILL
        return ErrorTrace(tuple(self._errors), rank, code, self._interrupted_by)

    def _follow_traceback(self, line: str) -> None:
        rank, text = _split_prefix(line)
        if rank not in self._frames:
            return
        if text[:1].isspace():
            frame = _FRAME.match(text)
            if frame:
                self._frames[rank] = f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}"
                self._sources[rank] = ""
            elif not self._sources.get(rank):
                self._sources[rank] = text.strip()
            return
        if not (found := _EXCEPTION.match(text.rstrip())):
            return
        where, source = self._frames.pop(rank), self._sources.pop(rank, "")
        kind, message = found[1].rsplit(".", 1)[-1], (found[2] or "").strip()
        if kind == "KeyboardInterrupt":
            self._note_interruption(kind)
            return
        if not message and where:
            asserted = source.removeprefix("assert ") if source.startswith("assert ") else ""
            message = f"{f'{asserted} does not hold, ' if asserted else ''}in {where}"
        self._add(kind, message, rank, kind in _LAUNCHER_KINDS)

    def _feed_untraced(self, line: str) -> None:
        usage = _USAGE.search(line) if ": error: " in line else None
        if usage and usage[1].endswith(".py"):
            message = f"{usage[1].rsplit('/', 1)[-1]}: {usage[2]}"
            self._add("usage", message, _split_prefix(line)[0])
        elif outside := _OUTSIDE.search(line):
            self._add(outside[1] or "PatchError", outside[2] or outside[0], None)
        elif fatal := _FATAL.search(line):
            known = fatal[1].split(": ", 1)[-1]
            if not any(known in error.message for error in self._errors):
                kind = "OutOfMemoryError" if _OUT_OF_MEMORY.search(fatal[1]) else "fatal"
                message = fatal[1].removeprefix("torch.OutOfMemoryError: ")
                self._add(kind, message, _split_prefix(line)[0])

    def _feed_slurm(self, line: str) -> None:
        if _SLURM_OUT_OF_MEMORY.search(line):
            self._add(SCHEDULER, _HOST_MEMORY, None)
        elif failed := _SLURM_NODE_FAILED.search(line):
            self._add(SCHEDULER, f"node {failed[1]} failed" if failed[1] else "a node failed", None)
        elif _SLURM_TASK_FAILED.search(line):
            self._task_failed = True  # Slurm then cancels the step, which is no news.
        elif (found := _CANCELLED.search(line)) and not self._task_failed:
            why = (found[1] or "").strip()
            self._note_interruption(_SLURM_STOPPED.get(why, f"Slurm {why.lower()}".strip()))

    def _note_interruption(self, by: str) -> None:
        # Stopping what has already failed is no interruption.
        if self._interrupted_by is None and all(error.secondary for error in self._errors):
            self._interrupted_by = by

    def _feed_timeout(self, line: str) -> None:
        rank, text = _split_prefix(line)
        if rank not in self._timed_out and (found := _NCCL_TIMEOUT.search(text)):
            number = f" no. {found[1]}" if found[1] else ""
            message = f"it waited {int(found[3]) / 1000:.0f} s in {found[2]}{number}"
            if self._errors and self._errors[-1].message.startswith(_TERMINATED):
                self._errors.pop()  # Its next line says by what, and this is that.
            causes = (error.kind for error in self._errors if not error.secondary)
            self._add(NCCL_TIMEOUT, message, rank, any(kind != NCCL_TIMEOUT for kind in causes))
            self._timed_out.add(rank)

    def _feed_torchrun(self, line: str) -> None:
        if self._in_epilogue:
            if rank_of := _FAILED_RANK.search(line):
                self._listed_rank = int(rank_of[1])
            elif (
                (code := _FAILED_EXIT.search(line))
                and code[2] not in self._ended_by_torchrun
                and len(self._failures) < _MAX_ERRORS
            ):
                self._failures.append((self._listed_rank, int(code[1])))
        elif line.strip() in _EPILOGUE:
            self._in_epilogue = True
        elif found := _ENDED_BY_TORCHRUN.search(line):
            self._ended_by_torchrun.add(found[1])

    def _add(self, kind: str, message: str, rank: int | None, secondary: bool = False) -> None:
        follows = self._ignored or (bool(self._timed_out) and kind not in (NCCL_TIMEOUT, SCHEDULER))
        secondary = secondary or follows or bool(_SECONDARY.search(message[:_MAX_MESSAGE]))
        self._ignored = False
        if len(self._errors) < _MAX_ERRORS:
            self._errors.append(LoggedError(kind, message[:_MAX_MESSAGE], rank, secondary))


def signal_name(number: int) -> str:
    """`SIGTERM` of 15; empty of what is no signal."""
    return Signals(number).name if number in Signals else ""


def _split_prefix(line: str) -> tuple[int | None, str]:
    """The rank in `[default1]:` or `[rank1]: ` and the text behind it."""
    found = _PREFIX.match(line)
    return (int(found[1]), line[found.end() :]) if found else (None, line)
