"""Alpa's dynamic program against brute force, and its choice on the planner's own costs."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import load_model
from parakit.config.run import spec_from_model
from parakit.config.strategy import Batch, Parallelism
from parakit.planner.alpa import (
    StageCost,
    compare_with_alpa,
    find_best_stages,
    list_submeshes,
    run_alpa,
)
from parakit.planner.search import Request, search_configurations
from parakit.planner.time.cluster import Cluster

ROOMY = 1000


def cost(seconds: float, fixed: int = 0, flight: int = 0) -> StageCost:
    return StageCost(seconds, fixed, flight, Parallelism())


def every_way(units: int, meshes: list[int], devices: int) -> Iterator[list[tuple[int, int, int]]]:
    for stages in range(1, units + 1):
        for cuts in combinations(range(1, units), stages - 1):
            ends = [*cuts, units]
            firsts = [0, *cuts]
            for sizes in product(meshes, repeat=stages):
                if sum(sizes) == devices:
                    yield list(zip(firsts, ends, sizes, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_dynamic_program_finds_the_same_cost_as_exhaustive_search(seed: int) -> None:
    draw = random.Random(seed)
    units, meshes, devices, count = 4, [1, 2, 4], 4, draw.choice([1, 2, 8])
    ways = {
        (first, end, mesh): [
            cost(draw.randint(1, 9) * (end - first) / mesh, draw.randint(0, 4), draw.randint(0, 3))
            for _ in range(2)
        ]
        for first in range(units)
        for end in range(first + 1, units + 1)
        for mesh in meshes
    }
    capacity = draw.choice([6, 10, ROOMY])

    def total(stages: list[tuple[int, int, int]]) -> float:
        seconds = []
        for later, key in enumerate(reversed(stages)):
            held = min(later + 1, count)
            fits = [w for w in ways[key] if w.fixed_bytes + held * w.flight_bytes <= capacity]
            seconds.append(min((way.seconds for way in fits), default=float("inf")))
        return sum(seconds) + (count - 1) * max(seconds)

    tried = min(map(total, every_way(units, meshes, devices)))
    best = find_best_stages(units, meshes, devices, count, capacity, lambda *key: ways[key])
    assert (best[0] if best else float("inf")) == pytest.approx(tried)


def test_a_stage_of_more_work_gets_more_devices() -> None:
    # Units of 1, 1 and 6 seconds on one device; a submesh divides them: 1 + 1 + 6/2, slowest 3.
    work = [1.0, 1.0, 6.0]
    stages = find_best_stages(
        3, [1, 2], 4, 10, ROOMY, lambda first, end, mesh: [cost(sum(work[first:end]) / mesh)]
    )
    assert stages is not None
    assert [(s.first, s.end, s.devices) for s in stages[1]] == [(0, 2, 2), (2, 3, 2)]
    assert stages[0] == 1 + 3 + 9 * 3


def test_submeshes_are_powers_of_two_in_a_node_or_full_nodes() -> None:
    assert list_submeshes(4, 4) == [1, 2, 4]
    assert list_submeshes(24, 8) == [1, 2, 4, 8, 16, 24]


def request(devices: int) -> Request:
    model = load_model("gpt2-tiny")
    h100, link = device_by_key("h100"), link_by_key("nvlink4")
    cluster = Cluster(h100, devices, devices, link, link)
    template = spec_from_model(model, Parallelism(), Batch(1, 8))
    return Request(model, cluster, 8, template)


def test_alpa_plan_that_megatron_can_run_is_never_faster_than_the_searched_winner() -> None:
    asked = request(2)
    result, plan = run_alpa(asked), search_configurations(asked)
    winner = plan.winner
    assert result is not None
    assert winner is not None
    assert result.candidate is not None
    # The exhaustive search minimises the same costs. The slack is for their different order of summation.
    assert result.total >= winner.seconds.total * (1 - 1e-12)
    assert compare_with_alpa(plan).startswith("Alpa's dynamic program chooses")


def test_a_large_cluster_is_refused() -> None:
    asked = request(2)
    larger = replace(asked, cluster=replace(asked.cluster, devices=64))
    with pytest.raises(ValueError, match="up to 16 devices, and here are 64; leave ALPA= out"):
        run_alpa(larger)
