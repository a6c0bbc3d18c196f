"""Dialect of MaxText: `completed step: 3, seconds: 5.402, TFLOP/s/device: 141.542, …, loss: 11.379`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, StepLine, StepNumber
from parakit.logs.iterations import PRINTED_TOKENS_PER_DEVICE


class _Step(StepLine):
    """Format of a step. Steps are counted from 0."""

    mark = b"completed step: "
    opening = re.compile(r"completed step: (?P<iteration>\d{1,9}), seconds: ")
    rank = 12
    trainer = "MaxText"
    numbers = (
        StepNumber("elapsed_ms", "seconds: {1,4}", "(?=, )", 3),
        StepNumber("throughput_tflops_per_gpu", "TFLOP/s(?:/device)?: {1,4}", "(?=, )"),
        StepNumber(PRINTED_TOKENS_PER_DEVICE, "Tokens/s/device: {1,4}", "(?=, )"),
        # The loss ends the line, with three decimals.
        StepNumber("lm_loss", r"\bloss: {1,4}", r"(?![\d.…])", value=r"(\d{1,9}\.\d{3}|nan|inf)"),
    )


DIALECT = Dialect(name="MaxText", line=_Step)
