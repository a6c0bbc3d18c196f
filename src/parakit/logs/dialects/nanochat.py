"""Dialect of nanochat and of GPT-2 reproductions: `step 00200/35280 (0.57%) | loss: … | dt: 558.89ms | …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, StepLine, StepNumber
from parakit.logs.iterations import EXTRA_METRIC_PREFIX, PRINTED_TOKENS_PER_SECOND


class _Step(StepLine):
    """Format of a step. Its loss is smoothed in logs of nanochat, and not smoothed in those of reproductions."""

    mark = b"| dt: "
    opening = re.compile(
        r"(?<![A-Za-z])[Ss]tep:? {0,9}(?P<iteration>\d{1,9})(?:/(?P<total_iterations>\d{1,9}))?"
        r"(?: \([\d.]{1,8}%\))? {0,4}\| (?=(?:train )?loss: )"
    )
    rank = 16
    trainer = "nanochat"
    numbers = (
        StepNumber("lm_loss", "loss: "),
        StepNumber("grad_norm", "norm: "),
        StepNumber("learning_rate", r"\| lr:? "),
        StepNumber("elapsed_ms", "dt: ", "ms"),
        StepNumber(PRINTED_TOKENS_PER_SECOND, "tok/sec: "),
        StepNumber(EXTRA_METRIC_PREFIX + "mfu %", r"mfu: ", r"(?=%| \|)"),
    )


DIALECT = Dialect(name="nanochat", line=_Step)
