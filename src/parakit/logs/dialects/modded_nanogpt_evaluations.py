"""Dialect of modded-nanogpt's logs with evaluations alone: `step:3040/3040 val_loss:3.27839 train_time:574.450s …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, StepLine, StepNumber
from parakit.logs.iterations import EXTRA_METRIC_PREFIX, TRAINED_SECONDS


class _Evaluation(StepLine):
    """Format of an evaluation. Its loss is a validation loss, and its time is the training time so far."""

    mark = b" val_loss:"
    opening = re.compile(
        r"(?<![A-Za-z])step:(?P<iteration>\d{1,9})/(?P<total_iterations>\d{1,9}) (?=val_loss:)"
    )
    rank = 23
    trainer = "modded-nanogpt"
    numbers = (
        StepNumber(EXTRA_METRIC_PREFIX + "val_loss", "val_loss:", "(?= )"),
        StepNumber(TRAINED_SECONDS, r"train_time:(?=[\d.]{1,20}ms)", "ms", -3),
        StepNumber(TRAINED_SECONDS, r"train_time:(?=[\d.]{1,20}s)", "s"),
    )


DIALECT = Dialect(name="modded-nanogpt, evaluations", line=_Evaluation)
