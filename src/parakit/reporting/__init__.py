"""Training logs and run folders read into rows, compared, explained and written as a report.

This package decides what a log says, which iterations are measurements, which runs may be compared, and how the
result is shown. It reads logs of many trainers; each trainer's words are in one file of `read/dialects`. It loads
no torch.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.reporting.analyse.comparability import conditions
    from parakit.reporting.analyse.configurations import pooled
    from parakit.reporting.analyse.entry import Entry, rows_of
    from parakit.reporting.analyse.parity import (
        BETWEEN_BACKENDS,
        HALF_ITERATIONS,
        ROUNDING_AN_ITERATION,
        allowed_difference,
        last_digit,
        loss_curve,
        resumption_sentence,
    )
    from parakit.reporting.analyse.statistics import Estimate, TimeComparison, TimeVerdict, compare
    from parakit.reporting.build import finish_report
    from parakit.reporting.canvas import WIDTH_INCHES, Chart, colour, draw, grid
    from parakit.reporting.command import report_options, trace
    from parakit.reporting.explain.predicted import ideal_bubble
    from parakit.reporting.render.files import FinishedReport
    from parakit.reporting.render.tables import time_text
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "BETWEEN_BACKENDS",
    "HALF_ITERATIONS",
    "ROUNDING_AN_ITERATION",
    "WIDTH_INCHES",
    "Chart",
    "Entry",
    "Estimate",
    "FinishedReport",
    "TimeComparison",
    "TimeVerdict",
    "allowed_difference",
    "colour",
    "compare",
    "conditions",
    "draw",
    "finish_report",
    "grid",
    "ideal_bubble",
    "last_digit",
    "loss_curve",
    "pooled",
    "report_options",
    "resumption_sentence",
    "rows_of",
    "time_text",
    "trace",
]
