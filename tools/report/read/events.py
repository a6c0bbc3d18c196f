"""All but the iteration line: parameters, memory, timers, validation, checkpoints, arguments; failures.

`ErrorCollector` collects exceptions with their rank, torchrun's epilogue and signals.
"""

from __future__ import annotations

import re

from tools.report.read.scraped import (
    CheckpointEvent,
    ErrorTrace,
    LoggedError,
    MemoryReading,
    ParameterCount,
    TheoreticalMemory,
    Validation,
)

OTHER_NEWS = re.compile(
    rb"MB|GB\)|parameters|\.:|\w \.{1,60} |validation|checkpoint|xiting|after training is done"
    rb"|before the start of training step|arguments ---|Traceback|[Ee]rror|Segmentation|terminate"
    rb"|memory|Unexpected result|Failures:|Root Cause|ignal|receiving SIG|Exception ignored"
)
"""What a line holds that may say more than an iteration's numbers."""

_NUMBER = r"([-+]?(?:\d{1,18}(?:\.\d{0,18})?(?:[eE][-+]?\d{1,3})?|nan|inf))"
_PARAMETERS = re.compile(
    r"number of parameters on \(tensor,[^)]{0,60}pipeline\) model parallel rank "
    r"\((\d{1,6}),(?: \d{1,6},)? (\d{1,6})\): (\d{1,18})"
)
_MEMORY = re.compile(
    r"\[Rank (\d{1,6})\] \((?:after (\d{1,12}) iterations|[^)]{0,200})\) memory \(MB\)"
    rf" \| allocated: {_NUMBER} \| max allocated: {_NUMBER}"
    rf" \| reserved: {_NUMBER} \| max reserved: {_NUMBER}"
    rf"(?: \| total device memory used: {_NUMBER})?"
)
_THEORETICAL = re.compile(
    rf"Theoretical memory footprints: weight and optimizer={_NUMBER} MB"
    rf"(?:, activation={_NUMBER} MB, total={_NUMBER} MB)?"
)
_BILLIONS = re.compile(
    rf"((?:Number|Total number) of (?:active )?parameters[a-z ]{{0,40}}) in billions: {{1,3}}{_NUMBER}"
)
_TIMER = re.compile(
    rf"([A-Za-z][\w/-]{{1,60}}) \.{{1,60}}: (?:\({_NUMBER}, {_NUMBER}\)|{_NUMBER}(?![\d.,]))"
)
_VALIDATION = re.compile(
    r"validation\S{0,60} loss at ((?:the end of training|iteration)[^|]{0,160})\|"
)
_VALIDATION_VALUE = re.compile(rf"([A-Za-z][\w ]{{0,40}}?) value: {_NUMBER} \|")
_CHECKPOINT = re.compile(
    r"(saving)(?: [a-z]{1,20})? checkpoint at iteration {1,12}(\d{1,12})"
    r"|successfully (saved)(?: local)? checkpoint from iteration {1,12}(\d{1,12})"
    r"|successfully (loaded)(?: local)? checkpoint from [^|]{0,300}? at iteration {1,12}(\d{1,12})"
)
_EXIT = re.compile(
    r"\[(exiting program [^\]]{1,80}|after training is done)\]"
    r"|(Exiting during evaluation, timelimit)"
)
_ARGUMENT = re.compile(r"([A-Za-z_]\w{0,80}) \.{1,60} ")
_MAX_VALUE = 4000


def parameter_counts(line: str) -> list[ParameterCount]:
    """Parameters of model-parallel ranks; several lines may be glued together."""
    return [ParameterCount(int(m[1]), int(m[2]), int(m[3])) for m in _PARAMETERS.finditer(line)]


def memory_readings(line: str) -> list[MemoryReading]:
    """Allocator readings; several may be glued together."""
    return [
        MemoryReading(
            int(m[1]),
            int(m[2]) if m[2] else None,
            float(m[3]),
            float(m[4]),
            float(m[5]),
            float(m[6]),
            _optional(m[7]),
        )
        for m in _MEMORY.finditer(line)
    ]


def theoretical_memory(line: str) -> TheoreticalMemory | None:
    """Megatron's own memory estimate."""
    m = _THEORETICAL.search(line)
    return TheoreticalMemory(float(m[1]), _optional(m[2]), _optional(m[3])) if m else None


