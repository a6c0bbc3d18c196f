"""`explain`: which cost, why uneven, why less, what if; in sentences and tables from a report's runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tools.report.analyse.gpu_bench import bench_tables
from tools.report.analyse.report import Report, build_report
from tools.report.explain.costs import bubble_sentences, cost_sentences, largest_costs
from tools.report.explain.memory import (
    pipeline_memory_sentences,
    sequence_parallel_sentences,
    sharding_sentences,
)
from tools.report.explain.predicted import Evidence
from tools.report.explain.routing import routing_sentences, routing_tables
from tools.report.explain.subjects import Subject, Topic, subjects_of
from tools.report.explain.tables import tables
from tools.report.explain.traffic import context_sentences, traffic_sentences
from tools.report.read.runs import find_run_folders, load_runs
from tools.spec.published import load_published
from tools.text.table import TextTable, markdown_table, markdown_text, readable_table

_QUESTIONS: tuple[tuple[str, Callable[[Sequence[Subject]], list[str]]], ...] = (
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
class Explanation:
    """Sentences by question, and the tables they rest on; empty without a ledger."""

    topics: tuple[Topic, ...] = ()
    tables: tuple[TextTable, ...] = ()
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    """The same as numbers, by run."""
    paid: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """How much each run pays beyond baseline's share, and for what most."""


def explain(report: Report) -> Explanation:
    """Explain the runs of a report whose ledgers were kept, and what `make bench-gpu` measured."""
    subjects = subjects_of(report)
    bench = bench_tables(report.gpu_bench)
    kept = ((each.run.ledgers, each.evidence.times) for each in subjects)
    if not any(held.communication or held.memory or times for held, times in kept):
        return Explanation(tables=bench)
    topics = (Topic(question, tuple(answer(subjects))) for question, answer in _QUESTIONS)
    return Explanation(
        tuple(topic for topic in topics if topic.sentences),
        bench + tables(subjects) + routing_tables(subjects),
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
