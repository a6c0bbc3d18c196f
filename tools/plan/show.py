"""A plan as plain data, for `--json` and for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tools.plan import memory
from tools.plan.advice import GIB, advice, binding
from tools.plan.collectives.call import CollectiveCall, by_group, total_wire_bytes
from tools.plan.collectives.rank import communication_of_rank
from tools.plan.memory import COMPONENTS
from tools.plan.search import Candidate, Plan, Request, Scaling, single_axis_candidates
from tools.plan.time import iteration
from tools.plan.time.iteration import TIME_COMPONENTS
from tools.spec.groups import Group
from tools.spec.model import Model
from tools.spec.run import RunSpec, cp_comm_flags, recompute_flags
from tools.spec.strategy import batch_for, strategy_name


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
        "named": [
            candidate_as_data(request, candidate) for candidate in single_axis_candidates(request)
        ],
        "training_days": days,
        "scaling": asdict(scaled) if scaled else None,
        "assumptions": [*memory.ASSUMPTIONS, *iteration.ASSUMPTIONS],
    }


def candidate_as_data(request: Request, candidate: Candidate) -> dict[str, Any]:
    """One configuration with its memory, communication and time by component."""
    spec = candidate.spec
    return {
        "strategy": candidate.strategy,
        "command": make_command(request.model, spec),
        "parallelism": asdict(spec.parallelism),
        "micro_batch_size": spec.batch.micro_batch_size,
        "global_batch_size": spec.batch.global_batch_size,
        "microbatches": spec.microbatches,
        "recompute": str(spec.recompute),
        "cp_comm_type": spec.cp_comm_type,
        "extra_flags": list(_extra_flags(spec)),
        "fits": candidate.fits,
        "iteration_seconds": candidate.seconds.total,
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "memory_bytes": candidate.memory.total,
        "memory_rank": candidate.memory_rank,
        "memory": {name: getattr(candidate.memory, name) for name in COMPONENTS},
        "communication": _communication(spec),
        "time": {name: getattr(candidate.seconds, name) for name in TIME_COMPONENTS},
    }


def busiest_collectives(spec: RunSpec) -> tuple[CollectiveCall, ...]:
    """Calls of the pipeline rank that sends most: the first, the second or the last."""
    pipeline = spec.parallelism.pipeline
    ranks = sorted({0, min(1, pipeline - 1), pipeline - 1})
    return max((communication_of_rank(spec, rank) for rank in ranks), key=total_wire_bytes)


def _communication(spec: RunSpec) -> dict[str, int]:
    groups: dict[Group, int] = by_group(busiest_collectives(spec))
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


_GB = 1e9


def print_plan(
    plan: Plan, console: Console, days: float | None = None, scaled: Scaling | None = None
) -> None:
    """Print a plan."""
    for sentence in advice(plan):
        console.print(sentence, highlight=False)
    if scaled and plan.winner:
        console.print(_scaling_sentence(plan, scaled), highlight=False)
    if days is not None:
        console.print(f"Training takes {days:,.1f} days.", highlight=False)
    if not plan.winner:
        return
    console.print(_ranking(plan.ranked, f"The best of {plan.legal:,} legal configurations"))
    if plan.lightest:
        console.print(_ranking([plan.lightest], "Least memory"))
    if named := single_axis_candidates(plan.request):
        console.print(_ranking(named, "As make train-<strategy> runs them"))
    console.print(_details(plan.winner))
    command = make_command(plan.request.model, plan.winner.spec)
    console.print(f"[bold]{command}[/bold]", highlight=False, soft_wrap=True)


def _scaling_sentence(plan: Plan, scaled: Scaling) -> str:
    devices = plan.request.cluster.devices
    if scaled.devices == devices:
        return f"Fewer than {devices} devices do not hold it."
    return (
        f"Against {scaled.devices} device(s) ({scaled.strategy}), the fewest that hold it, "
        f"{devices} work at {100 * scaled.efficiency:.0f}% of the efficiency a device."
    )


def _ranking(candidates: tuple[Candidate, ...] | list[Candidate], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("strategy")
    for name in ("micro batch", "virtual", "recompute", "ms/iteration", "tokens/s", "MFU"):
        table.add_column(name, justify="right")
    table.add_column("GiB a rank", justify="right")
    table.add_column("GB sent", justify="right")
    for candidate in candidates:
        table.add_row(*_row(candidate))
    return table


def _row(candidate: Candidate) -> tuple[str, ...]:
    spec = candidate.spec
    strategy = candidate.strategy
    if spec.parallelism.context > 1:
        strategy += f" ({spec.cp_comm_type})"
    return (
        strategy,
        str(spec.batch.micro_batch_size),
        str(spec.parallelism.virtual_stages),
        str(spec.recompute),
        f"{1e3 * candidate.seconds.total:,.1f}",
        f"{candidate.tokens_per_second:,.0f}",
        f"{100 * candidate.mfu:.1f}%",
        f"{candidate.memory.total / GIB:.1f}" + ("" if candidate.fits else " (too much)"),
        f"{total_wire_bytes(busiest_collectives(spec)) / _GB:,.2f}",
    )


def _details(winner: Candidate) -> Table:
    """Three columns of components, largest first."""
    memory = {name: getattr(winner.memory, name) for name in COMPONENTS}
    seconds = {name: getattr(winner.seconds, name) for name in TIME_COMPONENTS}
    sent = {str(g): b for g, b in by_group(busiest_collectives(winner.spec)).items()}
    table = Table(
        title=f"{winner.strategy}, by component", title_justify="left", box=box.SIMPLE_HEAD
    )
    for name, unit in (("memory", "GiB"), ("time", "ms"), ("sent, busiest rank", "GB")):
        table.add_column(name)
        table.add_column(unit, justify="right")
    columns = [_sorted(memory, GIB), _sorted(seconds, 1e-3), _sorted(sent, _GB)]
    for row in range(max(map(len, columns))):
        cells = [column[row] if row < len(column) else ("", "") for column in columns]
        table.add_row(*(text for cell in cells for text in cell))
    return table


def _sorted(values: Mapping[str, float], unit: float) -> list[tuple[str, str]]:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [(name.replace("_", " "), f"{value / unit:,.2f}") for name, value in ordered if value]


def _extra_flags(spec: RunSpec) -> tuple[str, ...]:
    """Megatron's flags beyond those of the strategy."""
    return (*recompute_flags(spec.recompute), *cp_comm_flags(spec))


def make_command(model: Model, spec: RunSpec) -> str:
    """The command that trains this configuration."""
    parallelism, batch = spec.parallelism, spec.batch
    target = f"train-{strategy_name(parallelism)}-{model.name}-{parallelism.world_size}gpu"
    usual = batch_for(model.batch, parallelism)
    words = ["make", target]
    if batch.micro_batch_size != usual.micro_batch_size:
        words.append(f"MICRO_BATCH={batch.micro_batch_size}")
    if batch.global_batch_size != usual.global_batch_size:
        words.append(f"GLOBAL_BATCH={batch.global_batch_size}")
    flags = list(_extra_flags(spec))
    if spec.dtype not in {model.dtype, "fp32"}:
        flags.append(f"--{spec.dtype}")
    if spec.shape.seq_length != model.shape.seq_length:
        flags += ["--seq-length", str(spec.shape.seq_length)]
    if spec.shape.positions != model.shape.positions:
        flags += ["--max-position-embeddings", str(spec.shape.positions)]
    if flags:
        words.append(f'EXTRA="{" ".join(flags)}"')
    return " ".join(words)
