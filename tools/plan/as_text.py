"""A plan for people: advice first, then the ranking, then what the winner is made of."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from tools.plan.advice import GIB, advice
from tools.plan.as_data import busiest_traffic
from tools.plan.memory import COMPONENTS
from tools.plan.named import named_candidates
from tools.plan.naming import make_command
from tools.plan.scaling import Scaling
from tools.plan.search import Candidate, Plan
from tools.plan.timing import TIME_COMPONENTS
from tools.plan.wire import by_group, total_wire_bytes

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
    if named := named_candidates(plan.request):
        console.print(_ranking(named, "As make train-<strategy> runs them"))
    console.print(_details(plan.winner))
    command = make_command(plan.request.model, plan.winner.configuration)
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
    configuration = candidate.configuration
    strategy = candidate.strategy
    if configuration.parallelism.context > 1:
        strategy += f" ({configuration.cp_comm_type})"
    return (
        strategy,
        str(configuration.batch.micro_batch_size),
        str(configuration.parallelism.virtual_stages),
        str(configuration.recompute),
        f"{1e3 * candidate.seconds.total:,.1f}",
        f"{candidate.tokens_per_second:,.0f}",
        f"{100 * candidate.mfu:.1f}%",
        f"{candidate.memory.total / GIB:.1f}" + ("" if candidate.fits else " (too much)"),
        f"{total_wire_bytes(busiest_traffic(configuration)) / _GB:,.2f}",
    )


def _details(winner: Candidate) -> Table:
    """Three columns of components, largest first."""
    memory = {name: getattr(winner.memory, name) for name in COMPONENTS}
    seconds = {name: getattr(winner.seconds, name) for name in TIME_COMPONENTS}
    sent = {str(g): b for g, b in by_group(busiest_traffic(winner.configuration)).items()}
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
