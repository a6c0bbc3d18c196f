"""What a pipeline waits for, and what more micro batches would change."""

from __future__ import annotations

from collections.abc import Sequence

from tools.report.explain.predicted import Stages, ideal_bubble, measured_stages
from tools.report.explain.subjects import Subject
from tools.text.units import joined, milliseconds, signed

_FACTORS = (2, 4)
"""How many times the micro batches are asked about."""


def bubble_sentences(subjects: Sequence[Subject]) -> list[str]:
    """Sentences for every pipeline; none without one."""
    found = []
    for subject in subjects:
        if subject.split.pipeline > 1:
            found += _sentences(subject)
    return found


def _sentences(subject: Subject) -> list[str]:
    configuration, times = subject.findings.configuration, subject.findings.times
    if configuration is None:
        return [
            f"{subject.label}: its micro batches are not known, so nothing is said of its bubble."
        ]
    split, count = configuration.parallelism, configuration.microbatches
    virtual = split.virtual_stages
    below = f"({count}·{virtual})" if virtual > 1 else f"{count}"
    form = f"({split.pipeline}−1)/{below}"
    ideal = f"{form} = {ideal_bubble(configuration):.1%}"
    if not subject.findings.bubble or times is None:
        return [
            f"{subject.label}: {count} micro batch(es) make a bubble of {ideal} of the work; without a "
            "usable time ledger there is nothing to hold it against."
        ]
    measured = joined([f"{c.measured:.1%} on rank {c.rank}" for c in subject.findings.bubble])
    sentences = [
        f"{subject.label}: {count} micro batch(es) make a bubble of {ideal} of the work; measured, "
        f"sending and waiting are {measured}."
    ]
    stages = measured_stages(configuration, times)
    if stages is not None:
        sentences += [_uneven(subject, stages), _more(subject, stages)]
    return sentences


def _uneven(subject: Subject, stages: Stages) -> str:
    works = joined([milliseconds(value) for value in stages.seconds])
    explained = joined(
        [f"{stages.idle_over_work(s):.1%} on stage {s}" for s in range(len(stages.seconds))]
    )
    configuration = subject.findings.configuration
    assert configuration is not None
    left = max(
        abs(c.measured - stages.idle_over_work(_stage(subject, c.rank)))
        for c in subject.findings.bubble
    )
    return (
        f"{subject.label}: its stages work {works} a micro batch; 1F1B over stages that unequal waits "
        f"{explained}, messages not counted; up to {left:.1%} of the work is in neither: messages, and "
        "whatever delayed one rank and not the other."
    )


def _more(subject: Subject, stages: Stages) -> str:
    count = stages.microbatches
    now = stages.iteration_seconds(count) / count
    configuration = subject.findings.configuration
    assert configuration is not None
    asked = []
    for factor in _FACTORS:
        more = factor * count
        each = stages.iteration_seconds(more) / more
        asked.append(
            f"{more} make (p−1)/m {ideal_bubble(configuration, more):.1%} and "
            f"{milliseconds(each)} a micro batch ({signed(f'{each / now - 1:.1%}')})"
        )
    floor = max(stages.seconds)
    return (
        f"{subject.label}: with {count} micro batch(es) these stages take {milliseconds(now)} a micro "
        f"batch; {joined(asked)}; however many, not below the slower stage's {milliseconds(floor)}."
    )


def _stage(subject: Subject, rank: int) -> int:
    return rank // (subject.split.world_size // subject.split.pipeline)
