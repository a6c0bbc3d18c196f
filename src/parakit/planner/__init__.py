"""Closed forms of memory, communication and time; the search over strategies; the dry run.

This package decides what a configuration costs before it runs, and which one to recommend. Its constants are
fitted to published measurements, which `validate` predicts again. Only the dry run's own process loads Megatron.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.planner.advice import advice_sentences
    from parakit.planner.calibration import load_device_calibration, calibration_path
    from parakit.planner.one_strategy import TimedStrategy, time_strategy
    from parakit.planner.options import PlanOptions, RequestError, plan_options
    from parakit.planner.readings.local_readings import MeasurementRow, add_rows, load_own_runs, build_measurement_row
    from parakit.planner.readings.neighbours import Uncertainty, estimate_uncertainty
    from parakit.planner.readings.page import write_residuals_page
    from parakit.planner.readings.reading_to_spec import RefusedError, parse_execution
    from parakit.planner.readings.table import MeasurementsError
    from parakit.planner.recorded import RecordedRun, predict_recorded_run
    from parakit.planner.request import expert_tensor_of
    from parakit.planner.result import PlanResult, plan_strategies
    from parakit.planner.search import Candidate, Plan, Request, search_configurations
    from parakit.planner.ties import TIED, are_tied
    from parakit.planner.time.cluster import Calibration, Cluster
    from parakit.planner.time.compute import layer_seconds, product_seconds
    from parakit.planner.time.constants import NAMES, constants_of
    from parakit.planner.time.execution import Execution
    from parakit.planner.time.rates import rates
    from parakit.planner.verdict import Fit, close_reason, fit_within
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "NAMES",
    "TIED",
    "Calibration",
    "Candidate",
    "Cluster",
    "Execution",
    "Fit",
    "Plan",
    "PlanOptions",
    "PlanResult",
    "MeasurementsError",
    "RecordedRun",
    "RefusedError",
    "Request",
    "RequestError",
    "MeasurementRow",
    "TimedStrategy",
    "Uncertainty",
    "add_rows",
    "advice_sentences",
    "are_tied",
    "load_device_calibration",
    "calibration_path",
    "close_reason",
    "constants_of",
    "parse_execution",
    "expert_tensor_of",
    "fit_within",
    "layer_seconds",
    "load_own_runs",
    "plan_options",
    "plan_strategies",
    "predict_recorded_run",
    "product_seconds",
    "rates",
    "build_measurement_row",
    "search_configurations",
    "time_strategy",
    "estimate_uncertainty",
    "write_residuals_page",
]
