"""Dialect of modded-nanogpt's speedruns: `step:7400/20000 train_loss:2.0282 train_time:595325ms step_avg:80.45ms`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, EventReader, StepLine, StepNumber, read_first_match
from parakit.logs.iterations import TRAINED_SECONDS
from parakit.logs.scraped import Validation

_EVALUATION = r"step:(\d{1,9})/\d{1,9} val_loss:(\d{1,9}\.\d{1,9}) "


class _Step(StepLine):
    """Format of a step. Its time is the difference between its training time so far and that of the step before."""

    mark = b"step:"
    opening = re.compile(
        r"(?<![A-Za-z])step:(?P<iteration>\d{1,9})/(?P<total_iterations>\d{1,9}) "
        r"(?=(?:train_loss:\S{1,20} )?(?:train_)?time:)"
    )
    rank = 14
    trainer = "modded-nanogpt"
    numbers = (
        StepNumber("lm_loss", "train_loss:", "(?= )"),
        StepNumber(TRAINED_SECONDS, "train_time:", "ms", -3),
    )


DIALECT = Dialect(
    name="modded-nanogpt",
    line=_Step,
    events=(
        EventReader(
            "val_loss:",
            read_first_match(
                _EVALUATION, lambda m: Validation(int(m[1]), {"lm loss": float(m[2])})
            ),
        ),
    ),
)
