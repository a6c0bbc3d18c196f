"""Dialect of verl's supervised fine-tuning: `step:1 - train/loss:0.8079 - train/lr:1e-05 - …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, EventReader, read_every_match
from parakit.logs.dialects.verl import VerlLine
from parakit.logs.scraped import Validation

_EVALUATION = r"(?<![A-Za-z_])step:(\d{1,9}) - val/loss:(?:np\.\w{1,10}\()?(\d{1,9}\.\d{1,20})\)?(?= - |\s*\Z)"


class _Step(VerlLine):
    """Format of a step. Some versions print no time of a step."""

    mark = b"train/loss:"
    opening = re.compile(r"(?<![A-Za-z_])step:(?P<iteration>\d{1,9}) - ")
    rank = 19
    needs_time = False


DIALECT = Dialect(
    name="verl, fine-tuning",
    line=_Step,
    names={
        "train/loss": ("lm_loss", 0),
        "train/grad_norm": ("grad_norm", 0),
        "train/lr": ("learning_rate", 0),
        "train/lr(1e-3)": ("learning_rate", -3),
        "train/time(s)": ("elapsed_ms", 3),
    },
    events=(
        EventReader(
            "val/loss:",
            read_every_match(
                _EVALUATION, lambda m: Validation(int(m[1]), {"lm loss": float(m[2])})
            ),
        ),
    ),
)
