"""Explain which cost separates a strategy from baseline, and for what a pipeline's stages wait.

The reference is baseline's fair time: the time of baseline's iteration, scaled to the tokens of the other
strategy and divided over its ranks. What an iteration takes beyond the fair time is a cost. Costs are
split by the parts of an iteration, such as "gradient sync", from the runs' `time.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parakit.artifacts.measurements import TimeRecord
from parakit.config.run import RunSpec
from parakit.config.strategy import Parallelism
from parakit.costs import Phase
from parakit.formatting.units import change, joined, milliseconds, number, plural, signed
from parakit.reporting.analyse.statistics import TimeComparison, TimeVerdict, compare_times
from parakit.reporting.analyse.time_shares import mean
from parakit.reporting.explain.predicted import (
    PredictionEvidence,
    StageTimes,
    Subject,
    find_subject,
    ideal_bubble,
    measure_stages,
)

_FORWARD, _BACKWARD = "forward without communication", "backward without communication"
_MIN_FRACTION_NAMED = 0.05
"""Fraction of the whole difference; smaller parts are summed up as all other parts."""
_NEGLIGIBLE_FRACTION = 0.02
_DOUBTFUL_FRACTION = 0.15
"""Fraction of the fair time: if arithmetic saves more than that, the machine was another one or busy."""
_MICROBATCH_FACTORS = (2, 4)
"""Factors by which the sentence on more micro batches multiplies their number."""
_MAX_PAYERS = 4
COST_DEFINITION = (
    "A cost is the time per iteration beyond baseline's time divided by the number of ranks."
)
"""Sentence that follows sentences on costs."""

Costs = dict[str, float]
"""Seconds per iteration that each part takes beyond its fair time; negative if it takes less."""


@dataclass(frozen=True)
class _TimePair:
    """Time records of a strategy and of its baseline.

    The fair time of the strategy is the baseline's time multiplied by `ratio`. In this time the strategy's ranks
    would do the baseline's work if they shared it without any loss.
    """

    baseline: TimeRecord
    strategy: TimeRecord
    ratio: float

    @property
    def iteration_seconds(self) -> float:
        """Seconds per iteration of the strategy, mean over its ranks."""
        return mean(rank.iteration_seconds for rank in self.strategy.ranks)

    @property
    def fair_seconds(self) -> float:
        """Fair time per iteration in seconds."""
        return self.ratio * mean(rank.iteration_seconds for rank in self.baseline.ranks)


def cost_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield one sentence on the costs of a strategy; none for baseline."""
    if subject.split != Parallelism():
        yield _cost_sentence(subject, find_subject(subjects, subject, Parallelism()))


def answer_costs(subjects: Sequence[Subject]) -> str:
    """Return sentences on the largest cost of each strategy beyond its fair time.

    There is one sentence for each part of the iteration that costs a strategy most, such as gradient sync. The last
    sentence counts the strategies without a cost above noise. If no strategy has a cost, a single sentence says why.
    """
    costs_by_part: dict[str, list[str]] = {}
    largest = largest_costs(subjects)
    for subject in subjects:
        if subject.run.name in largest:
            amount, part = largest[subject.run.name]
            costs_by_part.setdefault(part, []).append(f"{subject.label} ({amount})")
    if not costs_by_part:
        return (
            "No cost can be named: times are within noise, or a time record or baseline is missing."
        )
    parts = sorted(costs_by_part, key=lambda part: -len(costs_by_part[part]))
    costs = [
        f"The largest cost of {_join_payers(costs_by_part[part])} is {part}." for part in parts
    ]
    text = f"{' '.join(costs)} {COST_DEFINITION}"
    num_strategies = sum(subject.split != Parallelism() for subject in subjects)
    num_with_cost = sum(len(payers) for payers in costs_by_part.values())
    num_without_cost = num_strategies - num_with_cost
    if num_without_cost:
        text += f" For {plural(num_without_cost, 'other row')} no cost is above noise, or a record is missing."
    return text


def _join_payers(names: Sequence[str]) -> str:
    """Return the first _MAX_PAYERS names joined to a text, which ends with the number of further names."""
    more = len(names) - _MAX_PAYERS
    return joined([*names[:_MAX_PAYERS], *([f"{more} more"] if more > 0 else [])])


