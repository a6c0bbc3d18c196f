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
        layer_activation_bytes,
        norm_modules,
        offloaded_bytes,
        residual_bytes,
    )
    from parakit.costs.adapters import LinearLayer, list_adapted_linears, list_linears
    from parakit.costs.collectives.call import (
        LATEST_MEGATRON,
        CollectiveCall,
        MegatronVersion,
        sum_bytes_by_group,
        total_wire_bytes,
    )
    from parakit.costs.collectives.context import context_collectives
    from parakit.costs.collectives.control import control_collectives
    from parakit.costs.collectives.data import gradient_collectives
    from parakit.costs.collectives.experts import expert_collectives
    from parakit.costs.collectives.pipeline import pipeline_collectives
    from parakit.costs.collectives.rank import busiest_collectives, rank_collectives
    from parakit.costs.collectives.tensor import (
        batch_collectives,
        embedding_collectives,
        head_collectives,
        layer_collectives,
        partial_gradient_collectives,
    )
    from parakit.costs.constraints import (
        CP_COMM_TYPES,
        NEWEST,
        adapter_rules,
        divisors,
        find_violations,
    )
    from parakit.costs.dispatchers import DEEP_EP_NVLINK_PEERS, supports_deep_ep
    from parakit.costs.flops import (
        FLOP_CONVENTIONS,
        WITH_RECOMPUTE,
        flops_by_convention,
        iteration_flops,
        mfu,
        model_flops,
        token_flops,
    )
    from parakit.costs.memory import (
        COMPONENTS,
        MEMORY_ASSUMPTIONS,
        PRECISIONS,
        PredictedMemory,
        activation_bytes,
        bytes_per_parameter,
        chunks_in_flight,
        communication_bytes,
        distinct_ranks,
        estimate_rank_memory,
        find_peak_rank,
        find_peak_rank_within,
        head_bytes,
        held_parameters,
        host_bytes,
        keeps_quantised_weights,
        layers_in_flight,
        logit_elements,
        logits_bytes,
        middle_ranks,
        offloaded_parameters,
        placeholder_bytes,
        workspace_bytes,
    )
    from parakit.costs.operations import Operation, Phase, describe_algorithm, wire_bytes
    from parakit.costs.replay import (
        estimate_device_memory,
        find_peak_device_memory,
        find_peak_rank_that_may_fit,
        supports_replay,
    )
    from parakit.costs.schedules import (
        COMPARED_SCHEDULES,
        Event,
        Pass,
        ScheduleFigures,
        SimulatedSchedule,
        Step,
        closed_form_activations,
        closed_form_bubble,
        measure_schedule,
        simulate_schedule,
    )
    from parakit.costs.shared_link import (
        NUM_NODES,
        link_seconds,
        seconds_at_other_rate,
        stride_and_ranks,
    )
    from parakit.costs.tensors import (
        UnevenSplitError,
        active_parameters,
        adapter_parameters,
        explain_vocabulary_change,
        rank_parameters,
        rank_tensors,
        total_parameters,
        trained_parameters,
    )
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "COMPARED_SCHEDULES",
    "COMPONENTS",
    "CP_COMM_TYPES",
    "DEEP_EP_NVLINK_PEERS",
    "FLOP_CONVENTIONS",
    "FP8_RECIPE_BYTES",
    "LATEST_MEGATRON",
    "MEMORY_ASSUMPTIONS",
    "NEWEST",
    "NUM_NODES",
    "PRECISIONS",
    "WITH_RECOMPUTE",
    "CollectiveCall",
    "Event",
    "LinearLayer",
    "MegatronVersion",
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
    "adapter_parameters",
    "adapter_rules",
    "batch_collectives",
    "busiest_collectives",
    "bytes_per_parameter",
    "chunk_activation_bytes",
    "chunks_in_flight",
    "closed_form_activations",
    "closed_form_bubble",
    "communication_bytes",
    "context_collectives",
    "control_collectives",
    "describe_algorithm",
    "distinct_ranks",
    "divisors",
    "embedding_collectives",
    "estimate_device_memory",
    "estimate_rank_memory",
    "expert_collectives",
    "explain_vocabulary_change",
    "find_peak_device_memory",
    "find_peak_rank",
    "find_peak_rank_that_may_fit",
    "find_peak_rank_within",
    "find_violations",
    "flops_by_convention",
    "gradient_collectives",
    "head_bytes",
    "head_collectives",
    "held_parameters",
    "host_bytes",
    "iteration_flops",
    "keeps_quantised_weights",
    "layer_activation_bytes",
    "layer_collectives",
    "layers_in_flight",
    "link_seconds",
    "list_adapted_linears",
    "list_linears",
    "logit_elements",
    "logits_bytes",
    "measure_schedule",
    "mfu",
    "middle_ranks",
    "model_flops",
    "norm_modules",
    "offloaded_bytes",
    "offloaded_parameters",
    "partial_gradient_collectives",
    "pipeline_collectives",
    "placeholder_bytes",
    "rank_collectives",
    "rank_parameters",
    "rank_tensors",
    "residual_bytes",
    "seconds_at_other_rate",
    "simulate_schedule",
    "stride_and_ranks",
    "sum_bytes_by_group",
    "supports_deep_ep",
    "supports_replay",
    "token_flops",
    "total_parameters",
    "total_wire_bytes",
    "trained_parameters",
    "wire_bytes",
    "workspace_bytes",
]
