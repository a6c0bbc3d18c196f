"""Megatron-LM, 1 (2019) to 0.19: the line that its relatives print too; `megatron_news.py` has the rest.

Lines of several ranks share one stream and may be glued together, so a line is searched for,
never anchored; a field counts only if its closing bar is there: a cut number is dropped, not kept
shortened.
"""

from __future__ import annotations

import re
from decimal import Decimal

from tools.report.read.dialects import (
    Dialect,
    FoundIteration,
    LineField,
    LineFormat,
    Names,
    is_of_a_policy,
    iteration_of,
)
from tools.report.read.iterations import OTHER, Iteration, dtype_of
from tools.report.read.scraped import Generation

SECONDS = Generation("Megatron", "0.7 to 0.15")
"""Time stamps in seconds; the first line comes with the log interval."""
MICROSECONDS = Generation("Megatron", "0.16 to 0.18", averages_second_line=True)
"""Time stamps in microseconds; iteration 1 is always printed, without resetting its timer."""
MICROSECONDS_GTP = Generation("Megatron", "0.19", averages_second_line=True)
"""As 0.16; parameters are listed by (tensor, gtp_weight_remat, pipeline)."""

_MARK = "iteration"
_START = re.compile(r"iteration(?:\s{1,12}|= {0,12})(\d{1,12})\s{0,4}/\s{0,12}(\d{1,12})\s{0,4}\|")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,6})?\]")
_STAMP_WITHIN = 64
"""Characters before the iteration."""
_NAMES: Names = (
    ("consumed_samples", 0, ("consumed samples",)),
    ("skipped_samples", 0, ("skipped samples",)),
    ("elapsed_ms", 0, ("elapsed time per iteration (ms)",)),
    ("throughput_tflops_per_gpu", 0, ("throughput per GPU (TFLOP/s/GPU)",)),
    ("energy_joules_per_gpu", 0, ("energy per GPU (J/iter/GPU)",)),
    ("power_watts_per_gpu", 0, ("power per GPU (W/GPU)",)),
    ("learning_rate", 0, ("learning rate",)),
    ("global_batch_size", 0, ("global batch size",)),
    ("lm_loss", 0, ("lm loss",)),
    ("loss_scale", 0, ("loss scale",)),
    ("grad_norm", 0, ("grad norm",)),
    ("params_norm", 0, ("params norm",)),
    ("num_zeros", 0, ("num zeros",)),
    ("skipped_iterations", 0, ("number of skipped iterations",)),
    ("nan_iterations", 0, ("number of nan iterations",)),
)
"""A blank, `_` and `-` in a name are the same."""
_IN_PLACE_OF_LM_LOSS = "loss"
"""Some forks call it so; beside an `lm loss` it is another loss, and so it is of a policy."""
_EPOCH = re.compile(r"\bepoch:? {0,4}(\d{1,6}),? {0,4}\Z", re.IGNORECASE)
_WITHIN = 24
"""Characters before the iteration in which its epoch stands."""
_UNCLOSED = re.compile(
    r" {0,4}(?:(?:reduced_train_loss|train_step_timing in s|grad_norm): {1,8}"
    r"(?=[\d.]{5})\d{1,9}\.\d{1,9}|grad norm: {1,8}\d{1,9}\.\d{3})\s{0,8}\Z"
)
"""The last number of a line that some trainers close with no bar: NeMo writes four digits of it and
Megatron three decimals of this one; with fewer it was cut."""
_MAX_INTEGER = 10**18
_MAX_NUMBER = 1e100
_MAX_OTHER = 64
_OTHER_NAME = re.compile(r"[A-Za-z][\w .()/-]{0,60}\Z")
_NOT_LOSSES = frozenset(
    {"allocated", "max allocated", "reserved", "max reserved", "total device memory used"}
)
_JOINT = re.compile(r"[ _-]{1,80}")
# A second number is the mean so far (Primus); a unit behind the number is GPT-NeoX's.
_VALUE = re.compile(
    r"\s{0,80}([-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:e[-+]?\d{1,6})?|[-+]?(?:nan|inf))"
    r"(?:/\s?[\d.]{1,40}|\s\(avg [\d.]{1,40}\)|([GTP])FLOPS)?\s{0,80}\Z",
    re.IGNORECASE,
)
_UNITS = {None: 0, "G": -3, "T": 0, "P": 3}


