"""Dialect of MLPerf's results without times of steps, which follow from the counts and times of blocks.

A block is the training between two evaluations. Its counts have different units: `step` counts steps,
`samples_count` samples, and `first_epoch_num` with `epoch_count` tokens for GPT-3. Some trainers count steps at the
beginning of a block and samples at its end, under one name. A block begins at the count at which the block before
ended, so these two counts show the units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec

from parakit.logs.dialects import Dialect, EventReader, ParsedIteration
from parakit.logs.dialects.mlperf import (
    Result,
    find_step_sizes,
    is_number,
    make_parsed_iteration,
    parse_event,
)
from parakit.logs.iterations import Iteration
from parakit.logs.scraped import Fact, NumbersAhead

_LOSSES = ("train_loss", "reduced_train_loss", "loss")

_Counts = Mapping[str, float]


class _Block(Result):
    """Format of the event that ends a block of steps.

    The iteration, the time and the batch size follow only together with the event at the block's beginning
    (`_read_block_start`).
    """

    rank = 5
    of_blocks: ClassVar = True

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the step that a line reports, as a list; empty if the line reports none.

        The line can report a step with a mean time, the end of a block, or a step with a loss.
        """
        steps_with_mean = super().find(line)
        if steps_with_mean:
            return steps_with_mean
        event = parse_event(line)
        value, counts = event.get("value"), _read_counts(event.get("metadata"))
        match event.get("key"):
            case "block_stop" if counts and is_number(event.get("time_ms")):
                values: dict[str, int | float] = {"iteration": int(counts.get("step", 0))}
                if "step" not in counts and "samples_count" in counts:
                    values["consumed_samples"] = int(counts["samples_count"])
            # A `step` that equals the count of samples is no number of steps.
            case "tracked_stats" if counts.get("step") != counts.get("samples_count"):
                numbers = value if isinstance(value, dict) else {}
                loss = next((numbers[name] for name in _LOSSES if name in numbers), None)
                if not is_number(loss) or "step" not in counts:
                    return []
                values = {"iteration": int(counts["step"]), "lm_loss": float(loss)}
            case "train_loss" if is_number(value) and counts:
                return [_parse_loss_event(line, float(value), counts)]
            case _:
                return []
        if event["key"] != "block_stop":
            return [make_parsed_iteration(line, values)]
        parsed = make_parsed_iteration(line, values)
        return [parsed._replace(at_ms=event.get("time_ms"), counts=counts)]


def _parse_loss_event(line: str, loss: float, counts: _Counts) -> ParsedIteration:
    """Return the step of a `train_loss` event, numbered by its count of steps or else by its count of samples."""
    samples = counts.get("samples_count")
    if "step" in counts and counts["step"] != samples:
        return make_parsed_iteration(line, {"iteration": int(counts["step"]), "lm_loss": loss})
    count = int(counts.get("step", samples or 0))
    parsed = make_parsed_iteration(line, {"iteration": count, "lm_loss": loss})
    return parsed._replace(by_arguments=partial(_number_by_samples, parsed.iteration))


