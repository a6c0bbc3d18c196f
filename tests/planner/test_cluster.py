from dataclasses import dataclass

import pytest

from parakit.config.groups import Group
from parakit.config.strategy import Parallelism
from parakit.costs.shared_link import link_seconds, seconds_at_other_rate


@dataclass(frozen=True)
class Sent:
    group: str
    wire_bytes: int


def test_all_bytes_cross_the_link_between_two_ranks() -> None:
    calls = (Sent("dp_cp", 1000), Sent("world", 250))
    assert link_seconds(calls, Parallelism(data=2), 1e4) == pytest.approx(1.0)


def test_tensor_parallel_groups_on_one_side_do_not_use_the_link() -> None:
    calls = (Sent("tp", 10**6), Sent("dp_cp", 1000))
    # Two data-parallel rings, one per tensor-parallel rank, cross and share the link.
    assert link_seconds(calls, Parallelism(data=2, tensor=2), 1e4) == pytest.approx(1.6)


@pytest.mark.parametrize(
    ("parallelism", "group", "crossing"),
    [
        (Parallelism(data=4), Group.DATA_CONTEXT, 1),
        (Parallelism(tensor=2, data=2), Group.TENSOR, 0),
        (Parallelism(tensor=2, data=2), Group.DATA_CONTEXT, 2),
        (Parallelism(tensor=4), Group.TENSOR, 1),
        (Parallelism(tensor=2, pipeline=2), Group.PIPELINE, 2),
        (Parallelism(data=2, pipeline=2), Group.DATA_CONTEXT, 0),
    ],
)
def test_groups_with_ranks_on_both_sides(
    parallelism: Parallelism, group: Group, crossing: int
) -> None:
    assert link_seconds([Sent(group, 1)], parallelism, 8.0) == crossing


def test_only_the_links_part_of_an_iteration_changes_with_its_rate() -> None:
    assert seconds_at_other_rate(0.5, 0.2, 1e9, 2e9) == pytest.approx(0.4)
    assert seconds_at_other_rate(0.5, 0.2, 1e9, 1e9) == 0.5
