"""Runs that were read from logs and run folders, compared, explained and written as a report.

This package decides which runs may be compared, what a difference between them means, and how the result is
shown. `parakit.logs` reads the runs, and the planner predicts them. It loads no torch.
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
    from parakit.reporting.canvas import WIDTH_INCHES, Chart, colour, draw, grid
    from parakit.reporting.command import trace
    from parakit.reporting.explain.predicted import ideal_bubble
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
    "TimeComparison",
    "TimeVerdict",
    "allowed_difference",
    "colour",
    "compare",
    "conditions",
    "draw",
    "grid",
    "ideal_bubble",
    "last_digit",
    "loss_curve",
    "pooled",
    "resumption_sentence",
    "rows_of",
    "time_text",
    "trace",
]
