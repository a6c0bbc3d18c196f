"""`make plan ALPA=1`: Alpa's inter-operator pass (arXiv:2201.12023 §5) on the planner's costs.

The method cuts the model into stages and the cluster into submeshes, one a stage, and minimises
Σ t_i + (B − 1)·max t_i over B micro batches by a dynamic program for each bound t_max on the slowest
stage. Stages may differ in layers, devices and degrees, which Megatron's cannot. Messages
between them cost nothing, as in the paper.
"""

from __future__ import annotations

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
"""Parts that layers are clustered into, as Alpa clusters operators; each is of equal layers."""


@dataclass(frozen=True)
class StageCost:
    """One stage on one submesh."""

    seconds: float
    """Of one micro batch, forward and backward, with a share of what follows the last."""
    fixed_bytes: int
    """Weights, gradients, optimizer and temporaries on one device."""
    flight_bytes: int
    """Of each micro batch between forward and backward."""
    split: Parallelism
    """Inside the stage."""


@dataclass(frozen=True)
class AlpaStage:
    """Units `first` to before `end` on `devices` devices."""

    first: int
    end: int
    devices: int
    cost: StageCost


Costs = Callable[[int, int, int], Iterable[StageCost]]
"""Ways to run units `first` to before `end` on so many devices."""
_Fastest = Callable[[int, int, int, int], StageCost | None]
"""The fastest that fits with so many micro batches in flight."""
_Found = tuple[float, tuple[AlpaStage, ...]]
"""Sum of the stages' seconds, or an iteration's, and the stages."""


@dataclass(frozen=True)
class AlpaPlan:
    """What the method chooses."""

    stages: tuple[AlpaStage, ...]
    layers_a_unit: int
    seconds: float
    """Of an iteration, by its own objective."""
    candidate: Candidate | None
    """The same strategy as Megatron can run it and the planner times it; None where stages differ."""

    @property
    def total(self) -> float:
        """Seconds of an iteration, by the planner where it can."""
        return self.candidate.seconds.total if self.candidate else self.seconds

    def __str__(self) -> str:
        timed = f"{ms(self.total)} ms an iteration"
        if self.candidate is not None:
            micro = self.candidate.spec.batch.micro_batch_size
            return f"{self.candidate.strategy}, micro batch {micro}: {timed}"
        parts = (
            f"{(stage.end - stage.first) * self.layers_a_unit} layers as "
            f"{strategy_name(stage.cost.split)} on {stage.devices}"
            for stage in self.stages
        )
        return f"{', then '.join(parts)}: {timed}, which Megatron cannot run"


def compare_with_alpa(plan: Plan) -> str:
    """A sentence: what the method chooses, and the exhaustive search.

    Raises:
        ValueError: The cluster is too large for it.
    """
    found, winner = run_alpa(plan.request), plan.winner
    if found is None or winner is None:
        return "Alpa's dynamic program finds nothing that fits."
    if found.candidate is not None and found.candidate.strategy == winner.strategy:
        return f"Alpa's dynamic program chooses the same strategy: {found}."
    return (
        f"Alpa's dynamic program chooses {found}, {found.total / winner.seconds.total:.2f} times the "
        f"{winner.strategy} of the exhaustive search."
    )


def list_submeshes(devices: int, per_node: int) -> list[int]:
    """Devices of the shapes that cover a cluster without gaps: powers of two in a node, whole nodes."""
    inside = [size for size in (1 << n for n in range(20)) if size <= min(devices, per_node)]
    return sorted({*inside, *range(per_node, devices + 1, per_node)})


def find_best_stages(
    units: int, meshes: list[int], devices: int, count: int, capacity: int, costs: Costs
) -> _Found | None:
    """The dynamic program over every bound on the slowest stage.

    Args:
        units: Parts of the model, in order.
        meshes: Sizes of submeshes; those of the stages add up to `devices`.
        devices: Of the cluster.
        count: Micro batches, B.
        capacity: Bytes of a device.
        costs: Ways to run some units on some devices.
    """

    @cache
    def fastest(first: int, end: int, mesh: int, flights: int) -> StageCost | None:
        ways = costs(first, end, mesh)
        fits = (way for way in ways if way.fixed_bytes + flights * way.flight_bytes <= capacity)
        return min(fits, key=lambda way: way.seconds, default=None)

    spans = combinations(range(units + 1), 2)
    flights = range(1, min(units, devices, count) + 1)
    ways = (fastest(*span, *rest) for span, *rest in product(spans, meshes, flights))
    best: _Found | None = None
    for bound in sorted({way.seconds for way in ways if way is not None}):
        if best is not None and count * bound >= best[0]:
            break
        found = _within(bound, units, meshes, devices, count, fastest)
        if found is not None:
            slowest = max(stage.cost.seconds for stage in found[1])
            total = found[0] + (count - 1) * slowest
            if best is None or total < best[0]:
                best = total, found[1]
    return best


