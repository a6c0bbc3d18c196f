"""The best configurations of a model on a cluster, found without evaluating all of them.

Degrees bound an iteration's time from below by the work of the slowest stage, the bubble of the most
virtual stages, and messages and gradients in the quickest sharding, where nothing is recomputed,
context parallelism sends nothing, and a sample costs no more than in one micro batch of all. A size of
the micro batch, recomputation, the algorithm and sharding only add to that, and are chosen one after
the other where the bound is among the lowest. Going from the lowest bound up, the search stops when
none is below the tenth best time: the ranking is that of an exhaustive search (a test compares the two).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import exp, inf
from typing import NamedTuple

from parakit.config.model import Model
from parakit.config.recompute import Recompute
from parakit.config.replacing import replace, replace_cached
from parakit.config.run import RunSpec
from parakit.config.stages import virtual_degrees
from parakit.config.strategy import Batch, Parallelism, parse_strategy, scale_batch, strategy_name
from parakit.costs import (
    PredictedMemory,
    find_peak_rank,
    find_peak_rank_within,
    find_violations,
    mfu,
    model_flops,
)
from parakit.planner.candidates import (
    build_unsharded_spec,
    enumerate_splits,
    enumerate_variants,
    list_cp_comm_types,
    list_micro_batch_sizes,
    list_recomputes,
    list_shardings,
    list_virtual_stages,
    min_memory_variant,
)
from parakit.planner.readings.local_readings import OwnRuns
from parakit.planner.ties import TIE_RATIO, are_tied, choose_preferred
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.iteration import (
    TIME_COMPONENTS,
    IterationSeconds,
    iteration_seconds,
    message_seconds,
    slowest_stage,
    straggler_fraction,
    synchronisation_seconds,
)
from parakit.planner.verdict import Fit, judge_fit_on_cluster, recommended_bytes

MOST_RANKED = 10
SECONDS_A_DAY = 86400
SINGLE_AXIS_CODES = ("dp", "tp", "sp", "cp", "pp")
_MOST_DEVICES = 65536
LEAST_SAMPLE_TIME_RATIO = 0.96
"""Least time of a sample in a micro batch over that in a larger one, which it does not divide: products
are computed in whole tiles."""
_ALL = 4
"""Of a bound for which it was not asked either which recomputation it needs to fit."""


@dataclass(frozen=True)
class Request:
    """What is to be trained, on what."""

    model: Model
    cluster: Cluster
    global_batch: int
    template: RunSpec
    """The model with its dtype, sequence length, dropout and stated ETP; all other degrees and the batch
    are the search's."""
    own_runs: OwnRuns = field(default_factory=OwnRuns)
    """One's own runs on these devices, which correct every time."""
    extra: tuple[str, ...] = ()
    """Flags of Megatron's beyond the model's own, as they were given."""

    @property
    def capacity(self) -> int:
        """The most bytes that a rank of a recommended plan holds."""
        return recommended_bytes(self.cluster.device.memory_bytes)


@dataclass(frozen=True)
class Candidate:
    """One evaluated configuration."""

    spec: RunSpec
    memory: PredictedMemory
    """Of the fullest rank."""
    memory_rank: int
    seconds: IterationSeconds
    is_recommended: bool
    """Whether a plan may recommend it: it holds at most `MOST_RECOMMENDED` of the device."""
    verdict: Fit
    tokens_per_second: float
    mfu: float

    @property
    def strategy(self) -> str:
        """Name in the kit's grammar."""
        return strategy_name(self.spec.parallelism)

    @property
    def fits(self) -> bool:
        """Verdict that the run may be tried: it fits, or is close."""
        return self.verdict is not Fit.DOES_NOT_FIT

    def is_tied(self, other: Candidate) -> bool:
        """Whether their times differ by less than is known."""
        return are_tied(self.seconds.total, other.seconds.total)


@dataclass(frozen=True)
class Plan:
    """What a search found."""

    request: Request
    legal: int
    """Legal combinations, all of them considered."""
    ranked: tuple[Candidate, ...]
    """The fastest that fit, one a strategy: the preferred one of those that are tied, then the others,
    fastest first."""
    lightest: Candidate | None
    """The one with the least memory; where nothing fits it is the closest miss."""
    examined: tuple[Candidate, ...]
    """Everything that was evaluated in full, for pictures."""

    @property
    def winner(self) -> Candidate | None:
        """The best that fits; None if nothing does."""
        return self.ranked[0] if self.ranked else None

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """Others that no difference to the winner is known of."""
        return tuple(found for found in self.ranked[1:] if found.is_tied(self.ranked[0]))