def parameters_in_billions(line: str) -> dict[str, float]:
    """`Number of parameters in … in billions`, under the words of the log."""
    return {m[1]: float(m[2]) for m in _BILLIONS.finditer(line)}


def timer(line: str) -> tuple[str, float, float] | None:
    """A timer's name, fastest and slowest rank (equal where only the slowest is printed), in ms."""
    m = _TIMER.search(line)
    if m is None:
        return None
    return (m[1], float(m[2]), float(m[3])) if m[2] else (m[1], float(m[4]), float(m[4]))


def validation(line: str) -> Validation | None:
    """A validation line."""
    head = _VALIDATION.search(line)
    if head is None:
        return None
    losses = {
        m[1].strip(): float(m[2]) for m in _VALIDATION_VALUE.finditer(line[head.end() :][:4000])
    }
    number = re.search(r"iteration (\d{1,12})", head[1])
    return Validation(int(number[1]) if number else None, losses, head[1].strip())


def checkpoint(line: str) -> CheckpointEvent | None:
    """A checkpoint that is being saved, was saved or was loaded."""
    m = _CHECKPOINT.search(line)
    if m is None:
        return None
    action, iteration = (text for text in m.groups() if text)
    return CheckpointEvent(action, int(iteration))


def exit_reason(line: str) -> str | None:
    """Why Megatron stopped, in its own words."""
    m = _EXIT.search(line)
    return (m[1] or m[2]) if m else None


def argument(line: str) -> tuple[str, str] | None:
    """One line of the printed arguments."""
    m = _ARGUMENT.search(line)
    return (m[1], line[m.end() : m.end() + _MAX_VALUE]) if m else None


def _optional(text: str | None) -> float | None:
    return float(text) if text else None


_PREFIX = re.compile(r"\s{0,8}(?:\[(?:default|rank|Rank |RANK )?(\d{1,6})\]:? ?){1,3}", re.ASCII)
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s*File "([^"]{1,500})", line (\d{1,7})(?:, in (\S{1,120}))?')
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,80}?"
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Fault|Abort|NotFound|Failed))(?::\s?(.*))?\Z"
)
_USAGE = re.compile(r"(\S{1,200}): error: (.{1,2000})")
_FATAL = re.compile(
    r"(Fatal Python error: .{1,200}|Segmentation fault.{0,40}"
    r"|terminate called after throwing .{1,200}"
    r"|torch\.OutOfMemoryError: .{1,400}|CUDA out of memory\. .{1,400})"
)
_UNEXPECTED_RESULT = re.compile(
    r"(Unexpected result \S{1,40}) on rank (\d{1,6}) at iteration #(\d{1,9}).{0,40}message='(.{1,200})'"
)
"""Megatron's `rerun_state_machine`, which then ends with exit code 16 or 17 and no traceback."""

_FAILED_RANK = re.compile(r"rank\s{1,12}: (\d{1,6}) \(local_rank")
_FAILED_EXIT = re.compile(r"exitcode\s{1,12}: (-?\d{1,4})")
_SIGNAL = re.compile(r"got signal: (\d{1,3})|exiting program after receiving (SIG[A-Z]{2,8})")
_SIGNAL_NAMES = {"1": "SIGHUP", "2": "SIGINT", "9": "SIGKILL", "15": "SIGTERM"}
_SECONDARY = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
    r"|communicator was aborted|collective operation timeout|recvValue failed|ncclRemoteError"
    r"|Socket Timeout|failed to recv|Rank \d+ successfully reached monitoredBarrier"
    r"|NCCL error|heartbeat monitor",
    re.IGNORECASE,
)
_LAUNCHER_KINDS = ("ChildFailedError", "SignalException", "RendezvousClosedError")
_EPILOGUE = ("Failures:", "Root Cause (first observed failure):")
_KILLING = (4, 7, 8, 9, 11)
"""Signals that a rank dies of by itself or by the kernel; torchrun ends the others with SIGTERM."""
_MAX_ERRORS = 256
_MAX_MESSAGE = 2000


