"""Which cost separates a strategy from baseline, and what a pipeline waits for."""

from __future__ import annotations

from collections.abc import Sequence

from tools.records.measurements import Phase, RankTime, TimeRecord
from tools.report.analyse.statistics import TimeComparison, TimeVerdict, compare
from tools.report.analyse.time_shares import mean
from tools.report.explain.predicted import StageTimes, ideal_bubble, measured_stages
from tools.report.explain.subjects import Subject, find
from tools.report.read.runs import Run
from tools.spec.strategy import Parallelism
from tools.text.units import change, joined, milliseconds, number, plural, signed

_FORWARD, _BACKWARD = "forward without communication", "backward without communication"
_SMALLEST_SHARE = 0.05
"""Of the whole difference; smaller parts are summed up as the rest."""
_NEGLIGIBLE_SHARE = 0.02
_DOUBTFUL_SHARE = 0.15
"""Of baseline's share: arithmetic that much faster is another machine's, or another load's."""
_FACTORS = (2, 4)
"""How many times the micro batches are asked about."""

Costs = dict[str, float]
"""Seconds of each part of an iteration above baseline's share; negative if below."""


def cost_sentences(subjects: Sequence[Subject]) -> list[str]:
    """A sentence for every configuration that is not a baseline."""
    found = []
    for subject in subjects:
        if subject.split == Parallelism():
            continue
        baseline = find(subjects, subject, Parallelism())
        found.append(_cost_sentence(subject, baseline))
    return found


def costs_above(reference: TimeRecord, other: TimeRecord, share: float) -> Costs:
    """Seconds of each part beyond `share` times the reference's, largest first, means over ranks.

    They sum to the difference of the iterations, but for the clock readings between phases.
    """
    ours, theirs = _parts(reference), _parts(other)
    found = {part: theirs[part] - share * ours[part] for part in ours}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def fair_share(reference: Subject, other: Subject) -> float | None:
    """Baseline's work over the other's ranks, relative to baseline's own iteration."""
    one, two = reference.run.spec, other.run.spec
    if one is None or two is None:
        return None
    work = two.tokens_per_iteration / one.tokens_per_iteration
    return work * one.parallelism.world_size / two.parallelism.world_size


def bubble_sentences(subjects: Sequence[Subject]) -> list[str]:
    """Sentences for every pipeline; none without one."""
    found = []
    for subject in subjects:
        if subject.split.pipeline > 1:
            found += _bubble_sentences(subject)
    return found


def _cost_sentence(subject: Subject, baseline: Subject | None) -> str:
    if baseline is None:
        return f"{subject.label}: there is no baseline run of this model to compare it with."
    times, reference = subject.evidence.times, baseline.evidence.times
    share = fair_share(baseline, subject)
    if times is None or reference is None or share is None:
        who = subject.label if times is None else baseline.label
        return f"{subject.label}: {who} left no usable time ledger, so its cost cannot be split up."
    whole = mean(r.iteration_seconds for r in times.ranks)
    fair = share * mean(r.iteration_seconds for r in reference.ranks)
    text = f"{subject.label}: {_difference(subject, whole, fair)}"
    found = _against_share(subject, baseline, share)
    if found is None or found.verdict is TimeVerdict.UNKNOWN:
        return f"{text}; too few iterations were timed for a verdict, so no cost can be named."
    if found.verdict is TimeVerdict.NOISE:
        unseen = f" ({found.resolution})" if found.resolution else ""
        return f"{text}, which is within noise{unseen}, so no cost can be named."
    costs = costs_above(reference, times, share)
    named = _named_causes(costs, whole - fair, _noise(found) * fair)
    return f"{text}: {named}{_arithmetic(subject, baseline, costs, share)}"


