"""The command `dryrun`: dry runs of some ranks as tables or JSON, each figure beside its closed form.

Example: `python -m parakit dryrun --model gpt3-175b --tensor 8 --pipeline 16 --data 8`.
"""

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
from parakit.config.batch import choose_batch
from parakit.config.flags import refuse_misspelled_flags
from parakit.config.model import Model, find_model
from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, RunSpec, spec_from_model
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
    "Attention is Megatron's own in both columns. It stores its scores for backward, which fused attention "
    "does not. Under CP it is the kit's, which stores none either.",
    "A peak counts live tensors, without CUDA context, workspaces, NCCL and the allocator's remainders.",
    "Experts get equal shares of the tokens.",
)


def dryrun(variables: Namespace) -> int:
    """Dry-run the named ranks, print their counts beside the planner's closed forms, and return the exit code.

    The exit code is 1 if a rank differs from its closed form, else 0.

    Raises:
        ValueError: The dry run is not possible. The message is one sentence.
    """
    model = find_model(variables.model)
    refuse_misspelled_flags(model.flags)
    spec = _build_spec(variables, model)
    ranks = parse_ranks(variables.ranks, spec)
    refuse_unsupported(spec)
    with DryRunner(verbose=variables.verbose) as runner:
        comparisons = dry_run_ranks(runner, model, spec, ranks)
    if variables.json:
        print(json.dumps(encode_dry_run(model, spec, comparisons), indent=2))
    else:
        print_comparisons(model, spec, comparisons)
    return 0 if all(comparison.agrees for comparison in comparisons) else 1


def dryrun_arguments(parser: ArgumentParser) -> None:
    """Add the options of `dryrun` that no variable of make sets."""
    parser.add_argument("--verbose", action="store_true", help="also what Megatron prints")


def _parse_parallelism(arguments: Namespace, model: Model) -> Parallelism:
    """Return the parallelism that STRATEGY= names, or that the options for single parallel sizes state.

    Raises:
        DryRunError: The command line has both STRATEGY= and single sizes.
        StrategyError: There is no such strategy.
    """
    degrees = (arguments.dp, arguments.tp, arguments.pp, arguments.cp, arguments.ep, arguments.vpp)
    if arguments.strategy:
        if any(degree > 1 for degree in degrees) or arguments.sp or arguments.zero1:
            raise DryRunError(
                f"STRATEGY={arguments.strategy} names all degrees; leave --tensor and its like out."
            )
        named = parse_strategy(arguments.strategy, count_devices(arguments.strategy))
        # Experts under TP need it.
        is_sequence_parallel = named.tensor > 1 and bool(model.shape.experts)
        return replace(named, sequence_parallel=named.sequence_parallel or is_sequence_parallel)
    return Parallelism(
        data=arguments.dp,
        tensor=arguments.tp,
        pipeline=arguments.pp,
        context=arguments.cp,
        expert=arguments.ep,
        virtual_stages=arguments.vpp,
        # Experts under TP need it; Megatron drops it where there is no TP.
        sequence_parallel=arguments.tp > 1 and (arguments.sp or bool(model.shape.experts)),
        sharding=Sharding.ZERO1 if arguments.zero1 else Sharding.NONE,
    )


def _build_spec(arguments: Namespace, model: Model) -> RunSpec:
    """Return the run that a command line describes.

    Without `--micro-batch`, the micro batch is that of training. Without `--global-batch`, each replica has two micro
    batches per pipeline stage. Other options that are absent have the values of the model.

    Raises:
        DryRunError: The dtype is unknown, or the command line has both STRATEGY= and single sizes.
    """
    parallelism = _parse_parallelism(arguments, model)
    dtype = arguments.dtype or model.dtype
    if dtype not in PRECISIONS:
        raise DryRunError(f"There is no dtype '{dtype}'; use {', '.join(PRECISIONS)}.")
    micro_batch = choose_batch(
        model,
        parallelism,
        DeviceKind.GPU,
        micro_batch_size=arguments.micro_batch,
        global_batch_size=arguments.global_batch,
    ).micro_batch_size
    # With twice as many micro batches as stages the schedule reaches its steady state.
    global_batch = arguments.global_batch or (
        micro_batch * parallelism.data * 2 * parallelism.pipeline
    )
    plain = spec_from_model(model, parallelism, Batch(micro_batch, global_batch))
    return replace(
        replace_sequence_length(plain, arguments.seq),
        dtype=dtype,
        recompute=arguments.recompute or Recompute.NONE,
    )


def encode_dry_run(model: Model, spec: RunSpec, comparisons: list[CheckedRank]) -> dict[str, Any]:
    """Return the dry runs of a run's ranks as a dictionary for `dryrun --json`, in bytes and seconds."""
    return {
        "model": model.name,
        "strategy": strategy_name(spec.parallelism),
        "parallelism": asdict(spec.parallelism),
        "micro_batch_size": spec.batch.micro_batch_size,
        "global_batch_size": spec.batch.global_batch_size,
        "microbatches": spec.microbatches,
        "dtype": spec.dtype,
        "seq_length": spec.shape.seq_length,
        "ranks": [_encode_rank(comparison) for comparison in comparisons],
        "notes": list(NOTES),
    }


