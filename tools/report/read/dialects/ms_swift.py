"""ms-swift: a step's metrics as a dictionary or as JSON, with the mean time of a step so far."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from tools.report.read.dialects import PAIR, Dialect, MetricsLine


class _Step(MetricsLine):
    """Beside a reward its loss is a policy's."""

    mark = b"train_speed(s/it)"
    opening = re.compile(r"""\{['"]loss['"]: """)
    number = re.compile(
        r"""['"](?:iteration|global_step/max_steps)['"]: ['"]"""
        r"""(?P<iteration>\d{1,9})/(?P<total_iterations>\d{1,9})['"]"""
    )
    rank = 4
    trainer = "ms-swift"
    metric = PAIR
    mean_seconds = "train_speed(s/it)"
    fields: ClassVar[Mapping[str, str]] = {
        "loss": "lm_loss",
        "grad_norm": "grad_norm",
        "learning_rate": "learning_rate",
    }


DIALECT = Dialect(name="ms-swift", line=_Step)
