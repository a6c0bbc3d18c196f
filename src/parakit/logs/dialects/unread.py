"""Trainers whose logs are recognised and not read, so that users learn why there is no result."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect

_LINES = {
    "MLPerf's results": (
        "no time of a step is in it or follows from its blocks and its batch",
        r':::MLLOG \{.{0,200}"key": "(?:tracked_stats|run_start)"',
    ),
    "DeepSpeed without Megatron": (
        "it prints no time of an iteration",
        r"RunningAvgSamplesPerSec=[\d.]{1,30}, CurrSamplesPerSec="
        r"|rank=\d{1,6} time \(ms\) \| \w{1,30}: ",
    ),
}
DIALECT = Dialect(
    "not read",
    unread=tuple((trainer, reason, re.compile(line)) for trainer, (reason, line) in _LINES.items()),
)
