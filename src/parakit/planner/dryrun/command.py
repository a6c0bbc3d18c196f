"""`python -m parakit dryrun --model gpt3-175b --tensor 8 --pipeline 16 --data 8`: dry runs for people
and as data, each figure beside its closed form."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
from rich.console import Console

from parakit.artifacts.measurements import CallSummary
from parakit.config.flags import refuse_misspelled_flags
from parakit.config.model import Model, find_model
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec, spec_from_model
from parakit.config.strategy import (
    Batch,
    Parallelism,
    Sharding,
    count_devices,
    parse_strategy,
    strategy_name,
)
from parakit.costs import PRECISIONS
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import wide_console
from parakit.formatting.units import count, gb, gib
from parakit.planner.dryrun.comparison import CheckedRank, VerifiedStrategy, dry_run_ranks
from parakit.planner.dryrun.job import DryRunError, DryRunner, parse_ranks, refuse_unsupported
from parakit.planner.request import replace_sequence_length
from parakit.planner.show import trained_vocabulary_sentence

_gb, _gib = partial(gb, decimals=3), partial(gib, decimals=2)

NOTES = (
    "Attention is Megatron's own in both columns: it keeps its scores, which fused attention does not; "
    "under CP the kit's, which keeps none either.",
    "A peak is of live tensors: without context, workspaces, NCCL and the allocator's remainders.",
    "Experts get equal shares of the tokens.",
)


def dryrun(given: Namespace) -> int:
    """Dry-run the ranks that are named; 1 if one differs from its closed form.

    Raises:
        ValueError: What is asked for cannot be; one sentence.
    """
    model = find_model(given.model)
    refuse_misspelled_flags(model.flags)
    spec = _spec(given, model)
    ranks = parse_ranks(given.ranks, spec)
    refuse_unsupported(spec)
    with DryRunner(verbose=given.verbose) as runner:
        comparisons = dry_run_ranks(runner, model, spec, ranks)
    if given.json:
        print(json.dumps(encode_dry_run(model, spec, comparisons), indent=2))
    else:
        print_comparisons(model, spec, comparisons)
    return 0 if all(comparison.agrees for comparison in comparisons) else 1


def dryrun_arguments(parser: ArgumentParser) -> None:
    """What no variable says."""
    parser.add_argument("--verbose", action="store_true", help="also what Megatron prints")


def _parallelism(given: Namespace, model: Model) -> Parallelism:
    """Return the strategy of STRATEGY=, or of the degrees that a command line names one by one.

    Raises:
        DryRunError: Both are given.
        StrategyError: There is no such strategy.
    """
    degrees = (given.dp, given.tp, given.pp, given.cp, given.ep, given.vpp)
    if given.strategy:
        if any(degree > 1 for degree in degrees) or given.sp or given.zero1:
            raise DryRunError(
                f"STRATEGY={given.strategy} names all degrees; leave --tensor and its like out."
            )
        named = parse_strategy(given.strategy, count_devices(given.strategy))
        # Experts under TP need it.
        is_sequence_parallel = named.tensor > 1 and bool(model.shape.experts)
        return replace(named, sequence_parallel=named.sequence_parallel or is_sequence_parallel)
    return Parallelism(
        data=given.dp,
        tensor=given.tp,
        pipeline=given.pp,
        context=given.cp,
        expert=given.ep,
        virtual_stages=given.vpp,
        # Experts under TP need it; Megatron drops it where there is no TP.
        sequence_parallel=given.tp > 1 and (given.sp or bool(model.shape.experts)),
        sharding=Sharding.ZERO1 if given.zero1 else Sharding.NONE,
    )


def _spec(given: Namespace, model: Model) -> RunSpec:
    parallelism = _parallelism(given, model)
    dtype = given.dtype or model.dtype
    if dtype not in PRECISIONS:
        raise DryRunError(f"There is no dtype '{dtype}'; use {', '.join(PRECISIONS)}.")
    micro = given.micro_batch or model.batch.micro_batch_size
    # Twice as many micro batches as stages: the schedule reaches its steady state.
    whole = given.global_batch or micro * parallelism.data * 2 * parallelism.pipeline
    plain = spec_from_model(model, parallelism, Batch(micro, whole))
    return replace(
        replace_sequence_length(plain, given.seq),
        dtype=dtype,
        recompute=given.recompute or Recompute.NONE,
    )


def encode_dry_run(model: Model, spec: RunSpec, comparisons: list[CheckedRank]) -> dict[str, Any]:
    """Everything, for `--json`; bytes and seconds."""
    return {
        "model": model.name,
        "strategy": strategy_name(spec.parallelism),
        "parallelism": asdict(spec.parallelism),
        "micro_batch_size": spec.batch.micro_batch_size,
        "global_batch_size": spec.batch.global_batch_size,
        "microbatches": spec.microbatches,
        "dtype": spec.dtype,
        "seq_length": spec.shape.seq_length,
        "ranks": [_rank_as_data(comparison) for comparison in comparisons],
        "notes": list(NOTES),
    }


def print_comparisons(model: Model, spec: RunSpec, comparisons: list[CheckedRank]) -> None:
    """A table of figures, then of each rank's calls."""
    console = wide_console()
    parallelism, batch = spec.parallelism, spec.batch
    console.print(
        f"{model.name} as {strategy_name(parallelism)} on {parallelism.world_size} ranks: micro batch "
        f"{batch.micro_batch_size}, global batch {batch.global_batch_size}, "
        f"{spec.microbatches} micro batches, sequence {spec.shape.seq_length}, "
        f"{spec.dtype}.",
        highlight=False,
    )
    if difference := trained_vocabulary_sentence(spec):
        console.print(difference, highlight=False, style="bold yellow")
    for comparison in comparisons:
        console.print(rich_table(_figures_table(comparison)))
        console.print(rich_table(_calls_table(comparison).fitting(console.width)))
        console.print(comparison_sentence(comparison), highlight=False)
    for note in NOTES:
        console.print(f"[dim]{note}[/dim]", highlight=False)


