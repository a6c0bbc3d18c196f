"""Search for the fastest configurations of a model on a cluster, without evaluating all of them.

The search goes through parallel sizes that multiply to the number of devices. For every product it computes a
lower bound on the seconds of an iteration. The bound counts the work of the slowest stage, the pipeline bubble
with the most virtual stages, and messages and gradients in the fastest sharding. It assumes that nothing is
recomputed, that context parallelism sends nothing, and that time per sample is that of the largest micro batch.

Every further choice can only raise the bound: the kind of sharding, the micro batch, the recomputation, and the
algorithm of context parallelism. So the search makes these choices one after another, for the lowest bound first. It
evaluates a configuration when no lower bound is left, so configurations come in the order of time. It stops after the
tenth strategy that fits, and after all strategies that are tied with the fastest. The ranking equals that of an
exhaustive search, which a test compares with. A second test compares bounds of random choices with the times of
configurations.

The memory of each strategy in a plan is that of STRATEGY=: a replay of PyTorch's allocator, if the replay knows the run
(`parakit.costs.find_peak_device_memory`). A replay takes 10 to 200 ms, so the closed form decides first. For runs that
are replayed, it is a lower bound and drops only configurations that do not fit. The others are replayed in the order of
time, when their turn comes. A configuration that does not fit by the replay gives its turn to the next one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import count
from math import exp, inf
from typing import NamedTuple

from parakit.config.batch import choose_batch
from parakit.config.model import Model
from parakit.config.recompute import Recompute
from parakit.config.replacing import replace, replace_cached
from parakit.config.run import RunSpec
from parakit.config.stages import virtual_degrees
from parakit.config.strategy import Batch, Parallelism, Sharding, parse_strategy, strategy_name
from parakit.costs import (
    PredictedMemory,
    find_peak_device_memory,
    find_peak_rank,
    find_peak_rank_that_may_fit,
    find_peak_rank_within,
    find_violations,
    iteration_flops,
    mfu,
    supports_replay,
)
from parakit.planner.candidates import (
    apply_sharding,
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
from parakit.planner.expert_options import (
    NO_EXPERT_OPTIONS,
    ExpertOptions,
    choose_expert_options,
)
from parakit.planner.readings.local_readings import OwnRuns
from parakit.planner.ties import TIE_RATIO, Preference, are_tied, rank_preferences
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.iteration import (
    TIME_COMPONENTS,
    IterationSeconds,
    iteration_seconds,
    layerwise_sync_seconds,
    message_seconds,
    predict_stage_times,
    straggler_fraction,
    synchronisation_seconds,
)
from parakit.planner.verdict import Fit, judge_fit_on_cluster, recommended_bytes

MOST_RANKED = 10
SECONDS_PER_DAY = 86400
SINGLE_AXIS_CODES = ("dp", "tp", "sp", "cp", "pp")
"""Strategy codes with one parallel size: data, tensor, sequence, context and pipeline parallelism."""
LEAST_SAMPLE_TIME_RATIO = 0.96
"""Lower bound of time per sample in a micro batch, over that in a larger micro batch which is no multiple of it.

Matrix products are computed in whole tiles, so the larger micro batch can waste more of its last tiles.
"""
MOST_TENSOR_ACROSS_NODES = 8
"""Largest degree of tensor parallelism that a search tries on nodes with fewer devices. It tries larger degrees only
inside a node, because nobody splits each matrix product over a network."""
_MOST_DEVICES = 65536
_ROUNDING_SLACK = 1 + 1e-9
"""Factor by which a bound may exceed the time of its configurations by rounding. Bounds up to this factor above a time
are narrowed first, so that of two equal times the one with less memory is found."""


@dataclass(frozen=True)
class Request:
    """Model, cluster and batch for which a strategy is searched."""

    model: Model
    cluster: Cluster
    global_batch: int
    template: RunSpec
    """The run without its strategy: model, dtype, sequence length, dropout, adapters and the stated expert tensor
    parallelism (ETP). The search replaces all other parallel sizes and the batch."""
    own_runs: OwnRuns = field(default_factory=OwnRuns)
    """The user's own measurements on this kind of device. They correct every predicted time."""
    extra: tuple[str, ...] = ()
    """Megatron's flags of EXTRA, beyond the model's own."""
    expert_options: ExpertOptions = NO_EXPERT_OPTIONS
    """Options for experts that each candidate uses if Megatron and DeepEP accept them."""
    batch_origin: str = ""
    """Phrase that says where the global batch comes from; empty if the user gave one."""

    @property
    def capacity(self) -> int:
        """Most bytes per rank of a strategy that may be recommended."""
        return recommended_bytes(self.cluster.device.memory_bytes)

    @cached_property
    def has_replayed_runs(self) -> bool:
        """True if the replay of PyTorch's allocator knows some runs of the search."""
        return supports_replay(replace(self.template, recompute=Recompute.NONE))


