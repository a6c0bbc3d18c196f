"""Dialect of llm.c: `step    3/10 | loss 10.811316 (+nanz)| norm 21.1251 (+nanz)| lr 2.57e-06 | 2489.58 ms | …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, StepLine, StepNumber
from parakit.logs.iterations import EXTRA_METRIC_PREFIX, PRINTED_TOKENS_PER_SECOND


class _Step(StepLine):
    """Format of a step."""

    mark = b"step "
    opening = re.compile(
        r"(?<![A-Za-z])step {1,9}(?P<iteration>\d{1,9})/(?P<total_iterations>\d{1,9}) \| (?:train )?loss (?=[\dni])"
    )
    rank = 15
    trainer = "llm.c"
    numbers = (
        StepNumber("lm_loss", r"(?<=\| )(?:train )?loss ", r"(?= \(| ?\|)"),
        StepNumber("grad_norm", "norm ", r"(?= \(| ?\|)"),
        StepNumber("learning_rate", "lr ", r"(?= ?\|)"),
        StepNumber("elapsed_ms", r"lr [\d.e+-]{1,12} \| ", " ms"),
        StepNumber(EXTRA_METRIC_PREFIX + "mfu %", r" ms \| (?!-)", "%"),
        StepNumber(PRINTED_TOKENS_PER_SECOND, r" MFU \| ", " tok/s"),
    )


DIALECT = Dialect(name="llm.c", line=_Step)
