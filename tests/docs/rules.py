"""The guide's table of rules of thumb, computed by the current planner."""

from __future__ import annotations

from collections.abc import Sequence

from parakit.config.hardware import device_by_key
from parakit.costs.tensors import total_parameters
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import duration, gib
from parakit.planner.advice import StrategyFamily, find_best_of_each_family
from parakit.planner.options import PlanOptions
from parakit.planner.request import build_request
from parakit.planner.search import Candidate, search_tied_strategies

GPU = "a100"
CASES = (
    ("gpt2-large", 8, 64),
    ("gpt3-1.3b", 8, 512),
    ("gpt3-13b", 8, 64),
    ("gpt3-13b", 64, 1024),
    ("gpt3-175b", 256, 1536),
    ("gpt3-530b", 2240, 2240),
    ("gpt3-1t", 3072, 3072),
)
"""Model, devices, global batch: sizes of the survey's tree, below 1B to above 100B parameters."""


def print_rules() -> None:
    """Print the table."""
    print(rules_table(), end="")


def rules_table(cases: Sequence[tuple[str, int, int]] = CASES) -> str:
    """Return a row per case: the fastest strategy, the faster of ZeRO-2 and ZeRO-3, and how much slower that is."""
    rows = tuple(_row(*case) for case in cases)
    names = ("model", "devices, global batch", "fastest", "ZeRO-2/3 alone", "slower by")
    columns = tuple(
        Column[tuple[str, ...]](name, lambda row, index=index: row[index], right=False)  # type: ignore[misc]
        for index, name in enumerate(names)
    )
    return markdown_table(Table(columns, rows))


def _row(model: str, devices: int, batch: int) -> tuple[str, ...]:
    asked = PlanOptions(model, GPU, gpus=devices, global_batch=batch)
    request = build_request(asked)
    fastest = min(
        search_tied_strategies(request),
        key=lambda candidate: candidate.seconds.total,
        default=None,
    )
    families = (StrategyFamily.SHARDED_DATA,)
    sharded = find_best_of_each_family(request, families)[StrategyFamily.SHARDED_DATA]
    assert fastest is not None
    billions = total_parameters(request.template.shape) / 1e9
    size = f"{model}, {billions:.2f}B" if billions < 10 else f"{model}, {billions:,.0f}B"
    loss = sharded.seconds.total / fastest.seconds.total - 1
    slower = f"{loss:.0%}" if sharded.is_recommended else "–"
    return size, f"{devices:,}, {batch:,}", _called(fastest), _called(sharded), slower


def _called(candidate: Candidate) -> str:
    if candidate.is_recommended:
        return f"{candidate.strategy}, {duration(candidate.seconds.total)}"
    capacity = device_by_key(GPU).memory_bytes
    return f"{gib(candidate.memory.total, 0)} of {gib(capacity, 0)} GiB: {candidate.verdict}"
