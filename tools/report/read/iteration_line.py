"""Megatron's iteration line, wherever it stands in a text, in the words of Megatron and its relatives.

Lines of several ranks share one stream and may be glued together, so a line is searched for,
never anchored; a field counts only if its closing bar is there: a cut number is dropped, not kept
shortened. `NAMES` is the table of dialects: what a number is called, and in which unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from tools.report.read.iterations import OTHER, Iteration, dtype_of

MARK = "iteration"
START = re.compile(r"iteration(?:\s{1,12}|= {0,12})(\d{1,12})\s{0,4}/\s{0,12}(\d{1,12})\s{0,4}\|")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?\]")

NAMES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("consumed_samples", 0, ("consumed samples",)),
    ("skipped_samples", 0, ("skipped samples",)),
    ("elapsed_ms", 0, ("elapsed time per iteration (ms)",)),
    # Megatron-DeepSpeed; NeMo 2.
    ("elapsed_ms", 3, ("elapsed time per iteration (s)", "train_step_timing in s")),
    ("throughput_tflops_per_gpu", 0, ("throughput per GPU (TFLOP/s/GPU)", "TFLOPs")),
    # Primus; NeMo 2; GPT-NeoX.
    ("throughput_tflops_per_gpu", 0, ("compute per GPU (TFLOP/s/GPU)", "TFLOPS_per_GPU")),
    ("throughput_tflops_per_gpu", 0, ("approx flops per GPU",)),
    ("energy_joules_per_gpu", 0, ("energy per GPU (J/iter/GPU)",)),
    ("power_watts_per_gpu", 0, ("power per GPU (W/GPU)",)),
    ("learning_rate", 0, ("learning rate", "lr")),
    ("global_batch_size", 0, ("global batch size",)),
    ("lm_loss", 0, ("lm loss", "reduced_train_loss")),
    ("loss_scale", 0, ("loss scale",)),
    ("grad_norm", 0, ("grad norm",)),
    ("params_norm", 0, ("params norm",)),
    ("num_zeros", 0, ("num zeros",)),
    ("skipped_iterations", 0, ("number of skipped iterations",)),
    ("nan_iterations", 0, ("number of nan iterations",)),
)
"""Field, power of ten that its unit takes, names; a blank, `_` and `-` in a name are the same."""
_IN_PLACE_OF_LM_LOSS = "loss"
"""Some forks call it so; beside an `lm loss` it is another loss."""

_MAX_INTEGER = 10**18
_MAX_NUMBER = 1e100
_MAX_OTHER = 64
_OTHER_NAME = re.compile(r"[A-Za-z][\w .()/-]{0,60}\Z")
_NOT_LOSSES = frozenset(
    {"allocated", "max allocated", "reserved", "max reserved", "total device memory used"}
)
_JOINT = re.compile(r"[ _-]{1,80}")
# A second number is the mean so far (Primus); a unit behind the number is GPT-NeoX's.
VALUE = re.compile(
    r"\s{0,80}([-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,6})?|[-+]?(?:nan|inf))"
    r"(?:/\s?[\d.]{1,40}|\s\(avg [\d.]{1,40}\)|([GTP])FLOPS)?\s{0,80}\Z",
    re.IGNORECASE,
)
_UNITS = {None: 0, "G": -3, "T": 0, "P": 3}


def _key(name: str) -> str:
    return _JOINT.sub(" ", name.strip()).casefold()


_FIELDS = {_key(name): (field, power) for field, power, names in NAMES for name in names}
# As they are usually printed, so that most names are found without being rewritten.
_FIELDS |= {f" {name}": (field, power) for field, power, names in NAMES for name in names}


@dataclass(frozen=True)
class LineField:
    """One `name: value |` of a line."""

    field: str
    """Of an `Iteration`, or `OTHER` and the name; empty for what is not read."""
    value: int | float | None
    start: int
    """Where the value begins in the line, behind its colon."""
    stop: int
    power: int = 0
    """Of ten, by which the number as printed is multiplied."""


def find_iterations(text: str) -> list[Iteration]:
    """Every iteration line in a piece of a log, in order of appearance."""
    return [found for found, _ in iterations_in(text)] if MARK in text else []


def iterations_in(line: str) -> list[tuple[Iteration, int]]:
    """Each iteration of a line with the position it starts at."""
    found: list[tuple[Iteration, int]] = []
    start = START.search(line)
    while start is not None:
        # The quick look first: most lines hold one iteration, and a regex is slower to say so.
        more = line.find(MARK, start.end()) >= 0
        following = START.search(line, start.end()) if more else None
        stop = following.start() if following else len(line)
        parsed = _iteration(int(start[1]), int(start[2]), parts_of(line, start.end(), stop))
        if parsed is not None:
            found.append((parsed, start.start()))
        start = following
    return found


def parts_of(line: str, start: int, stop: int) -> list[LineField]:
    """The parts of an iteration's text that are closed by a bar."""
    end = line.find("\n", start, stop)
    stop = end if end >= 0 else stop
    parts = []
    others = 0
    while (bar := line.find("|", start, stop)) >= 0:
        colon = line.rfind(":", start, bar)
        if colon >= 0:
            part = _part(line[start:colon], line[colon + 1 : bar], colon + 1)
            others += part.field.startswith(OTHER)
            parts.append(part if others <= _MAX_OTHER else LineField("", None, colon + 1, bar))
        start = bar + 1
    if not any(part.field == "lm_loss" for part in parts):
        parts = [_as_lm_loss(part) for part in parts]
    return parts


