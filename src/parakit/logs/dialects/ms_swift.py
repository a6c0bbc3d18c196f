"""Dialect of ms-swift: metrics of a step as a dictionary or JSON, with the mean time of all steps so far."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, MetricsLine
from parakit.logs.iterations import MEAN_SECONDS, SECONDS_SO_FAR

_ELAPSED = re.compile(r"""['"]elapsed_time['"]: ['"]((?:\d{1,6}[dhms] ?){1,4})['"]""")
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


class _Step(MetricsLine):
    """Format of a step. The loss of a step with a reward is that of a policy."""

    mark = b"train_speed(s/it)"
    opening = re.compile(r"""\{['"]loss['"]: """)
    number = re.compile(
        r"""['"](?:iteration|global_step/max_steps)['"]: ['"]"""
        r"""(?P<iteration>\d{1,9})/(?P<total_iterations>\d{1,9})['"]"""
    )
    rank = 4
    trainer = "ms-swift"

    def numbers(self, text: str) -> dict[str, str]:
        """Return the numbers of a step by name. The time since the start (`1h 3m 7s`) is converted to seconds."""
        numbers = super().numbers(text)
        elapsed = _ELAPSED.search(text)
        if elapsed:
            parts = elapsed[1].split()
            seconds = sum(int(part[:-1]) * _UNITS[part[-1]] for part in parts)
            numbers["elapsed_time"] = str(seconds)
        return numbers


DIALECT = Dialect(
    name="ms-swift",
    line=_Step,
    names={
        "train_speed(s/it)": (MEAN_SECONDS, 0),
        "elapsed_time": (SECONDS_SO_FAR, 0),
        "loss": ("lm_loss", 0),
        "grad_norm": ("grad_norm", 0),
        "learning_rate": ("learning_rate", 0),
    },
)