class ErrorCollector:
    """Feed it every line; `trace()` is what was found."""

    def __init__(self) -> None:
        self._errors: list[LoggedError] = []
        self._frames: dict[int | None, str] = {}
        self._in_epilogue = False
        self._ignored = False
        self._listed_rank: int | None = None
        self._failures: list[tuple[int | None, int]] = []
        self._root: tuple[int | None, int | None] = (None, None)
        self._interrupted_by: str | None = None

    def feed(self, line: str) -> None:
        """Look at one line."""
        if self._frames:
            self._follow_traceback(line)
        if "Traceback" in line and _TRACEBACK in line:
            rank, _ = _split_prefix(line)
            if len(self._frames) < _MAX_ERRORS:
                self._frames[rank] = ""
        elif "rror" in line or "fault" in line or "terminate" in line or "memory" in line:
            self._feed_untraced(line)
        elif "Unexpected result" in line:
            self._feed_validation(line)
        if self._in_epilogue:
            self._feed_epilogue(line)
        elif line.strip() in _EPILOGUE:
            self._in_epilogue = True
        if "ignal" in line or "receiving SIG" in line:
            self._feed_signal(line)
        self._ignored = self._ignored or "Exception ignored in" in line

    def trace(self) -> ErrorTrace:
        """What was found in the lines so far."""
        # torchrun looks ten times a second, and of ranks found dead together it names the lowest; one
        # that a signal killed is the cause, because the others only lost their connection to it.
        killed = next(((r, code) for r, code in self._failures if -code in _KILLING), None)
        rank, code = killed or self._root
        return ErrorTrace(tuple(self._errors), rank, code, self._interrupted_by)

    def _follow_traceback(self, line: str) -> None:
        rank, text = _split_prefix(line)
        if rank not in self._frames:
            return
        if text[:1].isspace():
            frame = _FRAME.match(text)
            if frame:
                self._frames[rank] = f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}"
            return
        found = _EXCEPTION.match(text.rstrip())
        if found:
            self._close_traceback(rank, found[1], (found[2] or "").strip())

    def _close_traceback(self, rank: int | None, kind: str, message: str) -> None:
        where = self._frames.pop(rank)
        short = kind.rsplit(".", 1)[-1]
        if short == "KeyboardInterrupt":
            self._note_interruption("KeyboardInterrupt")
            return
        launcher = short in _LAUNCHER_KINDS
        self._add(short, message or f"in {where}" if where else message, rank, launcher)

    def _feed_validation(self, line: str) -> None:
        found = _UNEXPECTED_RESULT.search(line)
        if found:
            self._add(found[1], f"{found[4]}, at iteration {found[3]}", int(found[2]), False)

    def _feed_untraced(self, line: str) -> None:
        usage = _USAGE.search(line) if ": error: " in line else None
        if usage and usage[1].endswith(".py"):
            self._add("usage", f"{usage[1].rsplit('/', 1)[-1]}: {usage[2]}", _split_prefix(line)[0])
            return
        fatal = _FATAL.search(line)
        if fatal and not any(fatal[1].split(": ", 1)[-1] in e.message for e in self._errors):
            kind = "OutOfMemoryError" if "emory" in fatal[1] else "fatal"
            message = fatal[1].removeprefix("torch.OutOfMemoryError: ")
            self._add(kind, message, _split_prefix(line)[0])

    def _feed_epilogue(self, line: str) -> None:
        if rank := _FAILED_RANK.search(line):
            self._listed_rank = int(rank[1])
        elif (code := _FAILED_EXIT.search(line)) and len(self._failures) < _MAX_ERRORS:
            self._failures.append((self._listed_rank, int(code[1])))
            # The root cause is listed last.
            self._root = self._failures[-1]

    def _feed_signal(self, line: str) -> None:
        found = _SIGNAL.search(line)
        if found:
            self._note_interruption(found[2] or _SIGNAL_NAMES.get(found[1], f"signal {found[1]}"))

    def _note_interruption(self, by: str) -> None:
        # Stopping what has already failed is no interruption.
        if self._interrupted_by is None and all(error.secondary for error in self._errors):
            self._interrupted_by = by

    def _add(self, kind: str, message: str, rank: int | None, secondary: bool = False) -> None:
        secondary = secondary or self._ignored or bool(_SECONDARY.search(message[:_MAX_MESSAGE]))
        self._ignored = False
        if len(self._errors) < _MAX_ERRORS:
            self._errors.append(LoggedError(kind, message[:_MAX_MESSAGE], rank, secondary))


def _split_prefix(line: str) -> tuple[int | None, str]:
    """The rank in `[default1]:` or `[rank1]: ` and the text behind it."""
    found = _PREFIX.match(line)
    return (int(found[1]), line[found.end() :]) if found else (None, line)
