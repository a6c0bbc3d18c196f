"""Alpa's inter-operator method (arXiv:2201.12023 §5) on the planner's costs, for `make plan ALPA=1`.

The method cuts the model into stages and the cluster into submeshes, one per stage. It minimises
Σ t_i + (B − 1)·max t_i over B micro batches by a dynamic program for each bound t_max on the slowest stage. Stages may
differ in layers, devices and parallel sizes, which stages of Megatron cannot. Messages between stages cost nothing, as
in the paper. A "unit" is a group of equal consecutive layers; stages consist of full units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product

from parakit.config.run import RunSpec
from parakit.config.strategy import Parallelism, strategy_name
from parakit.costs import divisors, estimate_rank_memory, find_violations
from parakit.formatting.units import ms
from parakit.planner.candidates import build_unsharded_spec, enumerate_splits, list_shardings
from parakit.planner.search import Candidate, Plan, Request, evaluate_configuration
from parakit.planner.time.iteration import stage_seconds

MOST_DEVICES = 16
MOST_UNITS = 16
"""Most units into which layers are clustered, as Alpa clusters operators."""


@dataclass(frozen=True)
class StageCost:
    """Time and memory of one stage on some devices, with the way in which these devices split the stage."""

    seconds: float
    """Forward and backward of one micro batch, and its fraction of the time after the last backward."""
    fixed_bytes: int
    """Weights, gradients, optimizer and temporaries per device."""
    flight_bytes: int
    """Activations per micro batch between forward and backward."""
    split: Parallelism
    """Parallel sizes inside the stage."""


@dataclass(frozen=True)
class AlpaStage:
    """A stage of units `first` to before `end` on `devices` devices."""

    first: int
    end: int
    devices: int
    cost: StageCost


Costs = Callable[[int, int, int], Iterable[StageCost]]
"""Function from first unit, end and number of devices to the costs of all ways to run these units."""
_FindFastest = Callable[[int, int, int, int], StageCost | None]
"""Function from first unit, end, devices and micro batches in flight to the fastest way that fits, or None."""
_Stages = tuple[float, tuple[AlpaStage, ...]]
"""Seconds (a sum over stages, or those of an iteration), and the stages."""


@dataclass(frozen=True)
class AlpaPlan:
    """Stages that Alpa's method chooses, and the time of an iteration."""

    stages: tuple[AlpaStage, ...]
    layers_per_unit: int
    seconds: float
    """Seconds per iteration, by the method's own objective."""
    candidate: Candidate | None
    """The strategy as Megatron can run it, with the planner's time; None if the stages differ."""

    @property
    def total(self) -> float:
        """Seconds per iteration: the planner's if Megatron can run the stages, else the method's."""
        return self.candidate.seconds.total if self.candidate else self.seconds

    def __str__(self) -> str:
        time = f"{ms(self.total)} ms per iteration"
        if self.candidate is not None:
            micro = self.candidate.spec.batch.micro_batch_size
            return f"{self.candidate.strategy}, micro batch {micro}: {time}"
        stages = (
            f"{(stage.end - stage.first) * self.layers_per_unit} layers as "
            f"{strategy_name(stage.cost.split)} on {stage.devices}"
            for stage in self.stages
        )
        return f"{', then '.join(stages)}: {time}, which Megatron cannot run"


def compare_with_alpa(plan: Plan) -> str:
    """Return one sentence that compares the choice of Alpa's method with the winner of a plan.

    Raises:
        ValueError: The cluster has more than `MOST_DEVICES` devices.
    """
    chosen, winner = run_alpa(plan.request), plan.winner
    if chosen is None or winner is None:
        return "Alpa's dynamic program finds nothing that fits."
    if chosen.candidate is not None and chosen.candidate.strategy == winner.strategy:
        return f"Alpa's dynamic program chooses the same strategy: {chosen}."
    return (
        f"Alpa's dynamic program chooses {chosen}, {chosen.total / winner.seconds.total:.2f} times the "
        f"{winner.strategy} of the exhaustive search."
    )


def list_submeshes(devices: int, per_node: int) -> list[int]:
    """Return the sizes of submeshes that cover a cluster without gaps: powers of two in a node, and full nodes."""
    powers = (1 << exponent for exponent in range(20))
    inside_node = [size for size in powers if size <= min(devices, per_node)]
    return sorted({*inside_node, *range(per_node, devices + 1, per_node)})