@dataclass(frozen=True)
class Candidate:
    """Configuration of a run, with its predicted memory and time."""

    spec: RunSpec
    memory: PredictedMemory
    """Memory of the rank with the peak memory: of the replay, if `supports_replay`, or else of the closed form.
    Candidates in `Plan.examined` have the memory of the closed form."""
    memory_rank: int
    """Pipeline rank with the peak memory."""
    seconds: IterationSeconds
    is_recommended: bool
    """True if the peak rank holds at most `MOST_RECOMMENDED_FRACTION` of the device."""
    verdict: Fit
    tokens_per_second: float
    mfu: float
    expert_options: ExpertOptions = NO_EXPERT_OPTIONS
    """Options for experts that the search chose in addition to the flags of its request."""

    @property
    def strategy(self) -> str:
        """Name of the strategy, such as `tp2pp2dp2`."""
        return strategy_name(self.spec.parallelism)

    @property
    def fits(self) -> bool:
        """True if the run fits, or is so close that only a try can tell."""
        return self.verdict is not Fit.DOES_NOT_FIT

    def is_tied(self, other: Candidate) -> bool:
        """Return True if the predicted times of both are too close to tell which one is faster."""
        return are_tied(self.seconds.total, other.seconds.total)


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    request: Request
    legal: int
    """Number of legal combinations. The search considers all of them."""
    ranked: tuple[Candidate, ...]
    """The fastest candidates that fit, one per strategy. The preferred one of those that are tied with the fastest
    comes first, then the remaining ones by time. Empty if nothing fits."""
    lightest: Candidate | None
    """The candidate with the least memory, which is the closest miss if nothing fits. None if there is no legal
    combination."""
    examined: tuple[Candidate, ...]
    """All candidates that were evaluated in full, for pictures. Their memory is that of the closed form, because there
    are too many to replay."""

    @property
    def winner(self) -> Candidate | None:
        """Best candidate that fits; None if nothing fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """Ranked candidates whose time is tied with the winner's, without the winner."""
        return tuple(
            candidate for candidate in self.ranked[1:] if candidate.is_tied(self.ranked[0])
        )


def search_configurations(request: Request, kept: int = MOST_RANKED, slack: float = 1.0) -> Plan:
    """Search all legal configurations, and return a plan with the `kept` fastest strategies that fit the cluster.

    Args:
        request: Model, cluster and batch.
        kept: Number of strategies to rank. Configurations that differ only in virtual stages, micro batch or
            recomputation count as one strategy.
        slack: With a factor above 1, configurations that take up to this many times as long as the last ranked
            strategy are evaluated too. Pictures show them.

    Raises:
        NoPeakError: The device has no matrix rate in the requested dtype.
    """
    legal, bounds, lightest = _bound_all_splits(request)
    search = _FastestFirst(request, bounds)
    fitting = search.find_fastest(kept)
    if slack > 1 and len(fitting) >= kept:
        search.examine_within(slack * fitting[kept - 1].seconds.total)
    ranked = _rank_strategies(request, fitting)[:kept]
    examined = [_correct_by_own_runs(request, candidate) for candidate in search.examined]
    closest = evaluate_configuration(request, lightest) if lightest else None
    return Plan(request, legal, tuple(ranked), closest, tuple(examined))


def search_tied_strategies(request: Request) -> tuple[Candidate, ...]:
    """Return the strategies that fit the cluster and whose times are tied with the fastest.

    The first one is the winner of `search_configurations`, and the others follow by time. The result is empty if
    nothing fits.
    """
    _, bounds, _ = _bound_all_splits(request)
    # The bounds know nothing of the user's own runs. With such runs, a plan corrects this many strategies.
    number = MOST_RANKED if request.own_runs.residuals else 1
    ranked = _rank_strategies(request, _FastestFirst(request, bounds).find_fastest(number))
    fastest = min((candidate.seconds.total for candidate in ranked), default=inf)
    return tuple(candidate for candidate in ranked if are_tied(candidate.seconds.total, fastest))


def _rank_strategies(request: Request, fitting: list[Candidate]) -> list[Candidate]:
    """Correct the times of strategies by the user's own runs, and return the strategies with the best first.

    The preferred one of those that are tied with the fastest comes first, then the remaining ones by time.
    """
    corrected = [_correct_by_own_runs(request, candidate) for candidate in fitting]
    return _put_preferred_first(request, sorted(corrected, key=_sort_key))


