"""Explain a report's runs: answers to eight questions, the sentences behind them, and tables.

`explain` turns a report into an `Explanation`; the other functions print it or write it as Markdown. In
tables, ranks with equal values share one line.
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
from parakit.formatting.terminal import say
from parakit.formatting.units import DASH, amount, count, ms, percent, signed, signed_percent
from parakit.logs import describe_newest_runs, find_run_folders, load_runs
from parakit.reporting.analyse.report import Report, build_report
from parakit.reporting.analyse.time_shares import TimeShares
from parakit.reporting.explain.closed_form import ComponentResidual
from parakit.reporting.explain.costs import (
    answer_bubble,
    answer_costs,
    bubble_sentences,
    cost_sentences,
    largest_costs,
)
from parakit.reporting.explain.memory import (
    answer_pipeline_memory,
    answer_sequence_parallel,
    answer_sharding,
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
from parakit.reporting.explain.routing import answer_routing, routing_sentences, routing_tables
from parakit.reporting.explain.traffic import (
    answer_context,
    answer_traffic,
    context_sentences,
    traffic_sentences,
)


@dataclass(frozen=True)
class _Question:
    """Question about a report, with a function for the sentences on each row and one for the short answer."""

    text: str
    explain_row: Callable[[Subject, Sequence[Subject]], Iterable[str]]
    """Function that returns sentences on one row; all rows are passed to it for comparison."""
    answer: Callable[[Sequence[Subject]], str]
    """Function that returns a short answer over all rows; empty if nothing was measured."""


_QUESTIONS = (
    _Question("Which cost separates each strategy from baseline?", cost_sentences, answer_costs),
    _Question("What does each strategy send?", traffic_sentences, answer_traffic),
    _Question(
        *("How does context parallelism compare with tensor parallelism?", context_sentences),
        answer=answer_context,
    ),
    _Question(
        *("What does the pipeline wait for, and would more micro batches help?", bubble_sentences),
        answer=answer_bubble,
    ),
    _Question(
        *("How evenly are tokens routed, and what does it cost?", routing_sentences),
        answer=answer_routing,
    ),
    _Question(
        *("Why is a pipeline's memory uneven?", pipeline_memory_sentences),
        answer=answer_pipeline_memory,
    ),
    _Question(
        *("What does sequence parallelism save?", sequence_parallel_sentences),
        answer=answer_sequence_parallel,
    ),
    _Question("What does sharding the optimizer save?", sharding_sentences, answer_sharding),
)

NOTHING = (
    "No run here left a ledger (comm.json, memory.json, time.json), so there is nothing to explain: "
    "train with the ledger on, which is the default."
)
_NO_ANSWER = "The runs left too few measurements for an answer."


@dataclass(frozen=True)
class Topic:
    """Question with a short answer and the sentences behind it."""

    question: str
    sentences: tuple[str, ...]
    """One or more sentences per row of the report."""
    answer: str = ""
    """Answer over all rows, two sentences at most."""


@dataclass(frozen=True)
class Explanation:
    """Answers to the questions about a report, and the tables with the figures. Both may be empty."""

    topics: tuple[Topic, ...] = ()
    tables: tuple[TextTable, ...] = ()
    evidence: Mapping[str, PredictionEvidence] = field(default_factory=dict)
    """Measured and predicted figures behind the tables, by run name."""
    paid: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Largest cost beyond baseline's fair time and the part that causes it, by run name."""


def explain(report: Report) -> Explanation:
    """Explain the runs of a report; the result is empty if none of them left a measurement."""
    subjects = build_subjects(report)
    if not any(_has_measurements(subject) for subject in subjects):
        return Explanation()
    topics = []
    for question in _QUESTIONS:
        sentences: list[str] = []
        for subject in subjects:
            sentences += question.explain_row(subject, subjects)
        if sentences:
            answer = question.answer(subjects) or _NO_ANSWER
            topics.append(Topic(question.text, tuple(sentences), answer))
    return Explanation(
        topics=tuple(topics),
        tables=(*build_tables(subjects), *routing_tables(subjects)),
        evidence={subject.run.name: subject.evidence for subject in subjects},
        paid=largest_costs(subjects),
    )