def largest_costs(subjects: Sequence[Subject]) -> dict[str, tuple[str, str]]:
    """How much each run pays beyond baseline's share, and for what most, if that is above noise."""
    found = {}
    for subject in subjects:
        baseline = find(subjects, subject, Parallelism())
        if baseline is None or subject is baseline:
            continue
        times, reference = subject.evidence.times, baseline.evidence.times
        share = fair_share(baseline, subject)
        if times is None or reference is None or share is None:
            continue
        compared = _against_share(subject, baseline, share)
        if compared is None or compared.verdict is not TimeVerdict.SLOWER:
            continue
        part, seconds = next(iter(costs_above(reference, times, share).items()))
        fair = share * mean(rank.iteration_seconds for rank in reference.ranks)
        if seconds > _noise(compared) * fair:
            found[subject.run.name] = milliseconds(seconds), part
    return found


def _against_share(subject: Subject, baseline: Subject, share: float) -> TimeComparison | None:
    one, two = baseline.entry.estimate, subject.entry.estimate
    return compare(one, two, 1 / share) if one and two else None


def _noise(found: TimeComparison) -> float:
    """From the ratio to its interval's nearer end, on the side of no difference."""
    end = (found.low if found.ratio > 1 else found.high) or found.ratio
    return abs(found.ratio - end)


def _difference(subject: Subject, whole: float, fair: float) -> str:
    ranks = subject.split.world_size
    direction = "above" if whole > fair else "below"
    return (
        f"an iteration takes {number(1000 * whole)} ms, baseline's work divided over "
        f"{plural(ranks, 'rank')} would take {milliseconds(fair)}; {milliseconds(abs(whole - fair))} "
        f"{direction} that"
    )


def _named_causes(costs: Costs, difference: float, noise: float) -> str:
    """The large parts, and the sum of the others; `noise` is what cannot be seen."""
    least = max(_SMALLEST_SHARE * abs(difference), noise)
    shown = {part: seconds for part, seconds in costs.items() if abs(seconds) >= least}
    if not shown:
        return f"no part of it is above the {milliseconds(noise)} that runs scatter by."
    parts = [f"{signed(milliseconds(seconds))} {part}" for part, seconds in shown.items()]
    rest = difference - sum(shown.values())
    if abs(rest) > _NEGLIGIBLE_SHARE * abs(difference):
        parted = ", each part within noise" if noise == least else ""
        within = ", within noise" if abs(rest) <= noise else parted
        parts.append(f"{signed(milliseconds(rest))} all else{within}")
    return f"{joined(parts)}."


def _arithmetic(subject: Subject, baseline: Subject, costs: Costs, share: float) -> str:
    """Why arithmetic takes another time than baseline's share of it, where that is a large part."""
    extra = costs[_FORWARD] + costs[_BACKWARD]
    times = baseline.evidence.times
    assert times is not None  # `costs` were split by it.
    parts = _parts(times)
    fair = share * (parts[_FORWARD] + parts[_BACKWARD])
    if extra < -_DOUBTFUL_SHARE * share * mean(r.iteration_seconds for r in times.ranks):
        return (
            " Arithmetic takes less than baseline's share of it, so the machine was not the same for "
            "both runs, and this division does not hold."
        )
    if extra <= max(0, *(costs[part] for part in costs if part not in (_FORWARD, _BACKWARD))):
        return ""
    text = f" The largest part is arithmetic itself, {milliseconds(extra)} in all"
    crowding = _ranks_a_core(subject.run)
    if crowding is None:
        return f"{text}; how many cores its ranks had is not known."
    if crowding <= 1:
        return (
            f"{text}: each rank had a core of its own, so it is smaller matrices, memory bandwidth that "
            "ranks share, or another load on the machine."
        )
    shared = min(extra, (crowding - 1) * fair)
    rest = extra - shared
    left = f", and {milliseconds(rest)} of it not" if rest > _NEGLIGIBLE_SHARE * extra else ""
    reason = f"{crowding:g} ranks shared each core, which explains up to {milliseconds(shared)}"
    return f"{text}: {reason}{left}."


def _ranks_a_core(run: Run) -> float | None:
    """Ranks for each core of their machine; a rank computes with one thread."""
    if run.record is None:
        return None
    host, ranks = run.record.host, run.record.spec.parallelism.world_size
    return ranks / max(1, len(host.nodes)) / host.cores


