"""Closed forms of memory, communication and time; the search over strategies; the dry run.

This package decides what a configuration costs before it runs, and which one to recommend. Its constants are
fitted to published measurements, which `validate` predicts again. Only the dry run's own process loads Megatron.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.planner.activations import chunk_activation_bytes
    from parakit.planner.advice import advice_sentences
    from parakit.planner.calibration import calibration_of, calibration_path
    from parakit.planner.candidates import base, shardings, splits
    from parakit.planner.collectives.call import (
        LATEST,
        CollectiveCall,
        Megatron,
        by_group,
        total_wire_bytes,
    )
    from parakit.planner.collectives.rank import communication_of_rank
    from parakit.planner.constraints import NEWEST, divisors, violations
    from parakit.planner.memory import (
        PredictedMemory,
        activation_bytes,
        communication_bytes,
        fullest_rank,
        head_bytes,
        held_parameters,
        layers_in_flight,
        logits_bytes,
        memory_of_rank,
        precision_of,
    )
    from parakit.planner.one_strategy import TimedStrategy, time_strategy
    from parakit.planner.options import PlanOptions, RequestError, plan_options
    from parakit.planner.readings.local_readings import Row, add_rows, own_runs, row_of
    from parakit.planner.readings.neighbours import Uncertainty, uncertainty
    from parakit.planner.readings.page import write_residuals_page
    from parakit.planner.readings.reading_to_spec import RefusedError, execution_of_flags
    from parakit.planner.readings.table import ReadingsError
    from parakit.planner.request import expert_tensor_of
    from parakit.planner.schedules.simulate import (
        Event,
        Pass,
        SimulatedSchedule,
        Step,
        figures,
        simulate,
    )
    from parakit.planner.search import Candidate, Plan, Request, evaluate, search_configurations
    from parakit.planner.tensors import (
        UnevenSplitError,
        active_parameters,
        parameters_total,
        rank_parameters,
        vocabulary_sentence,
    )
    from parakit.planner.ties import TIED, are_tied
    from parakit.planner.time.cluster import (
        NODES,
        Calibration,
        Cluster,
        at_other_rate,
        link_seconds,
    )
    from parakit.planner.time.compute import layer_seconds, product_seconds
    from parakit.planner.time.constants import NAMES, constants_of
    from parakit.planner.time.execution import Execution
    from parakit.planner.time.flops import model_flops, token_flops
    from parakit.planner.time.iteration import stage_seconds
    from parakit.planner.time.rates import NoPeakError, rates
    from parakit.planner.verdict import Fit, close_reason, fit_within
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "LATEST",
    "NAMES",
    "NEWEST",
    "NODES",
    "TIED",
    "Calibration",
    "Candidate",
    "Cluster",
    "CollectiveCall",
    "Event",
    "Execution",
    "Fit",
    "Megatron",
    "NoPeakError",
    "Pass",
    "Plan",
    "PlanOptions",
    "PredictedMemory",
    "ReadingsError",
    "RefusedError",
    "Request",
    "RequestError",
    "Row",
    "SimulatedSchedule",
    "Step",
    "TimedStrategy",
    "Uncertainty",
    "UnevenSplitError",
    "activation_bytes",
    "active_parameters",
    "add_rows",
    "advice_sentences",
    "are_tied",
    "at_other_rate",
    "base",
    "by_group",
    "calibration_of",
    "calibration_path",
    "chunk_activation_bytes",
    "close_reason",
    "communication_bytes",
    "communication_of_rank",
    "constants_of",
    "divisors",
    "evaluate",
    "execution_of_flags",
    "expert_tensor_of",
    "figures",
    "fit_within",
    "fullest_rank",
    "head_bytes",
    "held_parameters",
    "layer_seconds",
    "layers_in_flight",
    "link_seconds",
    "logits_bytes",
    "memory_of_rank",
    "model_flops",
    "own_runs",
    "parameters_total",
    "plan_options",
    "precision_of",
    "product_seconds",
    "rank_parameters",
    "rates",
    "row_of",
    "search_configurations",
    "shardings",
    "simulate",
    "splits",
    "stage_seconds",
    "time_strategy",
    "token_flops",
    "total_wire_bytes",
    "uncertainty",
    "violations",
    "vocabulary_sentence",
    "write_residuals_page",
]
