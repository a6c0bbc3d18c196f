"""The iteration lines of a run by column: half a million take 50 MB, and one field is one array.

As a sequence it gives `Iteration`s, made when they are asked for. What must look at every line of a
long run takes `values` and `known`, which cost no object a line.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray


class Iteration(msgspec.Struct, frozen=True, gc=False):
    """One iteration line. A msgspec struct: half a million are made in seconds, frozen or not."""

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
    """Every further number of the line under its own name: MoE's balancing losses, MTP's."""
    first_of_start: bool = False
    """First line after a start or a resume."""
    averaged: bool = False
    """Mean over all iterations since the start, losses included (second line, 0.16 on)."""
    after_pause: bool = False
    """Follows an evaluation or a checkpoint."""

    @property
    def has_nan(self) -> bool:
        """Whether its loss or its gradient norm is no number."""
        return (
            bool(self.nan_iterations)
            or (self.lm_loss is not None and not math.isfinite(self.lm_loss))
            or (self.grad_norm is not None and math.isnan(self.grad_norm))
        )


EXTRA_METRIC_PREFIX = "other/"
"""Before the name of a number that has no field of its own."""
MEAN_SECONDS = EXTRA_METRIC_PREFIX + "mean seconds of all iterations so far"
"""What some trainers print in place of an iteration's own time, which follows from two of them."""
SECONDS_SO_FAR = EXTRA_METRIC_PREFIX + "seconds since the start"
"""Whole ones, beside such a mean: both count from the start of the process, which may be a resume."""
LOG_LINE = "log_line"
"""The column with each line's own number in its file, from 1 on; no part of what it says."""
_BLOCK = 4096
_FLAGS = ("first_of_start", "averaged", "after_pause")
_FIELDS = tuple(name for name in Iteration.__struct_fields__ if name != "extra_metrics")
_INTEGERS = frozenset(
    name for name in _FIELDS if name not in _FLAGS and "int" in str(Iteration.__annotations__[name])
)


@dataclass
class Columns:
    """Values of some lines by field; where not every line has one, `known` says which do."""

    count: int = 0
    values: dict[str, NDArray[Any]] = field(default_factory=dict)
    known: dict[str, NDArray[np.bool_]] = field(default_factory=dict)

    def at(self, places: slice | NDArray[np.int64]) -> Columns:
        """The lines at these places, copied."""
        values = {name: column[places].copy() for name, column in self.values.items()}
        known = {name: column[places].copy() for name, column in self.known.items()}
        count = len(np.arange(self.count)[places])
        return Columns(count, values, known)

    def rows(self, start: int, stop: int) -> Iterator[Iteration]:
        """The lines from `start` to before `stop` as objects."""
        lists: dict[str, list[Any]] = {}
        for name, column in self.values.items():
            lists[name] = column[start:stop].tolist()
            if name in self.known:
                pairs = zip(lists[name], self.known[name][start:stop].tolist(), strict=True)
                lists[name] = [value if there else None for value, there in pairs]
        if others := {
            n.removeprefix(EXTRA_METRIC_PREFIX): lists[n]
            for n in lists
            if n.startswith(EXTRA_METRIC_PREFIX)
        }:
            rows = (zip(others, row, strict=True) for row in zip(*others.values(), strict=True))
            found = ({name: value for name, value in row if value is not None} for row in rows)
            lists["extra_metrics"] = [row or None for row in found]
        for name in Iteration.__struct_fields__:
            lists.setdefault(name, [False if name in _FLAGS else None] * (stop - start))
        return map(Iteration, *(lists[name] for name in Iteration.__struct_fields__))


def make_columns(lines: Sequence[Iteration]) -> Columns:
    """Lines as columns; integers must be below 2**63."""
    found = Columns(len(lines))
    values = {name: list(map(operator.attrgetter(name), lines)) for name in _FIELDS}
    for name in sorted({name for line in lines for name in line.extra_metrics or ()}):
        values[EXTRA_METRIC_PREFIX + name] = [
            (line.extra_metrics or {}).get(name) for line in lines
        ]
    for name, column in values.items():
        if any(value is not None and value is not False for value in column):
            known = [value is not None for value in column]
            if not all(known):
                found.known[name] = np.array(known)
            plain = [0 if value is None else value for value in column]
            found.values[name] = np.array(plain, dtype=find_dtype(name))
    return found


def find_dtype(name: str) -> type[np.generic]:
    """The type of a field's column."""
    if name in _FLAGS:
        return np.bool_
    return np.int64 if name in _INTEGERS or name == LOG_LINE else np.float64


