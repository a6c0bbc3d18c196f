"""Dialect of nanoGPT: `iter 10: loss 3.1338, time 1972.52ms, mfu 0.19%`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, EventReader, StepLine, StepNumber, read_first_match
from parakit.logs.iterations import EXTRA_METRIC_PREFIX
from parakit.logs.scraped import Validation

_EVALUATION = r"step (\d{1,9}): train loss \d{1,9}\.\d{4}, val loss (\d{1,9}\.\d{4})(?![\d…])"


class _Step(StepLine):
    """Format of a step. The time of a step with an evaluation includes the evaluation."""

    mark = b"iter "
    opening = re.compile(r"(?<!\| )(?<![A-Za-z])iter (?P<iteration>\d{1,9}): loss ")
    rank = 13
    trainer = "nanoGPT"
    numbers = (
        StepNumber("lm_loss", "loss ", "(?=, )"),
        StepNumber("elapsed_ms", "time ", "ms"),
        StepNumber(EXTRA_METRIC_PREFIX + "mfu %", r"mfu (?!-)", "%"),
    )


DIALECT = Dialect(
    name="nanoGPT",
    line=_Step,
    events=(
        EventReader(
            ", val loss ",
            read_first_match(
                _EVALUATION, lambda m: Validation(int(m[1]), {"lm loss": float(m[2])})
            ),
        ),
    ),
)
