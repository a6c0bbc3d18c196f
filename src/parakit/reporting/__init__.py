"""Turn runs into a report: rows, verdicts, explanations, and files.

`analyse` decides which iterations count and which runs may be compared, `explain` compares measurements with
the planner's closed forms, and `render` writes the page, Markdown, CSV and JSON. The package loads no torch.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.reporting.analyse.comparability import describe_conditions
    from parakit.reporting.analyse.configurations import estimate_pooled_runs
    from parakit.reporting.analyse.disturbance import why_disturbed
    from parakit.reporting.analyse.entry import Entry, build_entries_from_folders
    from parakit.reporting.analyse.parity import (
        BACKEND_ROUNDING_PER_ITERATION,
        MAX_HALF_PRECISION_ITERATIONS,
        ROUNDING_PER_ITERATION,
        allowed_difference,
        last_digit_unit,
        loss_curve,
        resumption_sentence,
    )
    from parakit.reporting.analyse.statistics import (
        Estimate,
        TimeComparison,
        TimeVerdict,
        compare_times,
    )
    from parakit.reporting.build import finish_report
    from parakit.reporting.canvas import WIDTH_INCHES, Chart, add_grid, draw_chart, entry_colour
    from parakit.reporting.command import report_options, trace
    from parakit.reporting.explain.predicted import ideal_bubble
    from parakit.reporting.render.files import FinishedReport
    from parakit.reporting.render.tables import format_time
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "BACKEND_ROUNDING_PER_ITERATION",
    "MAX_HALF_PRECISION_ITERATIONS",
    "ROUNDING_PER_ITERATION",
    "WIDTH_INCHES",
    "Chart",
    "Entry",
    "Estimate",
    "FinishedReport",
    "TimeComparison",
    "TimeVerdict",
    "add_grid",
    "allowed_difference",
    "build_entries_from_folders",
    "compare_times",
    "describe_conditions",
    "draw_chart",
    "entry_colour",
    "estimate_pooled_runs",
    "finish_report",
    "format_time",
    "ideal_bubble",
    "last_digit_unit",
    "loss_curve",
    "report_options",
    "resumption_sentence",
    "trace",
    "why_disturbed",
]