def search_configurations(request: Request, kept: int = MOST_RANKED, slack: float = 1.0) -> Plan:
    """Rank every legal configuration.

    `slack` above 1 also evaluates those that are up to so many times slower than the last one kept,
    for pictures.

    Raises:
        NoPeakError: The device has no matrix rate in the requested dtype.
    """
    capacity, limit = request.capacity, inf
    best: dict[Parallelism, Candidate] = {}
    examined: list[Candidate] = []
    legal, queue, lightest = _bounds(request)
    while queue:
        bound = heapq.heappop(queue)
        if bound.seconds > limit:
            break
        if bound.left:
            for narrower in _narrowed(request, bound):
                heapq.heappush(queue, narrower)
            continue
        for spec in enumerate_variants(bound.plain):
            if bound.fixed + bound.ramp / spec.parallelism.virtual_stages > limit:
                continue
            if not (fullest := find_peak_rank_within(spec, capacity)):
                continue
            examined.append(candidate := _predicted(request, spec, fullest))
            # Strategies that differ in the number of virtual stages count as one.
            key = replace(spec.parallelism, virtual_stages=1)
            if key not in best or _order(candidate) < _order(best[key]):
                best[key] = candidate
        if len(best) >= kept:
            limit = max(slack * _slowest_kept(best, kept), TIE_RATIO * _slowest_kept(best, 1))
    fitting = list(best.values())
    if (
        request.own_runs.residuals
    ):  # Which bounds the loop cannot know: the kept ones change places.
        fitting = [_corrected(request, each) for each in sorted(fitting, key=_order)[:kept]]
        examined = [_corrected(request, each) for each in examined]
    ranked = sorted(fitting, key=_order)
    if ranked:
        seconds = {each.spec: each.seconds.total for each in ranked}
        held = {each.spec: each.memory.total for each in ranked}
        chosen = choose_preferred(seconds, held.__getitem__)
        ranked = sorted(ranked, key=lambda each: each.spec != chosen)[:kept]
    closest = evaluate_configuration(request, lightest) if lightest else None
    return Plan(request, legal, tuple(ranked), closest, tuple(examined))


def evaluate_configuration(
    request: Request, spec: RunSpec, fullest: tuple[int, PredictedMemory] | None = None
) -> Candidate:
    """Memory, time and rates of one configuration, corrected by one's own runs."""
    return _corrected(request, _predicted(request, spec, fullest or find_peak_rank(spec)))


def _corrected(request: Request, candidate: Candidate) -> Candidate:
    """All parts of the time in the same proportion: which of them is wrong is not known."""
    if not request.own_runs.residuals:
        return candidate
    factor = exp(-request.own_runs.bias(candidate.spec))
    parts = {name: factor * getattr(candidate.seconds, name) for name in TIME_COMPONENTS}
    return replace(
        candidate,
        seconds=replace(candidate.seconds, **parts),
        tokens_per_second=candidate.tokens_per_second / factor,
        mfu=candidate.mfu / factor,
    )


def _predicted(request: Request, spec: RunSpec, fullest: tuple[int, PredictedMemory]) -> Candidate:
    (rank, memory), cluster, shape = fullest, request.cluster, spec.shape
    seconds, samples = iteration_seconds(spec, cluster), spec.batch.global_batch_size
    peak, devices = cluster.device.peak_flops(spec.dtype) or 0.0, spec.parallelism.world_size
    return Candidate(
        spec=spec,
        memory=memory,
        memory_rank=rank,
        seconds=seconds,
        is_recommended=memory.total <= request.capacity,
        verdict=judge_fit_on_cluster(spec, memory, cluster),
        tokens_per_second=samples * shape.seq_length / seconds.total,
        mfu=mfu(model_flops(shape, samples), seconds.total, devices, peak),
    )


def select_pareto_frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats in both time and memory, fastest first."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds.total, c.memory.total)):
        if not kept or candidate.memory.total < kept[-1].memory.total:
            kept.append(candidate)
    return kept


class _Bound(NamedTuple):
    """Least seconds of combinations of one split, without sharding and schedule."""

    seconds: float
    number: int
    """In the order in which they were found, so that no two are equal."""
    plain: RunSpec
    """With the largest of the micro batches, and the first recomputation with which the smallest
    fits, if that was asked."""
    sizes: tuple[int, ...]
    """Micro batches, smallest first."""
    after: float
    """Of `seconds`, of messages, gradients and update; 0 if that was not asked."""
    fixed: float
    """Of `seconds`, what virtual stages do not change."""
    ramp: float
    """Of one micro batch in the other stages, which virtual stages divide."""
    left: int
    """Of micro batch, recomputation and context parallelism's algorithm the last so many, not chosen."""


