"""A plan as plain data, for `--json` and for other tools."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tools.plan import memory, timing
from tools.plan.advice import advice, binding
from tools.plan.communication import communication_of_rank
from tools.plan.memory import COMPONENTS
from tools.plan.named import named_candidates
from tools.plan.naming import extra_flags, make_command
from tools.plan.scaling import Scaling
from tools.plan.search import Candidate, Plan, Request
from tools.plan.timing import TIME_COMPONENTS
from tools.plan.wire import Traffic, by_group, total_wire_bytes
from tools.spec.groups import Group
from tools.spec.run import RunSpec


def plan_as_data(
    plan: Plan, days: float | None = None, scaled: Scaling | None = None
) -> dict[str, Any]:
    """Everything a reader may want of a plan; bytes, seconds, tokens a second."""
    request = plan.request
    lightest = plan.lightest
    return {
        **_request_as_data(request),
        "legal_configurations": plan.legal,
        "advice": advice(plan),
        "binding": binding(plan),
        "winner": candidate_as_data(request, plan.winner) if plan.winner else None,
        "ranked": [candidate_as_data(request, candidate) for candidate in plan.ranked],
        "lightest": candidate_as_data(request, lightest) if lightest else None,
        "named": [candidate_as_data(request, candidate) for candidate in named_candidates(request)],
        "training_days": days,
        "scaling": asdict(scaled) if scaled else None,
        "assumptions": [*memory.ASSUMPTIONS, *timing.ASSUMPTIONS],
    }


def candidate_as_data(request: Request, candidate: Candidate) -> dict[str, Any]:
    """One configuration with its memory, communication and time by component."""
    configuration = candidate.configuration
    return {
        "strategy": candidate.strategy,
        "command": make_command(request.model, configuration),
        "parallelism": asdict(configuration.parallelism),
        "micro_batch_size": configuration.batch.micro_batch_size,
        "global_batch_size": configuration.batch.global_batch_size,
        "microbatches": configuration.microbatches,
        "recompute": str(configuration.recompute),
        "cp_comm_type": configuration.cp_comm_type,
        "extra_flags": list(extra_flags(configuration)),
        "fits": candidate.fits,
        "iteration_seconds": candidate.seconds.total,
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "memory_bytes": candidate.memory.total,
        "memory_rank": candidate.memory_rank,
        "memory": {name: getattr(candidate.memory, name) for name in COMPONENTS},
        "communication": _communication(configuration),
        "time": {name: getattr(candidate.seconds, name) for name in TIME_COMPONENTS},
    }


def busiest_traffic(configuration: RunSpec) -> tuple[Traffic, ...]:
    """Calls of the pipeline rank that sends most: the first, the second or the last."""
    pipeline = configuration.parallelism.pipeline
    ranks = sorted({0, min(1, pipeline - 1), pipeline - 1})
    return max((communication_of_rank(configuration, rank) for rank in ranks), key=total_wire_bytes)


def _communication(configuration: RunSpec) -> dict[str, int]:
    groups: dict[Group, int] = by_group(busiest_traffic(configuration))
    return {str(group): sent for group, sent in groups.items()}


def _request_as_data(request: Request) -> dict[str, Any]:
    cluster, template = request.cluster, request.template
    return {
        "model": request.model.name,
        "gpu": cluster.device.key,
        "gpus": cluster.devices,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "intra": cluster.intra.key,
        "inter": cluster.inter.key,
        "global_batch": request.global_batch,
        "seq_length": template.shape.seq_length,
        "dtype": template.dtype,
        "calibration": cluster.calibration.source,
    }
