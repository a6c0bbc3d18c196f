"""What the figures say, in sentences: which parallelism, why it wins, what limits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from enum import StrEnum

from parakit.config.groups import Group
from parakit.config.recompute import Recompute
from parakit.config.strategy import Parallelism
from parakit.costs import PRECISIONS, find_peak_rank, total_parameters
from parakit.formatting.units import GIB, amount, duration, gib, joined, ms, plural
from parakit.planner.candidates import (
    build_unsharded_spec,
    enumerate_splits,
    enumerate_variants,
    list_micro_batch_sizes,
    list_recomputes,
)
from parakit.planner.search import Candidate, Plan, Request, evaluate_configuration
from parakit.planner.ties import TIE_RATIO
from parakit.planner.time.cluster import Cluster, find_route
from parakit.planner.time.iteration import TIME_COMPONENTS
from parakit.planner.verdict import MOST_RECOMMENDED_FRACTION, Fit, explain_close_fit

_COMPONENT_WORDS = {
    "matmul": "matrix products",
    "memory_bound": "memory-bound kernels",
    "tensor_parallel": "exposed tensor-parallel communication",
    "context_parallel": "exposed context-parallel communication",
    "expert_parallel": "expert-parallel communication",
    "pipeline_messages": "messages between stages",
    "bubble": "the pipeline bubble",
    "gradient_sync": "gradient synchronisation",
    "optimizer": "the optimizer",
}
"""The others' names say it."""
_OVERHEADS = {
    "tensor_parallel": Group.TENSOR,
    "context_parallel": Group.CONTEXT,
    "expert_parallel": Group.EXPERT,
    "pipeline_messages": Group.PIPELINE,
    "bubble": None,
    "gradient_sync": Group.DATA_CONTEXT,
}
"""What is not work, and the group whose link it waits for."""


class StrategyFamily(StrEnum):
    """Families of the decision tree."""

    DATA = "data parallelism"
    SHARDED_DATA = "sharded data parallelism (ZeRO)"
    TENSOR = "tensor parallelism"
    CONTEXT = "context parallelism"
    PIPELINE = "pipeline parallelism"
    HYBRID = "a hybrid"
    SINGLE = "a single device"


FAMILIES_OF_OTHER_TRAINERS = (
    StrategyFamily.SINGLE,
    StrategyFamily.DATA,
    StrategyFamily.SHARDED_DATA,
)
"""What PyTorch's DDP and FSDP and DeepSpeed have too."""


def strategy_family(parallelism: Parallelism) -> StrategyFamily:
    """The family a parallelism belongs to; the distributed optimizer alone is still data
    parallelism."""
    sharded = parallelism.sharding.wraps_modules
    dimensions = {
        StrategyFamily.TENSOR: parallelism.tensor,
        StrategyFamily.CONTEXT: parallelism.context,
        StrategyFamily.PIPELINE: parallelism.pipeline,
        StrategyFamily.SHARDED_DATA if sharded else StrategyFamily.DATA: parallelism.data,
    }
    used = [kind for kind, degree in dimensions.items() if degree > 1]
    return StrategyFamily.HYBRID if len(used) > 1 else used[0] if used else StrategyFamily.SINGLE


def find_best_of_each_family(request: Request) -> dict[StrategyFamily, Candidate]:
    """The fastest of every pure family; where none fits, the one that needs the least memory."""
    best: dict[StrategyFamily, Candidate] = {}
    for candidate in _pure_candidates(request):
        kind = strategy_family(candidate.spec.parallelism)
        if kind not in best or _preference(candidate) < _preference(best[kind]):
            best[kind] = candidate
    return best


def advice_sentences(plan: Plan) -> list[str]:
    """The plan in a few sentences; see the README for how they compare with rules of thumb."""
    if plan.winner is None:
        return [no_fit_sentence(plan)]
    sentences = _request_sentences(plan.request)
    if plan.request.cluster.devices > 1:
        sentences.append(_single_sentence(plan.request, plan.winner))
    sentences.append(_kind_sentence(plan, plan.winner))
    if len(plan.ranked) > 1:
        sentences.append(runner_up_sentence(plan.ranked[0], plan.ranked[1]))
    sentences.append(bottleneck_sentence(plan))
    return sentences


