"""Answers to further questions of somebody who chooses a strategy, which `make plan ALL=1` prints.

Every figure is a prediction. `describe_changes` also searches with another link, batch and number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from parakit.config.strategy import Parallelism, Sharding
from parakit.costs import total_parameters
from parakit.formatting.units import gib, joined, plural
from parakit.planner.advice import (
    FAMILIES_OF_OTHER_TRAINERS,
    StrategyFamily,
    families_sentence,
    find_best_of_each_family,
    one_device_sentence,
    runner_up_sentence,
    strategy_family,
)
from parakit.planner.search import Candidate, Plan, Request, resize_request, search_tied_strategies
from parakit.planner.verdict import MOST_RECOMMENDED_FRACTION

if TYPE_CHECKING:
    from rich.console import Console

INFERENCE = (
    "For the latency of one request, use tensor parallelism. For throughput, or over slow links, use "
    "pipeline stages and replicas. ZeRO helps neither."
)
"""Advice on inference, as in docs/guide.md and the lab guide. It is reasoning: the kit measures no inference."""
_LEAST_GAIN = 1.10
"""Ratio of two predicted times from which another trainer is worth the change. Predictions err by several percent, so a
smaller gain may not exist."""


def print_answers(plan: Plan, console: Console) -> None:
    """Print the answers for a plan that has a winner, with one row per question."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for question, answer in answer_questions(plan).items():
        table.add_row(question, answer)
    console.print(table, width=min(120, console.width), highlight=False)


def answer_questions(plan: Plan) -> dict[str, str]:
    """Return the answers for a plan that has a winner, by question, in the order in which they are shown."""
    winner, request = plan.winner, plan.request
    assert winner is not None
    best_by_family = find_best_of_each_family(request)
    # Strategies that split a replica as the winner does differ only in sharding, which is hardly another choice.
    alternatives = sorted(
        plan.ranked[1:],
        key=lambda candidate: _replica_split(candidate) == _replica_split(winner),
    )
    second = "No other strategy fits."
    if alternatives:
        second = runner_up_sentence(winner, alternatives[0])
    return {
        "Second": second,
        "Avoid": _name_family_to_avoid(winner, best_by_family),
        "One device": _answer_one_device(request, winner),
        "One kind alone": _answer_one_kind(plan, winner),
        "Megatron for this?": _answer_megatron(winner, best_by_family, plan),
        "ZeRO or TP?": _answer_zero_or_tensor(best_by_family),
        "Micro batches": _describe_micro_batches(winner),
        "For inference": _answer_inference(request),
    }


def _answer_one_device(request: Request, winner: Candidate) -> str:
    """Return whether one device is enough, for a plan on several devices."""
    if request.cluster.devices == 1:
        return "The plan is for one device."
    return one_device_sentence(request, winner)


def _answer_one_kind(plan: Plan, winner: Candidate) -> str:
    """Return what each kind of parallelism alone takes, for a plan on several devices."""
    if plan.request.cluster.devices == 1:
        return "One device has no parallelism."
    return families_sentence(plan, winner)


def _name_family_to_avoid(
    winner: Candidate, best_by_family: dict[StrategyFamily, Candidate]
) -> str:
    """Return a sentence with the kinds of parallelism that do not fit alone.

    If all kinds fit, the sentence has the slowest kind and how much longer it takes than the winner.
    """
    too_large = [
        f"{family} alone ({gib(best.memory.total, 0)} GiB per device)"
        for family, best in best_by_family.items()
        if not best.fits
    ]
    if too_large:
        verb = "does" if len(too_large) == 1 else "do"
        return f"{_capitalise(joined(too_large))} {verb} not fit."
    alternatives = {
        family: best
        for family, best in best_by_family.items()
        if best.spec.parallelism != winner.spec.parallelism
    }
    if not alternatives:
        return "Nothing: one device has no alternatives."
    slowest = max(alternatives, key=lambda family: alternatives[family].seconds.total)
    ratio = _time_ratio(alternatives[slowest], winner)
    name = alternatives[slowest].strategy
    return f"{_capitalise(slowest)} alone ({name}) takes {ratio:.2f} times as long."


def _answer_megatron(
    winner: Candidate, best_by_family: dict[StrategyFamily, Candidate], plan: Plan
) -> str:
    """Return the answer to this question: do the kinds of parallelism that only Megatron has save time?

    The comparison is with the kinds that DDP, FSDP and DeepSpeed have too.

    The answer begins with "Yes", "Hardly" or "Not needed".
    """
    family = strategy_family(winner.spec.parallelism)
    if family in FAMILIES_OF_OTHER_TRAINERS:
        text = f"Not needed: PyTorch's DDP and FSDP and DeepSpeed have {family} too."
        for candidate in plan.ranked:
            if strategy_family(candidate.spec.parallelism) not in FAMILIES_OF_OTHER_TRAINERS:
                ratio = _time_ratio(candidate, winner)
                return (
                    f"{text} The best strategy that only Megatron has, {candidate.strategy}, takes "
                    f"{ratio:.2f} times as long as {winner.strategy}."
                )
        return text
    unsplit = [
        best for family, best in best_by_family.items() if family in FAMILIES_OF_OTHER_TRAINERS
    ]
    recommended = [candidate for candidate in unsplit if candidate.is_recommended]
    if not recommended:
        fits = any(candidate.fits for candidate in unsplit)
        return f"Yes: without splitting layers or sequences the model {_misfit_phrase(fits)}."
    best = min(recommended, key=lambda candidate: candidate.seconds.total)
    ratio = _time_ratio(best, winner)
    verdict = "Yes" if ratio >= _LEAST_GAIN else "Hardly"
    return (
        f"{verdict}: the best strategy that PyTorch and DeepSpeed have too, {best.strategy}, takes "
        f"{ratio:.2f} times as long as {winner.strategy}."
    )


