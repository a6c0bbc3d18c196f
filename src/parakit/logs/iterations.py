"""Iteration lines of a run, stored by column.

A field of all lines is one array, so half a million lines take 50 MB. `IterationTable` is also a sequence of
`Iteration` objects, which are made on request. Code that reads every line of a long run uses `values` and `known`
instead, which make no objects.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray


class Iteration(msgspec.Struct, frozen=True, gc=False):
    """Numbers in one iteration line. A number that the line does not have is None.

    The class is a msgspec struct, because half a million objects must be made in seconds.
    """

    iteration: int
    total_iterations: int | None = None
    consumed_samples: int | None = None
    skipped_samples: int | None = None
    elapsed_ms: float | None = None
    throughput_tflops_per_gpu: float | None = None
    energy_joules_per_gpu: float | None = None
    power_watts_per_gpu: float | None = None
    learning_rate: float | None = None
    global_batch_size: int | None = None
    lm_loss: float | None = None
    loss_scale: float | None = None
    grad_norm: float | None = None
    params_norm: float | None = None
    num_zeros: float | None = None
    skipped_iterations: int | None = None
    nan_iterations: int | None = None
    extra_metrics: dict[str, float] | None = None
    """All other numbers of the line by their printed names, such as load-balancing losses of MoE."""
    first_of_start: bool = False
    """True for the first line after a start or a resume."""
    averaged: bool = False
    """True if the numbers are means over all iterations since the start (second line, from 0.16 on)."""
    after_pause: bool = False
    """True if an evaluation or a checkpoint came before the line."""

    @property
    def has_nan(self) -> bool:
        """True if the loss is NaN or infinite, or the gradient norm is NaN."""
        return (
            bool(self.nan_iterations)
            or (self.lm_loss is not None and not math.isfinite(self.lm_loss))
            or (self.grad_norm is not None and math.isnan(self.grad_norm))
        )


EXTRA_METRIC_PREFIX = "other/"
"""Prefix of the column of a number that has no field of `Iteration`; its printed name follows."""
MEAN_SECONDS = EXTRA_METRIC_PREFIX + "mean seconds of all iterations so far"
"""Column of the mean iteration time since the start, which some trainers print instead of the time.

Two such means give an iteration's time."""
SECONDS_SO_FAR = EXTRA_METRIC_PREFIX + "seconds since the start"
"""Column of the full seconds since the start of the process, which such trainers print with the mean."""
CLOCK_SECONDS = EXTRA_METRIC_PREFIX + "seconds of the clock"
"""Column of the date and time at the end of an iteration, if a trainer prints no times of iterations."""
TRAINED_SECONDS = EXTRA_METRIC_PREFIX + "trained seconds"
"""Column of the seconds of training so far, without evaluations, which some trainers print instead of a time."""
PRINTED_TOKENS_PER_SECOND = EXTRA_METRIC_PREFIX + "tokens/s"
"""Column of the throughput of all devices that a trainer prints."""
PRINTED_TOKENS_PER_DEVICE = EXTRA_METRIC_PREFIX + "tokens/s/device"
"""Column of the throughput of a device that a trainer prints."""
LOG_LINE = "log_line"
"""Column of the line number of each iteration in the file, from 1."""
_BLOCK = 4096
_FLAGS = ("first_of_start", "averaged", "after_pause")
_FIELDS = tuple(name for name in Iteration.__struct_fields__ if name != "extra_metrics")
_INTEGERS = frozenset(
    name for name in _FIELDS if name not in _FLAGS and "int" in str(Iteration.__annotations__[name])
)


