"""What an explanation works on: a report's entries with what their ledgers found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.report.analyse.report_data import Entry, Report
from tools.report.explain.predicted import Findings, findings_of
from tools.report.read.runs import Run
from tools.spec.strategy import Parallelism


@dataclass(frozen=True)
class Subject:
    """One configuration of a report, its newest run explained."""

    entry: Entry
    findings: Findings

    @property
    def label(self) -> str:
        """How tables and charts call it."""
        return self.entry.label

    @property
    def run(self) -> Run:
        """The run whose ledgers are read."""
        return self.entry.run

    @property
    def split(self) -> Parallelism:
        """How it was split; whole where that is not known."""
        return self.run.setup.parallelism or Parallelism()

    @property
    def cohort(self) -> tuple[object, ...]:
        """Subjects that may be held against each other: model, device, backend and precision."""
        setup = self.run.setup
        return setup.model, setup.device, setup.backend, setup.dtype


@dataclass(frozen=True)
class Topic:
    """Sentences on one question."""

    question: str
    sentences: tuple[str, ...]


def subjects_of(report: Report) -> tuple[Subject, ...]:
    """Every entry with its findings."""
    return tuple(Subject(entry, findings_of(entry.run)) for entry in report.entries)


def find(
    subjects: Sequence[Subject], like: Subject, split: Parallelism, *, same_batch: bool = False
) -> Subject | None:
    """The subject that is split so in the cohort of another, and of its batch if asked."""
    return next(
        (
            other
            for other in subjects
            if other.split == split
            and other.cohort == like.cohort
            and (not same_batch or other.run.setup.batch == like.run.setup.batch)
        ),
        None,
    )
