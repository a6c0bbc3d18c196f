"""Which cost separates a strategy from baseline, and what a pipeline waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parakit.artifacts.measurements import TimeRecord
from parakit.config.strategy import Parallelism
from parakit.costs import Phase
from parakit.formatting.units import change, joined, milliseconds, number, plural, signed
from parakit.reporting.analyse.statistics import TimeComparison, TimeVerdict, compare_times
from parakit.reporting.analyse.time_shares import mean
from parakit.reporting.explain.predicted import Subject, find_subject, ideal_bubble, measure_stages

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


def cost_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """What a configuration that is not a baseline pays beyond baseline's share."""
    if subject.split != Parallelism():
        yield _cost_sentence(subject, find_subject(subjects, subject, Parallelism()))


def costs_above_fair_time(reference: TimeRecord, other: TimeRecord, share: float) -> Costs:
    """Seconds of each part beyond `share` times the reference's, largest first, means over ranks.

    They sum to the difference of the iterations, but for the clock readings between phases.
    """
    ours, theirs = _parts(reference), _parts(other)
    found = {part: theirs[part] - share * ours[part] for part in ours}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def fair_time_ratio(reference: Subject, other: Subject) -> float | None:
    """Baseline's work over the other's ranks, relative to baseline's own iteration."""
    one, two = reference.run.spec, other.run.spec
    if one is None or two is None:
        return None
    work = two.tokens_per_iteration / one.tokens_per_iteration
    return work * one.parallelism.world_size / two.parallelism.world_size


def bubble_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """What the stages of a pipeline wait for; nothing without one."""
    configuration, evidence = subject.evidence.configuration, subject.evidence
    if subject.split.pipeline == 1:
        return
    if configuration is None:
        yield f"{subject.label}: its micro batches are not known, so its bubble is not known."
        return
    split, count = configuration.parallelism, configuration.microbatches
    virtual = split.virtual_stages
    below = f"({count}·{virtual})" if virtual > 1 else f"{count}"
    ideal = f"({split.pipeline}−1)/{below} = {ideal_bubble(configuration):.1%}"
    text = f"{subject.label}: {plural(count, 'micro batch')} make a bubble of {ideal} of the work;"
    if not evidence.bubble or evidence.times is None:
        yield f"{text} without a usable time ledger there is nothing to compare it with."
        return
    measured = joined([f"{c.measured:.1%} on rank {c.rank}" for c in evidence.bubble])
    yield f"{text} measured, sending and waiting are {measured}."
    stages = measure_stages(configuration, evidence.times)
    if stages is None:
        return
    works = joined([milliseconds(value) for value in stages.seconds])
    idle = [stages.idle_over_work(stage) for stage in range(len(stages.seconds))]
    explained = joined([f"{share:.1%} on stage {stage}" for stage, share in enumerate(idle)])
    left = max(abs(c.measured - idle[split.pipeline_rank(c.rank)]) for c in evidence.bubble)
    yield (
        f"{subject.label}: its stages work {works} a micro batch; 1F1B over stages that unequal waits "
        f"{explained}, messages not counted; up to {left:.1%} of the work is in neither: messages, and "
        "whatever delayed one rank and not the other."
    )
    now = stages.iteration_seconds(count) / count
    asked = []
    for more in (factor * count for factor in _FACTORS):
        each = stages.iteration_seconds(more) / more
        asked.append(
            f"{more} make {'(p−1)/(m·v)' if virtual > 1 else '(p−1)/m'}"
            f" {ideal_bubble(configuration, more):.1%} and "
            f"{milliseconds(each)} a micro batch ({change(each / now, 1)})"
        )
    yield (
        f"{subject.label}: with {plural(count, 'micro batch')} these stages take "
        f"{milliseconds(now)} a micro batch; {joined(asked)}; however many, not below the slower "
        f"stage's {milliseconds(max(stages.seconds))}."
    )