def _has_measurements(subject: Subject) -> bool:
    """Return True if a row's run left a communication log, a memory record or usable times."""
    measurements = subject.run.measurements
    return bool(measurements.communication or measurements.memory or subject.evidence.times)


def explain_runs(paths: Sequence[Path], root: Path, console: Console) -> int:
    """Print the explanation of the named runs, or of all runs in `root`; return 0, or 1 if there is no run.

    A name that is not a folder is searched in `root`.
    """
    folders = find_run_folders(root)
    found_paths = []
    for path in paths:
        is_in_root = not path.exists() and root / path in folders
        found_paths.append(root / path if is_in_root else path)
    missing = [str(path) for path in found_paths if not path.exists()]
    if missing:
        say(console, f"There is no run {', '.join(missing)}; {describe_newest_runs(root)}.")
        return 1
    runs, problems = load_runs(found_paths or folders)
    for problem in problems:
        console.print(problem, markup=False)
    if not runs:
        console.print(f"There is no run in {root}; make demo trains six.", markup=False)
        return 1
    report = build_report("explain", runs, load_published(), all_conditions=bool(found_paths))
    print_explanation(explain(report), console)
    return 0


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print each question with its answer and sentences, then the tables."""
    if not explanation.topics and not explanation.tables:
        console.print(Text(NOTHING))
        return
    for topic in explanation.topics:
        console.print(Text(topic.question, style="bold"))
        console.print(Text(topic.answer))
        for sentence in topic.sentences:
            console.print(Text(f"• {sentence}"))
        console.print()
    for table in explanation.tables:
        console.print(readable_table(table, console.width))


def explanation_markdown(explanation: Explanation) -> str:
    """Return the explanation as a Markdown section; empty for an empty explanation."""
    if not explanation.topics and not explanation.tables:
        return ""
    parts = ["## Explained"]
    for topic in explanation.topics:
        parts += [f"### {topic.question}", markdown_text(topic.answer)]
        parts.append("\n".join(f"- {markdown_text(sentence)}" for sentence in topic.sentences))
    for table in explanation.tables:
        parts += [f"### {table.title}", markdown_table(table)]
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
"""Phases of an iteration in the order of the table's columns, with their headings."""
_WHOLE_NUMBER_COMPONENTS = ("parameters", "weights", "gradients")
"""Components whose values the table shows to the last digit, because they should be exact."""
_MAX_WHOLE_RESIDUAL = 1e5
"""Residuals below this are shown as whole numbers, larger ones with a unit."""

type Cells[T] = tuple[tuple[str, Callable[[T], str]], ...]
type RankedItem = tuple[int | str, Any]
"""Rank, and an item that a table has a line for."""


def _published_fractions_text(shares: TimeShares) -> str:
    """Return forward, backward with gradient sync, and optimizer as percentages of their sum."""
    return " / ".join(f"{100 * fraction:.0f}" for fraction in shares.published_fractions)


_TIME: Cells[TimeShares] = (
    ("ms", lambda shares: ms(shares.iteration_seconds)),
    *(
        (heading, lambda shares, phase=phase: percent(shares.phases.get(phase)))
        for phase, heading in _PHASES
    ),
    ("of it communication", lambda shares: percent(shares.exposed_communication)),
    ("fwd/bwd+sync/opt", _published_fractions_text),
)
_CALLS: Cells[CallRow] = (
    ("Group", lambda row: row.group),
    ("Operation", lambda row: row.operation),
    ("What", lambda row: row.what or "in no closed form"),
    ("Calls: measured", lambda row: count(row.measured_calls)),
    ("predicted", lambda row: count(row.predicted_calls)),
    ("On the wire: measured", lambda row: count(row.measured_wire_bytes)),
    ("predicted", lambda row: count(row.predicted_wire_bytes)),
    ("residual", lambda row: _signed_whole_number(row.residual_wire_bytes)),
)
_UNATTRIBUTED: Cells[Unattributed] = (
    ("Group", lambda item: item.group),
    ("Operation", lambda item: item.operation),
    ("Bytes per call", lambda item: count(item.payload_bytes)),
    ("Calls made", lambda item: count(item.calls) if item.calls > 0 else DASH),
    ("Calls missing", lambda item: count(-item.calls) if item.calls < 0 else DASH),
)