def costs_above_fair_time(reference: TimeRecord, other: TimeRecord, share: float) -> Costs:
    """Return the seconds that each part of an iteration takes beyond its fair time, the largest first.

    The fair time of a part is `share` times the reference's time for it. A part that takes less than its fair
    time has a negative cost. Times are means over ranks. The costs add up to the other run's iteration time
    minus `share` times the reference's iteration time. Only the short time between phases belongs to no part.
    """
    fair_parts, parts = _split_iteration(reference), _split_iteration(other)
    costs = {part: parts[part] - share * fair_parts[part] for part in parts}
    largest_first = sorted(costs, key=lambda part: -costs[part])
    return {part: costs[part] for part in largest_first}


def fair_time_ratio(reference: Subject, other: Subject) -> float | None:
    """Return the fair time of `other` divided by the reference's iteration time.

    It is the ratio of their tokens per rank. None means that the configuration of one of the runs is unknown.
    """
    reference_spec, spec = reference.run.spec, other.run.spec
    if reference_spec is None or spec is None:
        return None
    tokens_ratio = spec.tokens_per_iteration / reference_spec.tokens_per_iteration
    return tokens_ratio * reference_spec.parallelism.world_size / spec.parallelism.world_size


def _pair_times(subject: Subject, baseline: Subject) -> _TimePair | None:
    """Return the time records of a strategy and its baseline; None if one of them is missing."""
    times, reference = subject.evidence.times, baseline.evidence.times
    ratio = fair_time_ratio(baseline, subject)
    if times is None or reference is None or ratio is None:
        return None
    return _TimePair(reference, times, ratio)


def _cost_sentence(subject: Subject, baseline: Subject | None) -> str:
    """Return a sentence on the time that a strategy takes beyond its fair time, or on why it is unknown."""
    if baseline is None:
        return f"{subject.label}: there is no baseline run of this model to compare it with."
    pair = _pair_times(subject, baseline)
    if pair is None:
        label = subject.label if subject.evidence.times is None else baseline.label
        return f"{subject.label}: {label} left no usable time.json, so its cost cannot be split up."
    difference = pair.iteration_seconds - pair.fair_seconds
    text = (
        f"{subject.label}: an iteration takes {number(1000 * pair.iteration_seconds)} ms; baseline's"
        f" work divided over {plural(subject.split.world_size, 'rank')} would take"
        f" {milliseconds(pair.fair_seconds)}. The difference is"
        f" {milliseconds(abs(difference))}{'' if difference > 0 else ' less'}"
    )
    comparison = _compare_with_fair_time(subject, baseline, pair.ratio)
    if comparison is None or comparison.verdict is TimeVerdict.UNKNOWN:
        return f"{text}; too few iterations were timed for a verdict, so no cost can be named."
    if comparison.verdict is TimeVerdict.NOISE:
        limit = f" ({comparison.resolution})" if comparison.resolution else ""
        return f"{text}, which is within noise{limit}, so no cost can be named."
    noise = _noise_fraction(comparison) * pair.fair_seconds
    costs = costs_above_fair_time(pair.baseline, pair.strategy, pair.ratio)
    parts = _name_large_costs(costs, difference, noise)
    return f"{text}: {parts}.{_explain_slow_arithmetic(subject, pair, costs)}"


def _name_large_costs(costs: Costs, difference: float, noise: float) -> str:
    """Return a text with the large costs, and with the sum of all other parts if it is not negligible.

    A cost is large if it is above noise and above a fixed fraction of the difference.

    Args:
        costs: Seconds of each part beyond its fair time.
        difference: Seconds of the whole iteration beyond its fair time.
        noise: Seconds by which the difference may scatter between runs.
    """
    least = max(_MIN_FRACTION_NAMED * abs(difference), noise)
    large_costs = {part: seconds for part, seconds in costs.items() if abs(seconds) >= least}
    if not large_costs:
        return f"no part of it is above the {milliseconds(noise)} that runs scatter by"
    texts = [f"{signed(milliseconds(seconds))} {part}" for part, seconds in large_costs.items()]
    remainder = difference - sum(large_costs.values())
    if abs(remainder) > _NEGLIGIBLE_FRACTION * abs(difference):
        doubt = ""
        if abs(remainder) <= noise:
            doubt = ", within noise"
        elif noise == least:
            doubt = ", no part of which is above noise"
        texts.append(f"{signed(milliseconds(remainder))} all other parts{doubt}")
    return joined(texts)


