"""MLPerf's results that print no step's time: it follows from where and when a block begins and ends.

A block is what is trained between two evaluations. Which unit its counts have differs: `step` counts
steps, `samples_count` samples, and `first_epoch_num` with `epoch_count` are tokens in GPT-3's. Some
trainers count steps where a block begins and samples where it ends, under one name. A block begins where
the one before it ended, so the two counts of that moment tell the units apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """The end of a block; its iteration, time and batch follow from its beginning, see `_begin`."""

    rank = 5
    of_blocks: ClassVar = True

    def find(self, line: str) -> list[ParsedIteration]:
        """A block's last step, its first where its mean is printed, or a step with its loss alone."""
        if means := super().find(line):
            return means
        found = parse_event(line)
        value, counts = found.get("value"), _counts(found.get("metadata"))
        match found.get("key"):
            case "block_stop" if counts and is_number(found.get("time_ms")):
                values: dict[str, int | float] = {"iteration": int(counts.get("step", 0))}
                if "step" not in counts and "samples_count" in counts:
                    values["consumed_samples"] = int(counts["samples_count"])
            # A `step` that is the samples' count is no step.
            case "tracked_stats" if counts.get("step") != counts.get("samples_count"):
                numbers = value if isinstance(value, dict) else {}
                loss = next((numbers[name] for name in _LOSSES if name in numbers), None)
                if not is_number(loss) or "step" not in counts:
                    return []
                values = {"iteration": int(counts["step"]), "lm_loss": float(loss)}
            case _:
                return []
        if found["key"] != "block_stop":
            return [make_parsed_iteration(line, values)]
        return [
            make_parsed_iteration(line, values)._replace(at_ms=found.get("time_ms"), counts=counts)
        ]


def _begin(line: str) -> Iterator[Fact]:
    """Where a block begins, to which its end is related."""
    found = parse_event(line)
    counts, begun = _counts(found.get("metadata")), found.get("time_ms")
    if found.get("key") != "block_start" or not counts or not is_number(begun):
        yield NumbersAhead(
            lambda line, given, stored: None
        )  # No end belongs to the block before it.
        return

    def complete(
        line: ParsedIteration, given: Mapping[str, str], stored: dict[str, Any]
    ) -> Iteration | None:
        """Return the block's last step with the mean time of its steps; None if it cannot be told."""
        at_ms, found = line.at_ms, line.iteration
        if at_ms is None:
            return None
        ends = dict(line.counts)
        if "epoch_count" in counts:
            ends["first_epoch_num"] = counts.get("first_epoch_num", 0) + counts["epoch_count"]
        sizes = find_step_sizes(given)
        batch = sizes["samples_count"]
        blocks = []
        for name, size in sizes.items():
            if size and name in counts and name in ends:
                units = stored.setdefault(name, _Units(size, batch if size == 1 else size))
                blocks.append(units.steps(counts[name], ends[name]))
        for block in blocks:
            if block and at_ms > begun:
                trained, last = block
                if batch:
                    known = {"global_batch_size": batch, "consumed_samples": batch * last}
                    found = msgspec.structs.replace(found, **known)
                each = (at_ms - begun) / trained
                return msgspec.structs.replace(found, iteration=last, elapsed_ms=each)
        return None

    yield NumbersAhead(complete)


class _Units:
    """The units of one count at the beginnings and at the ends of blocks, told by what follows on what.

    Args:
        size: What a step adds to the count, by its name.
        factor: What a step adds to the finer of the two units that it may have; 0 if not known.
    """

    def __init__(self, size: int, factor: int) -> None:
        self._size = size
        self._factor = factor
        self._previous_end: float | None = None
        self._scale: float | None = None
        """Brings a beginning into the unit of the ends."""

    def steps(self, begin: float, end: float) -> tuple[float, int] | None:
        """Return the steps of a block and the number of its last step.

        None if the units cannot be told, or the block trained nothing.
        """
        previous, self._previous_end = self._previous_end, end
        if previous is None:
            scale = self._scale_of_first(begin, end)
        else:
            # After a block without an end nothing follows: the units stay what they were.
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
        """Return what brings a beginning to the end before it; None if no unit does."""
        if begin == previous_end:
            return 1.0
        if self._factor and begin * self._factor == previous_end:
            return float(self._factor)
        if self._factor and begin == previous_end * self._factor:
            return 1 / self._factor
        return None

    def _scale_of_first(self, begin: float, end: float) -> float | None:
        """Return the scale by the count's name; None if beginning and end may be in two units."""
        if self._size > 1:
            # If the beginning is in steps, these are fewer samples than the block's end has.
            return None if 0 < begin * self._factor < end else 1.0
        # An end under the name of steps may count samples, which are a multiple of the batch.
        may_be_samples = self._factor > 1 and end % self._factor == 0
        return None if may_be_samples and begin * self._factor < end else 1.0


def _counts(about: Any) -> _Counts:
    found = about if isinstance(about, dict) else {}
    names = ("step", "samples_count", "first_epoch_num", "epoch_count")
    return {name: found[name] for name in names if is_number(found.get(name))}


DIALECT = Dialect(
    name="MLPerf, by blocks", line=_Block, events=(EventReader('"block_start"', _begin),)
)