_numbers = count()


def _bounds(request: Request) -> tuple[int, list[_Bound], RunSpec | None]:
    """Count the legal combinations, bound those that can fit, find the lightest of all.

    Memory grows with the micro batch, and is least with full recomputation and sharding: a split
    whose lightest combination does not fit is left at once.
    """
    template, legal = request.template, 0
    queue: list[_Bound] = []
    least, lightest = inf, None
    expert_tensor = template.parallelism.expert_tensor
    for split in enumerate_splits(template.shape, request.cluster.devices, expert_tensor):
        sizes = list_micro_batch_sizes(split, request.global_batch)
        if not sizes:
            continue
        legal += _count(template, split, sizes)
        smallest = min_memory_variant(
            build_unsharded_spec(template, split, sizes[0], Recompute.FULL)
        )
        if not (fullest := find_peak_rank_within(smallest, max(request.capacity, least))):
            continue
        held = fullest[1].total
        if held < least:
            least, lightest = held, smallest
        if held <= request.capacity:
            plain = build_unsharded_spec(template, split, sizes[0], Recompute.NONE)
            unchosen = replace(plain, cp_comm_type="") if split.context > 1 else plain
            queue.append(_bound(request, unchosen, tuple(sizes), _ALL, 0.0))
    heapq.heapify(queue)
    return legal, queue, lightest


def _bound(
    request: Request, plain: RunSpec, sizes: tuple[int, ...], left: int, after: float
) -> _Bound:
    """A sample takes no less in a micro batch than in one of several times as many."""
    cluster, split = request.cluster, plain.parallelism
    if plain.batch.micro_batch_size != sizes[-1]:
        plain = replace(plain, batch=Batch(sizes[-1], request.global_batch))
    _, slowest, through = slowest_stage(plain, cluster)
    if len(sizes) > 1:
        virtual = virtual_degrees(plain.stages, plain.shape.layers, split.pipeline)
    else:
        virtual = list_virtual_stages(plain.shape, split, plain.microbatches)
    share = LEAST_SAMPLE_TIME_RATIO if any(sizes[-1] % size for size in sizes) else 1.0
    late = 1 + straggler_fraction(cluster)
    fixed = late * (share * plain.microbatches * slowest + after)
    ramp = late * share * (through - slowest) * sizes[0] / sizes[-1]
    seconds = fixed + ramp / virtual[-1]
    return _Bound(seconds, next(_numbers), plain, sizes, after, fixed, ramp, left)


def _narrowed(request: Request, bound: _Bound) -> Iterator[_Bound]:
    """Bounds of what is in this one, by what can be chosen next."""
    plain, sizes, ways = bound.plain, bound.sizes, list_recomputes(request.template)
    middle = len(sizes) // 2
    if bound.left == _ALL:
        smallest = replace(plain, batch=Batch(sizes[0], request.global_batch))
        fitting = _fitting(request, smallest, ways[:-1])
        fitting = fitting or replace(plain, recompute=ways[-1])  # Which is known to fit.
        yield _bound(request, fitting, sizes, 3, _after(request.cluster, plain))
    elif middle:
        yield _bound(request, plain, sizes[:middle], 3, bound.after)
        larger = replace(plain, batch=Batch(sizes[middle], request.global_batch))
        if chosen := _fitting(request, larger, ways[ways.index(plain.recompute) :]):
            yield _bound(request, chosen, sizes[middle:], 3, bound.after)
    elif bound.left > 1:
        left = int(plain.parallelism.context > 1)
        yield bound._replace(left=left, number=next(_numbers))
        for recompute in ways[ways.index(plain.recompute) + 1 :]:
            chosen = replace(plain, recompute=recompute)
            yield _bound(request, chosen, sizes, left, bound.after)
    else:
        for comm_type in list_cp_comm_types(request.template, plain.parallelism):
            yield _bound(request, replace(plain, cp_comm_type=comm_type), sizes, 0, bound.after)


