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
    from parakit.reporting.read.diagnosis import after_last, diagnose, first_error
    from parakit.reporting.read.dialects import find_iterations
    from parakit.reporting.read.failures import NCCL_TIMEOUT
    from parakit.reporting.read.iterations import Iteration
    from parakit.reporting.read.lines import printable, split_lines
    from parakit.reporting.read.printed import printed_spec
    from parakit.reporting.read.runs import Run, find_run_folders, load_folder
    from parakit.reporting.read.scrape import scrape_log
    from parakit.reporting.read.sources import read_samples
    from parakit.reporting.read.training_log import TrainingLog, read_training_logs
    from parakit.reporting.render.files import FinishedReport
    from parakit.reporting.render.tables import time_text
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "BETWEEN_BACKENDS",
    "HALF_ITERATIONS",
    "NCCL_TIMEOUT",
    "ROUNDING_AN_ITERATION",
    "WIDTH_INCHES",
    "Chart",
    "Entry",
    "Estimate",
    "FinishedReport",
    "Iteration",
    "Run",
    "TimeComparison",
    "TimeVerdict",
    "TrainingLog",
    "after_last",
    "allowed_difference",
    "colour",
    "compare",
    "conditions",
    "diagnose",
    "draw",
    "find_iterations",
    "find_run_folders",
    "finish_report",
    "first_error",
    "grid",
    "ideal_bubble",
    "last_digit",
    "load_folder",
    "loss_curve",
    "pooled",
    "printable",
    "printed_spec",
    "read_samples",
    "read_training_logs",
    "report_options",
    "resumption_sentence",
    "rows_of",
    "scrape_log",
    "split_lines",
    "time_text",
    "trace",
]
