"""Ten questions of somebody who has to choose, answered by searches over the same model: part of `make plan`.

What is changed to see what would change the choice is said in the answer; every figure is a prediction,
and the last answer says how far predictions like these were off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from parakit.config.strategy import Parallelism, Sharding
from parakit.costs import total_parameters
from parakit.formatting.units import duration, gib, joined, plural
from parakit.planner.advice import (
    FAMILIES_OF_OTHER_TRAINERS,
    StrategyFamily,
    bottleneck_sentence,
    find_best_of_each_family,
    runner_up_sentence,
    strategy_family,
)
from parakit.planner.readings.neighbours import estimate_uncertainty
from parakit.planner.search import Candidate, Plan, Request, resize_request, search_configurations
from parakit.planner.show import plan_command
from parakit.planner.verdict import MOST_RECOMMENDED_FRACTION

if TYPE_CHECKING:
    from rich.console import Console

INFERENCE = (
    "For the latency of one request TP; for throughput, or over slow links, stages and replicas; "
    "ZeRO helps neither."
)
"""As docs/guide.md and the lab guide have it: reasoning, the kit measures no inference."""
_KEPT = 8
"""Strategies in which the winner's is looked for under other circumstances."""


def print_answers(plan: Plan, console: Console) -> None:
    """Print the answers for a plan that has a winner, a row per question."""
    from rich.table import Table

    assert plan.winner is not None
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    command = plan_command(plan.request, plan.winner.spec)
    for name, text in answer_questions(plan).items():
        table.add_row(name, text.removesuffix(f" {command}"))
    console.print(table, width=min(120, console.width), highlight=False)


def answer_questions(plan: Plan) -> dict[str, str]:
    """Ten questions, and what the figures say, for a plan that has a winner."""
    winner, request = plan.winner, plan.request
    assert winner is not None
    kinds = find_best_of_each_family(request)
    # Another sharding of the same split is hardly another choice.
    others = sorted(plan.ranked[1:], key=lambda one: _split(one) == _split(winner))
    alike = [
        f"{one.strategy} ({duration(one.seconds.total)}, {gib(one.memory.total)} GiB)"
        for one in plan.ranked[1:]
        if one.is_tied(winner) and _split(one) == _split(winner)
    ]
    tied = f", tied with {joined(alike)}: of these the one with the least memory" if alike else ""
    return {
        "Use": f"{winner.strategy}: {duration(winner.seconds.total)} an iteration of "
        f"{request.global_batch} samples, {gib(winner.memory.total)} of "
        f"{gib(request.cluster.device.memory_bytes, 0)} GiB, MFU {winner.mfu:.0%}{tied}. "
        f"{plan_command(request, winner.spec)}",
        "Second": runner_up_sentence(winner, others[0]) if others else "No other strategy fits.",
        "Avoid": _avoid(winner, kinds),
        "Why": bottleneck_sentence(plan),
        "Megatron for this?": _is_megatron_worth_it(winner, kinds, plan),
        "ZeRO or TP?": _zero_or_tensor(kinds),
        "Micro batches": _micro_batches(winner),
        "What would change it": _changes(plan, winner),
        "For inference": _inference(request),
        "How sure": str(estimate_uncertainty(winner.spec, request.cluster, request.own_runs)),
    }


def _avoid(winner: Candidate, kinds: dict[StrategyFamily, Candidate]) -> str:
    """The families that do not fit, else the slowest."""
    heavy = [(kind, found) for kind, found in kinds.items() if not found.fits]
    if heavy:
        texts = [f"{kind} alone ({gib(c.memory.total, 0)} GiB a device)" for kind, c in heavy]
        return f"{joined(texts)}: does not fit."
    others = {k: c for k, c in kinds.items() if c.spec.parallelism != winner.spec.parallelism}
    if not others:
        return "Nothing: one device has no alternatives."
    kind = max(others, key=lambda kind: others[kind].seconds.total)
    return (
        f"{kind} alone ({others[kind].strategy}) takes "
        f"{_ratio(others[kind], winner):.2f} times as long."
    )