def no_fit_sentence(plan: Plan) -> str:
    """Why nothing can be recommended."""
    request, cluster = plan.request, plan.request.cluster
    if plan.lightest is None:
        return (
            f"No split of {plural(cluster.devices, 'device')} divides the global batch of "
            f"{request.global_batch} and {request.model.name}'s layers, heads and sequence; use a "
            "global batch that is a multiple of the number of devices."
        )
    memory = plan.lightest.memory
    if plan.lightest.fits:
        return (
            f"No strategy of {request.model.name} on {cluster.devices} {cluster.device.name} stays "
            f"within {MOST_RECOMMENDED_FRACTION:.0%} of a device, so none is recommended. The closest, "
            f"{plan.lightest.strategy}, holds {_held(plan.lightest, cluster)}, which is "
            f"{_close(plan.lightest, cluster)}."
        )
    missing = memory.total - request.capacity
    return (
        f"{request.model.name} does not fit on {cluster.devices} {cluster.device.name}: the closest, "
        f"{plan.lightest.strategy}, needs {gib(memory.total)} GiB on its fullest rank and misses by "
        f"{gib(missing)} GiB ({1 - MOST_RECOMMENDED_FRACTION:.0%} of the device is kept free)."
    )


def _held(candidate: Candidate, cluster: Cluster) -> str:
    fraction = candidate.memory.total / cluster.device.memory_bytes
    return f"{gib(candidate.memory.total)} GiB, {fraction:.0%} of the device"


def _close(candidate: Candidate, cluster: Cluster) -> str:
    reason = explain_close_fit(candidate.spec, candidate.memory, cluster.device.memory_bytes)
    return f"close: try it ({reason})"


def runner_up_sentence(winner: Candidate, second: Candidate) -> str:
    """One sentence of numbers: where the winner's lead comes from."""
    lead = second.seconds.total - winner.seconds.total
    if winner.is_tied(second):
        return (
            f"{winner.strategy} takes {duration(winner.seconds.total)} an iteration, tied with "
            f"{second.strategy}'s {duration(second.seconds.total)}: of those within {TIE_RATIO - 1:.0%} the "
            "one with the least memory is taken, and of those alike in it the one with the fewest "
            "dimensions of parallelism."
        )
    return (
        f"{winner.strategy} takes {duration(winner.seconds.total)} an iteration, "
        f"{100 * lead / winner.seconds.total:.1f}% less than {second.strategy}'s "
        f"{duration(second.seconds.total)}: it {describe_saving(winner, second)}."
    )


def describe_saving(winner: Candidate, second: Candidate) -> str:
    """Where the winner's lead comes from: what it saves most of, and what it gives back most of."""
    slow, fast = second.seconds, winner.seconds
    gaps = {name: getattr(slow, name) - getattr(fast, name) for name in TIME_COMPONENTS}
    most, least = max(gaps, key=gaps.__getitem__), min(gaps, key=gaps.__getitem__)
    text = f"saves {ms(gaps[most])} ms of {_called(most)}"
    if gaps[least] < -0.001:
        text += f" and gives back {ms(-gaps[least])} ms of {_called(least)}"
    return text


def _called(component: str) -> str:
    return _COMPONENT_WORDS.get(component, component.replace("_", " "))


def name_bottleneck(plan: Plan) -> str:
    """What limits the winner: memory, a link, the bubble, or arithmetic."""
    winner = plan.winner
    if winner is None:
        return "memory"
    if largest := _largest_wait(winner):
        words, group = _called(largest).removeprefix("the "), _OVERHEADS[largest]
        if group is None:
            return words
        return f"{find_route(plan.request.cluster, winner.spec.parallelism, group).link} ({words})"
    if winner.memory.total > 0.9 * plan.request.cluster.device.memory_bytes:
        return "memory"
    return "arithmetic"


def _largest_wait(winner: Candidate) -> str | None:
    """The largest component that is not work, where it is over a tenth of the iteration."""
    largest = max(_OVERHEADS, key=lambda name: getattr(winner.seconds, name))
    share = getattr(winner.seconds, largest) / winner.seconds.total
    return largest if share > 0.1 else None


def bottleneck_sentence(plan: Plan) -> str:
    """The same with its numbers."""
    winner, cluster = plan.winner, plan.request.cluster
    assert winner is not None
    seconds = winner.seconds
    close = f"; this is {_close(winner, cluster)}" if winner.verdict is Fit.CLOSE else ""
    parts = sorted(TIME_COMPONENTS, key=lambda name: -getattr(seconds, name))[:3]
    waits = _largest_wait(winner)
    shares = ", ".join(
        f"{_called(name)} {100 * getattr(seconds, name) / seconds.total:.0f}%"
        for name in (*parts, *((waits,) if waits and waits not in parts else ()))
    )
    return (
        f"The bottleneck is {name_bottleneck(plan)}: of the iteration {shares}; the fullest rank holds "
        f"{_held(winner, cluster)}{close}."
    )


