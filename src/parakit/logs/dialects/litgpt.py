"""Dialect of litgpt: `Epoch 1 | iter 2 step 1 | loss train: 1.660, val: n/a | iter time: 548.72 ms (step)`.

Older versions write `iter 76 step 38: loss 10.8259, iter time: 197.87ms`.
"""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, StepLine, StepNumber


class _Step(StepLine):
    """Format of an iteration, which is one micro batch. Several iterations may make one optimizer step."""

    mark = b"iter time: "
    opening = re.compile(
        r"(?<![A-Za-z])iter {1,6}(?P<iteration>\d{1,9}) (?:\| )?step {1,6}\d{1,9}(?: {0,6}\|| ?:) (?=loss )"
    )
    rank = 17
    trainer = "litgpt"
    numbers = (
        StepNumber("lm_loss", "loss (?:train:? )?(?=[\\dni])", "(?=, )"),
        StepNumber("elapsed_ms", r"iter time: (?!\d{1,9}\.\d{1,4} s\b)", " ?ms"),
        StepNumber("elapsed_ms", r"iter time: (?=\d{1,9}\.\d{1,4} s\b)", " s", 3),
    )


DIALECT = Dialect(name="litgpt", line=_Step)