def _within(
    bound: float, units: int, meshes: list[int], devices: int, count: int, fastest: _Fastest
) -> _Found | None:
    """Least sum of stage times where none is above `bound`: F(s, k, d), from the last stage on.

    A stage with `later` ones behind it holds as many micro batches more (1F1B).
    """
    reached: dict[tuple[int, int], _Found] = {(units, 0): (0.0, ())}
    best: _Found | None = None
    for later in range(min(units, devices)):
        grown: dict[tuple[int, int], _Found] = {}
        for (end, used), (seconds, stages) in reached.items():
            for first, mesh in product(range(end), meshes):
                if used + mesh > devices:
                    continue
                cost = fastest(first, end, mesh, min(later + 1, count))
                if cost is None or cost.seconds > bound:
                    continue
                total, key = seconds + cost.seconds, (first, used + mesh)
                if key not in grown or total < grown[key][0]:
                    grown[key] = total, (AlpaStage(first, end, mesh, cost), *stages)
        whole = grown.get((0, devices))
        if whole is not None and (best is None or whole[0] < best[0]):
            best = whole
        reached = grown
    return best


def run_alpa(request: Request) -> AlpaPlan | None:
    """What Alpa's method chooses, over every number of micro batches; None if nothing fits.

    Raises:
        ValueError: The cluster is too large for it.
    """
    devices = request.cluster.devices
    if devices > MOST_DEVICES:
        raise ValueError(
            f"Alpa's program is solved for up to {MOST_DEVICES} devices, and here are {devices}; leave "
            "ALPA= out, or use fewer GPUS=."
        )
    layers = request.template.shape.layers
    units = max(n for n in divisors(layers) if n <= MOST_UNITS)
    meshes = list_submeshes(devices, min(devices, request.cluster.per_node))
    found: list[AlpaPlan] = []
    for samples in divisors(request.global_batch):
        count = request.global_batch // samples
        costs = _stage_costs(request, samples, units)
        best = find_best_stages(units, meshes, devices, count, request.capacity, costs)
        if best is not None:
            candidate = _as_candidate(request, best[1], samples)
            found.append(AlpaPlan(best[1], layers // units, best[0], candidate))
    return min(found, key=lambda each: each.total, default=None)


def _stage_costs(request: Request, samples: int, units: int) -> Costs:
    """Costs by the planner's formulas: a stage stands in a pipeline of as many equal ones as make it
    a first, a middle or a last one."""
    layers_a_unit = request.template.shape.layers // units

    @cache
    def kind_of_stage(length: int, begins: bool, ends: bool, mesh: int) -> tuple[StageCost, ...]:
        stages = 3 - begins - ends
        rank = 0 if begins else 1
        return tuple(
            _cost(request, spec, rank, samples)
            for spec in _specs(request, samples, length * layers_a_unit * stages, stages, mesh)
        )

    def costs(first: int, end: int, mesh: int) -> Iterable[StageCost]:
        return kind_of_stage(end - first, first == 0, end == units, mesh)

    return costs


def _specs(
    request: Request, samples: int, layers: int, stages: int, mesh: int
) -> Iterator[RunSpec]:
    """Ways to split a stage over a submesh that divide what they split."""
    shape = replace(request.template.shape, layers=layers)
    template = replace(request.template, shape=shape)
    for split in enumerate_splits(shape, mesh):
        if split.pipeline > 1 or samples % split.data:
            continue
        whole = replace(split, pipeline=stages)
        plain = build_unsharded_spec(template, whole, samples // split.data, template.recompute)
        for sharding in list_shardings(replace(whole, pipeline=2)):
            spec = replace(plain, parallelism=replace(whole, sharding=sharding))
            if not find_violations(spec):
                yield spec


def _cost(request: Request, spec: RunSpec, rank: int, samples: int) -> StageCost:
    seconds, after = stage_seconds(spec, request.cluster, rank)
    one = replace(spec, batch=replace(spec.batch, global_batch_size=samples))
    memory = estimate_rank_memory(one, rank)
    return StageCost(
        seconds=seconds + after * samples / request.global_batch,
        fixed_bytes=memory.total - memory.activations,
        flight_bytes=memory.activations,
        split=replace(spec.parallelism, pipeline=1),
    )


def _as_candidate(
    request: Request, stages: tuple[AlpaStage, ...], samples: int
) -> Candidate | None:
    """Stages of equal layers and one split are a strategy of Megatron's."""
    lengths = {stage.end - stage.first for stage in stages}
    if len({stage.cost.split for stage in stages}) > 1 or len(lengths) > 1:
        return None
    split = replace(stages[0].cost.split, pipeline=len(stages))
    plain = build_unsharded_spec(
        request.template, split, samples // split.data, request.template.recompute
    )
    return None if find_violations(plain) else evaluate_configuration(request, plain)