def _answer_zero_or_tensor(best_by_family: dict[StrategyFamily, Candidate]) -> str:
    """Return a sentence that compares sharded data parallelism alone with tensor parallelism alone.

    The better strategy stands first. If one of them is impossible, the sentence says so.
    """
    sharded = best_by_family.get(StrategyFamily.SHARDED_DATA)
    tensor = best_by_family.get(StrategyFamily.TENSOR)
    if sharded is None or tensor is None:
        missing = StrategyFamily.TENSOR if tensor is None else StrategyFamily.SHARDED_DATA
        return f"Over all devices {missing} alone cannot be split evenly."
    if sharded.is_recommended != tensor.is_recommended:
        better, worse = (sharded, tensor) if sharded.is_recommended else (tensor, sharded)
        return f"{_name_with_kind(better)}. {_name_with_kind(worse)} {_misfit_phrase(worse.fits)}."
    faster, slower = sorted((sharded, tensor), key=lambda candidate: candidate.seconds.total)
    ratio = _time_ratio(slower, faster)
    return f"{_name_with_kind(faster)}. {_name_with_kind(slower)} takes {ratio:.2f} times as long."


def _name_with_kind(candidate: Candidate) -> str:
    """Return `ZeRO (dp8-zero3)` or `TP (sp8)`, for a candidate with one of the two kinds of parallelism alone."""
    kind = "TP" if candidate.spec.parallelism.tensor > 1 else "ZeRO"
    return f"{kind} ({candidate.strategy})"


def _misfit_phrase(fits: bool) -> str:
    """Return why a candidate is not recommended that does not fit, or that fits only closely."""
    if fits:
        return f"takes more than {MOST_RECOMMENDED_FRACTION:.0%} of a device"
    return "does not fit"


def _describe_micro_batches(winner: Candidate) -> str:
    """Return sentences with the number and size of the micro batches per replica, and with the pipeline bubble."""
    spec = winner.spec
    size = plural(spec.batch.micro_batch_size, "sample")
    text = f"{plural(spec.microbatches, 'micro batch')} of {size} per replica."
    if spec.parallelism.pipeline == 1:
        return f"{text} Without pipeline stages there is no bubble, so use as few as fit."
    bubble = winner.seconds.bubble / winner.seconds.total
    return (
        f"{text} The pipeline bubble is {bubble:.0%} of the iteration. It halves with twice as many "
        "micro batches."
    )


def describe_changes(plan: Plan, winner: Candidate) -> str:
    """Return sentences with the best strategy under other circumstances, such as twice the devices.

    The last sentence lists the circumstances that do not change the choice.
    """
    sentences, unchanged = [], []
    for circumstance, request in _enumerate_variations(plan.request):
        ranked = search_tied_strategies(request)
        if not ranked:
            sentences.append(f"With {circumstance} nothing fits.")
            continue
        tied = [candidate for candidate in ranked if candidate.is_tied(ranked[0])]
        if any(_replica_split(candidate) == _replica_split(winner) for candidate in tied):
            unchanged.append(circumstance)
        else:
            sentences.append(f"With {circumstance} use {ranked[0].strategy}.")
    if unchanged:
        sentences.append(_describe_unchanged(unchanged))
    return " ".join(sentences)


def _describe_unchanged(circumstances: list[str]) -> str:
    """Return a sentence that lists the circumstances of which none changes the choice. The list is not empty."""
    if len(circumstances) == 1:
        return f"The choice stays the same with {circumstances[0]}."
    return f"Each of these changes alone leaves the choice the same: {joined(circumstances)}."


def _enumerate_variations(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield pairs of a circumstance in words, such as "twice the devices", and the request changed accordingly."""
    cluster = request.cluster
    outer = "inter" if cluster.nodes > 1 else "intra"
    link = getattr(cluster, outer)
    slow_link = {outer: replace(link, bytes_per_second=link.bytes_per_second / 4)}
    if cluster.devices > 1:
        slower = replace(request, cluster=replace(cluster, **slow_link))
        yield f"a quarter of {link.key}'s rate", slower
    fewer_sequences = request.global_batch // 4
    if request.batch_origin and fewer_sequences:
        # Nobody stated the batch, and pipeline stages need many micro batches.
        smaller_batch = resize_request(request, cluster.devices, fewer_sequences)
        yield f"a global batch of {fewer_sequences:,}", smaller_batch
    yield (
        "twice the global batch",
        resize_request(request, cluster.devices, 2 * request.global_batch),
    )
    yield "twice the devices", resize_request(request, 2 * cluster.devices)


def _answer_inference(request: Request) -> str:
    """Return sentences with the number of devices that inference needs for the weights in bf16, and advice.

    The number of devices is a power of two.
    """
    weight_bytes, devices = 2 * total_parameters(request.template.shape), 1
    while weight_bytes > devices * request.capacity:
        devices *= 2
    return (
        "Inference has no gradients, no optimizer and no activations for backward: the weights take "
        f"{gib(weight_bytes)} GiB in bf16 and need {plural(devices, 'device')}. {INFERENCE}"
    )


def _capitalise(text: str) -> str:
    """Return a text with its first letter in upper case."""
    return f"{text[0].upper()}{text[1:]}"


def _replica_split(candidate: Candidate) -> Parallelism:
    """Return how one replica is split, without the number of replicas and their sharding."""
    return replace(candidate.spec.parallelism, data=1, sharding=Sharding.NONE)


def _time_ratio(slower: Candidate, faster: Candidate) -> float:
    """Return the time of an iteration of `slower` over that of `faster`."""
    return slower.seconds.total / faster.seconds.total
