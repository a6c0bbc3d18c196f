"""All but the iteration line: parameters, memory, timers, validation, checkpoints, arguments."""

from __future__ import annotations

import re

from tools.report.read.scraped import (
    CheckpointEvent,
    MemoryReading,
    ParameterCount,
    TheoreticalMemory,
    Validation,
)

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