class IterationTable(Sequence[Iteration]):
    """Iteration lines in order of their numbers, each number once."""

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns or Columns()

    @classmethod
    def of(cls, lines: Iterable[Iteration]) -> IterationTable:
        """A table of these lines, as they come."""
        return cls(make_columns(list(lines)))

    def values(self, name: str) -> NDArray[np.float64]:
        """A field of every line; NaN where the line does not have it (or holds NaN, see `known`)."""
        column = self._columns.values.get(name)
        if column is None:
            return np.full(len(self), np.nan)
        found: NDArray[np.float64] = column.astype(np.float64)
        if name in self._columns.known:
            found[~self._columns.known[name]] = np.nan
        return found

    def known(self, name: str) -> NDArray[np.bool_]:
        """Which lines have a field; of a flag, which carry it."""
        column = self._columns.values.get(name)
        if column is None:
            return np.zeros(len(self), np.bool_)
        if name in _FLAGS:
            return column.copy()
        return self._columns.known.get(name, np.ones(len(self), np.bool_)).copy()

    def timed(self) -> IterationTable:
        """With the times that means over all iterations so far imply, where a log has only these."""
        if self.known("elapsed_ms").any() or MEAN_SECONDS not in self._columns.values:
            return self
        values = dict(self._columns.values)
        del values[MEAN_SECONDS]
        values.pop(SECONDS_SO_FAR, None)
        times = self._times_of_means()
        values["elapsed_ms"] = np.nan_to_num(times)
        known = self._columns.known | {"elapsed_ms": ~np.isnan(times)}
        return IterationTable(Columns(len(self), values, known))

    def _times_of_means(self) -> NDArray[np.float64]:
        """Milliseconds of an iteration; NaN where a mean is not the time so far over its iterations."""
        times = np.full(len(self), np.nan)
        lines = zip(
            *(self.numbers, self.values(MEAN_SECONDS), self.values(SECONDS_SO_FAR)), strict=True
        )
        start = last = 0
        before = 0.0
        for place, (number, mean, elapsed) in enumerate(lines):
            if not (mean > 0 and elapsed < math.inf):
                continue
            slack = 1 + 1e-3 * elapsed  # A mean may be printed with four digits.
            for first in (start, 0, number - max(1, round(elapsed / mean))):
                if abs(mean * (number - first) - elapsed) <= slack:
                    break
            else:
                continue
            if first != start:
                start, last, before = first, first, 0.0
            # Of many iterations the seconds say more than a rounded mean.
            so_far = min(max(mean * (number - first), elapsed - 0.5), elapsed + 0.5)
            if number > last and so_far > before:
                times[place] = 1000 * (so_far - before) / (number - last)
                last, before = number, so_far
        return times

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The iterations' numbers."""
        return self._columns.values.get("iteration", np.zeros(0, np.int64)).copy()

    @property
    def other_names(self) -> tuple[str, ...]:
        """Names of the numbers without a field; `values(OTHER + name)` has them."""
        return tuple(
            name.removeprefix(EXTRA_METRIC_PREFIX)
            for name in self._columns.values
            if name.startswith(EXTRA_METRIC_PREFIX)
        )

    @property
    def has_nan(self) -> NDArray[np.bool_]:
        """`Iteration.has_nan` of every line."""
        loss = self.known("lm_loss") & ~np.isfinite(self.values("lm_loss"))
        norm = self.known("grad_norm") & np.isnan(self.values("grad_norm"))
        found: NDArray[np.bool_] = (np.nan_to_num(self.values("nan_iterations")) > 0) | loss | norm
        return found

    def __len__(self) -> int:
        return self._columns.count

    @overload
    def __getitem__(self, place: int) -> Iteration: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Iteration, ...]: ...
    def __getitem__(self, place: int | slice) -> Iteration | tuple[Iteration, ...]:
        if isinstance(place, slice):
            found = self._columns.at(place)
            return tuple(found.rows(0, found.count))
        index = range(len(self))[place]
        return next(self._columns.rows(index, index + 1))

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


class TableBuilder:
    """Takes lines in the order of a log; of two with one number the later counts."""

    def __init__(self) -> None:
        self._chunks: list[Columns] = []
        self._recent: list[tuple[Iteration, int]] = []
        self._count = 0
        self.first: int | None = None
        """Number of the first line."""
        self.last: Iteration | None = None

    def __len__(self) -> int:
        return self._count

    def append(self, line: Iteration, log_line: int) -> None:
        """Add the iteration that stands in a line of the file."""
        if self.first is None:
            self.first = line.iteration
        self._recent.append((line, log_line))
        self.last = line
        self._count += 1
        if len(self._recent) >= _BLOCK:
            self._flush()

    def extend(self, lines: Columns) -> None:
        """Add lines that are columns already, with rising numbers."""
        self._flush()
        if self.first is None:
            self.first = int(lines.values["iteration"][0])
        self._chunks.append(lines)
        self._count += lines.count
        (self.last,) = lines.rows(lines.count - 1, lines.count)

    def build(self) -> tuple[IterationTable, IterationTable]:
        """The table, and the lines that a later one replaced. The builder is empty afterwards."""
        self._flush()
        columns = _joined(self._chunks, self._count)
        numbers = columns.values.get("iteration", np.zeros(0, np.int64))
        if np.all(numbers[1:] > numbers[:-1]):
            return IterationTable(columns), IterationTable()
        _, places = np.unique(numbers[::-1], return_index=True)
        keep = len(numbers) - 1 - places
        replaced = columns.at(np.setdiff1d(np.arange(len(numbers)), keep))
        for each in (columns.values, columns.known):
            for name in each:
                each[name] = each[name][keep]
        columns.count = len(keep)
        return IterationTable(columns), IterationTable(replaced)

    def _flush(self) -> None:
        if self._recent:
            lines, places = zip(*self._recent, strict=True)
            columns = make_columns(lines)
            columns.values[LOG_LINE] = np.array(places, find_dtype(LOG_LINE))
            self._chunks.append(columns)
            self._recent = []


def _joined(chunks: list[Columns], count: int) -> Columns:
    """Chunks as one; a chunk's column is given up as soon as it is copied."""
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
