"""`explain`: which cost, why uneven, why less, what if; in sentences and tables from a report's runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.report.analyse.report_data import Report
from tools.report.explain.explain_costs import cost_sentences
from tools.report.explain.explain_memory import (
    pipeline_memory_sentences,
    sequence_parallel_sentences,
    sharding_sentences,
)
from tools.report.explain.explain_pipeline import bubble_sentences
from tools.report.explain.explain_routing import routing_sentences, routing_tables
from tools.report.explain.explain_tables import Table, tables
from tools.report.explain.explain_traffic import context_sentences, traffic_sentences
from tools.report.explain.explained import Subject, Topic, subjects_of
from tools.report.explain.gpu_bench import bench_tables
from tools.report.explain.predicted import Findings

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
    tables: tuple[Table, ...] = ()
    findings: Mapping[str, Findings] = field(default_factory=dict)
    """The same as numbers, by run."""


def explain(report: Report) -> Explanation:
    """Explain the runs of a report whose ledgers were kept, and what `make bench-gpu` measured."""
    subjects = subjects_of(report)
    bench = bench_tables(report.gpu_bench)
    if not any(_has_ledger(subject) for subject in subjects):
        return Explanation(tables=bench)
    topics = (Topic(question, tuple(answer(subjects))) for question, answer in _QUESTIONS)
    return Explanation(
        tuple(topic for topic in topics if topic.sentences),
        bench + tables(subjects) + routing_tables(subjects),
        {subject.run.name: subject.findings for subject in subjects},
    )


def _has_ledger(subject: Subject) -> bool:
    ledgers = subject.run.ledgers
    return bool(ledgers.communication or ledgers.memory or subject.findings.times)