def _cost_sentence(subject: Subject, baseline: Subject | None) -> str:
    if baseline is None:
        return f"{subject.label}: there is no baseline run of this model to compare it with."
    times, reference = subject.evidence.times, baseline.evidence.times
    share = fair_time_ratio(baseline, subject)
    if times is None or reference is None or share is None:
        who = subject.label if times is None else baseline.label
        return f"{subject.label}: {who} left no usable time ledger, so its cost cannot be split up."
    whole = mean(r.iteration_seconds for r in times.ranks)
    fair = share * mean(r.iteration_seconds for r in reference.ranks)
    text = (
        f"{subject.label}: an iteration takes {number(1000 * whole)} ms, baseline's work divided over"
        f" {plural(subject.split.world_size, 'rank')} would take {milliseconds(fair)};"
        f" {milliseconds(abs(whole - fair))} {'above' if whole > fair else 'below'} that"
    )
    found = _against_share(subject, baseline, share)
    if found is None or found[0].verdict is TimeVerdict.UNKNOWN:
        return f"{text}; too few iterations were timed for a verdict, so no cost can be named."
    if found[0].verdict is TimeVerdict.NOISE:
        unseen = f" ({found[0].resolution})" if found[0].resolution else ""
        return f"{text}, which is within noise{unseen}, so no cost can be named."
    # The large parts, and the sum of the others; noise is what cannot be seen.
    difference, noise = whole - fair, found[1] * fair
    least = max(_SMALLEST_SHARE * abs(difference), noise)
    costs = costs_above_fair_time(reference, times, share)
    shown = {part: seconds for part, seconds in costs.items() if abs(seconds) >= least}
    named = f"no part of it is above the {milliseconds(noise)} that runs scatter by"
    if shown:
        parts = [f"{signed(milliseconds(seconds))} {part}" for part, seconds in shown.items()]
        rest = difference - sum(shown.values())
        if abs(rest) > _NEGLIGIBLE_SHARE * abs(difference):
            parted = ", no part of which is above noise" if noise == least else ""
            within = ", within noise" if abs(rest) <= noise else parted
            parts.append(f"{signed(milliseconds(rest))} all else{within}")
        named = joined(parts)
    return f"{text}: {named}.{_arithmetic(subject, reference, costs, share)}"


def largest_costs(subjects: Sequence[Subject]) -> dict[str, tuple[str, str]]:
    """How much each run pays beyond baseline's share, and for what most, if that is above noise."""
    found = {}
    for subject in subjects:
        baseline = find_subject(subjects, subject, Parallelism())
        if baseline is None or subject is baseline:
            continue
        times, reference = subject.evidence.times, baseline.evidence.times
        share = fair_time_ratio(baseline, subject)
        if times is None or reference is None or share is None:
            continue
        compared = _against_share(subject, baseline, share)
        if compared is None or compared[0].verdict is not TimeVerdict.SLOWER:
            continue
        part, seconds = next(iter(costs_above_fair_time(reference, times, share).items()))
        fair = share * mean(rank.iteration_seconds for rank in reference.ranks)
        if seconds > compared[1] * fair:
            found[subject.run.name] = milliseconds(seconds), part
    return found


def _against_share(
    subject: Subject, baseline: Subject, share: float
) -> tuple[TimeComparison, float] | None:
    """The ratio to baseline's share, and its noise: how far its interval reaches towards 1."""
    one, two = baseline.entry.estimate, subject.entry.estimate
    if one is None or two is None:
        return None
    found = compare_times(one, two, 1 / share)
    end = (found.low if found.ratio > 1 else found.high) or found.ratio
    return found, abs(found.ratio - end)


def _arithmetic(subject: Subject, reference: TimeRecord, costs: Costs, share: float) -> str:
    """Why arithmetic takes another time than baseline's share of it, where that is a large part."""
    extra = costs[_FORWARD] + costs[_BACKWARD]
    parts = _parts(reference)
    fair = share * (parts[_FORWARD] + parts[_BACKWARD])
    if extra < -_DOUBTFUL_SHARE * share * mean(r.iteration_seconds for r in reference.ranks):
        return (
            " Arithmetic takes less than baseline's share of it, so the machine was not the same for "
            "both runs, and this division does not hold."
        )
    if extra <= max(0, *(costs[part] for part in costs if part not in (_FORWARD, _BACKWARD))):
        return ""
    text = f" The largest part is arithmetic itself, {milliseconds(extra)} in all"
    if (record := subject.run.record) is None:
        return f"{text}; how many cores its ranks had is not known."
    # A rank computes with one thread.
    ranks, nodes = record.spec.parallelism.world_size, len(record.host.nodes)
    crowding = ranks / max(1, nodes) / record.host.cores
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


def _parts(times: TimeRecord) -> dict[str, float]:
    """Seconds by part, means over ranks."""
    inside, whole = (Phase.FORWARD, Phase.BACKWARD), (Phase.GRADIENT_SYNC, Phase.PIPELINE)
    others = [phase for phase in Phase if phase not in (*inside, *whole, Phase.OPTIMIZER)]
    ranks = [rank for rank in times.ranks if rank.iteration_seconds]

    def spent(*phases: Phase) -> float:
        return mean(sum(rank.phase_seconds.get(p, 0.0) for p in phases) for rank in ranks)

    def called(*phases: Phase) -> float:
        return mean(sum(rank.communication_seconds.get(p, 0.0) for p in phases) for rank in ranks)

    return {
        _FORWARD: spent(Phase.FORWARD) - called(Phase.FORWARD),
        _BACKWARD: spent(Phase.BACKWARD) - called(Phase.BACKWARD),
        "communication inside forward and backward": called(*inside),
        "gradient sync": spent(Phase.GRADIENT_SYNC),
        "waiting for other pipeline stages": spent(Phase.PIPELINE),
        "the optimizer": spent(Phase.OPTIMIZER),
        "data, loss reduction and logging": spent(*others),
    }
