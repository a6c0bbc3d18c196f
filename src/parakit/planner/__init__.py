"""Closed forms of memory, communication and time; the search over strategies; the dry run.

This package decides what a configuration costs before it runs, and which one to recommend. Its constants are
fitted to published measurements, which `validate` predicts again. Only the dry run's own process loads Megatron.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.planner.advice import no_fit_sentence
    from parakit.planner.calibration import calibration_path, load_device_calibration
    from parakit.planner.measured_step import resolve_measured_step
    from parakit.planner.one_strategy import TimedStrategy, time_strategy
    from parakit.planner.options import PlanOptions, RequestError, plan_options
    from parakit.planner.readings.local_readings import (
        MeasurementRow,
        add_rows,
        build_measurement_row,
        load_own_runs,
    )
    from parakit.planner.readings.neighbours import Uncertainty, estimate_uncertainty
    from parakit.planner.readings.page import write_residuals_page
    from parakit.planner.readings.reading_to_spec import RefusedError, parse_execution
    from parakit.planner.readings.table import MeasurementsError
    from parakit.planner.recorded import RecordedRun, predict_recorded_run
    from parakit.planner.request import parse_expert_tensor
    from parakit.planner.result import PlanResult, plan_strategies
    from parakit.planner.screen import advice_sentences
    from parakit.planner.search import Candidate, Plan, Request, search_configurations
    from parakit.planner.ties import TIE_RATIO, are_tied
    from parakit.planner.time.cluster import Calibration, Cluster
    from parakit.planner.time.compute import layer_seconds, product_seconds
    from parakit.planner.time.constants import CONSTANT_NAMES, load_constants
    from parakit.planner.time.execution import Execution
    from parakit.planner.time.rates import DeviceRates, compute_device_rates
    from parakit.planner.verdict import Fit, explain_close_fit, judge_fit
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "CONSTANT_NAMES",
    "TIE_RATIO",
    "Calibration",
    "Candidate",
    "Cluster",
    "DeviceRates",
    "Execution",
    "Fit",
    "MeasurementRow",
    "MeasurementsError",
    "Plan",
    "PlanOptions",
    "PlanResult",
    "RecordedRun",
    "RefusedError",
    "Request",
    "RequestError",
    "TimedStrategy",
    "Uncertainty",
    "add_rows",
    "advice_sentences",
    "are_tied",
    "build_measurement_row",
    "calibration_path",
    "compute_device_rates",
    "estimate_uncertainty",
    "explain_close_fit",
    "judge_fit",
    "layer_seconds",
    "load_constants",
    "load_device_calibration",
    "load_own_runs",
    "no_fit_sentence",
    "parse_execution",
    "parse_expert_tensor",
    "plan_options",
    "plan_strategies",
    "predict_recorded_run",
    "product_seconds",
    "resolve_measured_step",
    "search_configurations",
    "time_strategy",
    "write_residuals_page",
]