def time_stamp(line: str) -> tuple[str, bool] | None:
    """The line's first `[date time]` and whether it counts microseconds."""
    found = _STAMP.search(line)
    return (found[1] + (found[2] or ""), found[2] is not None) if found else None


def _part(name: str, text: str, start: int) -> LineField:
    known = _FIELDS.get(name) or _FIELDS.get(_key(name))
    stop = start + len(text)
    match = VALUE.match(text)
    if known is None:
        short = name.strip()
        kept = match and match.end(1) == len(text.rstrip()) and short not in _NOT_LOSSES
        if match and kept and _OTHER_NAME.match(short):
            return LineField(OTHER + short, _number(match[1], 0), start, stop)
        return LineField("", None, start, stop)
    field, power = known
    if match is None:
        return LineField(field, None, start, stop)
    power += _UNITS[match[2] and match[2].upper()]
    whole = dtype_of(field) is dtype_of("iteration")
    return LineField(field, (_integer if whole else _number)(match[1], power), start, stop, power)


def _as_lm_loss(part: LineField) -> LineField:
    if part.field != OTHER + _IN_PLACE_OF_LM_LOSS:
        return part
    return LineField("lm_loss", part.value, part.start, part.stop)


def _integer(text: str, power: int) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if not power and -_MAX_INTEGER < number < _MAX_INTEGER else None


def _number(text: str, power: int) -> float | None:
    # Shifting the decimal point rounds once, multiplying would a second time.
    try:
        number = float(Decimal(text).scaleb(power)) if power else float(text)
    except ArithmeticError:
        return None
    # Nothing measures so much; "inf" and "nan" are what was printed.
    return number if abs(number) < _MAX_NUMBER or text[-1].isalpha() else None


def _iteration(number: int, total: int, parts: list[LineField]) -> Iteration | None:
    values: dict[str, int | float | None] = {}
    others: dict[str, float] = {}
    for part in parts:
        if part.field.startswith(OTHER):
            if part.value is not None:
                others[part.field.removeprefix(OTHER)] = part.value
        elif part.field:
            values[part.field] = part.value
    if not _is_whole(values):
        return None
    if others:
        values["other_losses"] = others  # type: ignore[assignment]
    return Iteration(number, total, **values)  # type: ignore[arg-type]


def _is_whole(values: dict[str, int | float | None]) -> bool:
    """Whether enough is there to be an iteration's line; NeMo's first has no time behind a bar."""
    if values.get("elapsed_ms") is not None or values.get("consumed_samples") is not None:
        return True
    return values.get("lm_loss") is not None and values.get("global_batch_size") is not None


def fields_of(line: str) -> Iterator[LineField]:
    """Number, total and parts of a line's one iteration; nothing where it holds several or none."""
    found = iterations_in(line)
    start = START.search(line)
    if len(found) == 1 and start is not None and start.start() == found[0][1]:
        # Behind "iteration" or "iteration=".
        first = start.start() + len(MARK) + (line[start.start() + len(MARK)] == "=")
        yield LineField("iteration", int(start[1]), first, start.end(1))
        yield LineField(
            "total_iterations", int(start[2]), line.index("/", start.end(1)) + 1, start.end(2)
        )
        yield from parts_of(line, start.end(), len(line))