@dataclass
class Columns:
    """Columns of some iteration lines, by field.

    `known` states which lines have a value. A field without an entry in `known` has a value in every line.
    """

    count: int = 0
    values: dict[str, NDArray[Any]] = field(default_factory=dict)
    known: dict[str, NDArray[np.bool_]] = field(default_factory=dict)

    def select(self, indices: slice | NDArray[np.int64]) -> Columns:
        """Return copies of the lines at these indices."""
        values = {name: column[indices].copy() for name, column in self.values.items()}
        known = {name: column[indices].copy() for name, column in self.known.items()}
        count = len(np.arange(self.count)[indices])
        return Columns(count, values, known)

    def rows(self, start: int, stop: int) -> Iterator[Iteration]:
        """Yield the lines from index `start` to `stop` (exclusive) as objects."""
        lists: dict[str, list[Any]] = {}
        for name, column in self.values.items():
            values = column[start:stop].tolist()
            if name in self.known:
                is_known = self.known[name][start:stop].tolist()
                values = [
                    value if known else None for value, known in zip(values, is_known, strict=True)
                ]
            lists[name] = values
        extra_names = [name for name in lists if name.startswith(EXTRA_METRIC_PREFIX)]
        if extra_names:
            extra_lists = {name: lists[name] for name in extra_names}
            lists["extra_metrics"] = list(_join_extra_metrics(extra_lists))
        for name in Iteration.__struct_fields__:
            default = False if name in _FLAGS else None
            lists.setdefault(name, [default] * (stop - start))
        return map(Iteration, *(lists[name] for name in Iteration.__struct_fields__))


def _join_extra_metrics(
    lists: Mapping[str, Sequence[float | None]],
) -> Iterator[dict[str, float] | None]:
    """Yield the extra metrics of each line by printed name; None for a line without any."""
    names = [name.removeprefix(EXTRA_METRIC_PREFIX) for name in lists]
    for values in zip(*lists.values(), strict=True):
        metrics = {
            name: value for name, value in zip(names, values, strict=True) if value is not None
        }
        yield metrics or None


def make_columns(lines: Sequence[Iteration]) -> Columns:
    """Return lines as columns. A field without any value gets no column. Integers must be below 2**63."""
    values: dict[str, list[Any]] = {}
    for name in _FIELDS:
        values[name] = list(map(operator.attrgetter(name), lines))
    extra_names: set[str] = set()
    for line in lines:
        extra_names.update(line.extra_metrics or ())
    for name in sorted(extra_names):
        column_name = EXTRA_METRIC_PREFIX + name
        values[column_name] = [(line.extra_metrics or {}).get(name) for line in lines]
    columns = Columns(len(lines))
    for name, column in values.items():
        has_value = any(value is not None and value is not False for value in column)
        if not has_value:
            continue
        known = [value is not None for value in column]
        if not all(known):
            columns.known[name] = np.array(known)
        plain = [0 if value is None else value for value in column]
        columns.values[name] = np.array(plain, dtype=find_dtype(name))
    return columns


def find_dtype(name: str) -> type[np.generic]:
    """Return the NumPy dtype of a field's column: bool for flags, else int64 or float64."""
    if name in _FLAGS:
        return np.bool_
    return np.int64 if name in _INTEGERS or name == LOG_LINE else np.float64


