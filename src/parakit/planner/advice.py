"""Sentences about a plan: which strategy to use, why it is the fastest, and what limits it.

`screen.py` puts these sentences together as the first screen of `make plan`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import astuple, replace
from enum import StrEnum
from typing import NamedTuple

from parakit.config.groups import Group
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec
from parakit.config.strategy import Parallelism, Sharding, strategy_name
from parakit.costs import PRECISIONS, adapter_parameters, total_parameters
from parakit.formatting.units import GIB, amount, duration, gib, joined, ms, percent, plural
from parakit.planner.candidates import (
    build_unsharded_spec,
    enumerate_splits,
    enumerate_variants,
    list_micro_batch_sizes,
    list_recomputes,
)
from parakit.planner.search import (
    Candidate,
    Plan,
    Request,
    evaluate_closed_form,
    rank_candidate_preferences,
    replay_first_fitting,
    replay_memory,
)
from parakit.planner.ties import ROOMY_FRACTION, TIE_RATIO, find_deciding_field
from parakit.planner.time.cluster import Cluster, find_route
from parakit.planner.time.iteration import TIME_COMPONENTS
from parakit.planner.verdict import MOST_RECOMMENDED_FRACTION, Fit, explain_close_fit

_COMPONENT_NAMES = {
    "matmul": "matrix products",
    "memory_bound": "memory-bound kernels",
    "tensor_parallel": "exposed tensor-parallel communication",
    "context_parallel": "exposed context-parallel communication",
    "expert_parallel": "expert-parallel communication",
    "host_launches": "waiting for the host to launch kernels",
    "pipeline_messages": "messages between stages",
    "bubble": "the pipeline bubble",
    "gradient_sync": "gradient synchronisation",
    "optimizer": "the optimizer",
}
"""Names of an iteration's components in sentences. Components that are missing here keep their own name."""
_WAITING_COMPONENTS = {
    "tensor_parallel": Group.TENSOR,
    "context_parallel": Group.CONTEXT,
    "expert_parallel": Group.EXPERT,
    "host_launches": None,
    "pipeline_messages": Group.PIPELINE,
    "bubble": None,
    "gradient_sync": Group.DATA_CONTEXT,
}
"""Components in which devices wait, and the process group for whose link they wait; None if they wait for no link."""
_LEAST_WAIT = 0.1
"""Fraction of an iteration above which a wait is the bottleneck."""
_FULL_DEVICE = 0.9
"""Fraction of a device's memory above which memory is the bottleneck."""
_MOST_NAMED_TIES = 3
"""Tied strategies that a sentence names."""


class _Reason(NamedTuple):
    """Reason against a tied strategy, as a verb phrase for one strategy and for several."""

    singular: str
    plural: str


_IS_LESS_USUAL = _Reason("is less usual", "are less usual")
_REASONS_AGAINST = {
    "is_close": _Reason(
        "is close to the device's memory limit", "are close to the device's memory limit"
    ),
    "is_unusual": _IS_LESS_USUAL,
    "lacks_room": _Reason(
        f"fills more than {ROOMY_FRACTION:.0%} of the device",
        f"fill more than {ROOMY_FRACTION:.0%} of the device",
    ),
    "usualness": _IS_LESS_USUAL,
    "num_kinds": _Reason("combines more kinds of parallelism", "combine more kinds of parallelism"),
    "seconds": _Reason("takes longer", "take longer"),
}
"""Reasons against a tied strategy by the field of `Preference` that decides."""


class StrategyFamily(StrEnum):
    """Kinds of parallelism, as the advice names them."""

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
"""Kinds of parallelism for which nobody needs Megatron: PyTorch's DDP and FSDP and DeepSpeed have them too."""


def strategy_family(parallelism: Parallelism) -> StrategyFamily:
    """Return the kind of parallelism of a strategy. Several kinds give `HYBRID`, and one rank gives `SINGLE`.

    ZeRO-1 counts as plain data parallelism. ZeRO-2, ZeRO-3 and FSDP2 count as sharded data parallelism.
    """
    is_sharded = parallelism.sharding.wraps_modules
    degree_by_family = {
        StrategyFamily.TENSOR: parallelism.tensor,
        StrategyFamily.CONTEXT: parallelism.context,
        StrategyFamily.PIPELINE: parallelism.pipeline,
        StrategyFamily.SHARDED_DATA if is_sharded else StrategyFamily.DATA: parallelism.data,
    }
    families = [family for family, degree in degree_by_family.items() if degree > 1]
    if len(families) > 1:
        return StrategyFamily.HYBRID
    return families[0] if families else StrategyFamily.SINGLE


