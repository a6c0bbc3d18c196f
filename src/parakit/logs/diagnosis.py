"""How a run ended, from its log: `diagnose` for a file, `classify_log` for a scraped log."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from parakit.artifacts.run import Status, StatusRecord
from parakit.logs.failures import NCCL_TIMEOUT, SCHEDULER, signal_name
from parakit.logs.scrape import scrape_log
from parakit.logs.scraped import LoggedError, ScrapedLog

_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|Unable to allocate"
    r"|CUBLAS_STATUS_ALLOC_FAILED|MemoryError|bad_alloc|could not (?:create|execute) a primitive$",
    re.IGNORECASE,
)
"""Texts of an allocation that was refused.

oneDNN says no more than that it could not create or execute a primitive. A primitive that it does not
support fails before, and the text goes on: `could not create a primitive descriptor for …`.
"""
_OPEN_FILES = re.compile(r"Too many open files", re.IGNORECASE)
_ALLOCATION = re.compile(r"ried to allocate ([\d.]{1,20} ?[A-Za-z]{1,6})")
_CAPACITY = re.compile(
    r"(GPU \d{1,4}) has a total capacity of ([\d.]{1,12} [A-Za-z]{1,6})"
    r"(?: of which ([\d.]{1,12} [A-Za-z]{1,6}) is free)?"
)
_NAN = re.compile(r"found NaN|found Inf|Unexpected result (?:nan|-?inf|NaN)|is NaN", re.IGNORECASE)
_GLOO = "gloo"
"""It ends whichever rank first notices that calls do not fit or a peer is gone: it accuses nobody."""
_SILENT = (4, 7, 8, 9)
"""Signals after which a rank logs nothing; after SIGSEGV and SIGABRT it may."""
_STOPPED = (None, 1, -2, -15, 130, 143)
"""Root causes that a stopped run has; torchrun also stops the others when one is killed."""


def diagnose_log(log_path: Path, exit_code: int | None, interrupted: bool) -> StatusRecord:
    """Say how a run ended.

    Args:
        log_path: Its log, which need not exist.
        exit_code: Of the launcher; None where it is not known (a foreign log, a stale run folder).
        interrupted: Whether the launcher was asked to stop.
    """
    try:
        return classify_log(scrape_log(log_path), exit_code, interrupted)
    except OSError as error:
        reason = f"{log_path.name} cannot be read: {error.strerror or error}."
        return StatusRecord(Status.NO_LOG, exit_code, reason)


def classify_log(
    log: ScrapedLog, exit_code: int | None = None, interrupted: bool = False
) -> StatusRecord:
    """Say how the run of a scraped log ended; arguments as in `diagnose`."""
    if log.other_trainer is not None and exit_code is None:
        return StatusRecord(Status.NO_LOG, exit_code, _not_megatron(log))
    by, where = log.trace.interrupted_by, describe_log_end(log)
    if interrupted:
        return StatusRecord(Status.INTERRUPTED, exit_code, f"Stopped on request{where}.")
    last = log.iterations[-1] if log.iterations else None
    if log.exit_reason is not None:
        finished = "SIGTERM" not in log.exit_reason
    else:
        finished = last is not None and last.iteration == last.total_iterations
    if exit_code == 0 or (exit_code is None and finished):
        return _classify_lines(log, exit_code, finished=True)
    if by and log.trace.root_cause_exit_code in _STOPPED:
        # Noted only if nothing had failed before it: what a rank raises while it ends is no news.
        return StatusRecord(Status.INTERRUPTED, exit_code, f"Stopped by {by}{where}.")
    if error := find_first_error(log):
        return _classify_error(log, error, exit_code)
    return _classify_exit_code(log, exit_code) or _classify_lines(log, exit_code, finished=False)


def find_first_error(log: ScrapedLog) -> LoggedError | None:
    """The first real error: no follow-up, and of torchrun's root-cause rank if that has any.

    None where a signal killed a rank: the others only report that they lost it.
    """
    trace, code = log.trace, log.trace.root_cause_exit_code
    errors = [error for error in trace.errors if not error.secondary]
    if code is not None and -code in _SILENT:
        return next((error for error in errors if error.kind == SCHEDULER), None)
    candidates = errors or [error for error in trace.errors if error.kind != "ChildFailedError"]
    of_root = [e for e in candidates if e.rank is not None and e.rank == trace.root_cause_rank]
    return next(iter(of_root or candidates), None)


def describe_log_end(log: ScrapedLog) -> str:
    """Where a log ends: ` after iteration 7`."""
    if not log.iterations:
        return " before the first iteration"
    return f" after iteration {log.iterations[-1].iteration}"


def _classify_lines(log: ScrapedLog, exit_code: int | None, finished: bool) -> StatusRecord:
    """Of a run that finished, or whose log stops without a reason."""
    lines, where = log.iterations, describe_log_end(log)
    rank = None if finished else log.trace.root_cause_rank
    if not log.is_megatron:
        return StatusRecord(Status.NO_LOG, exit_code, _not_megatron(log))
    if (since := _nan_since(log)) is not None:
        end = " to the end." if finished else f", where the log stops{where}."
        return StatusRecord(Status.NAN, exit_code, f"NaN from iteration {since}{end}", rank)
    if not finished:
        text = f"The log stops{where} without saying why."
        return StatusRecord(Status.INCOMPLETE, exit_code, text, rank)
    if not lines:
        reason = "The run ended without a single iteration line."
        return StatusRecord(Status.INCOMPLETE, exit_code, reason)
    # A loss scale that was too large has every step skipped.
    lossless = ~(np.abs(lines.values("lm_loss")) > 0)
    if np.all((lines.values("skipped_iterations") > 0) & lossless):
        return StatusRecord(Status.NAN, exit_code, _skipped(log))
    return StatusRecord(Status.OK, exit_code, "")


def _skipped(log: ScrapedLog) -> str:
    last = log.iterations[-1]
    scale = f" The loss scale has come down to {last.loss_scale:.0f}." if last.loss_scale else ""
    # 65536 fits most models; one that was skipped at that scale needs less than the scale it ended with.
    fits = min(2**16, last.loss_scale / 4) if last.loss_scale else 2**16
    return (
        f"No step was taken: each of {last.iteration} iterations was skipped, its gradients being "
        f"inf or NaN.{scale} Train more iterations (ITERS=), or begin with a smaller one "
        f"(EXTRA='--initial-loss-scale {max(fits, 1):.0f}')."
    )


def _classify_error(log: ScrapedLog, error: LoggedError, exit_code: int | None) -> StatusRecord:
    rank = error.rank if error.rank is not None else log.trace.root_cause_rank
    text = f"{error.kind}: {error.message}" if error.message else error.kind
    if _MEMORY.search(text):
        return StatusRecord(Status.OUT_OF_MEMORY, exit_code, _allocation(error, rank), rank)
    if _OPEN_FILES.search(text):
        who = f"Rank {rank}" if rank is not None else "A rank"
        reason = f"{who} was allowed no more open files ({text}); raise the limit (ulimit -n)."
        return StatusRecord(Status.CRASHED, exit_code, reason, rank)
    status = Status.NAN if _NAN.search(text) else Status.CRASHED
    place = f"rank {rank}: " if rank is not None else ""
    accused = None if _GLOO in text or error.kind == NCCL_TIMEOUT else rank
    return StatusRecord(status, exit_code, f"{place}{text}{describe_log_end(log)}", accused)


def _classify_exit_code(log: ScrapedLog, exit_code: int | None) -> StatusRecord | None:
    """What an exit code tells, the root cause's before the launcher's; None where it tells nothing."""
    rank, code = log.trace.root_cause_rank, log.trace.root_cause_exit_code
    code = exit_code if code is None else code
    if not code:
        return None
    signal = -code if code < 0 else code - 128 if code > 128 else 0
    who = f"Rank {rank} was killed" if rank is not None else "Killed"
    text = f"Exit code {code}, and the log names no error"
    if name := signal_name(signal):
        text = f"{who} by {name}{_MEANS.get(signal, '')}"
    return StatusRecord(Status.CRASHED, exit_code, f"{text}; ended{describe_log_end(log)}", rank)


_MEANS = {
    9: ", which the kernel sends when memory runs out",
    7: ": a file it had mapped became shorter, or its disk failed",
}
"""What a signal tells, where it tells more than its name."""


def _allocation(error: LoggedError, rank: int | None) -> str:
    wanted, room = (pattern.search(error.message) for pattern in (_ALLOCATION, _CAPACITY))
    text = f"{f'Rank {rank}' if rank is not None else 'A rank'} ran out of memory"
    if wanted:
        text += f" when it tried to allocate {wanted[1]}"
    if room:
        text += f" ({room[1]} of {room[2]}" + (f", {room[3]} free)" if room[3] else ")")
    return text + "." if wanted else f"{text}: {error.message or error.kind}"


def _not_megatron(log: ScrapedLog) -> str:
    name = Path(log.path).name
    if log.other_trainer is not None:
        return f"{name} looks like a log of {log.other_trainer}."
    return f"{name} holds no line of Megatron's; name the log that training itself wrote."


def _nan_since(log: ScrapedLog) -> int | None:
    """The iteration from which on all are NaN to the last; None where the last is not."""
    finite = np.flatnonzero(~log.iterations.has_nan)
    since = int(finite[-1]) + 1 if len(finite) else 0
    return log.iterations[since].iteration if since < len(log.iterations) else None
