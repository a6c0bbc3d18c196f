"""Dialect of NeMo Automodel: `step 3 | epoch 0 | loss 9.7842 | … | tps 145236.76(72618.38/gpu) | …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, StepLine, StepNumber
from parakit.logs.iterations import (
    EXTRA_METRIC_PREFIX,
    PRINTED_TOKENS_PER_DEVICE,
    PRINTED_TOKENS_PER_SECOND,
)


class _Step(StepLine):
    """Format of a step. It has no time, and the clock of its line has whole seconds only."""

    mark = b"| epoch "
    opening = re.compile(r"(?<![A-Za-z])step (?P<iteration>\d{1,9}) \| epoch \d{1,6} \| loss ")
    rank = 18
    trainer = "NeMo Automodel"
    numbers = (
        StepNumber("lm_loss", "loss "),
        StepNumber("grad_norm", "grad_norm "),
        StepNumber("learning_rate", "lr "),
        StepNumber(EXTRA_METRIC_PREFIX + "memory GiB", "mem ", " GiB"),
        StepNumber(PRINTED_TOKENS_PER_SECOND, "tps ", r"\("),
        StepNumber(PRINTED_TOKENS_PER_DEVICE, r"tps [\d.]{1,20}\(", r"/gpu\)"),
    )


DIALECT = Dialect(name="NeMo Automodel", line=_Step)