def _after(cluster: Cluster, plain: RunSpec) -> float:
    """Least seconds of messages between stages, of gradients and of the update: with all hidden that can
    be, in the quickest sharding and schedule."""
    split = plain.parallelism
    sharded = (replace_cached(split, sharding=sharding) for sharding in list_shardings(split))
    specs = (replace(plain, parallelism=parallelism) for parallelism in sharded)
    after = min(sum(synchronisation_seconds(spec, cluster, inf)) for spec in specs)
    if split.pipeline == 1:
        return after
    virtual = virtual_degrees(plain.stages, plain.shape.layers, split.pipeline)[:2]
    scheduled = (replace_cached(split, virtual_stages=each) for each in virtual)
    specs = (replace(plain, parallelism=parallelism) for parallelism in scheduled)
    return after + min(message_seconds(spec, cluster) for spec in specs)


def _fitting(request: Request, plain: RunSpec, ways: Sequence[Recompute]) -> RunSpec | None:
    """With the first recomputation with which it can fit: each needs less memory than the one before,
    and more time."""
    for way in ways:
        chosen = replace(plain, recompute=way)
        if find_peak_rank_within(min_memory_variant(chosen), request.capacity):
            return chosen
    return None


def _count(template: RunSpec, split: Parallelism, sizes: list[int]) -> int:
    """Legal combinations of one split."""
    kinds = (
        len(list_recomputes(template))
        * len(list_cp_comm_types(template, split))
        * len(list_shardings(split))
    )
    samples = template.batch.global_batch_size // split.data
    each = (list_virtual_stages(template.shape, split, samples // size) for size in sizes)
    return kinds * sum(map(len, each))


def _order(candidate: Candidate) -> tuple[float, int, str]:
    return candidate.seconds.total, candidate.memory.total, candidate.strategy


def _slowest_kept(best: dict[Parallelism, Candidate], kept: int) -> float:
    return heapq.nsmallest(kept, (c.seconds.total for c in best.values()))[-1]


def evaluate_single_axis_strategies(request: Request) -> list[Candidate]:
    """Those that are legal on this many devices with this global batch, fastest first.

    The kit scales a model's batch with its devices; where that is not the requested global batch
    there is nothing to compare, and the list is empty.
    """
    devices = request.cluster.devices
    names = ["baseline"] if devices == 1 else [f"{word}{devices}" for word in SINGLE_AXIS_CODES]
    found = []
    for name in names:
        parallelism = parse_strategy(name, devices, request.template.parallelism.expert_tensor)
        batch = scale_batch(request.model.batch, parallelism)
        spec = replace(request.template, parallelism=parallelism, batch=batch)
        if batch.global_batch_size == request.global_batch and not find_violations(spec):
            found.append(evaluate_configuration(request, spec))
    return sorted(found, key=lambda candidate: candidate.seconds.total)


@dataclass(frozen=True)
class Scaling:
    """A plan against the smallest number of devices that fits."""

    devices: int
    """Of the smallest."""
    strategy: str
    efficiency: float
    """Tokens a second and device, relative to the smallest; same global batch."""


def estimate_training_days(plan: Plan, tokens: float) -> float | None:
    """Days to train on `tokens` tokens with the plan's winner, without interruptions."""
    return tokens / plan.winner.tokens_per_second / SECONDS_A_DAY if plan.winner else None


def compare_with_fewest_devices(plan: Plan) -> Scaling | None:
    """Efficiency against the smallest fitting power of two up to the plan's own size."""
    if plan.winner is None:
        return None
    own = plan.request.cluster.devices
    for devices in (2**doublings for doublings in range((own - 1).bit_length())):
        if fewer := search_configurations(resize_request(plan.request, devices), kept=1).winner:
            rate = fewer.tokens_per_second / devices
            return Scaling(devices, fewer.strategy, plan.winner.tokens_per_second / own / rate)
    return Scaling(own, plan.winner.strategy, 1.0)


def find_devices_needed(request: Request) -> int | None:
    """The smallest doubling of the request's devices on which the model fits; None up to 65536."""
    devices = request.cluster.devices * 2
    while devices <= _MOST_DEVICES:
        grown = resize_request(request, devices, request.global_batch * devices)
        if search_configurations(grown, kept=1).winner is not None:
            return devices
        devices *= 2
    return None


def resize_request(request: Request, devices: int, global_batch: int | None = None) -> Request:
    """The same on another number of devices, with another global batch if one is given."""
    batch = global_batch or request.global_batch
    template = request.template
    sized = replace(template, batch=replace(template.batch, global_batch_size=batch))
    cluster = replace(request.cluster, devices=devices)
    return replace(request, cluster=cluster, global_batch=batch, template=sized)
