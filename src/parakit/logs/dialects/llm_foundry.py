"""Dialect of LLM Foundry and Composer: `[batch=3/100]:`, and metrics in the lines after it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from parakit.logs.dialects import (
    Dialect,
    EventReader,
    LineField,
    LineFormat,
    ParsedIteration,
    make_iteration,
)
from parakit.logs.iterations import Iteration
from parakit.logs.scraped import Fact, Generation, NumbersAhead

_LOSS = re.compile(r"Train loss/train/total: (\d{1,9}\.\d{4}|nan|inf)(?![\d.…])")
_BATCH = re.compile(r"\[batch=(\d{1,9})/(\d{1,9})\]:?")


class _Loss(LineFormat):
    """Format of the loss of a batch, whose number stands in a line before it (`_read_batch`)."""

    mark = b"Train loss/train/total: "
    opening = re.compile(r"Train loss/train/total: ")
    rank = 21

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the loss of a line; empty if the line has none."""
        match = _LOSS.search(line)
        if match is None:
            return []
        batch = _BATCH.search(line, 0, match.start())
        number = int(batch[1]) if batch else 0
        fields = [LineField("iteration", number), LineField("lm_loss", float(match[1]))]
        generation = Generation("LLM Foundry", "batches")
        parsed = ParsedIteration(
            make_iteration(fields), match.start(), fields, generation=generation
        )
        # An end on a clock makes the numbers of an earlier line necessary.
        return [parsed if number else parsed._replace(at_ms=0.0)]


def _read_batch(line: str) -> Iterator[Fact]:
    """Yield the number of the batch to which the next loss belongs."""
    match = _BATCH.search(line)
    if match is None:
        return
    number, total = int(match[1]), int(match[2])

    def complete(
        parsed: ParsedIteration, _arguments: Mapping[str, str], _stored: dict[str, Any]
    ) -> Iteration | None:
        """Return the loss with the batch's number; None for a loss whose own line has its number."""
        if parsed.iteration.iteration:
            return None
        return msgspec.structs.replace(parsed.iteration, iteration=number, total_iterations=total)

    yield NumbersAhead(complete)


DIALECT = Dialect(
    name="LLM Foundry",
    line=_Loss,
    events=(EventReader("[batch=", _read_batch),),
)
