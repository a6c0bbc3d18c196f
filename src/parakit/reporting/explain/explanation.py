"""`explain`: which cost, why uneven, why less, what if; in sentences and tables from a report's runs.

Equal ranks are one line of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from parakit.config.published import load_published
from parakit.costs import Phase
from parakit.formatting.table import TextTable, markdown_table, markdown_text, readable_table
from parakit.formatting.units import DASH, amount, count, ms, percent, signed, signed_percent
from parakit.logs import find_run_folders, load_runs
from parakit.reporting.analyse.report import Report, build_report
from parakit.reporting.analyse.time_shares import TimeShares
from parakit.reporting.explain.closed_form import ComponentResidual
from parakit.reporting.explain.costs import bubble_sentences, cost_sentences, largest_costs
from parakit.reporting.explain.memory import (
    pipeline_memory_sentences,
    sequence_parallel_sentences,
    sharding_sentences,
)
from parakit.reporting.explain.predicted import (
    CallRow,
    PredictionEvidence,
    Subject,
    Unattributed,
    build_subjects,
)
from parakit.reporting.explain.routing import routing_sentences, routing_tables
from parakit.reporting.explain.traffic import context_sentences, traffic_sentences

_QUESTIONS: tuple[tuple[str, Callable[[Subject, Sequence[Subject]], Iterable[str]]], ...] = (
    ("Which cost separates each strategy from baseline?", cost_sentences),
    ("What does each strategy send?", traffic_sentences),
    ("How does context parallelism compare with tensor parallelism?", context_sentences),
    ("What does the pipeline wait for, and would more micro batches help?", bubble_sentences),
    ("How evenly are tokens routed, and what does it cost?", routing_sentences),
    ("Why is a pipeline's memory uneven?", pipeline_memory_sentences),
    ("What does sequence parallelism save?", sequence_parallel_sentences),
    ("What does sharding the optimizer save?", sharding_sentences),
)


@dataclass(frozen=True)
class Topic:
    """Sentences on one question."""

    question: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Sentences by question, and the tables they rest on; empty without a ledger."""

    topics: tuple[Topic, ...] = ()
    tables: tuple[TextTable, ...] = ()
    evidence: Mapping[str, PredictionEvidence] = field(default_factory=dict)
    """The same as numbers, by run."""
    paid: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """How much each run pays beyond baseline's share, and for what most."""


def explain(report: Report) -> Explanation:
    """Explain the runs of a report whose ledgers were kept."""
    subjects = build_subjects(report)
    kept = ((each.run.measurements, each.evidence.times) for each in subjects)
    if not any(held.communication or held.memory or times for held, times in kept):
        return Explanation()
    topics = (
        Topic(question, tuple(said for each in subjects for said in answer(each, subjects)))
        for question, answer in _QUESTIONS
    )
    return Explanation(
        tuple(topic for topic in topics if topic.sentences),
        (*build_tables(subjects), *routing_tables(subjects)),
        {subject.run.name: subject.evidence for subject in subjects},
        largest_costs(subjects),
    )


NOTHING = (
    "No run here left a ledger (comm.json, memory.json, time.json), so there is nothing to explain: "
    "train with the ledger on, which is the default."
)