def _is_megatron_worth_it(
    winner: Candidate, kinds: dict[StrategyFamily, Candidate], plan: Plan
) -> str:
    chosen = strategy_family(winner.spec.parallelism)
    if chosen in FAMILIES_OF_OTHER_TRAINERS:
        split = next(
            (
                c
                for c in plan.ranked
                if strategy_family(c.spec.parallelism) not in FAMILIES_OF_OTHER_TRAINERS
            ),
            None,
        )
        text = f"Not needed: {chosen} is what PyTorch's DDP and FSDP and DeepSpeed have too"
        if split is None:
            return f"{text}."
        ratio = _ratio(split, winner)
        return f"{text}; its own best strategy, {split.strategy}, takes {ratio:.2f} times as long."
    unsplit = [candidate for kind, candidate in kinds.items() if kind in FAMILIES_OF_OTHER_TRAINERS]
    plain = [candidate for candidate in unsplit if candidate.is_recommended]
    if not plain:
        fits = any(candidate.fits for candidate in unsplit)
        return f"Yes: without splitting layers or sequences the model {_misfit(fits)}."
    best = min(plain, key=lambda found: found.seconds.total)
    ratio = _ratio(best, winner)
    verdict = "Hardly" if best.is_tied(winner) else "Yes"
    return (
        f"{verdict}: without it the best is {best.strategy}, which takes {ratio:.2f} times as long."
    )


def _zero_or_tensor(kinds: dict[StrategyFamily, Candidate]) -> str:
    sharded, tensor = (kinds.get(k) for k in (StrategyFamily.SHARDED_DATA, StrategyFamily.TENSOR))
    if sharded is None or tensor is None:
        lacking = StrategyFamily.TENSOR if tensor is None else StrategyFamily.SHARDED_DATA
        return f"Over all devices {lacking} alone cannot be split evenly."
    if sharded.is_recommended != tensor.is_recommended:
        better, worse = (sharded, tensor) if sharded.is_recommended else (tensor, sharded)
        return f"{better.strategy}: the other {_misfit(worse.fits)}."
    faster, slower = sorted((sharded, tensor), key=lambda found: found.seconds.total)
    return f"{faster.strategy}: {slower.strategy} takes {_ratio(slower, faster):.2f} times as long."


def _misfit(fits: bool) -> str:
    """Return why something is not recommended that does not fit, or fits only closely."""
    return (
        f"takes more than {MOST_RECOMMENDED_FRACTION:.0%} of a device" if fits else "does not fit"
    )


def _micro_batches(winner: Candidate) -> str:
    spec = winner.spec
    size = plural(spec.batch.micro_batch_size, "sample")
    text = f"{plural(spec.microbatches, 'micro batch')} of {size} a replica"
    if spec.parallelism.pipeline == 1:
        return f"{text}; without stages there is no bubble, so as few as fit."
    bubble = winner.seconds.bubble / winner.seconds.total
    return f"{text}; the bubble is {bubble:.0%} of the iteration and halves with twice as many."


def _changes(plan: Plan, winner: Candidate) -> str:
    """The choice under other circumstances, of those that make it another one."""
    changed, same = [], []
    for what, request in _variations(plan.request):
        ranked = search_configurations(request, kept=_KEPT).ranked
        if not ranked:
            changed.append(f"with {what} nothing fits")
        elif any(_split(one) == _split(winner) for one in ranked if one.is_tied(ranked[0])):
            same.append(what)
        else:
            changed.append(f"with {what}: {ranked[0].strategy}")
    if same:
        changed.append(f"the same with {joined(same)}")
    text = "; ".join(changed)
    return f"{text[0].upper()}{text[1:]}."


def _variations(request: Request) -> Iterator[tuple[str, Request]]:
    cluster = request.cluster
    outer = "inter" if cluster.nodes > 1 else "intra"
    link = getattr(cluster, outer)
    slow = {outer: replace(link, bytes_per_second=link.bytes_per_second / 4)}
    if cluster.devices > 1:
        slower = replace(request, cluster=replace(cluster, **slow))
        yield f"a quarter of {link.key}'s rate", slower
    small = replace(cluster.device, memory_bytes=cluster.device.memory_bytes // 2)
    yield "half the memory", replace(request, cluster=replace(cluster, device=small))
    yield (
        "twice the global batch",
        resize_request(request, cluster.devices, 2 * request.global_batch),
    )
    yield "twice the devices", resize_request(request, 2 * cluster.devices)


def _inference(request: Request) -> str:
    weights, devices = 2 * total_parameters(request.template.shape), 1
    while weights > devices * request.capacity:
        devices *= 2
    return (
        f"There are no gradients, optimizer and kept activations: weights take {gib(weights)} GiB "
        f"in bf16 and need {plural(devices, 'device')}. {INFERENCE}"
    )


def _split(candidate: Candidate) -> Parallelism:
    """How one replica is split, however many there are and whatever they shard."""
    return replace(candidate.spec.parallelism, data=1, sharding=Sharding.NONE)


def _ratio(slower: Candidate, faster: Candidate) -> float:
    return slower.seconds.total / faster.seconds.total