def _parts(times: TimeRecord) -> dict[str, float]:
    """Seconds by part, means over ranks."""
    by_rank = [_parts_of_rank(rank) for rank in times.ranks if rank.iteration_seconds]
    return {part: mean(found[part] for found in by_rank) for part in _parts_of_rank(None)}


def _parts_of_rank(rank: RankTime | None) -> dict[str, float]:
    phases = rank.phase_seconds if rank else {}
    calls = rank.communication_seconds if rank else {}
    inside = (Phase.FORWARD, Phase.BACKWARD)
    alone = {phase: phases.get(phase, 0.0) - calls.get(phase, 0.0) for phase in inside}
    whole = (Phase.GRADIENT_SYNC, Phase.PIPELINE)
    others = [phase for phase in Phase if phase not in (*inside, *whole, Phase.OPTIMIZER)]
    return {
        _FORWARD: alone[Phase.FORWARD],
        _BACKWARD: alone[Phase.BACKWARD],
        "communication inside forward and backward": sum(calls.get(p, 0.0) for p in inside),
        "gradient sync": phases.get(Phase.GRADIENT_SYNC, 0.0),
        "waiting for other pipeline stages": phases.get(Phase.PIPELINE, 0.0),
        "the optimizer": phases.get(Phase.OPTIMIZER, 0.0),
        "data, loss reduction and logging": sum(phases.get(p, 0.0) for p in others),
    }


def _bubble_sentences(subject: Subject) -> list[str]:
    configuration, times = subject.evidence.configuration, subject.evidence.times
    if configuration is None:
        return [f"{subject.label}: its micro batches are not known, so its bubble is not known."]
    split, count = configuration.parallelism, configuration.microbatches
    virtual = split.virtual_stages
    below = f"({count}·{virtual})" if virtual > 1 else f"{count}"
    form = f"({split.pipeline}−1)/{below}"
    ideal = f"{form} = {ideal_bubble(configuration):.1%}"
    if not subject.evidence.bubble or times is None:
        return [
            f"{subject.label}: {count} micro batch(es) make a bubble of {ideal} of the work; without a "
            "usable time ledger there is nothing to compare it with."
        ]
    measured = joined([f"{c.measured:.1%} on rank {c.rank}" for c in subject.evidence.bubble])
    sentences = [
        f"{subject.label}: {count} micro batch(es) make a bubble of {ideal} of the work; measured, "
        f"sending and waiting are {measured}."
    ]
    stages = measured_stages(configuration, times)
    if stages is not None:
        sentences += [_uneven(subject, stages), _more(subject, stages)]
    return sentences


def _uneven(subject: Subject, stages: StageTimes) -> str:
    works = joined([milliseconds(value) for value in stages.seconds])
    explained = joined(
        [f"{stages.idle_over_work(s):.1%} on stage {s}" for s in range(len(stages.seconds))]
    )
    configuration = subject.evidence.configuration
    assert configuration is not None
    left = max(
        abs(c.measured - stages.idle_over_work(subject.split.pipeline_rank(c.rank)))
        for c in subject.evidence.bubble
    )
    return (
        f"{subject.label}: its stages work {works} a micro batch; 1F1B over stages that unequal waits "
        f"{explained}, messages not counted; up to {left:.1%} of the work is in neither: messages, and "
        "whatever delayed one rank and not the other."
    )


def _more(subject: Subject, stages: StageTimes) -> str:
    count = stages.microbatches
    now = stages.iteration_seconds(count) / count
    configuration = subject.evidence.configuration
    assert configuration is not None
    form = "(p−1)/(m·v)" if stages.virtual > 1 else "(p−1)/m"
    asked = []
    for factor in _FACTORS:
        more = factor * count
        each = stages.iteration_seconds(more) / more
        asked.append(
            f"{more} make {form} {ideal_bubble(configuration, more):.1%} and "
            f"{milliseconds(each)} a micro batch ({change(each / now, 1)})"
        )
    floor = max(stages.seconds)
    return (
        f"{subject.label}: with {count} micro batch(es) these stages take {milliseconds(now)} a micro "
        f"batch; {joined(asked)}; however many, not below the slower stage's {milliseconds(floor)}."
    )