class BarLine(LineFormat):
    """`iteration N/ M | name: value | …`, which all relatives print."""

    mark = _MARK.encode()
    opening = re.compile(r"iteration[ =]{1,12}\d{1,12} {0,4}/")
    rank = 0

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._fields = {_key(text): (name, power) for name, power, texts in names for text in texts}
        # As they are usually printed, so that most names are found without being rewritten.
        self._fields |= {
            f" {text}": (name, power) for name, power, texts in names for text in texts
        }

    def find(self, line: str) -> list[FoundIteration]:
        """Every iteration of a line, in order."""
        found: list[FoundIteration] = []
        start = _START.search(line)
        while start is not None:
            # The quick look first: most lines hold one iteration, and a regex is slower to say so.
            more = line.find(_MARK, start.end()) >= 0
            following = _START.search(line, start.end()) if more else None
            stop = following.start() if following else len(line)
            fields = [*_numbers_of(line, start), *self._parts(line, start.end(), stop)]
            iteration = iteration_of(fields)
            if _is_whole(iteration):
                # The first `[date time]` before it, and whose it is: some count microseconds.
                before = max(0, start.start() - _STAMP_WITHIN)
                stamp = _STAMP.search(line, before, start.start())
                text = stamp[1] + (stamp[2] or "") if stamp else ""
                of = (MICROSECONDS if stamp[2] else SECONDS) if stamp else Generation()
                found.append(FoundIteration(iteration, start.start(), fields, text, of))
            start = following
        return found

    def _parts(self, line: str, start: int, stop: int) -> list[LineField]:
        """The parts of an iteration's text that are closed by a bar."""
        end = line.find("\n", start, stop)
        stop = end if end >= 0 else stop
        parts = []
        others = 0
        last = line.rfind("|", start, stop) + 1
        if last and _UNCLOSED.match(line[last:stop]):
            line, stop = f"{line[:stop]}|", stop + 1
        while (bar := line.find("|", start, stop)) >= 0:
            colon = line.rfind(":", start, bar)
            if colon >= 0:
                part = self._part(line[start:colon], line[colon + 1 : bar], colon + 1)
                others += part.field.startswith(OTHER)
                parts.append(part if others <= _MAX_OTHER else LineField("", None, colon + 1, bar))
            start = bar + 1
        names = {part.field for part in parts}
        if "lm_loss" not in names and not is_of_a_policy(names):
            own = OTHER + _IN_PLACE_OF_LM_LOSS
            parts = [p._replace(field="lm_loss") if p.field == own else p for p in parts]
        return parts

    def _part(self, name: str, text: str, start: int) -> LineField:
        known = self._fields.get(name) or self._fields.get(_key(name))
        stop = start + len(text)
        match = _VALUE.match(text)
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
        return LineField(
            field, (_integer if whole else _number)(match[1], power), start, stop, power
        )


def _key(name: str) -> str:
    return _JOINT.sub(" ", name.strip()).casefold()


def _numbers_of(line: str, start: re.Match[str]) -> tuple[LineField, LineField]:
    """The iteration, behind "iteration" or "iteration=", and of how many it is."""
    first = start.start() + len(_MARK) + (line[start.start() + len(_MARK)] == "=")
    slash = line.index("/", start.end(1))
    epoch = _EPOCH.search(line[max(0, start.start() - _WITHIN) : start.start()])
    if epoch and int(epoch[1]):
        # Counted from 0 to the last in each epoch; without a place, because digits do not show it.
        earlier = int(epoch[1]) * (int(start[2]) + 1)
        return (
            LineField("iteration", earlier + int(start[1]), 0, 0),
            LineField("total_iterations", None, 0, 0),
        )
    return (
        LineField("iteration", int(start[1]), first, start.end(1)),
        LineField("total_iterations", int(start[2]), slash + 1, start.end(2)),
    )


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


def _is_whole(found: Iteration) -> bool:
    """Whether enough is there to be an iteration's line; NeMo's first has no time behind a bar."""
    if found.elapsed_ms is not None or found.consumed_samples is not None:
        return True
    return found.lm_loss is not None and found.global_batch_size is not None


DIALECT = Dialect(name="Megatron-LM", line=BarLine, names=_NAMES)