def _number_by_samples(iteration: Iteration, arguments: Mapping[str, str]) -> Iteration | None:
    """Return an iteration with its number instead of its count of samples; None if that is no whole number of steps."""
    batch = find_step_sizes(arguments)["samples_count"]
    if not batch or iteration.iteration % batch:
        return None
    return msgspec.structs.replace(iteration, iteration=iteration.iteration // batch)


def _read_block_start(line: str) -> Iterator[Fact]:
    """Yield a function that completes the event at the end of a block from the event at its beginning.

    The function gives the end event the number of the block's last step and the mean time of the block's steps. If
    the line is no usable `block_start`, the function completes nothing, so that the next end is not combined with
    the beginning of an older block.
    """
    event = parse_event(line)
    counts, begin_ms = _read_counts(event.get("metadata")), event.get("time_ms")
    if event.get("key") != "block_start" or not counts or not is_number(begin_ms):
        yield NumbersAhead(lambda end, arguments, stored: None)
        return

    def complete(
        end: ParsedIteration, arguments: Mapping[str, str], stored: dict[str, Any]
    ) -> Iteration | None:
        """Return the block's last step with the mean time of the block's steps; None if the step is not known."""
        if end.at_ms is None:
            return None
        sizes = find_step_sizes(arguments)
        block = _find_steps(counts, end.counts, sizes, stored)
        if block is None or end.at_ms <= begin_ms:
            return None
        num_steps, last_step = block
        iteration, batch = end.iteration, sizes["samples_count"]
        if batch:
            iteration = msgspec.structs.replace(
                iteration, global_batch_size=batch, consumed_samples=batch * last_step
            )
        milliseconds = (end.at_ms - begin_ms) / num_steps
        return msgspec.structs.replace(iteration, iteration=last_step, elapsed_ms=milliseconds)

    yield NumbersAhead(complete)


def _read_run_start(line: str) -> Iterator[Fact]:
    """Yield a function that stores the counts of a block whose beginning is not in the log.

    Some trainers print no beginning of the first block. Its end is the beginning of the second block, so its counts
    show the units of that beginning. The block itself has no time.
    """
    if parse_event(line).get("key") != "run_start":
        return

    def complete(
        end: ParsedIteration, arguments: Mapping[str, str], stored: dict[str, Any]
    ) -> Iteration | None:
        """Store the counts of a block's end; return None."""
        if end.at_ms is not None:
            sizes = find_step_sizes(arguments)
            for name in sizes.keys() & end.counts.keys():
                if sizes[name]:
                    _find_units(name, sizes, stored).store_end(end.counts[name])
        return None

    yield NumbersAhead(complete)


def _find_units(name: str, sizes: Mapping[str, int], stored: dict[str, Any]) -> _Units:
    """Return the units of a count, as found so far; they are created in `stored` at the first call."""
    size = sizes[name]
    units: _Units = stored.setdefault(
        name, _Units(size, sizes["samples_count"] if size == 1 else size)
    )
    return units


def _find_steps(
    begins: _Counts, ends: _Counts, sizes: Mapping[str, int], stored: dict[str, Any]
) -> tuple[float, int] | None:
    """Return the number of steps in a block, and the number of its last step; None if no count shows them.

    Args:
        begins: Counts at the beginning of the block.
        ends: Counts at its end.
        sizes: Increase of each count per step.
        stored: Units of each count, by name. They are kept from block to block and changed in place.
    """
    ends = dict(ends)
    if "epoch_count" in begins:
        ends["first_epoch_num"] = begins.get("first_epoch_num", 0) + begins["epoch_count"]
    blocks = []
    for name, size in sizes.items():
        if size and name in begins and name in ends:
            # Every count is read, because its units follow from block to block.
            units = _find_units(name, sizes, stored)
            blocks.append(units.steps(begins[name], ends[name]))
    return next(filter(None, blocks), None)


class _Units:
    """Units of one count at the beginnings and the ends of blocks, found from consecutive blocks.

    A count may be in steps or in samples, and its unit may differ between beginnings and ends.

    Args:
        size: Increase of the count per step if the count's name states its unit.
        factor: Increase of the count per step in the finer of its two possible units; 0 if unknown.
    """

    def __init__(self, size: int, factor: int) -> None:
        self._size = size
        self._factor = factor
        self._previous_end: float | None = None
        self._scale: float | None = None
        """Factor from the unit of beginnings to the unit of ends; None if unknown."""

    def store_end(self, end: float) -> None:
        """Store the count at the end of a block whose beginning is unknown."""
        self._previous_end = end

    def steps(self, begin: float, end: float) -> tuple[float, int] | None:
        """Return the number of steps of a block, and the number of its last step.

        None means that the units are unknown, or that the block trained nothing.
        """
        previous, self._previous_end = self._previous_end, end
        if previous is None:
            scale = self._scale_of_first(begin, end)
        else:
            # If the block before has no end, the counts do not fit, and the units stay as they were.
            scale = self._scale_between(begin, previous) or self._scale
            self._scale = scale
        if scale is None:
            return None
        size = self._size
        if scale != 1:
            size = 1 if scale < 1 else self._factor
        trained, last = (end - scale * begin) / size, round(end / size)
        return (trained, last) if trained > 0 and last > 0 else None

    def _scale_between(self, begin: float, previous_end: float) -> float | None:
        """Return the factor from the unit of beginnings to the unit of ends.

        A block begins when the block before it ends, so both counts are of the same moment. None means that no pair
        of units explains the counts.

        Args:
            begin: Count at the beginning of a block.
            previous_end: Count at the end of the block before.
        """
        if begin == previous_end:
            return 1.0
        if self._factor and begin * self._factor == previous_end:
            return float(self._factor)
        if self._factor and begin == previous_end * self._factor:
            return 1 / self._factor
        return None

    def _scale_of_first(self, begin: float, end: float) -> float | None:
        """Return the factor from the unit of beginnings to that of ends, for the first block; None if ambiguous."""
        if self._size > 1:
            # A beginning in steps would be fewer samples than the end of the block.
            return None if 0 < begin * self._factor < end else 1.0
        # An end with the name of steps may count samples, which are a multiple of the batch size.
        may_be_samples = self._factor > 1 and end % self._factor == 0
        return None if may_be_samples and begin * self._factor < end else 1.0


def _read_counts(metadata: Any) -> _Counts:
    """Return the counts in a result's metadata, by name; empty if there are none."""
    values = metadata if isinstance(metadata, dict) else {}
    names = ("step", "samples_count", "first_epoch_num", "epoch_count")
    return {name: values[name] for name in names if is_number(values.get(name))}


DIALECT = Dialect(
    name="MLPerf, by blocks",
    line=_Block,
    events=(
        EventReader('"block_start"', _read_block_start),
        EventReader('"run_start"', _read_run_start),
    ),
)
