"""`make plan VERIFY=3`: the best of a plan through the dry run, closed form against dry run."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from tools.plan.dryrun.command import dry_run
from tools.plan.dryrun.comparison import Comparison
from tools.plan.dryrun.job import DryRunError, check, ranks_named
from tools.plan.dryrun.process import DryRunner
from tools.plan.search import Candidate, Plan

_GB, _GIB = 1e9, 2**30


@dataclass(frozen=True)
class Verified:
    """A candidate and its first and last rank's dry runs, or why there are none."""

    candidate: Candidate
    comparisons: tuple[Comparison, ...]
    refusal: str = ""


def verify(plan: Plan, count: int) -> list[Verified]:
    """Dry-run the first and last rank of the `count` best candidates that a dry run can show.

    Those passed over are in the list with their refusal.
    """
    verified: list[Verified] = []
    with DryRunner() as runner:
        for candidate in plan.ranked:
            if sum(not item.refusal for item in verified) == count:
                break
            verified.append(_verified(runner, plan, candidate))
    return verified


def print_verified(verified: list[Verified], console: Console) -> None:
    """One table over all candidates, then what could not be run or differs."""
    table = Table(
        title="Closed form against Megatron's own code",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("strategy")
    table.add_column("rank", justify="right")
    for name in ("parameters", "GB sent", "in flight", "peak GiB, live"):
        table.add_column(name, justify="right")
        table.add_column("closed form", justify="right")
    table.add_column("")
    for item in verified:
        for comparison in item.comparisons:
            table.add_row(item.candidate.strategy, *_cells(comparison))
    console.print(table)
    for sentence in _sentences(verified):
        console.print(sentence, highlight=False)


def verified_as_data(verified: list[Verified]) -> list[dict[str, object]]:
    """The same for `--json`."""
    return [
        {
            "strategy": item.candidate.strategy,
            "refusal": item.refusal,
            "ranks": [
                {
                    "rank": comparison.report.rank,
                    "agrees": comparison.agrees,
                    "parameters": [comparison.report.parameters, comparison.parameters],
                    "wire_bytes": [
                        comparison.report.communication.wire_bytes,
                        comparison.wire_bytes,
                    ],
                    "in_flight": [comparison.report.in_flight, comparison.in_flight],
                    "peak_bytes": list(comparison.memory["peak"]),
                    "differences": [str(difference) for difference in comparison.differences],
                }
                for comparison in item.comparisons
            ],
        }
        for item in verified
    ]


def _verified(runner: DryRunner, plan: Plan, candidate: Candidate) -> Verified:
    model, spec = plan.request.model, candidate.spec
    try:
        check(spec)
        ranks = ranks_named("first,last", spec)
        return Verified(candidate, tuple(dry_run(runner, model, spec, ranks)))
    except DryRunError as error:
        return Verified(candidate, (), str(error))


def _cells(comparison: Comparison) -> tuple[str, ...]:
    report = comparison.report
    peak, closed_peak = comparison.memory["peak"]
    return (
        str(report.rank),
        f"{report.parameters:,}",
        f"{comparison.parameters:,}",
        f"{report.communication.wire_bytes / _GB:.3f}",
        f"{comparison.wire_bytes / _GB:.3f}",
        str(report.in_flight),
        str(comparison.in_flight),
        f"{peak / _GIB:.2f}",
        f"{closed_peak / _GIB:.2f}",
        "equal" if comparison.agrees else "differs",
    )


def _sentences(verified: list[Verified]) -> list[str]:
    sentences = [f"{item.candidate.strategy}: {item.refusal}" for item in verified if item.refusal]
    for item in verified:
        for comparison in item.comparisons:
            name = f"{item.candidate.strategy}, rank {comparison.report.rank}"
            sentences += [f"{name}: {difference}." for difference in comparison.differences]
    sentences.append(
        "Both columns are Megatron without Transformer Engine: unfused attention, keys and values "
        "gathered under CP."
    )
    return sentences