class _FastestFirst:
    """The strategies of a request that fit, in the order of time. A strategy is evaluated only at its turn."""

    def __init__(self, request: Request, bounds: list[_Bound]) -> None:
        """Start the search.

        Args:
            request: Model, cluster and batch.
            bounds: Bounds of all configurations, as a heap by seconds. The search changes the list.
        """
        self._request = request
        self._bounds = bounds
        self._variants: list[tuple[float, int, RunSpec]] = []
        """Heap of configurations without open choices: lower bound on seconds, serial number and run."""
        self._evaluated: list[tuple[tuple[float, int, str], int, Candidate]] = []
        """Heap of candidates whose turn has not come, by `_sort_key` and serial number."""
        self._found: set[Parallelism] = set()
        """Strategies that were returned, without their number of virtual stages."""
        self.examined: list[Candidate] = []
        """All candidates so far that may fit, with the memory of the closed form."""

    def find_fastest(self, number: int) -> list[Candidate]:
        """Return the fastest `number` strategies, and all strategies whose times are tied with the fastest.

        The list is shorter if fewer strategies fit.
        """
        fastest: list[Candidate] = []
        limit = inf
        while candidate := self.find_next(limit):
            fastest.append(candidate)
            if len(fastest) >= number:
                tie_limit = TIE_RATIO * fastest[0].seconds.total
                limit = max(fastest[number - 1].seconds.total, tie_limit)
        return fastest

    def find_next(self, limit: float) -> Candidate | None:
        """Return the fastest candidate of a new strategy, or None if none within `limit` seconds is left.

        Strategies that differ only in the number of virtual stages count as one. The candidate's memory is replayed,
        and leaves the part of the device free that plans keep free.
        """
        while True:
            fastest = self._evaluated[0][0][0] if self._evaluated else inf
            if self._narrow_lowest(min(limit, fastest) * _ROUNDING_SLACK):
                continue
            if not self._evaluated or fastest > limit:
                return None
            _, _, candidate = heapq.heappop(self._evaluated)
            strategy = replace(candidate.spec.parallelism, virtual_stages=1)
            if strategy in self._found:
                continue
            replayed = replay_memory(self._request, candidate)
            if replayed.is_recommended:
                self._found.add(strategy)
                return replayed

    def examine_within(self, limit: float) -> None:
        """Evaluate all configurations whose bound is at most `limit` seconds, and add them to `examined`."""
        while self._narrow_lowest(limit):
            pass

    def _narrow_lowest(self, limit: float) -> bool:
        """Narrow the lowest bound, or evaluate its configuration. Return False if it exceeds `limit` seconds."""
        lowest_bound = self._bounds[0].seconds if self._bounds else inf
        lowest_variant = self._variants[0][0] if self._variants else inf
        if not (self._bounds or self._variants) or min(lowest_bound, lowest_variant) > limit:
            return False
        if lowest_variant < lowest_bound:
            _, _, spec = heapq.heappop(self._variants)
            candidate = _evaluate_variant(self._request, spec)
            if candidate:
                self.examined.append(candidate)
                entry = (_sort_key(candidate), next(_numbers), candidate)
                heapq.heappush(self._evaluated, entry)
            return True
        bound = heapq.heappop(self._bounds)
        if bound.unchosen:
            for narrower in _narrow_bound(self._request, bound):
                heapq.heappush(self._bounds, narrower)
            return True
        for spec in enumerate_variants(bound.plain, bound.shardings):
            seconds = bound.fixed + bound.ramp / spec.parallelism.virtual_stages
            heapq.heappush(self._variants, (seconds, next(_numbers), spec))
        return True


def _evaluate_variant(request: Request, spec: RunSpec) -> Candidate | None:
    """Return the candidate of a configuration with the memory of the closed form, or None if it cannot fit.

    A configuration that does not fit with DeepEP's buffers is evaluated without them.
    """
    peak = find_peak_rank_that_may_fit(spec, request.capacity)
    plain_dispatcher = request.template.token_dispatcher
    if peak is None and spec.token_dispatcher is not plain_dispatcher:
        spec = replace(spec, token_dispatcher=plain_dispatcher)
        peak = find_peak_rank_that_may_fit(spec, request.capacity)
    return _predict(request, spec, peak) if peak else None


def replay_memory(request: Request, candidate: Candidate) -> Candidate:
    """Return a candidate with the memory of `find_peak_device_memory`, and with the verdict on this memory."""
    spec = candidate.spec
    if not supports_replay(spec):
        return candidate
    peak_rank, memory = find_peak_device_memory(spec, request.cluster.device.memory_bytes)
    is_recommended, verdict = _judge_memory(request, spec, memory)
    return replace(
        candidate,
        memory=memory,
        memory_rank=peak_rank,
        is_recommended=is_recommended,
        verdict=verdict,
    )


def _judge_memory(request: Request, spec: RunSpec, memory: PredictedMemory) -> tuple[bool, Fit]:
    """Return two results for a run with this memory on its peak rank: True if a plan may recommend the run, and the
    verdict on whether the run fits.
    """
    is_recommended = memory.total <= request.capacity
    return is_recommended, judge_fit_on_cluster(spec, memory, request.cluster)


