"""Dialect of LLM Foundry and Composer: `[batch=3/100]:`, and metrics in the lines after it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parakit.logs.dialects import (
    Dialect,
    EventReader,
    LineField,
    LineFormat,
    ParsedIteration,
    make_iteration,
)
from parakit.logs.scraped import Fact, Generation, StepAhead

_LOSS = re.compile(r"Train loss/train/total: (\d{1,9}\.\d{4}|nan|inf)(?![\d.…])")
_BATCH = re.compile(r"\[batch=(\d{1,9})/(\d{1,9})\]:?")


class _Loss(LineFormat):
    """Format of the loss of a batch. The number of the batch is in an earlier line (`_read_batch`)."""

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
        return [
            ParsedIteration(
                make_iteration(fields),
                match.start(),
                fields,
                generation=generation,
                by_order=not number,
            )
        ]


def _read_batch(line: str) -> Iterator[Fact]:
    """Yield the number of the batch to which the next loss belongs."""
    match = _BATCH.search(line)
    if match is None:
        return
    yield StepAhead(int(match[1]), int(match[2]))


DIALECT = Dialect(
    name="LLM Foundry",
    line=_Loss,
    events=(EventReader("[batch=", _read_batch),),
)