def _pure_candidates(request: Request) -> Iterator[Candidate]:
    """Every configuration with one dimension of parallelism alone."""
    template, devices = request.template, request.cluster.devices
    for split in enumerate_splits(template.shape, devices, template.parallelism.expert_tensor):
        degrees = (split.tensor, split.context, split.pipeline, split.data)
        if sum(degree > 1 for degree in degrees) > 1 or split.expert > 1:
            continue
        for size in list_micro_batch_sizes(split, request.global_batch):
            for recompute in list_recomputes(template):
                for spec in enumerate_variants(
                    build_unsharded_spec(template, split, size, recompute)
                ):
                    yield evaluate_configuration(request, spec, find_peak_rank(spec))


def _preference(candidate: Candidate) -> tuple[bool, float]:
    if candidate.is_recommended:
        return False, candidate.seconds.total
    return True, float(candidate.memory.total)


def _request_sentences(request: Request) -> list[str]:
    """What is planned, with what was assumed of it, and how large it is."""
    cluster, shape, dtype = request.cluster, request.template.shape, request.template.dtype
    nodes = f"; {cluster.nodes} nodes of {cluster.per_node}, {cluster.network}"
    parameters = total_parameters(shape)
    billions = parameters >= 0.1e9
    size = f"{parameters / 1e9:.2f} billion" if billions else f"{parameters / 1e6:,.1f} million"
    held = parameters * sum(astuple(PRECISIONS[dtype]))
    return [
        f"{request.model.name} on {cluster.devices:,} {cluster.device.name}: a global batch of "
        f"{request.global_batch:,} sequences of {shape.seq_length:,} tokens"
        f"{nodes if cluster.nodes > 1 else ''}.",
        f"{request.model.name} has {size} parameters; weights, gradients and optimizer take "
        f"{_rounded(held)} in {dtype}, one {cluster.device.name} has "
        f"{_rounded(cluster.device.memory_bytes)}.",
    ]


def _rounded(size_bytes: float) -> str:
    return f"{gib(size_bytes, 0)} GiB" if size_bytes >= 10 * GIB else amount(size_bytes)


def _single_sentence(request: Request, winner: Candidate) -> str:
    """The same training on one device of the same kind, as fast as what fits there."""
    unsplit = replace(request.template, parallelism=Parallelism())
    single = replace(request, cluster=replace(request.cluster, devices=1), template=unsplit)
    alone = min(_pure_candidates(single), key=_preference, default=None)
    if alone is None or not alone.fits:
        return "One device is not enough, whatever the micro batch and recomputation."
    if not alone.is_recommended:
        return f"One device is hardly enough: {_held(alone, single.cluster)}."
    return (
        f"One device is enough: it takes {duration(alone.seconds.total)} for the same global batch; "
        f"{request.cluster.devices} are {alone.seconds.total / winner.seconds.total:.2f} times as fast."
    )


def _kind_sentence(plan: Plan, winner: Candidate) -> str:
    kinds, chosen = find_best_of_each_family(plan.request), strategy_family(winner.spec.parallelism)
    capacity = gib(plan.request.cluster.device.memory_bytes, 0)
    others = ", ".join(
        f"{kind} takes {duration(found.seconds.total)} ({_named(found)})"
        if found.is_recommended
        else f"{kind} needs {gib(found.memory.total, 0)} of {capacity} GiB ({_named(found)})"
        for kind, found in kinds.items()
        if kind is not chosen
    )
    tail, devices = f"; alone, {others}" if others else "", plan.request.cluster.devices
    pure = (StrategyFamily.DATA, StrategyFamily.TENSOR, StrategyFamily.PIPELINE)
    illegal = [kind for kind in pure if kind not in kinds]
    if illegal and devices > 1:
        tail += f"; over all {devices} devices {joined(illegal)} cannot be split evenly"
    return f"Use {chosen} ({winner.strategy}, {duration(winner.seconds.total)}){tail}."


def _named(candidate: Candidate) -> str:
    """Its strategy, with what is recomputed."""
    recompute = candidate.spec.recompute
    again = "" if recompute == Recompute.NONE else f", recompute {recompute}"
    return f"{candidate.strategy}{again}"