def _put_preferred_first(request: Request, ranked: list[Candidate]) -> list[Candidate]:
    """Return the candidates with the preferred candidate in front.

    The preferred candidate has the smallest `Preference` of those that are tied with the fastest. All other candidates
    keep their order.
    """
    if not ranked:
        return ranked
    preferences = rank_candidate_preferences(request, ranked)
    preferred = min(preferences, key=preferences.__getitem__)
    return sorted(ranked, key=lambda candidate: candidate.spec != preferred)


def rank_candidate_preferences(
    request: Request, candidates: Sequence[Candidate]
) -> dict[RunSpec, Preference]:
    """Return the preference of each candidate's run that is tied with the fastest."""
    seconds = {candidate.spec: candidate.seconds.total for candidate in candidates}
    memory = {candidate.spec: candidate.memory for candidate in candidates}
    return rank_preferences(seconds, memory.__getitem__, request.cluster)


def evaluate_configuration(request: Request, spec: RunSpec) -> Candidate:
    """Predict memory, time and rates of one configuration. The user's own runs correct the time.

    This is the prediction for a strategy that the user names, and for every strategy in a plan. The memory is replayed
    if the replay knows the run.

    Args:
        request: The request with the cluster and the user's own runs.
        spec: The configuration, to which the request's options for experts are added.
    """
    return replay_memory(request, evaluate_closed_form(request, spec))


def evaluate_closed_form(request: Request, spec: RunSpec) -> Candidate:
    """Predict time, rates and the closed form's memory of one configuration. The user's own runs correct the time.

    The result is only for choosing among many configurations. `replay_first_fitting` replays the chosen one.
    """
    spec = choose_expert_options(spec, request.expert_options).apply_to_spec(spec)
    return _correct_by_own_runs(request, _predict(request, spec, find_peak_rank(spec)))


