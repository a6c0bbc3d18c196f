"""Dialect of slime and miles: times of a rollout in a dictionary, `perf 3: {'perf/step_time': 43.9, …}`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, MetricsLine


class _Rollout(MetricsLine):
    """Format of the line with the time of a full step, one of two lines per rollout."""

    mark = b"'perf/step_time'"
    opening = re.compile(r"perf (?P<iteration>\d{1,9}): \{")
    rank = 3
    trainer = "slime"


DIALECT = Dialect(
    name="slime",
    line=_Rollout,
    names={
        "perf/step_time": ("elapsed_ms", 3),
        "perf/actor_train_tflops": ("throughput_tflops_per_gpu", 0),
    },
)