def print_comparisons(model: Model, spec: RunSpec, comparisons: list[CheckedRank]) -> None:
    """Print the run, and then two tables per rank: its figures and its calls.

    A sentence after the tables of a rank says if the closed form holds.
    """
    console = wide_console()
    parallelism, batch = spec.parallelism, spec.batch
    console.print(
        f"{model.name} as {strategy_name(parallelism)} on {parallelism.world_size} ranks: micro batch "
        f"{batch.micro_batch_size}, global batch {batch.global_batch_size}, "
        f"{spec.microbatches} micro batches, sequence {spec.shape.seq_length}, "
        f"{spec.dtype}.",
        highlight=False,
    )
    difference = trained_vocabulary_sentence(spec)
    if difference:
        console.print(difference, highlight=False, style="bold yellow")
    for comparison in comparisons:
        console.print(rich_table(_build_figures_table(comparison)))
        console.print(rich_table(_build_calls_table(comparison).fitting(console.width)))
        console.print(comparison_sentence(comparison), highlight=False)
    for note in NOTES:
        console.print(f"[dim]{note}[/dim]", highlight=False)


def _build_figures_table(comparison: CheckedRank) -> Table[tuple[str, str, str]]:
    """Return a table of one rank's parameters, bytes and micro batches, with a column for the dry run and one for
    the closed form.
    """
    report = comparison.report
    module = report.memory.peak_module.removeprefix("module.module.")
    title = (
        f"rank {report.rank}, stage {comparison.pipeline_rank}; its peak is in "
        f"{report.memory.peak_phase}{f' ({module})' if module else ''}"
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
    """Return text that says that the closed form holds, or lists all differences from it.

    The text ends with the time and memory that the dry run took.
    """
    report = comparison.report
    cost = f"({report.seconds:.1f} s, {gib(report.process_bytes, 2)} GiB of this machine)"
    if comparison.agrees:
        calls = sum(row.calls for row in report.communication.calls if row.ranks > 1)
        return f"Parameters and all {calls:,} calls equal the closed form, byte for byte {cost}."
    return "\n".join(["The closed form differs:", *map(str, comparison.differences), cost])


def _encode_rank(comparison: CheckedRank) -> dict[str, Any]:
    """Return one rank's dry run and closed form as a dictionary for JSON."""
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
        # Calls of a dry run move no bytes, so their seconds have no meaning.
        "calls": [
            {name: value for name, value in asdict(row).items() if not name.endswith("_seconds")}
            for row in report.communication.calls
        ],
        "seconds": report.seconds,
        "process_bytes": report.process_bytes,
    }


def _build_calls_table(comparison: CheckedRank) -> Table[CallSummary]:
    """Return a table of one rank's calls that send bytes, most bytes first."""
    columns = (
        Column[CallSummary]("group", lambda row: row.group, right=False),
        Column[CallSummary]("operation", lambda row: row.operation, right=False, rank=1),
        Column[CallSummary]("phase", lambda row: row.phase, right=False, rank=3),
        Column[CallSummary]("ranks", lambda row: row.ranks, rank=4),
        Column[CallSummary]("calls", lambda row: row.calls, count, rank=2),
        Column[CallSummary]("bytes per call", lambda row: row.payload_bytes, count, rank=2),
        Column[CallSummary]("GB sent", lambda row: row.wire_bytes, _gb, rank=2),
    )
    calls = comparison.report.communication.calls
    sent = [row for row in calls if row.ranks > 1 and row.wire_bytes]
    return Table(columns, tuple(sorted(sent, key=lambda row: -row.wire_bytes)))


def print_verified(verified: list[VerifiedStrategy], console: Console) -> None:
    """Print a table with one row per rank of the candidates that were dry-run.

    After the table, the candidates that could not be run and the differences from the closed forms are printed.
    """
    rows = [
        (item.candidate.strategy, comparison)
        for item in verified
        for comparison in item.comparisons
    ]
    columns = tuple(replace(column, wraps=column.right) for column in _VERIFIED_COLUMNS)
    table = Table(columns, tuple(rows), "Closed form against Megatron's own code")
    console.print(rich_table(table, console.width))
    for item in verified:
        if item.refusal:
            console.print(f"{item.candidate.strategy}: {item.refusal}", highlight=False)
    for strategy, comparison in rows:
        rank_name = f"{strategy}, rank {comparison.report.rank}"
        for difference in comparison.differences:
            console.print(f"{rank_name}: {difference}.", highlight=False)
    console.print(
        "Both columns are Megatron without Transformer Engine: unfused attention, keys and values "
        "gathered under CP.",
        highlight=False,
    )


def encode_verified(verified: list[VerifiedStrategy]) -> list[dict[str, object]]:
    """Return a list for `plan --json` with one entry per candidate: its dry-run ranks, or why it was not run."""
    return [
        {
            "strategy": item.candidate.strategy,
            "refusal": item.refusal,
            "ranks": [_encode_rank(comparison) for comparison in item.comparisons],
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