def largest_costs(subjects: Sequence[Subject]) -> dict[str, tuple[str, str]]:
    """Return the largest cost of each run, by run name.

    The cost of a part of the iteration is the time that it takes beyond its fair time. The fair time is what the part
    takes in the baseline, scaled to the run's tokens per rank. A value has the cost as text, and the name of the part.
    Baselines are left out. So are runs that are not slower than their fair time, and runs with a largest cost
    within noise.
    """
    costs_by_run = {}
    for subject in subjects:
        baseline = find_subject(subjects, subject, Parallelism())
        if baseline is None or subject is baseline:
            continue
        pair = _pair_times(subject, baseline)
        if pair is None:
            continue
        comparison = _compare_with_fair_time(subject, baseline, pair.ratio)
        if comparison is None or comparison.verdict is not TimeVerdict.SLOWER:
            continue
        costs = costs_above_fair_time(pair.baseline, pair.strategy, pair.ratio)
        part, seconds = next(iter(costs.items()))
        if seconds > _noise_fraction(comparison) * pair.fair_seconds:
            costs_by_run[subject.run.name] = milliseconds(seconds), part
    return costs_by_run


def _compare_with_fair_time(
    subject: Subject, baseline: Subject, ratio: float
) -> TimeComparison | None:
    """Compare a row's time with its fair time; return None if the row or its baseline has no time."""
    reference, estimate = baseline.entry.estimate, subject.entry.estimate
    if reference is None or estimate is None:
        return None
    return compare_times(reference, estimate, 1 / ratio)


def _noise_fraction(comparison: TimeComparison) -> float:
    """Return the distance from the ratio of times to the end of its interval that is nearer to 1."""
    end = comparison.low if comparison.ratio > 1 else comparison.high
    return abs(comparison.ratio - (end or comparison.ratio))


def _explain_slow_arithmetic(subject: Subject, pair: _TimePair, costs: Costs) -> str:
    """Return a sentence on why the arithmetic of forward and backward takes more or less than its fair time.

    Communication inside of forward and backward is not included. The text is empty if another part costs more.
    """
    extra = costs[_FORWARD] + costs[_BACKWARD]
    if extra < -_DOUBTFUL_FRACTION * pair.fair_seconds:
        return (
            " Arithmetic takes less than its fair time, so the machine was not the same for both runs,"
            " and these costs do not hold."
        )
    other_costs = [seconds for part, seconds in costs.items() if part not in (_FORWARD, _BACKWARD)]
    if extra <= max(0, *other_costs):
        return ""
    text = f" The largest part is arithmetic itself, {milliseconds(extra)} in all"
    record = subject.run.record
    if record is None:
        return f"{text}; how many cores its ranks had is not known."
    # Each rank computes with one thread, so a rank uses one core at most.
    ranks, nodes = record.spec.parallelism.world_size, len(record.host.nodes)
    ranks_per_core = ranks / max(1, nodes) / record.host.cores
    if ranks_per_core <= 1:
        return (
            f"{text}: each rank had a core of its own, so the cause is smaller matrices, memory"
            " bandwidth that ranks share, or another load on the machine."
        )
    fair_parts = _split_iteration(pair.baseline)
    fair_arithmetic = pair.ratio * (fair_parts[_FORWARD] + fair_parts[_BACKWARD])
    explained = min(extra, (ranks_per_core - 1) * fair_arithmetic)
    unexplained = extra - explained
    text += f": {ranks_per_core:g} ranks shared each core, which explains up to {milliseconds(explained)}"
    if unexplained > _NEGLIGIBLE_FRACTION * extra:
        text += f", and {milliseconds(unexplained)} of it not"
    return f"{text}."


def _split_iteration(times: TimeRecord) -> dict[str, float]:
    """Return the seconds per iteration by part, averaged over the ranks with a steady iteration."""
    ranks = [rank for rank in times.ranks if rank.iteration_seconds]

    def total(*phases: Phase) -> float:
        """Return the seconds of phases, with the communication inside them."""
        return mean(sum(rank.phase_seconds.get(phase, 0.0) for phase in phases) for rank in ranks)

    def communication(*phases: Phase) -> float:
        """Return the seconds of communication inside phases."""
        return mean(
            sum(rank.communication_seconds.get(phase, 0.0) for phase in phases) for rank in ranks
        )

    named_phases = (
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.GRADIENT_SYNC,
        Phase.PIPELINE,
        Phase.OPTIMIZER,
    )
    other_phases = [phase for phase in Phase if phase not in named_phases]
    return {
        _FORWARD: total(Phase.FORWARD) - communication(Phase.FORWARD),
        _BACKWARD: total(Phase.BACKWARD) - communication(Phase.BACKWARD),
        "communication inside forward and backward": communication(Phase.FORWARD, Phase.BACKWARD),
        "gradient sync": total(Phase.GRADIENT_SYNC),
        "waiting for other pipeline stages": total(Phase.PIPELINE),
        "the optimizer": total(Phase.OPTIMIZER),
        "data, loss reduction and logging": total(*other_phases),
    }


