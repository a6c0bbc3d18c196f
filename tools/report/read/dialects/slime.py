"""slime and miles: a rollout's times in a dictionary, `perf 3: {'perf/step_time': 43.9, …}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from tools.report.read.dialects import PAIR, Dialect, MetricsLine


class _Rollout(MetricsLine):
    """Of its two lines a rollout the one with the whole step's time."""

    mark = b"'perf/step_time'"
    opening = re.compile(r"perf \d{1,9}: \{")
    number = re.compile(r"perf (?P<iteration>\d{1,9}): \{")
    rank = 3
    trainer = "slime"
    metric = PAIR
    end = "}"
    seconds = ("perf/step_time",)
    fields: ClassVar[Mapping[str, str]] = {"perf/actor_train_tflops": "throughput_tflops_per_gpu"}


DIALECT = Dialect(name="slime", line=_Rollout)