def find_best_stages(
    units: int, meshes: list[int], devices: int, count: int, capacity: int, costs: Costs
) -> _Stages | None:
    """Return the least seconds per iteration, and the stages that reach this time. The result is None if nothing fits.

    The function solves the dynamic program once per bound on the slowest stage, beginning with the lowest bound.

    Args:
        units: Number of units of the model, in order.
        meshes: Allowed numbers of devices per stage. The devices of all stages add up to `devices`.
        devices: Devices of the cluster.
        count: Number of micro batches, B.
        capacity: Bytes that a device may hold.
        costs: Function of first unit, end unit and number of devices. It returns the costs of all ways to run
            these units as one stage.
    """

    @cache
    def find_fastest(first: int, end: int, mesh: int, flights: int) -> StageCost | None:
        """Return the cost of the fastest way to run units `first` to before `end` on `mesh` devices.

        Only ways that fit with `flights` micro batches in flight count. The result is None if no way fits.
        """
        fastest: StageCost | None = None
        for cost in costs(first, end, mesh):
            fits = cost.fixed_bytes + flights * cost.flight_bytes <= capacity
            if fits and (fastest is None or cost.seconds < fastest.seconds):
                fastest = cost
        return fastest

    most_flights = min(units, devices, count)
    best: _Stages | None = None
    for bound in _list_stage_times(units, meshes, most_flights, find_fastest):
        # The slowest stage alone takes `bound` per micro batch, so this bound and higher bounds cannot be faster.
        if best is not None and count * bound >= best[0]:
            break
        within_bound = _solve_within_bound(bound, units, meshes, devices, count, find_fastest)
        if within_bound is None:
            continue
        sum_of_stages, stages = within_bound
        # The first micro batch passes through all stages. Then the slowest stage delays each further one.
        slowest = max(stage.cost.seconds for stage in stages)
        total = sum_of_stages + (count - 1) * slowest
        if best is None or total < best[0]:
            best = total, stages
    return best


def _list_stage_times(
    units: int, meshes: list[int], most_flights: int, find_fastest: _FindFastest
) -> list[float]:
    """Return the seconds per micro batch of all stages that are possible, in ascending order without repeats.

    One of these times is the time of the slowest stage in the best plan. The stages run any successive units on any
    mesh, with one to `most_flights` micro batches in flight.
    """
    times: set[float] = set()
    for first, end in combinations(range(units + 1), 2):
        for mesh, flights in product(meshes, range(1, most_flights + 1)):
            cost = find_fastest(first, end, mesh, flights)
            if cost is not None:
                times.add(cost.seconds)
    return sorted(times)


def _solve_within_bound(
    bound: float,
    units: int,
    meshes: list[int],
    devices: int,
    count: int,
    find_fastest: _FindFastest,
) -> _Stages | None:
    """Return the least sum of stage times and the stages that have it, if no stage may take longer than `bound`.

    The result is None if no stages meet the bound. The program F(s, k, d) of the paper is solved from the last
    stage to the first. A stage with n later stages holds n more micro batches in flight (1F1B).
    """
    # The best last stages, by the first unit that they run and the number of devices that they use.
    solved: dict[tuple[int, int], _Stages] = {(units, 0): (0.0, ())}
    best: _Stages | None = None
    for num_later in range(min(units, devices)):
        flights = min(num_later + 1, count)
        extended: dict[tuple[int, int], _Stages] = {}
        for (end, used_devices), (seconds, stages) in solved.items():
            for first, mesh in product(range(end), meshes):
                if used_devices + mesh > devices:
                    continue
                cost = find_fastest(first, end, mesh, flights)
                if cost is None or cost.seconds > bound:
                    continue
                total = seconds + cost.seconds
                state = first, used_devices + mesh
                known_total, _ = extended.get(state, (math.inf, ()))
                if total < known_total:
                    extended[state] = total, (AlpaStage(first, end, mesh, cost), *stages)
        complete = extended.get((0, devices))
        if complete is not None:
            complete_total, _ = complete
            if best is None or complete_total < best[0]:
                best = complete
        solved = extended
    return best


