"""Which cost separates a strategy from baseline: its time above a fair share of baseline's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.records.measurements import Phase, RankTime, TimeRecord
from tools.report.explain.subjects import Subject, find
from tools.report.explain.time_shares import mean
from tools.spec.strategy import Parallelism
from tools.text.units import joined, milliseconds, signed

_ARITHMETIC = "forward and backward without communication"
_SMALLEST_SHARE = 0.1
"""Of the whole difference; smaller parts are summed up as the rest."""
_NEGLIGIBLE_SHARE = 0.02
_DOUBTFUL_SHARE = 0.15
"""Of baseline's share: arithmetic that much faster is another machine's, or another load's."""


@dataclass(frozen=True)
class Cost:
    """A part of the iteration, in seconds above baseline's share; negative if below."""

    part: str
    seconds: float


def cost_sentences(subjects: Sequence[Subject]) -> list[str]:
    """A sentence for every configuration that is not a baseline."""
    found = []
    for subject in subjects:
        if subject.split == Parallelism():
            continue
        baseline = find(subjects, subject, Parallelism())
        found.append(_sentence(subject, baseline))
    return found


def costs_above(reference: TimeRecord, other: TimeRecord, share: float) -> list[Cost]:
    """Parts of an iteration beyond `share` times the reference's, largest first, means over ranks.

    They sum to the difference of the iterations, but for the clock readings between phases.
    """
    ours, theirs = _parts(reference), _parts(other)
    found = [Cost(part, theirs[part] - share * ours[part]) for part in ours]
    return sorted(found, key=lambda cost: -cost.seconds)


def fair_share(reference: Subject, other: Subject) -> float | None:
    """Baseline's work over the other's ranks, relative to baseline's own iteration."""
    one, two = reference.run.spec, other.run.spec
    if one is None or two is None:
        return None
    work = two.tokens_per_iteration / one.tokens_per_iteration
    return work * one.parallelism.world_size / two.parallelism.world_size


def _sentence(subject: Subject, baseline: Subject | None) -> str:
    if baseline is None:
        return f"{subject.label}: there is no baseline run of this model to hold it against."
    times, reference = subject.findings.times, baseline.findings.times
    share = fair_share(baseline, subject)
    if times is None or reference is None or share is None:
        who = subject.label if times is None else baseline.label
        return f"{subject.label}: {who} left no usable time ledger, so its cost cannot be split up."
    whole = mean(r.iteration_seconds for r in times.ranks)
    fair = share * mean(r.iteration_seconds for r in reference.ranks)
    text = f"{subject.label}: {_difference(subject, whole, fair)}"
    margin = _scatter(subject, whole) + _scatter(baseline, fair)
    if abs(whole - fair) <= margin:
        return (
            f"{text}; the scatter of iterations moves these means by {milliseconds(margin)}, so no cost "
            "can be named."
        )
    costs = costs_above(reference, times, share)
    return f"{text}: {_causes(costs, whole - fair)}{_doubt(costs, fair)}"


def _difference(subject: Subject, whole: float, fair: float) -> str:
    ranks = subject.split.world_size
    direction = "above" if whole > fair else "below"
    return (
        f"an iteration takes {milliseconds(whole)}, baseline's work divided over {ranks} rank(s) "
        f"would take {milliseconds(fair)}; {milliseconds(abs(whole - fair))} {direction} that"
    )


def _scatter(subject: Subject, seconds: float) -> float:
    """Two standard errors of the mean, from the scatter of the logged iterations."""
    found = subject.entry.configuration.estimate
    return 2 * found.spread * seconds / math.sqrt(found.count) if found else 0.0


def _causes(costs: Sequence[Cost], difference: float) -> str:
    shown = [c for c in costs if abs(c.seconds) >= _SMALLEST_SHARE * abs(difference)]
    parts = [f"{signed(milliseconds(cost.seconds))} {cost.part}" for cost in shown]
    rest = difference - sum(cost.seconds for cost in shown)
    if abs(rest) > _NEGLIGIBLE_SHARE * abs(difference):
        parts.append(f"{signed(milliseconds(rest))} all else")
    return f"{joined(parts)}."


def _doubt(costs: Sequence[Cost], fair: float) -> str:
    """What these numbers do not show."""
    arithmetic = next(cost.seconds for cost in costs if cost.part == _ARITHMETIC)
    if arithmetic < -_DOUBTFUL_SHARE * fair:
        return (
            " Arithmetic takes less than baseline's share of it, so the machine was not the same for "
            "both runs, and this division does not hold."
        )
    if arithmetic == max(cost.seconds for cost in costs) and arithmetic > 0:
        return (
            " The largest part is arithmetic itself, and what makes it slower (shared cores, smaller "
            "matrices, other load) is not in the ledgers."
        )
    return ""


def _parts(times: TimeRecord) -> dict[str, float]:
    """Seconds by part, means over ranks."""
    by_rank = [_parts_of_rank(rank) for rank in times.ranks if rank.iteration_seconds]
    return {part: mean(found[part] for found in by_rank) for part in _parts_of_rank(None)}


def _parts_of_rank(rank: RankTime | None) -> dict[str, float]:
    phases = rank.phase_seconds if rank else {}
    calls = rank.communication_seconds if rank else {}
    inside = (Phase.FORWARD, Phase.BACKWARD)
    whole = (Phase.GRADIENT_SYNC, Phase.PIPELINE)
    others = [phase for phase in Phase if phase not in (*inside, *whole, Phase.OPTIMIZER)]
    return {
        _ARITHMETIC: sum(phases.get(p, 0.0) - calls.get(p, 0.0) for p in inside),
        "communication inside forward and backward": sum(calls.get(p, 0.0) for p in inside),
        "gradient sync": phases.get(Phase.GRADIENT_SYNC, 0.0),
        "waiting for other pipeline stages": phases.get(Phase.PIPELINE, 0.0),
        "the optimizer": phases.get(Phase.OPTIMIZER, 0.0),
        "data, loss reduction and logging": sum(phases.get(p, 0.0) for p in others),
    }
