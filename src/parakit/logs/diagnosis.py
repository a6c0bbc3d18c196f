"""Find out how a run ended: `diagnose_log` for a file, `classify_log` for a scraped log."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from parakit.artifacts.run import Status, StatusRecord
from parakit.logs.failures import NCCL_TIMEOUT, SCHEDULER, signal_name
from parakit.logs.scrape import scrape_log
from parakit.logs.scraped import LoggedError, ScrapedLog

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|Unable to allocate"
    r"|CUBLAS_STATUS_ALLOC_FAILED|MemoryError|bad_alloc|could not (?:create|execute) a primitive$"
    r"|failed to map segment from shared object|Memory allocation still failed",
    re.IGNORECASE,
)
"""Texts of a refused allocation. The last two are those of the dynamic linker and of OpenBLAS.

If memory runs out, oneDNN only reports that it could not create or execute a primitive. The text of a primitive that
oneDNN does not support goes on: `could not create a primitive descriptor for …`.
"""
_OPEN_FILES = re.compile(r"Too many open files", re.IGNORECASE)
_ALLOCATION = re.compile(r"ried to allocate ([\d.]{1,20} ?[A-Za-z]{1,6})")
_CAPACITY = re.compile(
    r"(GPU \d{1,4}) has a total capacity of ([\d.]{1,12} [A-Za-z]{1,6})"
    r"(?: of which ([\d.]{1,12} [A-Za-z]{1,6}) is free)?"
)
_NAN = re.compile(r"found NaN|found Inf|Unexpected result (?:nan|-?inf|NaN)|is NaN", re.IGNORECASE)
_GLOO = "gloo"
"""Text in errors of gloo, which do not name a cause.

gloo ends the first rank that notices a call that does not fit or a lost peer."""
_SILENT_SIGNALS = (4, 7, 8, 9)
"""Signals after which a rank logs nothing. After SIGSEGV and SIGABRT it may log an error."""
_EXIT_CODES_OF_STOPPED_RUN = (None, 1, -2, -15, 130, 143)
"""Exit codes of the root-cause rank if somebody stopped the run.

