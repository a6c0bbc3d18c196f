"""All but the iteration line: parameters, memory, timers, validation, checkpoints, arguments.

Failures are in `failures.py`.
"""

from __future__ import annotations

import math
import re

from tools.report.read.lines import printable
from tools.report.read.scraped import (
    CheckpointEvent,
    MemoryReading,
    ParameterCount,
    TheoreticalMemory,
    Validation,
)

OTHER_NEWS = re.compile(
    rb"MB|GB\)|parameters|\.:|\w \.{1,60} |time \(ms\)|Step Time|validation"
    rb"|checkpoint|xiting|after training is done"
    rb"|before the start of training step|arguments ---|Traceback|[Ee]rror|Segmentation|terminate"
    rb"|memory|Unexpected result|Failures:|Root Cause|ignal|receiving SIG|Exception ignored"
    rb"|CANCELLED|DUE TO|oom|Out Of Memory|srun|slurm|SIG|Terminated|Killed|ode failure"
)
"""What a line holds that may say more than an iteration's numbers."""

_NUMBER = r"([-+]?(?:\d{1,18}(?:\.\d{0,18})?(?:[eE][-+]?\d{1,3})?|nan|inf))"
_PARAMETERS = re.compile(
    r"number of parameters on \(tensor,[^)]{0,60}pipeline\) model parallel rank "
    r"\((\d{1,6}),(?: \d{1,6},)? (\d{1,6})\): (\d{1,18})"
)
_GIGABYTES = re.compile(
    r"\[Rank (\d{1,6})\] \((?:after (\d{1,12}) iterations|[^)]{0,200})\) memory \(GB\) \|"
    r"((?: mem-[a-z-]{1,40}: [\d.]{1,20} ?(?:\||(?=\s|\Z))){1,40})"
)
_SIZES = tuple(
    re.compile(rf" mem-{name}-gigabytes: {_NUMBER}(?= ?\||\s|\Z)")
    for name in ("allocated", "max-allocated", "reserved", "max-reserved")
)
_MIB_A_GIGABYTE = 1e9 / 2**20
_MAX_MIB = 1e12
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
    rf"(?<![\w/-])([A-Za-z][\w/-]{{1,60}}) \.{{1,60}}: (?:\({_NUMBER}, {_NUMBER}\)|{_NUMBER}(?![\d.,]))"
)
_OLD_TIMERS = "time (ms) |"
# Two decimals are all that was printed, so that a cut number is known by having fewer.
_OLD_TIMER = re.compile(r"([A-Za-z][\w/ -]{1,60}): (\d{1,12}\.\d\d)(?= \||\s*\Z)")
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
_STEP_TIME = re.compile(
    r"Step Time : (\d{1,6}\.\d{1,6})s GPU utilization: (\d{1,6}\.\d{1,4})MODEL_TFLOP/s/GPU"
)
_ZERO_STAGE = re.compile(r"zero_optimization_stage \.{1,40} ([0-3])\b")
_NO_TIME = "it prints no time of an iteration"
_OTHER_TRAINERS = tuple(
    (f"{name}, of which no iteration is read: {why}", re.compile(pattern))
    for name, why, pattern in (
        (
            "torchtitan",
            _NO_TIME,
            r"step: {1,8}\d{1,9} {1,4}loss: {1,4}[\d.nai]{1,20} .{0,200}(?:tps|wps): ",
        ),
        (
            "nanotron",
            "its numbers are rounded to three digits",
            r"iteration: \d{1,9} / \d{1,9} \| consumed_tokens: ",
        ),
        (
            "NeMo's progress bar",
            "it is rewritten in place",
            r"Epoch \d{1,6}: .{0,200}train_step_timing in s=",
        ),
        (
            "the Hugging Face Trainer",
            _NO_TIME,
            r"\{'loss': '?[\d.]{1,20}'?, '(?:grad_norm|learning_rate)': ",
        ),
        ("LLM Foundry", _NO_TIME, r"\[batch=\d{1,9}/\d{1,9}\]:?\s*(?:\Z|Train)"),
        (
            "nanoGPT",
            "it is one process's estimate",
            r"iter \d{1,9}: loss [\d.]{1,12}, time [\d.]{1,12}ms",
        ),
        (
            "DeepSpeed without Megatron",
            _NO_TIME,
            r"RunningAvgSamplesPerSec=[\d.]{1,30}, CurrSamplesPerSec=",
        ),
    )
)
"""Lines of trainers whose logs are not read, so that a reader is not told that theirs is broken."""
_ARGUMENT = re.compile(r"(?<!\w)([A-Za-z_]\w{0,80}) \.{1,60} ")
_MAX_VALUE = 4000
_REMARK = re.compile(
    r"\b(?:overlap\w{0,20}|cuda ?graphs?|profil(?:er|ing)|garbage|straggler\w?|throttl\w{1,6}"
    r"|(?:re)?compil(?:e|ed|ing|ation)|autotun\w{1,6}|rebalanc\w{1,6})\b",
    re.IGNORECASE,
)
_MAX_REMARK = 120