def run_alpa(request: Request) -> AlpaPlan | None:
    """Return the fastest plan of Alpa's method over all numbers of micro batches. The result is None if nothing fits.

    Raises:
        ValueError: The cluster has more than `MOST_DEVICES` devices.
    """
    devices = request.cluster.devices
    if devices > MOST_DEVICES:
        raise ValueError(
            f"Alpa's program is solved for up to {MOST_DEVICES} devices, and here are {devices}; leave "
            "ALPA= out, or use fewer GPUS=."
        )
    layers = request.template.shape.layers
    units = max(number for number in divisors(layers) if number <= MOST_UNITS)
    meshes = list_submeshes(devices, min(devices, request.cluster.per_node))
    plans: list[AlpaPlan] = []
    for samples in divisors(request.global_batch):
        count = request.global_batch // samples
        costs = _build_stage_costs(request, samples, units)
        best = find_best_stages(units, meshes, devices, count, request.capacity, costs)
        if best is not None:
            seconds, stages = best
            candidate = _convert_to_candidate(request, stages, samples)
            plans.append(AlpaPlan(stages, layers // units, seconds, candidate))
    return min(plans, key=lambda plan: plan.total, default=None)


def _build_stage_costs(request: Request, samples: int, units: int) -> Costs:
    """Return a function that gives the costs of a stage by the planner's formulas.

    Arguments of that function are the first unit, the end unit and the number of devices. The formulas need a full
    pipeline, so the stage is put into one of up to three equal stages, as first, middle or last stage.

    Args:
        samples: Samples per micro batch over all replicas.
        units: Number of units of the model.
    """
    layers_per_unit = request.template.shape.layers // units

    @cache
    def cost_stage(length: int, is_first: bool, is_last: bool, mesh: int) -> tuple[StageCost, ...]:
        """Return the costs of all ways to run a stage of `length` units on `mesh` devices."""
        num_stages = 3 - is_first - is_last
        rank = 0 if is_first else 1
        layers = length * layers_per_unit * num_stages
        specs = _enumerate_stage_specs(request, samples, layers, num_stages, mesh)
        return tuple(_cost_stage_spec(request, spec, rank, samples) for spec in specs)

    def costs(first: int, end: int, mesh: int) -> Iterable[StageCost]:
        """Return the costs of all ways to run units `first` to before `end` on `mesh` devices."""
        return cost_stage(end - first, first == 0, end == units, mesh)

    return costs


def _enumerate_stage_specs(
    request: Request, samples: int, layers: int, stages: int, mesh: int
) -> Iterator[RunSpec]:
    """Yield the legal runs of a model with `layers` layers in `stages` equal pipeline stages of `mesh` devices."""
    shape = replace(request.template.shape, layers=layers)
    template = replace(request.template, shape=shape)
    for split in enumerate_splits(shape, mesh, lora=template.lora):
        if split.pipeline > 1 or samples % split.data:
            continue
        pipelined = replace(split, pipeline=stages)
        micro_batch = samples // split.data
        plain = build_unsharded_spec(template, pipelined, micro_batch, template.recompute)
        for sharding in list_shardings(replace(pipelined, pipeline=2), template.lora):
            spec = replace(plain, parallelism=replace(pipelined, sharding=sharding))
            if not find_violations(spec):
                yield spec


def _cost_stage_spec(request: Request, spec: RunSpec, rank: int, samples: int) -> StageCost:
    """Return the time per micro batch and the memory of pipeline rank `rank` of a run.

    A micro batch has `samples` samples over all replicas. The time of the work after the last micro batch, such as the
    update, is divided evenly among the micro batches and included.
    """
    seconds, seconds_after = stage_seconds(spec, request.cluster, rank)
    single_batch = replace(spec, batch=replace(spec.batch, global_batch_size=samples))
    memory = estimate_rank_memory(single_batch, rank)
    return StageCost(
        seconds=seconds + seconds_after * samples / request.global_batch,
        fixed_bytes=memory.total - memory.activations,
        flight_bytes=memory.activations,
        split=replace(spec.parallelism, pipeline=1),
    )


def _convert_to_candidate(
    request: Request, stages: tuple[AlpaStage, ...], samples: int
) -> Candidate | None:
    """Return the strategy of Megatron that has these stages, evaluated as a candidate.

    The result is None if the stages differ in layers or parallelism, or if Megatron refuses the run.
    """
    lengths = {stage.end - stage.first for stage in stages}
    if len({stage.cost.split for stage in stages}) > 1 or len(lengths) > 1:
        return None
    split = replace(stages[0].cost.split, pipeline=len(stages))
    plain = build_unsharded_spec(
        request.template, split, samples // split.data, request.template.recompute
    )
    return None if find_violations(plain) else evaluate_configuration(request, plain)
