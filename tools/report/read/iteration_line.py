"""Megatron's iteration line, wherever it stands in a text.

Lines of several ranks share one stream and may be glued together, so a line is searched for,
never anchored; a field counts only if its closing bar is there: a cut number is dropped, not kept
shortened.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tools.report.read.scraped import Iteration

MARK = "iteration"
_START = re.compile(r"iteration\s{1,12}(\d{1,12})\s{0,4}/\s{0,12}(\d{1,12})\s{0,4}\|")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?\]")
# The usual line as a whole: nothing else can hide in it, and it is parsed three times as fast.
_USUAL = re.compile(
    r"(?:\[default\d{1,5}\]:)? ?(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?\])?"
    r" iteration {1,12}(\d{1,12})/ {0,12}(\d{1,12}) \|"
    r" consumed samples: {1,12}(\d{1,17}) \|"
    r" elapsed time per iteration \(ms\): (\d{1,12}\.\d) \|"
    r"(?: throughput per GPU \(TFLOP/s/GPU\): (\d{1,9}\.\d) \|)?"
    r" learning rate: (\d\.\d{6}E[-+]\d\d) \|"
    r" global batch size: {1,8}(\d{1,9}) \|"
    r" lm loss: (\d\.\d{6}E[-+]\d\d) \|"
    r" loss scale: (\d{1,12}\.\d) \|"
    r"(?: grad norm: (\d{1,12}\.\d{3}) \|)?"
    r" number of skipped iterations: {1,4}(\d{1,6}) \|"
    r" number of nan iterations: {1,4}(\d{1,6}) \|\s{0,4}\Z"
)
_MAX_INTEGER = 10**18
_MAX_OTHER = 64
_OTHER_NAME = re.compile(r"[A-Za-z][\w .()/-]{0,60}\Z")
_NOT_LOSSES = frozenset(
    {"allocated", "max allocated", "reserved", "max reserved", "total device memory used"}
)


def find_iterations(text: str) -> list[Iteration]:
    """Every iteration line in a piece of a log, in order of appearance."""
    return [found for found, _ in iterations_in(text)] if MARK in text else []


def iterations_in(line: str) -> list[tuple[Iteration, int]]:
    """Each iteration of a line with the position it starts at."""
    found: list[tuple[Iteration, int]] = []
    start = _START.search(line)
    while start is not None:
        # The quick look first: most lines hold one iteration, and a regex is slower to say so.
        more = line.find(" iteration ", start.end()) >= 0
        following = _START.search(line, start.end()) if more else None
        text = line[start.end() : following.start()] if following else line[start.end() :]
        parsed = _parse_fields(int(start[1]), int(start[2]), text)
        if parsed is not None:
            found.append((parsed, start.start()))
        start = following
    return found


def usual_iteration(line: str) -> tuple[Iteration, tuple[str, bool] | None] | None:
    """The iteration and its time stamp, if the line is nothing but a usual iteration line."""
    m = _USUAL.match(line)
    if m is None:
        return None
    day, micro, number, total, samples, ms, rate, lr, batch, loss, scale, norm, skip, nan = (
        m.groups()
    )
    found = Iteration(
        iteration=int(number),
        total_iterations=int(total),
        consumed_samples=int(samples),
        elapsed_ms=float(ms),
        throughput_tflops_per_gpu=float(rate) if rate else None,
        learning_rate=float(lr),
        global_batch_size=int(batch),
        lm_loss=float(loss),
        loss_scale=float(scale),
        grad_norm=float(norm) if norm else None,
        skipped_iterations=int(skip),
        nan_iterations=int(nan),
    )
    return found, (day + (micro or ""), micro is not None) if day else None


def time_stamp(line: str) -> tuple[str, bool] | None:
    """The line's first `[date time]` and whether it counts microseconds."""
    found = _STAMP.search(line)
    return (found[1] + (found[2] or ""), found[2] is not None) if found else None


def _integer(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if -_MAX_INTEGER < number < _MAX_INTEGER else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_FIELDS: dict[str, tuple[str, Callable[[str], int | float | None]]] = {
    "consumed samples": ("consumed_samples", _integer),
    "skipped samples": ("skipped_samples", _integer),
    "elapsed time per iteration (ms)": ("elapsed_ms", _number),
    "throughput per GPU (TFLOP/s/GPU)": ("throughput_tflops_per_gpu", _number),
    "energy per GPU (J/iter/GPU)": ("energy_joules_per_gpu", _number),
    "power per GPU (W/GPU)": ("power_watts_per_gpu", _number),
    "learning rate": ("learning_rate", _number),
    "global batch size": ("global_batch_size", _integer),
    "lm loss": ("lm_loss", _number),
    "loss scale": ("loss_scale", _number),
    "grad norm": ("grad_norm", _number),
    "params norm": ("params_norm", _number),
    "num zeros": ("num_zeros", _number),
    "number of skipped iterations": ("skipped_iterations", _integer),
    "number of nan iterations": ("nan_iterations", _integer),
}
# As they stand behind a bar, so that the usual name needs no stripping.
_FIELDS |= {f" {name}": field for name, field in _FIELDS.items()}


def _parse_fields(iteration: int, total: int, text: str) -> Iteration | None:
    if "\n" in text:
        text = text[: text.index("\n")]
    values: dict[str, int | float | None] = {}
    others: dict[str, float] = {}
    parts = text.split("|")
    parts.pop()  # What follows the last bar is not closed by one.
    for part in parts:
        name, _, value = part.rpartition(":")
        field = _FIELDS.get(name) or _FIELDS.get(name.strip())
        if field is not None:
            values[field[0]] = field[1](value)
        elif len(others) < _MAX_OTHER:
            _keep_other(others, name.strip(), value)
    if values.get("elapsed_ms") is None and values.get("consumed_samples") is None:
        return None
    if others:
        values["other_losses"] = others  # type: ignore[assignment]
    return Iteration(iteration, total, **values)  # type: ignore[arg-type]


def _keep_other(others: dict[str, float], name: str, value: str) -> None:
    number = _number(value)
    if number is not None and name not in _NOT_LOSSES and _OTHER_NAME.match(name):
        others[name] = number