class IterationTable(Sequence[Iteration]):
    """Iteration lines in the order of their numbers. Every number occurs at most once."""

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns or Columns()

    @classmethod
    def of(cls, lines: Iterable[Iteration]) -> IterationTable:
        """Return a table of these lines in their order."""
        return cls(make_columns(list(lines)))

    def values(self, name: str) -> NDArray[np.float64]:
        """Return the values of a field, one per line; NaN if the line has no value.

        A printed value may also be NaN; `known` distinguishes the two cases.
        """
        column = self._columns.values.get(name)
        if column is None:
            return np.full(len(self), np.nan)
        values: NDArray[np.float64] = column.astype(np.float64)
        if name in self._columns.known:
            values[~self._columns.known[name]] = np.nan
        return values

    def known(self, name: str) -> NDArray[np.bool_]:
        """Return, for every line, whether the line has a value of the field. For a flag, return whether it is set."""
        column = self._columns.values.get(name)
        if column is None:
            return np.zeros(len(self), np.bool_)
        if name in _FLAGS:
            return column.copy()
        return self._columns.known.get(name, np.ones(len(self), np.bool_)).copy()

    def derive_times(self) -> IterationTable:
        """Return the table with iteration times computed from mean times, sums of times or clocks, if it has none.

        The columns with these helper values are removed.
        """
        sources = (MEAN_SECONDS, TRAINED_SECONDS, CLOCK_SECONDS)
        source = next((name for name in sources if name in self._columns.values), None)
        if source is None:
            return self
        helpers = (*sources, SECONDS_SO_FAR)
        values = {
            name: column for name, column in self._columns.values.items() if name not in helpers
        }
        if self.known("elapsed_ms").any():
            return IterationTable(Columns(len(self), values, self._columns.known))
        times = (
            self._compute_times_from_means()
            if source == MEAN_SECONDS
            else self._compute_times_from_sums(source)
        )
        values["elapsed_ms"] = np.nan_to_num(times)
        known = self._columns.known | {"elapsed_ms": ~np.isnan(times)}
        return IterationTable(Columns(len(self), values, known))

    def _compute_times_from_sums(self, name: str) -> NDArray[np.float64]:
        """Return the milliseconds of each iteration, from a column with a clock or with a sum of seconds.

        The result is NaN for the first line, for the first line after a restart, and where the seconds do not rise.
        If iterations between two lines are missing, the later line gets the mean time of all of them.
        """
        times = np.full(len(self), np.nan)
        if len(self) < 2:
            return times
        # A date and time in seconds has ten digits before the point, which leaves six after it.
        seconds = np.round(np.diff(self.values(name)), 6)
        usable = (seconds > 0) & ~self.known("first_of_start")[1:]
        times[1:][usable] = 1000 * seconds[usable] / np.diff(self.numbers)[usable]
        return times

    def _compute_times_from_means(self) -> NDArray[np.float64]:
        """Return the milliseconds of each iteration, from columns with mean times and with seconds since the start.

        A mean counts from the start of a process, and the log does not print with which iteration a process started.
        The result is NaN for a line whose mean and seconds fit no such iteration.
        """
        times = np.full(len(self), np.nan)
        means, seconds_so_far = self.values(MEAN_SECONDS), self.values(SECONDS_SO_FAR)
        first = last = 0
        seconds_before = 0.0
        lines = zip(self.numbers, means, seconds_so_far, strict=True)
        for index, (number, mean, elapsed) in enumerate(lines):
            if not (mean > 0 and elapsed < math.inf):
                continue
            likely_first = number - max(1, round(elapsed / mean))
            new_first = _find_first_iteration(
                number, mean=mean, elapsed=elapsed, candidates=(first, 0, likely_first)
            )
            if new_first is None:
                continue
            if new_first != first:
                first, last, seconds_before = new_first, new_first, 0.0
            # The mean is rounded. Over many iterations the printed seconds are more precise.
            seconds = min(max(mean * (number - first), elapsed - 0.5), elapsed + 0.5)
            if number > last and seconds > seconds_before:
                times[index] = 1000 * (seconds - seconds_before) / (number - last)
                last, seconds_before = number, seconds
        return times

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Number of every iteration, in rising order."""
        return self._columns.values.get("iteration", np.zeros(0, np.int64)).copy()

    @property
    def other_names(self) -> tuple[str, ...]:
        """Printed names of the extra metrics; `values(EXTRA_METRIC_PREFIX + name)` returns one of them."""
        return tuple(
            name.removeprefix(EXTRA_METRIC_PREFIX)
            for name in self._columns.values
            if name.startswith(EXTRA_METRIC_PREFIX)
        )

    @property
    def has_nan(self) -> NDArray[np.bool_]:
        """`Iteration.has_nan` for every line."""
        loss = self.known("lm_loss") & ~np.isfinite(self.values("lm_loss"))
        norm = self.known("grad_norm") & np.isnan(self.values("grad_norm"))
        counted = np.nan_to_num(self.values("nan_iterations")) > 0
        has_nan: NDArray[np.bool_] = counted | loss | norm
        return has_nan

    def __len__(self) -> int:
        return self._columns.count

    @overload
    def __getitem__(self, index: int) -> Iteration: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Iteration, ...]: ...
    def __getitem__(self, index: int | slice) -> Iteration | tuple[Iteration, ...]:
        if isinstance(index, slice):
            columns = self._columns.select(index)
            return tuple(columns.rows(0, columns.count))
        position = range(len(self))[index]
        return next(self._columns.rows(position, position + 1))

    def __iter__(self) -> Iterator[Iteration]:
        for start in range(0, len(self), _BLOCK):
            yield from self._columns.rows(start, min(len(self), start + _BLOCK))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IterationTable({len(self)} lines)"


def _find_first_iteration(
    number: int, *, mean: float, elapsed: float, candidates: Sequence[int]
) -> int | None:
    """Return the candidate after which the iterations up to `number` take `elapsed` seconds; None if none fits.

    A candidate is the number of the last iteration before the process started. It fits if (`number` - candidate)
    times `mean` seconds is close to `elapsed`. The first candidate that fits is returned.
    """
    slack = 1 + 1e-3 * elapsed  # The mean may be printed with only four digits.
    for candidate in candidates:
        if abs(mean * (number - candidate) - elapsed) <= slack:
            return candidate
    return None


class TableBuilder:
    """Builder of a table of iterations from the lines of a log, in their order.

    If several lines have the same iteration number, the last of these lines is used.
    """

    def __init__(self) -> None:
        self._chunks: list[Columns] = []
        self._recent: list[tuple[Iteration, int]] = []
        self._count = 0
        self.first: int | None = None
        """Number of the first line's iteration; None before any line."""
        self.last: Iteration | None = None

    def __len__(self) -> int:
        return self._count

    def append(self, line: Iteration, log_line: int) -> None:
        """Append the iteration that a line of the log prints. `log_line` is the number of this line in the file."""
        if self.first is None:
            self.first = line.iteration
        self._recent.append((line, log_line))
        self.last = line
        self._count += 1
        if len(self._recent) >= _BLOCK:
            self._flush()

    def extend(self, lines: Columns) -> None:
        """Append several lines at once, given as columns.

        There must be at least one line. The caller must have checked that the iteration numbers ascend.
        """
        self._flush()
        if self.first is None:
            self.first = int(lines.values["iteration"][0])
        self._chunks.append(lines)
        self._count += lines.count
        self.last = next(lines.rows(lines.count - 1, lines.count))

    def build(self) -> tuple[IterationTable, IterationTable]:
        """Return two tables: the iterations, and the lines that later lines with the same number replaced.

        The builder is empty afterwards.
        """
        self._flush()
        columns = _join_chunks(self._chunks, self._count)
        numbers = columns.values.get("iteration", np.zeros(0, np.int64))
        if np.all(numbers[1:] > numbers[:-1]):
            return IterationTable(columns), IterationTable()
        _, positions_from_end = np.unique(numbers[::-1], return_index=True)
        keep = len(numbers) - 1 - positions_from_end
        replaced = columns.select(np.setdiff1d(np.arange(len(numbers)), keep))
        for arrays in (columns.values, columns.known):
            for name in arrays:
                arrays[name] = arrays[name][keep]
        columns.count = len(keep)
        return IterationTable(columns), IterationTable(replaced)

    def _flush(self) -> None:
        """Store the lines that were appended since the last flush as columns."""
        if self._recent:
            lines, line_numbers = zip(*self._recent, strict=True)
            columns = make_columns(lines)
            columns.values[LOG_LINE] = np.array(line_numbers, find_dtype(LOG_LINE))
            self._chunks.append(columns)
            self._recent = []


def _join_chunks(chunks: list[Columns], count: int) -> Columns:
    """Return the columns of all chunks joined in order, `count` rows in total, and empty the list `chunks`.

    Each column of a chunk is freed as soon as it is copied, which limits the peak memory. Rows of a chunk that
    has no such column are 0 and marked as unknown.
    """
    joined = Columns(count)
    names = dict.fromkeys(name for chunk in chunks for name in chunk.values)
    for name in names:
        column = np.zeros(count, find_dtype(name))
        known = np.zeros(count, np.bool_)
        start = 0
        for chunk in chunks:
            stop = start + chunk.count
            values = chunk.values.pop(name, None)
            if values is not None:
                column[start:stop] = values
                known[start:stop] = chunk.known.pop(name, True)
            start = stop
        joined.values[name] = column
        if name not in _FLAGS and not known.all():
            joined.known[name] = known
    chunks.clear()
    return joined
