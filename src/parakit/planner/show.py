"""A plan for people and as data: advice, the ranking, what the winner is made of, how to train it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from rich.console import Console

from parakit.config.flags import drop_flags, merge_flags, unlisted_flags
from parakit.config.model import GPT2_VOCABULARY, Model
from parakit.config.run import RunSpec, searched_flags
from parakit.config.strategy import scale_batch, strategy_name
from parakit.costs import (
    COMPONENTS,
    MEMORY_ASSUMPTIONS,
    busiest_collectives,
    explain_vocabulary_change,
    host_bytes,
    sum_bytes_by_group,
    total_wire_bytes,
)
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.units import gb, gib, joined, ms, percent, plural
from parakit.planner.advice import advice_sentences, name_bottleneck
from parakit.planner.request import EXPERT_TENSOR, explain_ignored_flag, list_ignored_flags
from parakit.planner.search import (
    Candidate,
    Plan,
    Request,
    Scaling,
    evaluate_single_axis_strategies,
)
from parakit.planner.time import iteration
from parakit.planner.time.iteration import TIME_COMPONENTS
from parakit.planner.verdict import Fit

_MEMORY_MARKS = {Fit.FITS: "", Fit.CLOSE: " (close)", Fit.DOES_NOT_FIT: " (too much)"}
_NAMED = 3
"""Of tied strategies, those that a heading names."""


def encode_plan(plan: Plan, days: float | None, scaled: Scaling | None) -> dict[str, Any]:
    """Everything a reader may want of a plan that has a winner; bytes, seconds, tokens a second."""
    request, lightest = plan.request, plan.lightest
    cluster, template = request.cluster, request.template
    return {
        "model": request.model.name,
        "gpu": cluster.device.key,
        "gpus": cluster.devices,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "intra": cluster.intra.key,
        "inter": cluster.inter.key,
        "ports_per_node": cluster.nics or cluster.per_node,
        "oversubscription": cluster.oversubscription,
        "imbalance": template.expert_load.imbalance,
        "global_batch": request.global_batch,
        "seq_length": template.shape.seq_length,
        "dtype": template.dtype,
        "calibration": cluster.calibration.source,
        **encode_ignored_flags(list_ignored_flags(request, laid=False)),
        "legal_configurations": plan.legal,
        "advice": advice_sentences(plan),
        "binding": name_bottleneck(plan),
        "winner": encode_candidate(request, plan.ranked[0]),
        "ranked": [encode_candidate(request, candidate) for candidate in plan.ranked],
        "tied": [candidate.strategy for candidate in plan.tied],
        "lightest": encode_candidate(request, lightest) if lightest else None,
        "named": [
            encode_candidate(request, each) for each in evaluate_single_axis_strategies(request)
        ],
        "training_days": days,
        "scaling": asdict(scaled) if scaled else None,
        "assumptions": [*MEMORY_ASSUMPTIONS, *iteration.ASSUMPTIONS],
    }


def encode_candidate(request: Request, candidate: Candidate) -> dict[str, Any]:
    """One configuration with its memory, communication and time by component."""
    spec = candidate.spec
    return {
        "strategy": candidate.strategy,
        "command": make_command(request.model, spec, request.extra),
        "command_trains": trained_vocabulary_sentence(spec) or "what was planned",
        "parallelism": asdict(spec.parallelism),
        "micro_batch_size": spec.batch.micro_batch_size,
        "global_batch_size": spec.batch.global_batch_size,
        "microbatches": spec.microbatches,
        "recompute": str(spec.recompute),
        "cp_comm_type": spec.cp_comm_type,
        "extra_flags": list(searched_flags(spec)),
        "fits": candidate.fits,
        "verdict": candidate.verdict,
        "iteration_seconds": candidate.seconds.total,
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "memory_bytes": candidate.memory.total,
        "memory_rank": candidate.memory_rank,
        "host_memory_bytes": host_bytes(spec, candidate.memory_rank),
        "memory": {name: getattr(candidate.memory, name) for name in COMPONENTS},
        "communication": _communication(spec),
        "time": {name: getattr(candidate.seconds, name) for name in TIME_COMPONENTS},
    }


def _communication(spec: RunSpec) -> dict[str, int]:
    return {
        str(group): sent for group, sent in sum_bytes_by_group(busiest_collectives(spec)).items()
    }


def print_plan(
    plan: Plan, console: Console, days: float | None, scaled: Scaling | None, error: str
) -> None:
    """Print a plan that has a winner, without `print_command`; `error` is that of predictions like it."""
    sentences, devices = advice_sentences(plan), plan.request.cluster.devices
    if scaled and scaled.devices == devices:
        sentences.append(f"Fewer than {devices} devices do not hold it.")
    elif scaled:
        sentences.append(
            f"Against {plural(scaled.devices, 'device')} ({scaled.strategy}), the fewest that hold it, "
            f"{devices} work at {100 * scaled.efficiency:.0f}% of the efficiency a device."
        )
    if days is not None:
        sentences.append(f"Training takes {days:,.1f} days.")
    for sentence in (*sentences, error):
        console.print(sentence, highlight=False)
    winner = plan.ranked[0]
    best = f"The best of {plan.legal:,} legal configurations"
    if tied := [found.strategy for found in plan.tied]:
        more = [f"{len(tied) - _NAMED} more"] if len(tied) > _NAMED else []
        best += f"; tied with the first: {joined([*tied[:_NAMED], *more])}"
    rankings = [_ranking(plan.ranked, best)]
    if plan.lightest:
        rankings.append(_ranking([plan.lightest], "Least memory"))
    if named := evaluate_single_axis_strategies(plan.request):
        rankings.append(_ranking(named, "As make train-<strategy> runs them"))
    for ranking in rankings:
        console.print(rich_table(ranking.fitting(console.width)))
    console.print(rich_table(_details(winner)))
    print_ignored(list_ignored_flags(plan.request, laid=False), console)


def print_command(plan: Plan, console: Console) -> None:
    """Print the command that trains the winner of a plan."""
    winner = plan.ranked[0]
    command = plan_command(plan.request, winner.spec)
    if difference := trained_vocabulary_sentence(winner.spec):
        console.print(difference, style="bold yellow", highlight=False)
    console.print(f"[bold]{command}[/bold]", highlight=False, soft_wrap=True)


def _ranking(candidates: Sequence[Candidate], title: str) -> Table[Candidate]:
    def strategy(found: Candidate) -> str:
        algorithm = f" ({found.spec.cp_comm_type})" if found.spec.parallelism.context > 1 else ""
        return found.strategy + algorithm

    def memory(found: Candidate) -> str:
        return gib(found.memory.total) + _MEMORY_MARKS[found.verdict]

    def sent(found: Candidate) -> int:
        return total_wire_bytes(busiest_collectives(found.spec))

    columns = (
        Column[Candidate]("strategy", strategy, right=False),
        Column[Candidate]("micro batch", lambda c: c.spec.batch.micro_batch_size, rank=5),
        Column[Candidate]("virtual", lambda c: c.spec.parallelism.virtual_stages, rank=8),
        Column[Candidate]("recompute", lambda c: str(c.spec.recompute), rank=6),
        Column[Candidate]("ms/iteration", lambda c: c.seconds.total, ms, rank=1),
        Column[Candidate]("tokens/s", lambda c: c.tokens_per_second, "{:,.0f}".format, rank=4),
        Column[Candidate]("MFU", lambda c: c.mfu, percent, rank=3),
        Column[Candidate]("GiB a rank", memory, rank=2),
        Column[Candidate]("GB sent", sent, gb, rank=7),
    )
    return Table(columns, tuple(candidates), title)


def _details(winner: Candidate) -> Table[tuple[str, ...]]:
    """Three lists of components beside one another, largest first."""
    memory = {name: getattr(winner.memory, name) for name in COMPONENTS}
    seconds = {name: getattr(winner.seconds, name) for name in TIME_COMPONENTS}
    lists = [_sorted(memory, gib), _sorted(seconds, ms), _sorted(_communication(winner.spec), gb)]
    cells = zip_longest(*lists, fillvalue=("", ""))
    rows = tuple(tuple(text for cell in row for text in cell) for row in cells)
    names = ("memory", "GiB", "time", "ms", "busiest sends", "GB")
    columns = tuple(
        Column[tuple[str, ...]](name, itemgetter(index), right=index % 2 == 1)
        for index, name in enumerate(names)
    )
    return Table(columns, rows, f"{winner.strategy}, by component")


def _sorted(values: Mapping[str, float], written: Callable[..., str]) -> list[tuple[str, str]]:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [
        (name.replace("_", " "), written(value, decimals=2)) for name, value in ordered if value
    ]


def trained_vocabulary_sentence(spec: RunSpec) -> str:
    """How the model that the command trains, on the kit's own data, differs from the planned one."""
    return explain_vocabulary_change(spec.trained_shape, GPT2_VOCABULARY, spec.parallelism.tensor)