def replay_first_fitting(request: Request, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the first candidate that may be recommended by its replayed memory, or None if none of them may.

    Args:
        request: The request of the candidates.
        candidates: Candidates with the memory of the closed form.
    """
    for candidate in candidates:
        if find_peak_rank_that_may_fit(candidate.spec, request.capacity):
            replayed = replay_memory(request, candidate)
            if replayed.is_recommended:
                return replayed
    return None


def reevaluate_plan(plan: Plan, request: Request) -> Plan:
    """Return a plan whose ranked candidates are predicted for another request, and ranked again.

    The request differs from that of the plan only in flags that change time or memory.
    """
    candidates = [reevaluate_candidate(request, candidate) for candidate in plan.ranked]
    recommended = [candidate for candidate in candidates if candidate.is_recommended]
    ranked = _put_preferred_first(request, sorted(recommended, key=_sort_key))
    return replace(plan, request=request, ranked=tuple(ranked))


def reevaluate_candidate(request: Request, candidate: Candidate) -> Candidate:
    """Return a candidate's configuration, predicted for another request."""
    spec = candidate.spec
    configuration = replace(
        request.template,
        parallelism=spec.parallelism,
        batch=spec.batch,
        recompute=spec.recompute,
        stages=spec.stages,
        cp_comm_type=spec.cp_comm_type,
    )
    return evaluate_configuration(request, configuration)


def _correct_by_own_runs(request: Request, candidate: Candidate) -> Candidate:
    """Return a candidate with its time corrected by the errors of predictions for the user's own runs.

    All components of the time change by the same factor, because it is unknown which component is wrong. Without
    own runs, the candidate is returned unchanged.
    """
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


def _predict(request: Request, spec: RunSpec, peak: tuple[int, PredictedMemory]) -> Candidate:
    """Return a candidate with the time, memory and rates that the closed forms predict.

    Args:
        peak: Pipeline rank with the peak memory, and its memory.
    """
    peak_rank, memory = peak
    is_recommended, verdict = _judge_memory(request, spec, memory)
    options, cluster = _use_expert_options(request, spec)
    shape = spec.shape
    seconds = iteration_seconds(spec, cluster)
    samples = spec.batch.global_batch_size
    peak_flops = cluster.device.peak_flops(spec.dtype) or 0.0
    devices = spec.parallelism.world_size
    return Candidate(
        spec=spec,
        memory=memory,
        memory_rank=peak_rank,
        seconds=seconds,
        is_recommended=is_recommended,
        verdict=verdict,
        tokens_per_second=samples * shape.seq_length / seconds.total,
        mfu=mfu(iteration_flops(spec), seconds.total, devices, peak_flops),
        expert_options=options,
    )


def _use_expert_options(
    request: Request, spec: RunSpec, may_interleave: bool = False
) -> tuple[ExpertOptions, Cluster]:
    """Return the options for experts that a run uses, and the request's cluster with these options.

    A run whose token dispatcher is the template's does not use DeepEP.

    Args:
        request: The request.
        spec: The run.
        may_interleave: True if the run stands for runs with several virtual stages too.
    """
    allowed = request.expert_options
    if spec.token_dispatcher is request.template.token_dispatcher:
        allowed = replace(allowed, deep_ep=False)
    options = choose_expert_options(spec, allowed, may_interleave)
    return options, options.apply_to_cluster(request.cluster)


def select_pareto_frontier(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that no other candidate beats in both time and memory, fastest first."""
    frontier: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds.total, c.memory.total)):
        if not frontier or candidate.memory.total < frontier[-1].memory.total:
            frontier.append(candidate)
    return frontier


class _Unchosen(IntEnum):
    """Choices that a bound leaves open. The search makes them from the highest number down to 0."""

    NOTHING = 0
    CP_ALGORITHM = 1
    SIZE_AND_RECOMPUTE = 3
    """Micro batch, recomputation and the algorithm of context parallelism."""
    ALL = 4
    """All of these and the kind of sharding, and it is not known yet which recomputation the run needs to fit."""


class _Bound(NamedTuple):
    """Lower bound on the seconds of all configurations with one product of parallel sizes.

    Bounds are ordered by seconds, then by number.
    """

    seconds: float
    number: int
    """Serial number, so that no two bounds compare equal."""
    plain: RunSpec
    """Configuration without sharding and virtual stages, with the largest of the micro batches. Its recomputation
    is the first with which the smallest micro batch fits, once that is known."""
    sizes: tuple[int, ...]
    """Micro batch sizes, smallest first."""
    shardings: tuple[Sharding, ...]
    """Shardings of the configurations, the one with the least memory last. Once their kind is chosen, all of them
    communicate after the last backward, or the only one communicates layer by layer."""
    after: float
    """Part of `seconds` for messages, gradients and update without the layers' communication; 0 if it is not computed
    yet."""
    fixed: float
    """Part of `seconds` that virtual stages do not change."""
    ramp: float
    """Seconds of one micro batch in all other stages. Virtual stages divide them."""
    unchosen: _Unchosen


_numbers = count()


def _bound_all_splits(request: Request) -> tuple[int, list[_Bound], RunSpec | None]:
    """Return the number of legal configurations, a heap of bounds, and the configuration with the least memory.

    There is one bound per product of parallel sizes. Products that cannot fit have no bound. To decide this, only the
    configuration with the smallest micro batch, full recomputation and most sharding is checked, because it needs the
    least memory. The last value is None if no configuration is legal.
    """
    template, legal = request.template, 0
    bounds: list[_Bound] = []
    least_bytes, lightest = inf, None
    cluster, expert_tensor = request.cluster, template.parallelism.expert_tensor
    most_tensor = max(MOST_TENSOR_ACROSS_NODES, cluster.per_node)
    splits = enumerate_splits(
        template.shape, cluster.devices, expert_tensor, most_tensor, template.lora
    )
    for split in splits:
        sizes = list_micro_batch_sizes(split, request.global_batch)
        if not sizes:
            continue
        legal += _count_combinations(template, split, sizes)
        smallest = min_memory_variant(
            build_unsharded_spec(template, split, sizes[0], Recompute.FULL)
        )
        peak = find_peak_rank_within(
            smallest,
            max(request.capacity, least_bytes),
            counts_reclaimable=not request.has_replayed_runs,
        )
        if not peak:
            continue
        _, memory = peak
        if memory.total < least_bytes:
            least_bytes, lightest = memory.total, smallest
        # The replay of a run without recomputation may leave out the reclaimable bytes.
        least_total = memory.needed if request.has_replayed_runs else memory.total
        if least_total <= request.capacity:
            plain = build_unsharded_spec(template, split, sizes[0], Recompute.NONE)
            options = choose_expert_options(plain, request.expert_options)
            plain = options.apply_to_spec(plain)
            if split.context > 1:
                plain = replace(plain, cp_comm_type="")
            shardings = tuple(list_shardings(split, template.lora))
            bounds.append(
                _compute_bound(request, plain, tuple(sizes), shardings, _Unchosen.ALL, after=0.0)
            )
    heapq.heapify(bounds)
    return legal, bounds, lightest


def _compute_bound(
    request: Request,
    plain: RunSpec,
    sizes: tuple[int, ...],
    shardings: tuple[Sharding, ...],
    unchosen: _Unchosen,
    after: float,
) -> _Bound:
    """Return a lower bound on iteration seconds for all micro batch `sizes`.

    The bound is computed for the largest size, because time per sample does not grow with the micro batch. If a size
    does not divide the largest, the time is multiplied by `LEAST_SAMPLE_TIME_RATIO`.

    Shardings may communicate layer by layer, once per micro batch. Smaller micro batches then communicate at least as
    much. The communication hides at most as many seconds as the work takes, so the sum of both does not fall if the
    work takes longer than its bound.

    Args:
        request: The request.
        plain: The configuration without sharding and virtual stages.
        sizes: Micro batch sizes in ascending order.
        shardings: Shardings of the configurations, the one with the least memory last.
        unchosen: Choices that the bound leaves open.
        after: Lower bound on the seconds of pipeline messages, gradient communication and update, without
            communication layer by layer.
    """
    split = plain.parallelism
    if plain.batch.micro_batch_size != sizes[-1]:
        plain = replace(plain, batch=Batch(sizes[-1], request.global_batch))
    if len(sizes) > 1:
        virtual_stages = virtual_degrees(plain.stages, plain.shape.layers, split.pipeline)
    else:
        virtual_stages = list_virtual_stages(plain.shape, split, plain.microbatches)
    _, cluster = _use_expert_options(request, plain, may_interleave=virtual_stages[-1] > 1)
    slowest_seconds, all_stages_seconds = _least_stage_seconds(plain, cluster, virtual_stages)
    if plain.token_dispatcher is not request.template.token_dispatcher:
        # A run in which DeepEP's buffers do not fit falls back to the template's dispatcher, which may be faster.
        fallback = replace(plain, token_dispatcher=request.template.token_dispatcher)
        slowest_fallback, all_fallback = _least_stage_seconds(fallback, cluster, virtual_stages)
        slowest_seconds = min(slowest_seconds, slowest_fallback)
        all_stages_seconds = min(all_stages_seconds, all_fallback)
    divides_all = all(sizes[-1] % size == 0 for size in sizes)
    ratio = 1.0 if divides_all else LEAST_SAMPLE_TIME_RATIO
    straggling = 1 + straggler_fraction(cluster)
    working = ratio * plain.microbatches * slowest_seconds
    layerwise = min(
        layerwise_sync_seconds(apply_sharding(plain, sharding), cluster, working)
        for sharding in shardings
    )
    fixed = straggling * (working + after + layerwise)
    ramp = straggling * ratio * (all_stages_seconds - slowest_seconds) * sizes[0] / sizes[-1]
    seconds = fixed + ramp / virtual_stages[-1]
    return _Bound(seconds, next(_numbers), plain, sizes, shardings, after, fixed, ramp, unchosen)


def _least_stage_seconds(
    plain: RunSpec, cluster: Cluster, virtual_stages: Sequence[int]
) -> tuple[float, float]:
    """Return lower bounds on the seconds per micro batch of the slowest stage, and of all stages together.

    The bounds are for all these numbers of virtual stages per rank. The number changes how long the host waits for
    messages between stages. This time is least for one of the two smallest numbers. The number also changes on which
    ranks dense layers are among layers with experts, and then the stages of all numbers are computed.
    """
    numbers = virtual_stages if plain.shape.dense_layers else virtual_stages[:2]
    slowest = all_stages = inf
    for number in numbers:
        parallelism = replace_cached(plain.parallelism, virtual_stages=number)
        spec = replace(plain, parallelism=parallelism) if number > 1 else plain
        stages = predict_stage_times(spec, cluster)
        slowest = min(slowest, stages.slowest_seconds)
        all_stages = min(all_stages, stages.all_stages_seconds)
        if not (stages.waits_for_host or plain.shape.dense_layers):
            # Only the waits for the host depend on the number of virtual stages, so no other number takes less.
            break
    return slowest, all_stages


def _narrow_bound(request: Request, bound: _Bound) -> Iterator[_Bound]:
    """Yield the bounds that replace `bound` after the next of its open choices.

    Choices are made in this order: the kind of sharding, the least recomputation that fits, the micro batch (the list
    of sizes is halved until one size is left), more recomputation, and the algorithm of context parallelism.
    """
    plain, sizes = bound.plain, bound.sizes
    recomputes = list_recomputes(request.template)
    if bound.unchosen is _Unchosen.ALL:
        for shardings in _group_shardings(bound.shardings):
            yield from _bound_kind_of_sharding(request, bound, shardings)
    elif len(sizes) > 1:
        yield from _halve_sizes(request, bound, recomputes)
    elif bound.unchosen is _Unchosen.SIZE_AND_RECOMPUTE:
        has_context = plain.parallelism.context > 1
        unchosen = _Unchosen.CP_ALGORITHM if has_context else _Unchosen.NOTHING
        yield bound._replace(unchosen=unchosen, number=next(_numbers))
        heavier = recomputes[recomputes.index(plain.recompute) + 1 :]
        if heavier:
            # More recomputation takes more time, so this bound is reached before that of the next recomputation.
            recomputed = replace(plain, recompute=heavier[0])
            yield _compute_bound(
                request, recomputed, sizes, bound.shardings, bound.unchosen, bound.after
            )
    else:
        for comm_type in list_cp_comm_types(request.template, plain.parallelism):
            chosen = replace(plain, cp_comm_type=comm_type)
            yield _compute_bound(
                request, chosen, sizes, bound.shardings, _Unchosen.NOTHING, bound.after
            )


def _group_shardings(shardings: Sequence[Sharding]) -> list[tuple[Sharding, ...]]:
    """Return the shardings in groups. Each group gets its own bound.

    The first group has the shardings that communicate after the last backward, because their times are nearly equal.
    Each sharding that communicates layer by layer is a group of its own.
    """
    unlayered = tuple(sharding for sharding in shardings if not sharding.overlaps_by_default)
    layered = [(sharding,) for sharding in shardings if sharding.overlaps_by_default]
    return [unlayered, *layered]


def _bound_kind_of_sharding(
    request: Request, bound: _Bound, shardings: tuple[Sharding, ...]
) -> Iterator[_Bound]:
    """Yield the bound for one group of shardings of `bound`, for which nothing is chosen yet.

    The new bound has the least recomputation and the micro batch sizes that fit. Nothing is yielded if no size fits.
    """
    plain, recomputes = bound.plain, list_recomputes(request.template)
    smallest = replace(plain, batch=Batch(bound.sizes[0], request.global_batch))
    heaviest = replace(smallest, recompute=recomputes[-1])
    # The sharding with the least memory is known to fit, or the product would have no bound.
    is_known_to_fit = shardings[-1] is bound.shardings[-1]
    if not is_known_to_fit and not _can_fit(request, heaviest, shardings):
        return
    fitting = _apply_first_fitting_recompute(request, smallest, shardings, recomputes[:-1])
    sizes = _drop_sizes_that_never_fit(request, heaviest, bound.sizes, shardings)
    after = _least_seconds_after_work(request.cluster, plain, shardings)
    unchosen = _Unchosen.SIZE_AND_RECOMPUTE
    yield _compute_bound(request, fitting or heaviest, sizes, shardings, unchosen, after)


def _can_fit(request: Request, plain: RunSpec, shardings: tuple[Sharding, ...]) -> bool:
    """Return True if a run without virtual stages fits with the last of the shardings.

    DeepEP's buffers are not counted, because the search falls back to the template's dispatcher if they do not fit.
    Reclaimable bytes are not counted if some runs of the search are replayed, because a replay may have fewer of them.
    """
    dispatcher = request.template.token_dispatcher
    if plain.token_dispatcher is not dispatcher:
        plain = replace(plain, token_dispatcher=dispatcher)
    sharded = apply_sharding(plain, shardings[-1])
    counts_reclaimable = not request.has_replayed_runs
    peak = find_peak_rank_within(sharded, request.capacity, counts_reclaimable=counts_reclaimable)
    return peak is not None


def _drop_sizes_that_never_fit(
    request: Request, heaviest: RunSpec, sizes: tuple[int, ...], shardings: tuple[Sharding, ...]
) -> tuple[int, ...]:
    """Return the micro batch sizes that fit. The smallest size is known to fit.

    Args:
        request: The request.
        heaviest: The configuration with the most recomputation.
        sizes: Micro batch sizes, smallest first.
        shardings: Shardings of the configuration, the one with the least memory last.
    """

    def fits(size: int) -> bool:
        """Return True if a micro batch of this size fits with the most sharding."""
        sized = replace(heaviest, batch=Batch(size, request.global_batch))
        return _can_fit(request, sized, shardings)

    return sizes[: bisect_left(sizes, True, lo=1, key=lambda size: not fits(size))]


def _halve_sizes(
    request: Request, bound: _Bound, recomputes: Sequence[Recompute]
) -> Iterator[_Bound]:
    """Yield a bound for the smaller half of the micro batch sizes, and a second bound for the larger half.

    The second bound has the least recomputation with which the larger half can fit. If the larger half does not fit
    with any recomputation, the second bound is left out.
    """
    plain, sizes, unchosen = bound.plain, bound.sizes, _Unchosen.SIZE_AND_RECOMPUTE
    shardings, after = bound.shardings, bound.after
    middle = len(sizes) // 2
    yield _compute_bound(request, plain, sizes[:middle], shardings, unchosen, after)
    larger = replace(plain, batch=Batch(sizes[middle], request.global_batch))
    remaining = recomputes[recomputes.index(plain.recompute) :]
    fitting = _apply_first_fitting_recompute(request, larger, shardings, remaining)
    if fitting:
        yield _compute_bound(request, fitting, sizes[middle:], shardings, unchosen, after)


def _least_seconds_after_work(
    cluster: Cluster, plain: RunSpec, shardings: tuple[Sharding, ...]
) -> float:
    """Return a lower bound on the seconds of pipeline messages, gradient communication and update per iteration.

    The bound takes the fastest of the shardings and the fastest schedule. It counts no communication that can be
    overlapped, and none layer by layer.
    """
    split = plain.parallelism
    sharded = (apply_sharding(plain, sharding) for sharding in shardings)
    seconds = min(sum(synchronisation_seconds(spec, cluster, inf)) for spec in sharded)
    if split.pipeline == 1:
        return seconds
    virtual_stages = virtual_degrees(plain.stages, plain.shape.layers, split.pipeline)[:2]
    scheduled = (replace_cached(split, virtual_stages=number) for number in virtual_stages)
    specs = (replace(plain, parallelism=parallelism) for parallelism in scheduled)
    return seconds + min(message_seconds(spec, cluster) for spec in specs)


def _apply_first_fitting_recompute(
    request: Request,
    plain: RunSpec,
    shardings: tuple[Sharding, ...],
    recomputes: Sequence[Recompute],
) -> RunSpec | None:
    """Return the run `plain` with the first of `recomputes` with which it can fit into memory.

    The result is None if the run fits with none of them.

    Args:
        request: The request.
        plain: The configuration without sharding and virtual stages.
        shardings: Shardings of the configuration, the one with the least memory last.
        recomputes: Recomputations in the order of falling memory and rising time.
    """
    for recompute in recomputes:
        recomputed = replace(plain, recompute=recompute)
        if _can_fit(request, recomputed, shardings):
            return recomputed
    return None


def _count_combinations(template: RunSpec, split: Parallelism, sizes: list[int]) -> int:
    """Return the number of legal configurations for one product of parallel sizes.

    They differ in micro batch size, virtual stages, recomputation, sharding and the algorithm of context parallelism.
    """
    num_kinds = (
        len(list_recomputes(template))
        * len(list_cp_comm_types(template, split))
        * len(list_shardings(split, template.lora))
    )
    samples_per_rank = template.batch.global_batch_size // split.data
    num_schedules = sum(
        len(list_virtual_stages(template.shape, split, samples_per_rank // size)) for size in sizes
    )
    return num_kinds * num_schedules


def _sort_key(candidate: Candidate) -> tuple[float, int, str]:
    """Return seconds, bytes and strategy, by which candidates are ranked."""
    return candidate.seconds.total, candidate.memory.total, candidate.strategy


def evaluate_single_axis_strategies(request: Request) -> list[Candidate]:
    """Return the legal strategies with one kind of parallelism over all devices, fastest first.

    They train the requested global batch in the micro batches of `choose_batch`. On one device the baseline is the
    only strategy.
    """
    devices = request.cluster.devices
    names = ["baseline"] if devices == 1 else [f"{code}{devices}" for code in SINGLE_AXIS_CODES]
    candidates = []
    for name in names:
        parallelism = parse_strategy(name, devices, request.template.parallelism.expert_tensor)
        batch = choose_batch(
            request.model,
            parallelism,
            request.template.device,
            global_batch_size=request.global_batch,
        )
        spec = replace(request.template, parallelism=parallelism, batch=batch)
        if not find_violations(spec):
            candidates.append(evaluate_configuration(request, spec))
    return sorted(candidates, key=lambda candidate: candidate.seconds.total)


@dataclass(frozen=True)
class Scaling:
    """Efficiency of a plan's winner relative to the fewest devices that hold the model."""

    devices: int
    """The fewest devices, a power of two or the plan's own number."""
    strategy: str
    """Best strategy on the fewest devices."""
    efficiency: float
    """Tokens per second and device, relative to the fewest devices with the same global batch."""


def estimate_training_days(plan: Plan, tokens: float) -> float | None:
    """Return the days in which a plan's winner trains on `tokens` tokens without interruptions.

    None if nothing fits.
    """
    return tokens / plan.winner.tokens_per_second / SECONDS_PER_DAY if plan.winner else None


def compare_with_fewest_devices(plan: Plan) -> Scaling | None:
    """Compare a plan's winner with the best strategy on the fewest devices that hold the model.

    Powers of two are tried as numbers of devices. The efficiency is the winner's tokens per second per device, divided
    by the tokens per second per device on the fewest devices. The efficiency is 1 if no smaller number of devices holds
    the model. The result is None if the plan has no winner.
    """
    if plan.winner is None:
        return None
    all_devices = plan.request.cluster.devices
    for devices in (2**doublings for doublings in range((all_devices - 1).bit_length())):
        fewer = search_configurations(resize_request(plan.request, devices), kept=1).winner
        if fewer:
            rate = fewer.tokens_per_second / devices
            efficiency = plan.winner.tokens_per_second / all_devices / rate
            return Scaling(devices, fewer.strategy, efficiency)
    return Scaling(all_devices, plan.winner.strategy, 1.0)


def find_devices_needed(request: Request) -> int | None:
    """Double the request's devices until the model fits, and return their number.

    The global batch grows with the devices. The result is None if `_MOST_DEVICES` devices are not enough.
    """
    devices = request.cluster.devices * 2
    while devices <= _MOST_DEVICES:
        grown = resize_request(request, devices, request.global_batch * devices)
        if search_configurations(grown, kept=1).winner is not None:
            return devices
        devices *= 2
    return None


def resize_request(request: Request, devices: int, global_batch: int | None = None) -> Request:
    """Return a request for another number of devices; None as global batch keeps the request's own."""
    batch = global_batch or request.global_batch
    template = request.template
    resized = replace(template, batch=replace(template.batch, global_batch_size=batch))
    cluster = replace(request.cluster, devices=devices)
    return replace(request, cluster=cluster, global_batch=batch, template=resized)
