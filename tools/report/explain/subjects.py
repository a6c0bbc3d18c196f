"""What an explanation works on: a report's entries with what their ledgers found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.report.analyse.entry import Entry, names_of
from tools.report.analyse.report import Report
from tools.report.explain.predicted import Evidence, evidence_of
from tools.report.read.runs import Run
from tools.spec.strategy import Batch, Parallelism


@dataclass(frozen=True)
class Subject:
    """One configuration of a report, its newest run explained."""

    entry: Entry
    evidence: Evidence
    label: str
    """How tables and sentences call it; with its model where a report has several."""

    @property
    def run(self) -> Run:
        """The run whose ledgers are read."""
        return self.entry.run

    @property
    def split(self) -> Parallelism:
        """How it was split; whole where that is not known."""
        return self.run.spec.parallelism if self.run.spec else Parallelism()

    @property
    def cohort(self) -> tuple[object, ...]:
        """Subjects that may be compared: model, device, backend and precision."""
        run, spec = self.run, self.run.spec
        return run.model, run.device, spec and spec.backend, spec and spec.dtype


@dataclass(frozen=True)
class Topic:
    """Sentences on one question."""

    question: str
    sentences: tuple[str, ...]


def subjects_of(report: Report) -> tuple[Subject, ...]:
    """Every entry with its evidence."""
    named = zip(report.entries, names_of(report.entries), strict=True)
    return tuple(
        Subject(entry, evidence_of(entry.run, entry.time_ms), name) for entry, name in named
    )


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
            and (not same_batch or _batch(other.run) == _batch(like.run))
        ),
        None,
    )


def _batch(run: Run) -> Batch | None:
    return run.spec.batch if run.spec else None
