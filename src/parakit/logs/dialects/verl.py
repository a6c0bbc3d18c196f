"""Dialect of verl: metrics of a step in one line, `step:4 - actor/entropy:0.37 - timing_s/step:161.1 - …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, MetricsLine

_METRIC = re.compile(
    r"(?<= - )([a-z][\w@./-]{1,80}):(?:np\.float64\()?([-+]?\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?)"
    r"(?:(?=\)? - )|(?<=\d{12})\)?\s*\Z)"
)
"""Pattern of a name and a number. No text closes the last number, so it must have twelve digits to be complete."""


class _Step(MetricsLine):
    """Format of a step. Its loss is that of a policy, so it is stored under its printed name."""

    mark = b"timing_s/"
    opening = re.compile(r"(?<![A-Za-z_])step:(?P<iteration>\d{1,9}) - ")
    rank = 2
    trainer = "verl"
    metric = _METRIC
    end = ""


DIALECT = Dialect(
    name="verl",
    line=_Step,
    names={
        "timing_s/step": ("elapsed_ms", 3),
        "perf/time_per_step": ("elapsed_ms", 3),
        "actor/grad_norm": ("grad_norm", 0),
        "actor/lr": ("learning_rate", 0),
    },
)