def explain_runs(paths: Sequence[Path], root: Path, console: Console) -> int:
    """Explain the named runs, or all below `root`; 1 if there is none."""
    runs, problems = load_runs(paths or find_run_folders(root))
    for problem in problems:
        console.print(problem, markup=False)
    if not runs:
        console.print(f"There is no run in {root}; make demo trains six.", markup=False)
        return 1
    report = build_report("explain", runs, load_published(), all_conditions=bool(paths))
    print_explanation(explain(report), console)
    return 0


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Sentences first, then the tables they rest on."""
    if not explanation.topics and not explanation.tables:
        console.print(Text(NOTHING))
        return
    for topic in explanation.topics:
        console.print(Text(topic.question, style="bold"))
        for sentence in topic.sentences:
            console.print(Text(f"• {sentence}"))
        console.print()
    for found in explanation.tables:
        console.print(readable_table(found, console.width))


def explanation_markdown(explanation: Explanation) -> str:
    """The same as a Markdown section; empty if there is nothing."""
    if not explanation.topics and not explanation.tables:
        return ""
    parts = ["## Explained"]
    for topic in explanation.topics:
        parts.append(f"### {topic.question}")
        parts.append("\n".join(f"- {markdown_text(sentence)}" for sentence in topic.sentences))
    for found in explanation.tables:
        parts += [f"### {found.title}", markdown_table(found)]
    return "\n\n".join(parts) + "\n"


_PHASES = (
    (Phase.FORWARD, "forward"),
    (Phase.BACKWARD, "backward"),
    (Phase.GRADIENT_SYNC, "gradient sync"),
    (Phase.OPTIMIZER, "optimizer"),
    (Phase.PIPELINE, "pipeline wait"),
    (Phase.DATA, "data"),
    (Phase.OTHER, "other"),
)
_EXACT = ("parameters", "weights", "gradients")

type Cells[T] = tuple[tuple[str, Callable[[T], str]], ...]
type Item = tuple[int | str, Any]
"""A rank, and what a line of it is of."""


_TIME: Cells[TimeShares] = (
    ("ms", lambda shares: ms(shares.iteration_seconds)),
    *((name, lambda shares, of=phase: percent(shares.phases.get(of))) for phase, name in _PHASES),
    ("of it communication", lambda shares: percent(shares.exposed_communication)),
    (
        "fwd/bwd+sync/opt",
        lambda s: " / ".join(f"{100 * share:.0f}" for share in s.published_fractions),
    ),
)
_CALLS: Cells[CallRow] = (
    ("Group", lambda row: row.group),
    ("Operation", lambda row: row.operation),
    ("What", lambda row: row.what or "in no closed form"),
    ("Calls: measured", lambda row: count(row.measured_calls)),
    ("predicted", lambda row: count(row.predicted_calls)),
    ("On the wire: measured", lambda row: count(row.measured_wire_bytes)),
    ("predicted", lambda row: count(row.predicted_wire_bytes)),
    ("residual", lambda row: _whole(row.residual_wire_bytes)),
)
_UNATTRIBUTED: Cells[Unattributed] = (
    ("Group", lambda item: item.group),
    ("Operation", lambda item: item.operation),
    ("Bytes each", lambda item: count(item.payload_bytes)),
    ("Calls made", lambda item: count(item.calls) if item.calls > 0 else DASH),
    ("Calls missing", lambda item: count(-item.calls) if item.calls < 0 else DASH),
)
_MEMORY: Cells[ComponentResidual] = (
    ("Component", lambda found: found.component),
    ("Measured", lambda found: _amount_of(found)(int(found.measured))),
    ("Predicted", lambda found: _amount_of(found)(int(found.predicted))),
    (
        "Residual",
        lambda found: (
            _whole(found.residual) if abs(found.residual) < 1e5 else signed(amount(found.residual))
        ),
    ),
    (
        "Of it",
        lambda found: (
            "exact"
            if found.is_exact
            else signed_percent(found.residual / found.predicted if found.predicted else None)
        ),
    ),
    ("Note", lambda found: found.note),
)
_BUBBLE: Cells[ComponentResidual] = (
    ("Measured", lambda found: percent(found.measured)),
    ("(p−1)/(m·v)", lambda found: percent(found.predicted)),
    ("Residual", lambda found: signed_percent(found.residual)),
    ("Unequal stages", lambda found: found.note),
)


_MISSING: Cells[str] = (("Missing", str),)
_TABLES: tuple[tuple[str, str, Cells[Any], Callable[[PredictionEvidence], Iterable[Item]]], ...] = (
    (
        *("time-shares", "Where each rank's iteration goes", _TIME),
        lambda each: ((shares.rank, shares) for shares in each.shares),
    ),
    (
        *("calls", "Calls of an iteration, predicted and measured", _CALLS),
        lambda each: ((c.rank, row) for c in each.calls for row in c.rows),
    ),
    (
        *("unattributed", "Calls that only one side has", _UNATTRIBUTED),
        lambda each: ((c.rank, item) for c in each.calls for item in c.unattributed),
    ),
    (
        *("memory", "Parameters and memory at the peak, predicted and measured", _MEMORY),
        lambda each: (
            (found.rank, found)
            for found in (*each.parameters, *each.memory)
            if found.measured or found.predicted
        ),
    ),
    (
        *("bubble", "The pipeline's idle time over its working time", _BUBBLE),
        lambda each: ((found.rank, found) for found in each.bubble),
    ),
    ("missing", "What is missing", _MISSING, lambda each: (("", note) for note in each.notes)),
)


def build_tables(subjects: Sequence[Subject]) -> Iterator[TextTable]:
    """Every table that has a line: items by rank, those that are alike on several ranks once."""
    for name, title, cells, items in _TABLES:
        lines: list[tuple[str, ...]] = []
        for subject in subjects:
            ranks: dict[tuple[str, ...], list[object]] = {}
            for rank, item in items(subject.evidence):
                ranks.setdefault(tuple(cell(item) for _, cell in cells), []).append(rank)
            lines += ((subject.label, ", ".join(map(str, of)), *line) for line, of in ranks.items())
        if lines:
            header = ("Strategy", "Rank", *(head for head, _ in cells))
            yield TextTable(name, title, header, tuple(lines))


def _amount_of(found: ComponentResidual) -> Callable[[int], str]:
    return count if found.component in _EXACT else amount


def _whole(value: float) -> str:
    return "0" if not value else f"{value:+,.0f}".replace("-", "−")