_SHARDINGS = {
    Sharding.ZERO1: "ZeRO-1",
    Sharding.ZERO2: "ZeRO-2",
    Sharding.ZERO3: "ZeRO-3",
    Sharding.FSDP2: "PyTorch's FSDP2",
}


def describe_strategy(parallelism: Parallelism) -> str:
    """Return a strategy written out, such as `TP 4 with SP × PP 8 × DP 32, ZeRO-1`.

    The result is "one device" without any parallelism.
    """
    factors = []
    if parallelism.tensor > 1:
        sequence = " with SP" if parallelism.sequence_parallel else ""
        factors.append(f"TP {parallelism.tensor}{sequence}")
    if parallelism.context > 1:
        factors.append(f"CP {parallelism.context}")
    if parallelism.pipeline > 1:
        stages = f"PP {parallelism.pipeline}"
        if parallelism.virtual_stages > 1:
            stages += f" with {parallelism.virtual_stages} virtual stages each"
        factors.append(stages)
    if parallelism.data > 1:
        factors.append(f"DP {parallelism.data}")
    parts = [" × ".join(factors) or "one device"]
    if parallelism.expert > 1:
        parts.append(f"EP {parallelism.expert}")
    if parallelism.expert_tensor:
        parts.append(f"ETP {parallelism.expert_tensor}")
    if parallelism.sharding in _SHARDINGS:
        parts.append(_SHARDINGS[parallelism.sharding])
    return ", ".join(parts)


def find_best_of_each_family(
    request: Request, families: Container[StrategyFamily] = tuple(StrategyFamily)
) -> dict[StrategyFamily, Candidate]:
    """Return the best candidate of each kind of parallelism that uses only this kind over all devices.

    The best candidate is the fastest recommended one. If no candidate of a kind is recommended, it is the candidate
    with the least memory. Kinds that cannot be split evenly over the devices are missing.

    Args:
        request: The request.
        families: Kinds that are needed. The other kinds are missing in the result.
    """
    candidates_by_family: dict[StrategyFamily, list[Candidate]] = {}
    for spec in _enumerate_single_kind_specs(request):
        family = strategy_family(spec.parallelism)
        if family in families:
            candidate = evaluate_closed_form(request, spec)
            candidates_by_family.setdefault(family, []).append(candidate)
    return {
        family: _choose_best(request, candidates)
        for family, candidates in candidates_by_family.items()
    }


