"""A plan as tables and as data: rankings, the winner's components, and the kit's command that trains the winner."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from rich.console import Console

from parakit.config.batch import choose_batch
from parakit.config.flags import drop_flags, merge_flags, unlisted_flags
from parakit.config.model import GPT2_VOCABULARY, Model
from parakit.config.run import RunSpec, searched_flags
from parakit.config.strategy import strategy_name
from parakit.costs import (
    COMPONENTS,
    MEMORY_ASSUMPTIONS,
    adapter_parameters,
    busiest_collectives,
    explain_vocabulary_change,
    host_bytes,
    sum_bytes_by_group,
    supports_replay,
    total_wire_bytes,
)
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.units import gb, gib, joined, ms, percent, plural
from parakit.planner.advice import name_bottleneck
from parakit.planner.readings.models import has_no_file
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
from parakit.planner.training_command import describe_adapter_run
from parakit.planner.verdict import Fit

_MEMORY_MARKS = {Fit.FITS: "", Fit.CLOSE: " (close)", Fit.DOES_NOT_FIT: " (too much)"}
_CODE_MEANINGS = {
    "dp": "data parallelism",
    "tp": "tensor parallelism",
    "sp": "tensor and sequence parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
    "vpp": "pipeline parallelism with virtual stages",
    "ep": "expert parallelism",
    "etp": "tensor parallelism inside experts",
    "zero1": "sharded optimizer",
    "zero2": "sharded gradients and optimizer",
    "zero3": "sharded weights, gradients and optimizer",
}
"""Meanings of the codes in names of strategies."""


def encode_plan(
    plan: Plan, advice: Sequence[str], days: float | None, scaled: Scaling | None
) -> dict[str, Any]:
    """Return a plan that has a winner as a dictionary for JSON, in bytes, seconds and tokens per second.

    Args:
        plan: The plan.
        advice: The answers of the first screen.
        days: Days of training, or None if the number of tokens is not known.
        scaled: Comparison with the fewest devices, or None if it was not computed.
    """
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
        **encode_finetuning(request),
        "calibration": cluster.calibration.source,
        **encode_ignored_flags(list_ignored_flags(request, is_one_strategy=False)),
        "legal_configurations": plan.legal,
        "advice": advice,
        "binding": name_bottleneck(plan),
        "winner": encode_candidate(request, plan.ranked[0]),
        "ranked": [encode_candidate(request, candidate) for candidate in plan.ranked],
        "tied": [candidate.strategy for candidate in plan.tied],
        "lightest": encode_candidate(request, lightest) if lightest else None,
        "named": [
            encode_candidate(request, candidate)
            for candidate in evaluate_single_axis_strategies(request)
        ],
        "training_days": days,
        "scaling": asdict(scaled) if scaled else None,
        "assumptions": [*MEMORY_ASSUMPTIONS, *iteration.ASSUMPTIONS],
    }


def encode_finetuning(request: Request) -> dict[str, Any]:
    """Return the adapters and the packed documents of a request for JSON; both are None if nobody asked for them."""
    lora, length = request.template.lora, request.cluster.execution.document_length
    adapters = None
    if lora:
        trained = adapter_parameters(request.template.shape, lora)
        adapters = asdict(lora) | {"trained_parameters": trained}
    return {"peft": adapters, "document_length": length or None}


def encode_candidate(request: Request, candidate: Candidate) -> dict[str, Any]:
    """Return one configuration as a dictionary for JSON, with memory, communication and time by component."""
    spec = candidate.spec
    extra = (*request.extra, *candidate.expert_options.flags)
    return {
        "strategy": candidate.strategy,
        "command": describe_adapter_run(request, spec)
        if spec.lora
        else make_command(request.model, spec, extra),
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
        "memory_estimate": "replay" if supports_replay(spec) else "closed form",
        "host_memory_bytes": host_bytes(spec, candidate.memory_rank),
        "memory": {name: getattr(candidate.memory, name) for name in COMPONENTS},
        "communication": _sent_bytes_by_group(spec),
        "time": {name: getattr(candidate.seconds, name) for name in TIME_COMPONENTS},
    }


def _sent_bytes_by_group(spec: RunSpec) -> dict[str, int]:
    """Return the bytes that the busiest rank sends per iteration, by process group."""
    sent_bytes = sum_bytes_by_group(busiest_collectives(spec))
    return {str(group): sent for group, sent in sent_bytes.items()}


def print_tables(plan: Plan, console: Console) -> None:
    """Print the rankings and the components of a plan that has a winner, which `ALL=1` adds to the first screen."""
    title = f"The fastest of {plan.legal:,} legal configurations"
    _print_ranking(_build_ranking(plan.ranked, title), console)
    if plan.lightest:
        _print_ranking(_build_ranking([plan.lightest], "The least memory"), console)
    single_axis = evaluate_single_axis_strategies(plan.request)
    if single_axis:
        title = "One kind of parallelism alone, with the default micro batch"
        _print_ranking(_build_ranking(single_axis, title), console)
        few_micro_batches = single_micro_batch_sentence(single_axis)
        if few_micro_batches:
            console.print(few_micro_batches, highlight=False)
    shown = [*plan.ranked, *([plan.lightest] if plan.lightest else []), *single_axis]
    console.print(_legend([candidate.strategy for candidate in shown]), highlight=False)
    console.print(rich_table(_build_component_table(plan.ranked[0])))


def single_micro_batch_sentence(candidates: Sequence[Candidate]) -> str:
    """Return a sentence that names the pipelines with fewer micro batches than stages.

    Stages of such a pipeline idle, so its time says little about pipeline parallelism. The sentence is empty if there
    is no such pipeline.
    """
    names = [
        f"{candidate.strategy} ({plural(candidate.spec.microbatches, 'micro batch')})"
        for candidate in candidates
        if candidate.spec.microbatches < candidate.spec.parallelism.pipeline
    ]
    if not names:
        return ""
    verb = "has" if len(names) == 1 else "have"
    return (
        f"{joined(names)} {verb} fewer micro batches than stages, so stages idle. 'One kind alone' "
        "below has the time at the best micro batch and schedule."
    )


def training_sentence(devices: int, days: float, scaled: Scaling | None) -> str:
    """Return one or two sentences with the days of training.

    If `scaled` is known, the second sentence compares the speed per device with the speed on the fewest devices that
    hold the model.
    """
    if scaled is None:
        return f"Training takes {days:,.1f} days."
    if scaled.devices == devices:
        return (
            f"Training takes {days:,.1f} days. Fewer than {devices} devices do not hold the model."
        )
    return (
        f"Training takes {days:,.1f} days. Each device is {100 * scaled.efficiency:.0f}% as fast as on "
        f"{plural(scaled.devices, 'device')} ({scaled.strategy}), the smallest number that holds the model."
    )


def _print_ranking(ranking: Table[Candidate], console: Console) -> None:
    """Print a ranking with the columns that fit the console."""
    console.print(rich_table(ranking.fitting(console.width)))


def _legend(strategies: Sequence[str]) -> str:
    """Return the meanings of the codes in names of strategies."""
    codes = {code for name in strategies for code in re.findall(r"zero\d|[a-z]+", name)}
    meanings = [f"{code} {meaning}" for code, meaning in _CODE_MEANINGS.items() if code in codes]
    if not meanings:
        return "The baseline is one device without parallelism."
    return f"Codes: {', '.join(meanings)}. The number after a code is its number of ranks."


def _build_ranking(candidates: Sequence[Candidate], title: str) -> Table[Candidate]:
    """Return a table with one row per candidate: its choices, time, rates, memory and sent bytes."""

    def strategy(candidate: Candidate) -> str:
        """Return the name of the strategy. With context parallelism, its algorithm is added in brackets."""
        has_context = candidate.spec.parallelism.context > 1
        return candidate.strategy + (f" ({candidate.spec.cp_comm_type})" if has_context else "")

    def memory(candidate: Candidate) -> str:
        """Return the GiB of the rank with the peak memory, with a mark if they are close to the limit or too many."""
        return gib(candidate.memory.total) + _MEMORY_MARKS[candidate.verdict]

    def sent(candidate: Candidate) -> int:
        """Return the bytes that the busiest rank sends per iteration."""
        return total_wire_bytes(busiest_collectives(candidate.spec))

    columns = (
        Column[Candidate]("strategy", strategy, right=False),
        Column[Candidate]("micro batch", lambda c: c.spec.batch.micro_batch_size, rank=5),
        Column[Candidate]("virtual", lambda c: c.spec.parallelism.virtual_stages, rank=8),
        Column[Candidate]("recompute", lambda c: str(c.spec.recompute), rank=6),
        Column[Candidate]("ms/iteration", lambda c: c.seconds.total, ms, rank=1),
        Column[Candidate]("tokens/s", lambda c: c.tokens_per_second, "{:,.0f}".format, rank=4),
        Column[Candidate]("MFU", lambda c: c.mfu, percent, rank=3),
        Column[Candidate]("GiB per rank", memory, rank=2),
        Column[Candidate]("GB sent", sent, gb, rank=7),
    )
    return Table(columns, tuple(candidates), title)


def _build_component_table(winner: Candidate) -> Table[tuple[str, ...]]:
    """Return a table of the winner's memory, time and sent bytes by component.

    The three quantities have two columns each, sorted by size with the largest component first.
    """
    memory = {name: getattr(winner.memory, name) for name in COMPONENTS}
    seconds = {name: getattr(winner.seconds, name) for name in TIME_COMPONENTS}
    sent_bytes = _sent_bytes_by_group(winner.spec)
    rows = []
    # A quantity with fewer components has empty cells at its end.
    for memory_cells, time_cells, sent_cells in zip_longest(
        _sort_components(memory, gib),
        _sort_components(seconds, ms),
        _sort_components(sent_bytes, gb),
        fillvalue=("", ""),
    ):
        rows.append((*memory_cells, *time_cells, *sent_cells))
    names = ("memory", "GiB", "time", "ms", "busiest rank sends", "GB")
    columns = []
    for index, name in enumerate(names):
        is_number = index % 2 == 1
        columns.append(Column[tuple[str, ...]](name, itemgetter(index), right=is_number))
    return Table(tuple(columns), tuple(rows), f"{winner.strategy}, by component")


def _sort_components(
    values: Mapping[str, float], write: Callable[..., str]
) -> list[tuple[str, str]]:
    """Return the names and written values of all components that are not 0, largest first."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return [(name.replace("_", " "), write(value, decimals=2)) for name, value in ordered if value]