def _component_amount(component: ComponentResidual, value: float) -> str:
    """Return a component's value: a whole number if it should be exact, else bytes with a unit."""
    is_whole = component.component in _WHOLE_NUMBER_COMPONENTS
    return count(int(value)) if is_whole else amount(int(value))


def _residual_text(component: ComponentResidual) -> str:
    """Return a residual: a whole number if it is small, else bytes with a unit."""
    if abs(component.residual) < _MAX_WHOLE_RESIDUAL:
        return _signed_whole_number(component.residual)
    return signed(amount(component.residual))


def _relative_residual_text(component: ComponentResidual) -> str:
    """Return a residual as a percentage of the prediction, or `exact`; a dash if nothing was predicted."""
    if component.is_exact:
        return "exact"
    return signed_percent(component.residual / component.predicted if component.predicted else None)


_MEMORY: Cells[ComponentResidual] = (
    ("Component", lambda component: component.component),
    ("Measured", lambda component: _component_amount(component, component.measured)),
    ("Predicted", lambda component: _component_amount(component, component.predicted)),
    ("Residual", _residual_text),
    ("Of it", _relative_residual_text),
    ("Note", lambda component: component.note),
)
_BUBBLE: Cells[ComponentResidual] = (
    ("Measured", lambda bubble: percent(bubble.measured)),
    ("(p−1)/(m·v)", lambda bubble: percent(bubble.predicted)),
    ("Residual", lambda bubble: signed_percent(bubble.residual)),
    ("Unequal stages", lambda bubble: bubble.note),
)
_MISSING: Cells[str] = (("Missing", str),)


@dataclass(frozen=True)
class _TableDefinition:
    """Table of an explanation: its columns, and the items of a run that it has lines for."""

    name: str
    title: str
    cells: Cells[Any]
    items: Callable[[PredictionEvidence], Iterable[RankedItem]]


def _memory_items(evidence: PredictionEvidence) -> Iterator[RankedItem]:
    """Yield the components of parameters and memory that were measured or predicted."""
    for component in (*evidence.parameters, *evidence.memory):
        if component.measured or component.predicted:
            yield component.rank, component


_TABLES = (
    _TableDefinition(
        *("time-shares", "Where each rank's iteration goes", _TIME),
        items=lambda evidence: ((shares.rank, shares) for shares in evidence.shares),
    ),
    _TableDefinition(
        *("calls", "Calls of an iteration, predicted and measured", _CALLS),
        items=lambda evidence: (
            (comparison.rank, row) for comparison in evidence.calls for row in comparison.rows
        ),
    ),
    _TableDefinition(
        *("unattributed", "Calls that only one side has", _UNATTRIBUTED),
        items=lambda evidence: (
            (comparison.rank, item)
            for comparison in evidence.calls
            for item in comparison.unattributed
        ),
    ),
    _TableDefinition(
        *("memory", "Parameters and memory at the peak, predicted and measured", _MEMORY),
        items=_memory_items,
    ),
    _TableDefinition(
        *("bubble", "The pipeline's idle time over its working time", _BUBBLE),
        items=lambda evidence: ((bubble.rank, bubble) for bubble in evidence.bubble),
    ),
    _TableDefinition(
        *("missing", "What is missing", _MISSING),
        items=lambda evidence: (("", note) for note in evidence.notes),
    ),
)


def build_tables(subjects: Sequence[Subject]) -> Iterator[TextTable]:
    """Yield each table that has at least one line. Ranks of a row with equal cells share a line."""
    for table in _TABLES:
        headings = [heading for heading, _ in table.cells]
        lines: list[tuple[str, ...]] = []
        for subject in subjects:
            ranks_by_cells: dict[tuple[str, ...], list[str]] = {}
            for rank, item in table.items(subject.evidence):
                cells = tuple(write_cell(item) for _, write_cell in table.cells)
                ranks_by_cells.setdefault(cells, []).append(str(rank))
            for cells, ranks in ranks_by_cells.items():
                lines.append((subject.label, ", ".join(ranks), *cells))
        if lines:
            header = ("Strategy", "Rank", *headings)
            yield TextTable(table.name, table.title, header, tuple(lines))


def _signed_whole_number(value: float) -> str:
    """Return a whole number with its sign and thousands separators; 0 has no sign."""
    return "0" if not value else f"{value:+,.0f}".replace("-", "−")