def _choose_best(request: Request, candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest recommended candidate, or the one with the least memory if none is recommended.

    The memory of the result is replayed, if the replay knows the run.

    Args:
        request: The request of the candidates.
        candidates: Candidates with the memory of the closed form, at least one.
    """
    by_time = sorted(candidates, key=lambda candidate: candidate.seconds.total)
    fastest = replay_first_fitting(request, by_time)
    if fastest is not None:
        return fastest
    lightest = min(candidates, key=lambda candidate: candidate.memory.total)
    return replay_memory(request, lightest)


def use_sentence(spec: RunSpec) -> str:
    """Return the sentence with everything that a plan chooses: strategy, micro batch, recomputation and the code."""
    size = spec.batch.micro_batch_size
    parts = [
        describe_strategy(spec.parallelism),
        f"micro batch {size}",
        f"{plural(spec.microbatches, 'micro batch')} per replica",
        "no recomputation" if spec.recompute == Recompute.NONE else f"recompute {spec.recompute}",
    ]
    if spec.parallelism.context > 1:
        parts.append(f"CP by {spec.cp_comm_type}")
    return f"{parts[0]}; {', '.join(parts[1:])} ({strategy_name(spec.parallelism)})."


def no_fit_sentence(plan: Plan) -> str:
    """Return the sentence for a plan without a winner: why no strategy is recommended, and which one is closest."""
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
            f"{plan.lightest.strategy}, holds {_memory_phrase(plan.lightest, cluster)}, which is "
            f"{_close_phrase(plan.lightest, cluster)}."
        )
    missing = memory.total - request.capacity
    return (
        f"{request.model.name} does not fit on {cluster.devices} {cluster.device.name}: the closest, "
        f"{plan.lightest.strategy}, needs {gib(memory.total)} GiB on the rank with the peak memory and "
        f"misses by {gib(missing)} GiB ({1 - MOST_RECOMMENDED_FRACTION:.0%} of the device is kept free)."
    )


def _memory_phrase(candidate: Candidate, cluster: Cluster) -> str:
    """Return the peak memory, such as `72.9 GiB, 52% of the device`."""
    fraction = candidate.memory.total / cluster.device.memory_bytes
    return f"{gib(candidate.memory.total)} GiB, {fraction:.0%} of the device"


def _close_phrase(candidate: Candidate, cluster: Cluster) -> str:
    """Return why only a try can tell whether a candidate fits."""
    reason = explain_close_fit(candidate.spec, candidate.memory, cluster.device.memory_bytes)
    return f"close: try it ({reason})"


def cost_sentences(plan: Plan) -> tuple[str, str]:
    """Return two sentences on a winner: its iteration time with rates, and its memory.

    If the memory is close to the limit, the second sentence adds what to do.
    """
    winner, cluster = plan.winner, plan.request.cluster
    assert winner is not None
    time = (
        f"{duration(winner.seconds.total)} per iteration: {winner.tokens_per_second:,.0f} tokens/s, "
        f"{percent(winner.mfu)} MFU."
    )
    close = ""
    if winner.verdict is Fit.CLOSE:
        close = f", which is {_close_phrase(winner, cluster)}"
    return time, f"A rank holds at most {_memory_phrase(winner, cluster)}{close}."


def request_sentence(request: Request) -> str:
    """Return a sentence with the model, the devices and the global batch of a request.

    For several nodes the sentence names the network. If nobody stated the global batch, it says where it comes from.
    Sentences on adapters and on packed documents follow.
    """
    cluster, shape = request.cluster, request.template.shape
    parameters = total_parameters(shape)
    is_billions = parameters >= 0.1e9
    size = f"{parameters / 1e9:.2f} billion" if is_billions else f"{parameters / 1e6:,.1f} million"
    nodes = f", {cluster.nodes} nodes of {cluster.per_node} ({cluster.network})"
    origin = f" ({request.batch_origin})" if request.batch_origin else ""
    sentence = (
        f"{request.model.name} has {size} parameters and trains on {cluster.devices:,} "
        f"{cluster.device.name}{nodes if cluster.nodes > 1 else ''}, with a global batch of "
        f"{request.global_batch:,} sequences of {shape.seq_length:,} tokens{origin}."
    )
    return " ".join([sentence, *finetuning_sentences(request)])


def finetuning_sentences(request: Request) -> list[str]:
    """Return a sentence on the adapters that a request trains, and a sentence on the documents that a sample packs.

    Without LoRA and without packed documents the list is empty.
    """
    sentences: list[str] = []
    shape, lora = request.template.shape, request.template.lora
    if lora:
        trained, parameters = adapter_parameters(shape, lora), total_parameters(shape)
        sentences.append(
            f"LoRA rank {lora.rank} on {joined(list(lora.targets))} trains {trained / 1e6:,.1f} million of "
            f"{parameters / 1e9:.2f} billion parameters ({trained / parameters:.2%}); the frozen weights of linear "
            f"layers are in {lora.weights}."
        )
    length = request.cluster.execution.document_length
    if length:
        sentences.append(
            f"A sample packs documents of {length:,} tokens on average, and attention stays inside them."
        )
    return sentences


def tie_sentence(plan: Plan) -> str:
    """Return a sentence that names the strategies tied with the winner, and says why the plan does not choose them.

    The plan must have a strategy that is tied with its winner. At most `_MOST_NAMED_TIES` strategies are named, and the
    others are counted.
    """
    names = [candidate.strategy for candidate in plan.tied]
    num_unnamed = len(names) - _MOST_NAMED_TIES
    listed = joined(names)
    if num_unnamed > 0:
        listed = f"{', '.join(names[:_MOST_NAMED_TIES])} and {num_unnamed} more"
    where = " (ALL=1)" if num_unnamed > 0 else ""
    verb = "is" if len(names) == 1 else "are"
    distance = f"within {TIE_RATIO - 1:.0%}{where}"
    return f"{listed} {distance} {verb} too close to rank, but {_preference_clause(plan)}."


def _preference_clause(plan: Plan) -> str:
    """Return a clause that says for each reason which tied strategies the plan does not choose."""
    preferences = rank_candidate_preferences(plan.request, plan.ranked)
    preferred = preferences[plan.ranked[0].spec]
    strategies_by_reason: dict[_Reason, list[str]] = {}
    for candidate in plan.tied:
        field = find_deciding_field(preferred, preferences.get(candidate.spec))
        reason = _REASONS_AGAINST[field]
        strategies_by_reason.setdefault(reason, []).append(candidate.strategy)
    clauses = []
    for reason, strategies in strategies_by_reason.items():
        if len(plan.tied) == 1:
            clauses.append(f"it {reason.singular}")
        elif len(strategies) == 1:
            clauses.append(f"{strategies[0]} {reason.singular}")
        elif len(strategies) == len(plan.tied):
            clauses.append(f"all of them {reason.plural}")
        else:
            clauses.append(f"{len(strategies)} of them {reason.plural}")
    return joined(clauses)


def runner_up_sentence(winner: Candidate, second: Candidate) -> str:
    """Return a sentence that says how much longer the second strategy takes, and in which components it differs.

    If both strategies are tied, the sentence says so instead.
    """
    seconds, second_seconds = winner.seconds.total, second.seconds.total
    if winner.is_tied(second):
        return (
            f"{second.strategy} takes {duration(second_seconds)}, which is tied with {winner.strategy}'s "
            f"{duration(seconds)}: the planner cannot rank strategies whose predicted times differ by less "
            f"than {TIE_RATIO - 1:.0%}."
        )
    lead = 100 * (second_seconds - seconds) / seconds
    return (
        f"The next strategy, {second.strategy}, takes {duration(second_seconds)}, {lead:.1f}% longer: "
        f"{winner.strategy} {describe_saving(winner, second)}."
    )


def describe_saving(winner: Candidate, second: Candidate) -> str:
    """Return a phrase with the component in which the winner saves most time against the second strategy.

    The phrase starts with a verb, such as `saves 26.4 ms of matrix products`. If the winner needs more time in another
    component, the component with the largest loss is added.
    """
    gaps = {
        name: getattr(second.seconds, name) - getattr(winner.seconds, name)
        for name in TIME_COMPONENTS
    }
    largest, smallest = max(gaps, key=gaps.__getitem__), min(gaps, key=gaps.__getitem__)
    text = f"saves {ms(gaps[largest])} ms of {component_name(largest)}"
    if gaps[smallest] < -0.001:
        text += f" and needs {ms(-gaps[smallest])} ms more for {component_name(smallest)}"
    return text


def component_name(component: str) -> str:
    """Return the name of an iteration's component for a sentence."""
    return _COMPONENT_NAMES.get(component, component.replace("_", " "))


def name_bottleneck(plan: Plan) -> str:
    """Return the name of what limits the winner: a link, "pipeline bubble", "host", "memory" or "arithmetic".

    A plan without a winner gives "memory".
    """
    winner = plan.winner
    if winner is None:
        return "memory"
    largest = _largest_wait(winner)
    if largest:
        if largest == "host_launches":
            return "host"
        name = component_name(largest).removeprefix("the ")
        group = _WAITING_COMPONENTS[largest]
        if group is None:
            return name
        route = find_route(plan.request.cluster, winner.spec.parallelism, group)
        return f"{route.link} ({name})"
    if winner.memory.total > _FULL_DEVICE * plan.request.cluster.device.memory_bytes:
        return "memory"
    return "arithmetic"


def _largest_wait(winner: Candidate) -> str | None:
    """Return the component in which devices wait longest; None if it is under a tenth of the iteration."""
    largest = max(_WAITING_COMPONENTS, key=lambda name: getattr(winner.seconds, name))
    fraction = getattr(winner.seconds, largest) / winner.seconds.total
    return largest if fraction > _LEAST_WAIT else None


def bottleneck_sentence(plan: Plan) -> str:
    """Return a sentence with what limits the winner, and the fractions of the largest components of its
    iteration.
    """
    winner = plan.winner
    assert winner is not None
    seconds = winner.seconds
    shown = sorted(TIME_COMPONENTS, key=lambda name: -getattr(seconds, name))[:3]
    wait = _largest_wait(winner)
    if wait and wait not in shown:
        shown.append(wait)
    fractions = [
        f"{100 * getattr(seconds, name) / seconds.total:.0f}% {component_name(name).removeprefix('the ')}"
        for name in shown
    ]
    bottleneck = name_bottleneck(plan)
    if bottleneck == "memory":
        filled = winner.memory.total / plan.request.cluster.device.memory_bytes
        return (
            f"The bottleneck is memory: the peak rank fills {100 * filled:.0f}% of its device. An iteration's time is "
            f"{joined(fractions)}."
        )
    article = "the " if bottleneck in ("pipeline bubble", "host") else ""
    return f"The bottleneck is {article}{bottleneck}: an iteration's time is {joined(fractions)}."


def _enumerate_single_kind_specs(request: Request) -> Iterator[RunSpec]:
    """Yield every configuration that uses at most one kind of parallelism.

    Micro batch size, recomputation, sharding and virtual stages vary.
    """
    template, devices = request.template, request.cluster.devices
    expert_tensor = template.parallelism.expert_tensor
    for split in enumerate_splits(template.shape, devices, expert_tensor, lora=template.lora):
        degrees = (split.tensor, split.context, split.pipeline, split.data)
        if sum(degree > 1 for degree in degrees) > 1 or split.expert > 1:
            continue
        for size in list_micro_batch_sizes(split, request.global_batch):
            for recompute in list_recomputes(template):
                plain = build_unsharded_spec(template, split, size, recompute)
                yield from enumerate_variants(plain)


def _round_bytes(size_bytes: float) -> str:
    """Return a size in full GiB, or from `amount` below 10 GiB."""
    return f"{gib(size_bytes, 0)} GiB" if size_bytes >= 10 * GIB else amount(size_bytes)


def one_device_sentence(request: Request, winner: Candidate) -> str:
    """Return sentences that say if one device is enough for the same training.

    If one device is enough, a second sentence says how many times as fast all devices are.
    """
    unsplit = replace(request.template, parallelism=Parallelism())
    single = replace(request, cluster=replace(request.cluster, devices=1), template=unsplit)
    candidates = [
        evaluate_closed_form(single, spec) for spec in _enumerate_single_kind_specs(single)
    ]
    best = _choose_best(single, candidates) if candidates else None
    dtype, device = request.template.dtype, request.cluster.device
    state_bytes = total_parameters(request.template.shape) * sum(astuple(PRECISIONS[dtype]))
    if best is None or not best.fits:
        return (
            "One device is not enough, whatever the micro batch and recomputation: weights, gradients "
            f"and optimizer take {_round_bytes(state_bytes)} in {dtype}, and a device has "
            f"{_round_bytes(device.memory_bytes)}."
        )
    if not best.is_recommended:
        return f"One device is hardly enough: it would hold {_memory_phrase(best, single.cluster)}."
    ratio = best.seconds.total / winner.seconds.total
    return (
        f"One device is enough: it takes {duration(best.seconds.total)} for the same global batch. "
        f"{request.cluster.devices} devices are {ratio:.2f} times as fast."
    )


def families_sentence(plan: Plan, winner: Candidate) -> str:
    """Return sentences with the best time of each single kind of parallelism except the winner's kind.

    A kind that does not fit has its memory in place of its time. Kinds that cannot be split evenly are named.
    """
    best_by_family = find_best_of_each_family(plan.request)
    winner_family = strategy_family(winner.spec.parallelism)
    capacity = gib(plan.request.cluster.device.memory_bytes, 0)
    sentences = []
    for family, best in best_by_family.items():
        if family is winner_family:
            continue
        name = _name_with_recompute(best)
        if best.is_recommended:
            sentence = f"{family} takes {duration(best.seconds.total)} ({name})."
        else:
            sentence = f"{family} needs {gib(best.memory.total, 0)} of {capacity} GiB ({name})."
        sentences.append(f"{sentence[0].upper()}{sentence[1:]}")
    single_kinds = (StrategyFamily.DATA, StrategyFamily.TENSOR, StrategyFamily.PIPELINE)
    illegal = [family for family in single_kinds if family not in best_by_family]
    if sentences:
        sentences.insert(0, "Each kind is used alone, at its best micro batch and schedule.")
    if illegal:
        devices = plan.request.cluster.devices
        sentences.append(
            f"Over all {devices} devices {joined(illegal)} alone cannot be split evenly."
        )
    return " ".join(sentences) or "No other kind of parallelism is possible."


def _name_with_recompute(candidate: Candidate) -> str:
    """Return a candidate's strategy, with its recomputation if it has one."""
    recompute = candidate.spec.recompute
    suffix = "" if recompute == Recompute.NONE else f", recompute {recompute}"
    return f"{candidate.strategy}{suffix}"