def trained_vocabulary_sentence(spec: RunSpec) -> str:
    """Return how the model that the command trains on the kit's own data differs from the planned one.

    The sentence is empty if both have equally many parameters.
    """
    return explain_vocabulary_change(spec.trained_shape, GPT2_VOCABULARY, spec.parallelism.tensor)


def encode_ignored_flags(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags without which a prediction is made, and those of them that the kit does not know."""
    return {"ignored_flags": [*flags], "unknown_flags": [*unlisted_flags(flags)]}


def print_ignored(flags: Sequence[str], console: Console) -> None:
    """Print the flags without which a prediction is made, each with the reason; nothing if there are none."""
    if flags:
        named = ", ".join(f"{flag} ({explain_ignored_flag(flag)})" for flag in flags)
        console.print(f"Not part of the prediction: {named}.", style="bold yellow")


def plan_command(request: Request, candidate: Candidate) -> str:
    """Return the `make` command that trains a candidate.

    If the model comes from a file, the command has the file's path. If only published measurements describe the model,
    the command names a file that the user has to write first (`missing_file`).
    """
    source = request.model.source or missing_file(request.model)
    model = f" MODEL={shlex.quote(source)}" if source else ""
    extra = (*request.extra, *candidate.expert_options.flags)
    return make_command(request.model, candidate.spec, extra) + model


def missing_file(model: Model) -> str:
    """Return the file to write for a model that only published measurements describe; else an empty text."""
    return f"{model.name}.args" if has_no_file(model) else ""


def print_missing_file(model: Model, console: Console) -> None:
    """Print the content of the model file that the user has to write before training (`missing_file`).

    Nothing is printed if no file is missing.
    """
    file = missing_file(model)
    if file:
        console.print(
            f"Published measurements describe {model.name}, and the kit has no file of it. To train it, write "
            f"these flags to {file}: {shlex.join(model.flags)}",
            highlight=False,
        )


def make_command(model: Model, spec: RunSpec, extra: Sequence[str] = ()) -> str:
    """Return the `make` command that trains a configuration.

    The command states only what differs from the kit's defaults for this model and strategy.

    Args:
        model: The model.
        spec: The configuration.
        extra: Further flags of Megatron, which the command passes in EXTRA=.
    """
    parallelism, batch = spec.parallelism, spec.batch
    strategy = strategy_name(spec.flagged_parallelism)
    target = f"train-{strategy}-{model.name}-{parallelism.world_size}{spec.device}"
    default_batch = choose_batch(model, parallelism, spec.device)
    arguments = ["make", target]
    if batch.global_batch_size != default_batch.global_batch_size:
        arguments.append(f"GLOBAL_BATCH={batch.global_batch_size}")
        default_batch = choose_batch(
            model, parallelism, spec.device, global_batch_size=batch.global_batch_size
        )
    if batch.micro_batch_size != default_batch.micro_batch_size:
        arguments.append(f"MICRO_BATCH={batch.micro_batch_size}")
    # The strategy's name has the expert tensor parallelism.
    flags = [*drop_flags(extra, {EXPERT_TENSOR}), *searched_flags(spec)]
    if spec.dtype not in {model.dtype, "fp32"}:
        flags.append(f"--{spec.dtype}")
    if spec.shape.seq_length != model.shape.seq_length:
        flags += ["--seq-length", str(spec.shape.seq_length)]
    if spec.shape.positions != model.shape.positions:
        flags += ["--max-position-embeddings", str(spec.shape.positions)]
    if flags:
        arguments.append(f'EXTRA="{shlex.join(merge_flags(flags))}"')
    return " ".join(arguments)