def encode_ignored_flags(flags: Sequence[str]) -> dict[str, list[str]]:
    """Flags that a prediction is made without, and those of them that the kit does not know at all."""
    return {"ignored_flags": [*flags], "unknown_flags": [*unlisted_flags(flags)]}


def print_ignored(flags: Sequence[str], console: Console) -> None:
    """Print which flags a prediction is made without."""
    if flags:
        named = ", ".join(f"{flag} ({explain_ignored_flag(flag)})" for flag in flags)
        console.print(f"Not part of the prediction: {named}.", style="bold yellow")


def plan_command(request: Request, spec: RunSpec) -> str:
    """The command; for a model of a file elsewhere, with its path."""
    source = request.model.source
    own = f" MODEL={shlex.quote(source)}" if source else ""
    return make_command(request.model, spec, request.extra) + own


def make_command(model: Model, spec: RunSpec, extra: Sequence[str] = ()) -> str:
    """The command that trains this configuration, with the flags that were given for it."""
    parallelism, batch = spec.parallelism, spec.batch
    strategy = strategy_name(spec.flagged_parallelism)
    target = f"train-{strategy}-{model.name}-{parallelism.world_size}{spec.device}"
    usual = scale_batch(model.batch, parallelism)
    words = ["make", target]
    if batch.micro_batch_size != usual.micro_batch_size:
        words.append(f"MICRO_BATCH={batch.micro_batch_size}")
    if batch.global_batch_size != usual.global_batch_size:
        words.append(f"GLOBAL_BATCH={batch.global_batch_size}")
    flags = [*drop_flags(extra, {EXPERT_TENSOR}), *searched_flags(spec)]  # The name says ETP.
    if spec.dtype not in {model.dtype, "fp32"}:
        flags.append(f"--{spec.dtype}")
    if spec.shape.seq_length != model.shape.seq_length:
        flags += ["--seq-length", str(spec.shape.seq_length)]
    if spec.shape.positions != model.shape.positions:
        flags += ["--max-position-embeddings", str(spec.shape.positions)]
    if flags:
        words.append(f'EXTRA="{shlex.join(merge_flags(flags))}"')
    return " ".join(words)