def bubble_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """Yield sentences on a pipeline's bubble: the ideal value, the measured waits and their causes.

    A run without a pipeline yields nothing.
    """
    spec, evidence = subject.evidence.configuration, subject.evidence
    if subject.split.pipeline == 1:
        return
    if spec is None:
        yield f"{subject.label}: its micro batches are not known, so its bubble is not known."
        return
    virtual = spec.parallelism.virtual_stages
    divisor = f"({spec.microbatches}·{virtual})" if virtual > 1 else f"{spec.microbatches}"
    ideal = f"({spec.parallelism.pipeline}−1)/{divisor} = {ideal_bubble(spec):.1%}"
    text = (
        f"{subject.label}: with {plural(spec.microbatches, 'micro batch')} and equal stages the bubble"
        f" is {ideal} of the working time."
    )
    if not evidence.bubble or evidence.times is None:
        yield f"{text} There is no usable time.json to compare it with."
        return
    waits = joined([f"{bubble.measured:.1%} on rank {bubble.rank}" for bubble in evidence.bubble])
    yield f"{text} Measured, sending and waiting take {waits}."
    stages = measure_stages(spec, evidence.times)
    if stages is not None:
        yield f"{subject.label}: {_explain_unequal_stages(spec, evidence, stages)}"
        yield f"{subject.label}: {_predict_more_microbatches(spec, stages)}"


def _explain_unequal_stages(spec: RunSpec, evidence: PredictionEvidence, stages: StageTimes) -> str:
    """Return a sentence on the idle time of 1F1B that unequal stages cause, and on the idle time that remains."""
    work = joined([milliseconds(seconds) for seconds in stages.seconds])
    idle = [stages.idle_over_work(stage) for stage in range(len(stages.seconds))]
    idle_text = joined([f"{fraction:.1%} on stage {stage}" for stage, fraction in enumerate(idle)])
    unexplained = max(
        abs(bubble.measured - idle[spec.parallelism.pipeline_rank(bubble.rank)])
        for bubble in evidence.bubble
    )
    return (
        f"its stages work {work} per micro batch. With stages this unequal, 1F1B idles {idle_text} of"
        f" the working time, without the time of messages. Up to {unexplained:.1%} remain: messages,"
        " and delays of one rank alone."
    )


def _predict_more_microbatches(spec: RunSpec, stages: StageTimes) -> str:
    """Return a sentence that predicts the time per micro batch if an iteration had more micro batches.

    The sentence ends with the time of the slowest stage, which the time per micro batch approaches.
    """
    count = spec.microbatches
    seconds_now = stages.iteration_seconds(count) / count
    formula = "(p−1)/(m·v)" if spec.parallelism.virtual_stages > 1 else "(p−1)/m"
    predictions = []
    for factor in _MICROBATCH_FACTORS:
        more = factor * count
        seconds = stages.iteration_seconds(more) / more
        predictions.append(
            f"{more} would take {milliseconds(seconds)} ({change(seconds / seconds_now, 1)},"
            f" {formula} = {ideal_bubble(spec, more):.1%})"
        )
    return (
        f"with {plural(count, 'micro batch')} these stages take {milliseconds(seconds_now)} per micro"
        f" batch; {joined(predictions)}. No number of micro batches takes less than the slowest stage's"
        f" {milliseconds(max(stages.seconds))}."
    )


def answer_bubble(subjects: Sequence[Subject]) -> str:
    """Return two sentences: the longest wait in a pipeline, and the gain from more micro batches.

    The text is empty if no pipeline run has a usable time record. The second sentence is left out if a stage has
    no times.
    """
    bubbles = [(subject, bubble) for subject in subjects for bubble in subject.evidence.bubble]
    if not bubbles:
        return ""
    subject, longest = max(bubbles, key=lambda pair: pair[1].measured)
    evidence, spec = subject.evidence, subject.evidence.configuration
    text = (
        f"Rank {longest.rank} of {subject.label} waits for {longest.measured:.0%} of its working time;"
        f" with equal stages it would wait for {longest.predicted:.0%}."
    )
    if spec is None or evidence.times is None:
        return text
    stages = measure_stages(spec, evidence.times)
    if stages is None:
        return text
    count, more = spec.microbatches, _MICROBATCH_FACTORS[-1] * spec.microbatches
    seconds_per_microbatch = stages.iteration_seconds(count) / count
    # With more micro batches the stages fill and drain the pipeline less often per micro batch.
    seconds_with_more = stages.iteration_seconds(more) / more
    saving = 1 - seconds_with_more / seconds_per_microbatch
    return f"{text} {more} micro batches instead of {count} would save {saving:.1%} of the time."
