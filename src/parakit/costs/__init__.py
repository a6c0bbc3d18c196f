"""Closed forms of what a rank holds, computes and sends in one iteration, from the shape of a run alone.

This package decides which strategies Megatron accepts, the tensors and activations of a rank, its FLOPs, every
collective call and its bytes on the wire, and the order of pipeline schedules. It knows no device: the planner
turns its results into time, and the report compares them with measurements.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.costs.activations import (
        FP8_RECIPE_BYTES,
        chunk_activation_bytes,
        norm_modules,
        offloaded_bytes,
        residual_bytes,
    )
    from parakit.costs.collectives.call import (
        LATEST,
        CollectiveCall,
        Megatron,
        sum_bytes_by_group,
        total_wire_bytes,
    )
    from parakit.costs.collectives.context import context_collectives
    from parakit.costs.collectives.control import control_collectives
    from parakit.costs.collectives.data import gradient_collectives
    from parakit.costs.collectives.experts import expert_collectives
    from parakit.costs.collectives.pipeline import pipeline_collectives
    from parakit.costs.collectives.rank import busiest_collectives, communication_of_rank
    from parakit.costs.collectives.tensor import (
        batch_collectives,
        embedding_collectives,
        head_collectives,
        layer_collectives,
        partial_gradients,
    )
    from parakit.costs.constraints import CP_COMM_TYPES, NEWEST, divisors, violations
    from parakit.costs.dispatchers import PEERS
    from parakit.costs.flops import COUNTS, RECOMPUTED, counted_flops, mfu, model_flops, token_flops
    from parakit.costs.memory import (
        COMPONENTS,
        MEMORY_ASSUMPTIONS,
        PRECISIONS,
        PredictedMemory,
        activation_bytes,
        chunks_in_flight,
        communication_bytes,
        fullest_rank,
        fullest_within,
        head_bytes,
        held_parameters,
        host_bytes,
        keeps_quantised_weights,
        layers_in_flight,
        logit_elements,
        logits_bytes,
        memory_of_rank,
        middle_ranks,
        offloaded_parameters,
        placeholder_bytes,
        precision_of,
        ranks_apart,
        workspace_bytes,
    )
    from parakit.costs.operations import Operation, Phase, algorithm, wire_bytes
    from parakit.costs.schedules import (
        COMPARED,
        Event,
        Pass,
        ScheduleFigures,
        SimulatedSchedule,
        Step,
        closed_form_activations,
        closed_form_bubble,
        figures,
        simulate,
    )
    from parakit.costs.shared_link import NODES, at_other_rate, link_seconds, stride_and_ranks
    from parakit.costs.tensors import (
        UnevenSplitError,
        active_parameters,
        parameters_total,
        rank_parameters,
        rank_tensors,
        vocabulary_sentence,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "COMPARED",
    "COMPONENTS",
    "COUNTS",
    "CP_COMM_TYPES",
    "FP8_RECIPE_BYTES",
    "LATEST",
    "MEMORY_ASSUMPTIONS",
    "NEWEST",
    "NODES",
    "PEERS",
    "PRECISIONS",
    "RECOMPUTED",
    "CollectiveCall",
    "Event",
    "Megatron",
    "Operation",
    "Pass",
    "Phase",
    "PredictedMemory",
    "ScheduleFigures",
    "SimulatedSchedule",
    "Step",
    "UnevenSplitError",
    "activation_bytes",
    "active_parameters",
    "algorithm",
    "at_other_rate",
    "batch_collectives",
    "busiest_collectives",
    "chunk_activation_bytes",
    "chunks_in_flight",
    "closed_form_activations",
    "closed_form_bubble",
    "communication_bytes",
    "communication_of_rank",
    "context_collectives",
    "control_collectives",
    "counted_flops",
    "divisors",
    "embedding_collectives",
    "expert_collectives",
    "figures",
    "fullest_rank",
    "fullest_within",
    "gradient_collectives",
    "head_bytes",
    "head_collectives",
    "held_parameters",
    "host_bytes",
    "keeps_quantised_weights",
    "layer_collectives",
    "layers_in_flight",
    "link_seconds",
    "logit_elements",
    "logits_bytes",
    "memory_of_rank",
    "mfu",
    "middle_ranks",
    "model_flops",
    "norm_modules",
    "offloaded_bytes",
    "offloaded_parameters",
    "parameters_total",
    "partial_gradients",
    "pipeline_collectives",
    "placeholder_bytes",
    "precision_of",
    "rank_parameters",
    "rank_tensors",
    "ranks_apart",
    "residual_bytes",
    "simulate",
    "stride_and_ranks",
    "sum_bytes_by_group",
    "token_flops",
    "total_wire_bytes",
    "violations",
    "vocabulary_sentence",
    "wire_bytes",
    "workspace_bytes",
]