Other codes mean that this rank failed, and that torchrun stopped the others."""


def diagnose_log(log_path: Path, exit_code: int | None, interrupted: bool) -> StatusRecord:
    """Return the status of the run that wrote a log: how it ended, and why.

    A log that cannot be read gives the status NO_LOG with the reason.

    Args:
        log_path: Path of the log, which need not exist.
        exit_code: Exit code of the launcher; None if unknown (a foreign log, an old run folder).
        interrupted: True if the launcher was asked to stop.
    """
    try:
        return classify_log(scrape_log(log_path), exit_code, interrupted)
    except OSError as error:
        reason = f"{log_path.name} cannot be read: {error.strerror or error}."
        return StatusRecord(Status.NO_LOG, exit_code, reason)


def classify_log(
    log: ScrapedLog, exit_code: int | None = None, interrupted: bool = False
) -> StatusRecord:
    """Return the status of the run in a log that was read already. Arguments are those of `diagnose_log`."""
    if log.other_trainer is not None and exit_code is None:
        return StatusRecord(Status.NO_LOG, exit_code, _describe_foreign_log(log))
    log_end = describe_log_end(log)
    if interrupted:
        return StatusRecord(Status.INTERRUPTED, exit_code, f"Stopped on request{log_end}.")
    if exit_code == 0 or (exit_code is None and _is_finished(log)):
        return _classify_lines(log, exit_code, finished=True)
    interrupted_by = log.trace.interrupted_by
    if interrupted_by and log.trace.root_cause_exit_code in _EXIT_CODES_OF_STOPPED_RUN:
        # A signal is noted only if no error came before it. Errors after it follow from the stop.
        reason = f"Stopped by {interrupted_by}{log_end}."
        return StatusRecord(Status.INTERRUPTED, exit_code, reason)
    error = find_first_error(log)
    if error:
        return _classify_error(log, error, exit_code)
    return _classify_exit_code(log, exit_code) or _classify_lines(log, exit_code, finished=False)


def _is_finished(log: ScrapedLog) -> bool:
    """Return True if training ended as planned: the log prints a planned exit, or the last planned iteration.

    An exit that SIGTERM caused is not planned.
    """
    if log.exit_reason is not None:
        return "SIGTERM" not in log.exit_reason
    if not log.iterations:
        return False
    last = log.iterations[-1]
    return last.iteration == last.total_iterations


def find_first_error(log: ScrapedLog) -> LoggedError | None:
    """Return the first error that is a cause and not a consequence of another error.

    Errors of the rank that torchrun names as root cause have priority. None means that the log has no error, or
    that a signal killed a rank. In the last case other ranks only report that they lost this rank, so only an
    error of the scheduler is returned.
    """
    trace = log.trace
    causes = [error for error in trace.errors if not error.secondary]
    if _was_killed_silently(trace.root_cause_exit_code):
        scheduler_errors = [error for error in causes if error.kind == SCHEDULER]
        return scheduler_errors[0] if scheduler_errors else None
    # torchrun's ChildFailedError only says that a rank failed.
    candidates = causes or [error for error in trace.errors if error.kind != "ChildFailedError"]
    for error in candidates:
        if error.rank is not None and error.rank == trace.root_cause_rank:
            return error
    return candidates[0] if candidates else None


def _was_killed_silently(exit_code: int | None) -> bool:
    """Return True if a signal ended the process that a killed process has no time to report."""
    return exit_code is not None and -exit_code in _SILENT_SIGNALS


def describe_log_end(log: ScrapedLog) -> str:
    """Return where a log ends, with a blank before: ` after iteration 7`."""
    if not log.iterations:
        return " before the first iteration"
    return f" after iteration {log.iterations[-1].iteration}"


def _classify_lines(log: ScrapedLog, exit_code: int | None, finished: bool) -> StatusRecord:
    """Return the status of a run without an error, as its iterations show it.

    `finished` is True if the run ended as planned. It is False if the log stops without a reason.
    """
    lines, log_end = log.iterations, describe_log_end(log)
    rank = None if finished else log.trace.root_cause_rank
    if not log.is_megatron:
        return StatusRecord(Status.NO_LOG, exit_code, _describe_foreign_log(log))
    first_nan = _find_first_iteration_of_nan(log)
    if first_nan is not None:
        end = " to the end." if finished else f", where the log stops{log_end}."
        return StatusRecord(Status.NAN, exit_code, f"NaN from iteration {first_nan}{end}", rank)
    if not finished:
        text = f"The log stops{log_end} without saying why."
        return StatusRecord(Status.INCOMPLETE, exit_code, text, rank)
    if not lines:
        reason = "The run ended without a single iteration line."
        return StatusRecord(Status.INCOMPLETE, exit_code, reason)
    # If the loss scale is too large, Megatron skips every step and prints no loss.
    has_no_loss = ~(np.abs(lines.values("lm_loss")) > 0)
    if np.all((lines.values("skipped_iterations") > 0) & has_no_loss):
        return StatusRecord(Status.NAN, exit_code, _describe_skipped_run(log))
    return StatusRecord(Status.OK, exit_code, "")


def _describe_skipped_run(log: ScrapedLog) -> str:
    """Return sentences on a run in which every step was skipped, and on how to avoid this."""
    last = log.iterations[-1]
    scale = f" The loss scale has come down to {last.loss_scale:.0f}." if last.loss_scale else ""
    # A scale of 65536 fits most models. If that was too large, less than the last scale is needed.
    smaller_scale = min(2**16, last.loss_scale / 4) if last.loss_scale else 2**16
    return (
        f"No step was taken: each of {last.iteration} iterations was skipped, because its gradients were "
        f"inf or NaN.{scale} Train more iterations (ITERS=), or begin with a smaller scale "
        f"(EXTRA='--initial-loss-scale {max(smaller_scale, 1):.0f}')."
    )


def _classify_error(log: ScrapedLog, error: LoggedError, exit_code: int | None) -> StatusRecord:
    """Return the status of a run that failed with `error`: out of memory, NaN or crashed."""
    rank = error.rank if error.rank is not None else log.trace.root_cause_rank
    text = f"{error.kind}: {error.message}" if error.message else error.kind
    if _OUT_OF_MEMORY.search(text):
        reason = _describe_out_of_memory(error, rank)
        return StatusRecord(Status.OUT_OF_MEMORY, exit_code, reason, rank)
    if _OPEN_FILES.search(text):
        subject = f"Rank {rank}" if rank is not None else "A rank"
        reason = f"{subject} was allowed no more open files ({text}); raise the limit (ulimit -n)."
        return StatusRecord(Status.CRASHED, exit_code, reason, rank)
    status = Status.NAN if _NAN.search(text) else Status.CRASHED
    prefix = f"rank {rank}: " if rank is not None else ""
    # Errors of gloo and timeouts of NCCL come from the rank that notices, not from the cause.
    failed_rank = None if _GLOO in text or error.kind == NCCL_TIMEOUT else rank
    reason = f"{prefix}{text}{describe_log_end(log)}"
    return StatusRecord(status, exit_code, reason, failed_rank)


def _classify_exit_code(log: ScrapedLog, exit_code: int | None) -> StatusRecord | None:
    """Return the status that an exit code shows; None if the code is 0 or unknown.

    The code is that of the root-cause rank, or else that of the launcher.
    """
    rank, code = log.trace.root_cause_rank, log.trace.root_cause_exit_code
    code = exit_code if code is None else code
    if not code:
        return None
    # Python reports a signal as a negative exit code, and a shell adds 128.
    signal = 0
    if code < 0:
        signal = -code
    elif code > 128:
        signal = code - 128
    text = f"Exit code {code}, and the log names no error"
    if name := signal_name(signal):
        subject = f"Rank {rank} was killed" if rank is not None else "Killed"
        local_rank = log.trace.root_cause_local_rank
        if local_rank is not None:
            subject = f"The process with local rank {local_rank} was killed"
        text = f"{subject} by {name}{_CAUSES_OF_SIGNALS.get(signal, '')}"
    return StatusRecord(Status.CRASHED, exit_code, f"{text}; ended{describe_log_end(log)}", rank)


_CAUSES_OF_SIGNALS = {
    9: ", which the kernel sends when memory runs out",
    7: ": a file it had mapped became shorter, or its disk failed",
}
"""Usual cause of a signal, in words that follow its name."""


def _describe_out_of_memory(error: LoggedError, rank: int | None) -> str:
    """Return the sentence on a rank that ran out of memory, with sizes if the error has them."""
    subject = f"Rank {rank}" if rank is not None else "A rank"
    text = f"{subject} ran out of memory"
    allocation = _ALLOCATION.search(error.message)
    if allocation:
        text += f" when it tried to allocate {allocation[1]}"
    capacity = _CAPACITY.search(error.message)
    if capacity:
        gpu, total, free = capacity.groups()
        free_text = f", {free} free" if free else ""
        text += f" ({gpu} of {total}{free_text})"
    return f"{text}." if allocation else f"{text}: {error.message or error.kind}"


def _describe_foreign_log(log: ScrapedLog) -> str:
    """Return the sentence on a log from which no line can be read."""
    name = Path(log.path).name
    if log.other_trainer is not None:
        return f"{name} looks like a log of {log.other_trainer}."
    return f"{name} holds no line of Megatron's; name the log that training itself wrote."


def _find_first_iteration_of_nan(log: ScrapedLog) -> int | None:
    """Return the iteration from which on all iterations are NaN; None if the last one is not NaN."""
    finite_positions = np.flatnonzero(~log.iterations.has_nan)
    first = int(finite_positions[-1]) + 1 if len(finite_positions) else 0
    return log.iterations[first].iteration if first < len(log.iterations) else None
