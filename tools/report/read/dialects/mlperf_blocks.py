"""MLPerf's results that print no step's time: it follows from where and when a block begins and ends.

A block is what is trained between two evaluations. Which unit its counts have differs: `step` counts
steps, `samples_count` samples, and `first_epoch_num` with `epoch_count` are tokens in GPT-3's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from tools.report.read.dialects import Dialect, FoundIteration, News
from tools.report.read.dialects.mlperf import Result, event, found_iteration, is_number, step_sizes
from tools.report.read.iterations import Iteration
from tools.report.read.scraped import Fact, NumbersAhead

_LOSSES = ("train_loss", "reduced_train_loss", "loss")

_Counts = Mapping[str, float]


class _Block(Result):
    """The end of a block; its iteration, time and batch follow from its beginning, see `_begin`."""

    rank = 5
    of_blocks: ClassVar = True

    def find(self, line: str) -> list[FoundIteration]:
        """A block's last step, its first where its mean is printed, or a step with its loss alone."""
        if means := super().find(line):
            return means
        found = event(line)
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
        at_ms = found.get("time_ms") if found["key"] == "block_stop" else None
        return [found_iteration(line, values)._replace(at_ms=at_ms)]


def _begin(line: str) -> Iterator[Fact]:
    """Where a block begins, to which its end is related."""
    found = event(line)
    counts, begun = _counts(found.get("metadata")), found.get("time_ms")
    if found.get("key") != "block_start" or not counts or not is_number(begun):
        yield NumbersAhead(lambda line, given: None)  # No end belongs to the one before it.
        return

    def complete(line: FoundIteration, given: Mapping[str, str]) -> Iteration | None:
        """The block's last step with the mean time of its steps."""
        at_ms, found = line.at_ms, line.iteration
        if at_ms is None:
            return None
        ends: dict[str, float] = {"step": found.iteration}
        ends["samples_count"] = found.consumed_samples or 0
        if "epoch_count" in counts:
            ends["first_epoch_num"] = counts.get("first_epoch_num", 0) + counts["epoch_count"]
        sizes = step_sizes(given)
        # A count of what, and how many of it are a step.
        for name, size in sizes.items():
            trained = ends.get(name, 0) - counts.get(name, math.inf)
            if size and trained > 0 and at_ms > begun:
                number, each = round(ends[name] / size), (at_ms - begun) * size / trained
                if batch := sizes["samples_count"]:
                    known = {"global_batch_size": batch, "consumed_samples": batch * number}
                    found = msgspec.structs.replace(found, **known)
                return msgspec.structs.replace(found, iteration=number, elapsed_ms=each)
        return None

    yield NumbersAhead(complete)


def _counts(about: Any) -> _Counts:
    found = about if isinstance(about, dict) else {}
    names = ("step", "samples_count", "first_epoch_num", "epoch_count")
    return {name: found[name] for name in names if is_number(found.get(name))}


DIALECT = Dialect(name="MLPerf, by blocks", line=_Block, news=(News('"block_start"', _begin),))