def parameter_counts(line: str) -> list[ParameterCount]:
    """Parameters of model-parallel ranks; several lines may be glued together."""
    return [ParameterCount(int(m[1]), int(m[2]), int(m[3])) for m in _PARAMETERS.finditer(line)]


def memory_readings(line: str) -> list[MemoryReading]:
    """Allocator readings; several may be glued together."""
    found = [
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
    found += filter(None, map(_in_gigabytes, _GIGABYTES.finditer(line)))
    return [one for one in found if _is_possible(one)]


def _in_gigabytes(line: re.Match[str]) -> MemoryReading | None:
    """Megatron-Bridge's reading, which is in units of 10**9 bytes."""
    found = [size.search(line[3]) for size in _SIZES]
    sizes = [float(size[1]) * _MIB_A_GIGABYTE for size in found if size]
    if len(sizes) < len(_SIZES):
        return None
    return MemoryReading(int(line[1]), int(line[2]) if line[2] else None, *sizes)


def _is_possible(reading: MemoryReading) -> bool:
    """Whether its sizes are sizes; NaN and inf are what some platforms print."""
    sizes = (reading.max_allocated_mib, reading.max_reserved_mib, reading.device_used_mib or 0.0)
    return not any(_MAX_MIB < size < math.inf for size in sizes)


def theoretical_memory(line: str) -> TheoreticalMemory | None:
    """Megatron's own memory estimate."""
    m = _THEORETICAL.search(line)
    return TheoreticalMemory(float(m[1]), _optional(m[2]), _optional(m[3])) if m else None


def parameters_in_billions(line: str) -> dict[str, float]:
    """`Number of parameters in … in billions`, under the words of the log."""
    return {m[1]: float(m[2]) for m in _BILLIONS.finditer(line)}


def timers(line: str) -> list[tuple[str, float, float]]:
    """Timers' names, fastest and slowest rank (equal where only the slowest is printed), in ms."""
    if _OLD_TIMERS in line:
        text = line[line.index(_OLD_TIMERS) + len(_OLD_TIMERS) :]
        return [(m[1], float(m[2]), float(m[2])) for m in _OLD_TIMER.finditer(text)]
    m = _TIMER.search(line)
    if m is None:
        return []
    return [(m[1], float(m[2]), float(m[3])) if m[2] else (m[1], float(m[4]), float(m[4]))]


def step_time(line: str) -> tuple[float, float] | None:
    """Megatron-Bridge's line before an iteration's: its seconds, and TFLOP/s a GPU."""
    m = _STEP_TIME.search(line)
    return (float(m[1]), float(m[2])) if m else None


def zero_stage(line: str) -> str | None:
    """The ZeRO stage in DeepSpeed's list of its configuration."""
    m = _ZERO_STAGE.search(line)
    return m[1] if m else None


def other_trainer(line: str) -> str | None:
    """The trainer whose own line this is, and why it is not read; None where none is known."""
    return next((name for name, pattern in _OTHER_TRAINERS if pattern.search(line)), None)


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


def remark(line: str) -> str | None:
    """A line that tells of what changes an iteration's time, without its time stamp."""
    if not _REMARK.search(line[:_MAX_VALUE]):
        return None
    return re.sub(
        r"^[\s\d:.,/T\[\]+-]{8,40}(?=[A-Za-z])", "", printable(line[:_MAX_VALUE])
    ).strip()[:_MAX_REMARK]


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