def _figures_table(comparison: CheckedRank) -> Table[tuple[str, str, str]]:
    """Parameters, bytes and micro batches of one rank: dry run, closed form."""
    report = comparison.report
    where = report.memory.peak_module.removeprefix("module.module.")
    title = (
        f"rank {report.rank}, stage {comparison.pipeline_rank}; its peak is in "
        f"{report.memory.peak_phase}{f' ({where})' if where else ''}"
    )
    sent = report.communication.wire_bytes
    rows = [
        ("parameters", count(report.parameters), count(comparison.parameters)),
        ("bytes sent", count(sent), count(comparison.wire_bytes)),
        ("micro batches in flight", str(report.in_flight), str(comparison.in_flight)),
    ]
    for name, (measured, closed) in comparison.memory.items():
        rows.append((f"{name}, GiB", gib(measured, 3), gib(closed, 3)))
    for phase, size in report.memory.phase_peak_bytes.items():
        rows.append((f"peak in {phase}, GiB", gib(size, 3), ""))
    columns = (
        Column[tuple[str, str, str]]("", itemgetter(0), right=False),
        Column[tuple[str, str, str]]("dry run", itemgetter(1)),
        Column[tuple[str, str, str]]("closed form", itemgetter(2)),
    )
    return Table(columns, tuple(rows), title)


def comparison_sentence(comparison: CheckedRank) -> str:
    """Whether the closed form holds, or every difference by name."""
    report = comparison.report
    cost = f"({report.seconds:.1f} s, {gib(report.process_bytes, 2)} GiB of this machine)"
    if comparison.agrees:
        calls = sum(row.calls for row in report.communication.calls if row.ranks > 1)
        return f"Parameters and all {calls:,} calls equal the closed form, byte for byte {cost}."
    return "\n".join(["The closed form differs:", *map(str, comparison.differences), cost])


