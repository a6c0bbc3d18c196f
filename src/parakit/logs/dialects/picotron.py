"""Dialect of picotron: `[rank 2] Step: 3 | Loss: 8.9219 | … | Tokens/s: 10.61K | Tokens/s/GPU: 1.33K | …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import SHORT_NUMBER, Dialect, StepLine, StepNumber
from parakit.logs.iterations import (
    EXTRA_METRIC_PREFIX,
    PRINTED_TOKENS_PER_DEVICE,
    PRINTED_TOKENS_PER_SECOND,
)


class _Step(StepLine):
    """Format of a step without a time. The global batch is printed in tokens, so it is not read as a batch."""

    mark = b"| Tokens/s/GPU: "
    opening = re.compile(r"(?<![A-Za-z])Step: (?P<iteration>\d{1,9}) {0,9}\| Loss: ")
    rank = 19
    trainer = "picotron"
    numbers = (
        StepNumber("lm_loss", "Loss: {1,6}"),
        StepNumber(PRINTED_TOKENS_PER_SECOND, "Tokens/s: {1,6}", value=SHORT_NUMBER),
        StepNumber(PRINTED_TOKENS_PER_DEVICE, "Tokens/s/GPU: {1,6}", value=SHORT_NUMBER),
        StepNumber(EXTRA_METRIC_PREFIX + "mfu %", "MFU: {1,6}", "%"),
        StepNumber(EXTRA_METRIC_PREFIX + "memory GB", "Memory usage: {1,6}", "GB"),
    )


DIALECT = Dialect(name="picotron", line=_Step)