def _rank_as_data(comparison: CheckedRank) -> dict[str, Any]:
    report = comparison.report
    return {
        "rank": report.rank,
        "pipeline_rank": comparison.pipeline_rank,
        "agrees": comparison.agrees,
        "differences": [asdict(difference) for difference in comparison.differences],
        "closed_form": {
            "parameters": comparison.parameters,
            "wire_bytes": comparison.wire_bytes,
            "in_flight": comparison.in_flight,
            "memory": {name: closed for name, (_, closed) in comparison.memory.items()},
        },
        "parameters": report.parameters,
        "in_flight": report.in_flight,
        "wire_bytes": report.communication.wire_bytes,
        "memory": msgspec.to_builtins(report.memory),
        # How long a call that moves nothing took says nothing.
        "calls": [
            {name: value for name, value in asdict(row).items() if not name.endswith("_seconds")}
            for row in report.communication.calls
        ],
        "seconds": report.seconds,
        "process_bytes": report.process_bytes,
    }


def _calls_table(comparison: CheckedRank) -> Table[CallSummary]:
    columns = (
        Column[CallSummary]("group", lambda row: row.group, right=False),
        Column[CallSummary]("operation", lambda row: row.operation, right=False, rank=1),
        Column[CallSummary]("phase", lambda row: row.phase, right=False, rank=3),
        Column[CallSummary]("ranks", lambda row: row.ranks, rank=4),
        Column[CallSummary]("calls", lambda row: row.calls, count, rank=2),
        Column[CallSummary]("bytes a call", lambda row: row.payload_bytes, count, rank=2),
        Column[CallSummary]("GB sent", lambda row: row.wire_bytes, _gb, rank=2),
    )
    calls = comparison.report.communication.calls
    sent = [row for row in calls if row.ranks > 1 and row.wire_bytes]
    return Table(columns, tuple(sorted(sent, key=lambda row: -row.wire_bytes)))


def print_verified(verified: list[VerifiedStrategy], console: Console) -> None:
    """One table over all candidates, then what could not be run or differs."""
    rows = [(item.candidate.strategy, one) for item in verified for one in item.comparisons]
    columns = tuple(replace(column, wraps=column.right) for column in _VERIFIED_COLUMNS)
    table = Table(columns, tuple(rows), "Closed form against Megatron's own code")
    console.print(rich_table(table, console.width))
    for item in verified:
        if item.refusal:
            console.print(f"{item.candidate.strategy}: {item.refusal}", highlight=False)
    for strategy, comparison in rows:
        name = f"{strategy}, rank {comparison.report.rank}"
        for difference in comparison.differences:
            console.print(f"{name}: {difference}.", highlight=False)
    console.print(
        "Both columns are Megatron without Transformer Engine: unfused attention, keys and values "
        "gathered under CP.",
        highlight=False,
    )


def encode_verified(verified: list[VerifiedStrategy]) -> list[dict[str, object]]:
    """The same for `--json`."""
    return [
        {
            "strategy": item.candidate.strategy,
            "refusal": item.refusal,
            "ranks": [_rank_as_data(comparison) for comparison in item.comparisons],
        }
        for item in verified
    ]


_Row = tuple[str, CheckedRank]
_VERIFIED_COLUMNS = (
    Column[_Row]("strategy", lambda row: row[0], right=False),
    Column[_Row]("rank", lambda row: row[1].report.rank),
    Column[_Row]("parameters", lambda row: row[1].report.parameters, count),
    Column[_Row]("closed form", lambda row: row[1].parameters, count),
    Column[_Row]("GB sent", lambda row: row[1].report.communication.wire_bytes, _gb),
    Column[_Row]("closed form", lambda row: row[1].wire_bytes, _gb),
    Column[_Row]("in flight", lambda row: row[1].report.in_flight),
    Column[_Row]("closed form", lambda row: row[1].in_flight),
    Column[_Row]("peak GiB, live", lambda row: row[1].memory["peak"][0], _gib),
    Column[_Row]("closed form", lambda row: row[1].memory["peak"][1], _gib),
    Column[_Row]("", lambda row: "equal" if row[1].agrees else "differs", right=False),
)
