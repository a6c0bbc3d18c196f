"""How many tokens the busiest rank of experts gets, with and without a limit."""

from dataclasses import replace

import pytest

from parakit.config.experts import BALANCED, ExpertLoad, max_imbalance, parse_expert_load
from parakit.config.flags import Flags
from parakit.config.model import load_model

SHAPE = replace(load_model("moe-tiny").shape, experts=8, experts_per_token=2)
PADDED = ExpertLoad(capacity=1.25, pads_to_capacity=True)


def test_without_a_statement_every_rank_gets_the_mean() -> None:
    assert BALANCED.send_ratio(SHAPE, 64) == BALANCED.receive_ratio(SHAPE, 64, 8) == 1.0


@pytest.mark.parametrize(("ranks", "most"), [(1, 1.0), (2, 2.0), (4, 4.0), (8, 4.0)])
def test_a_rank_receives_at_most_every_token_once_for_each_expert_it_has(
    ranks: int, most: float
) -> None:
    assert max_imbalance(SHAPE, ranks) == most
    assert ExpertLoad(100.0).receive_ratio(SHAPE, 64, ranks) == most


def test_capacity_drops_what_the_busiest_gets_beyond_it() -> None:
    limited = ExpertLoad(2.0, capacity=1.5)
    assert limited.receive_ratio(SHAPE, 64, 8) == 1.5
    assert limited.send_ratio(SHAPE, 64) == 1.0
    assert ExpertLoad(capacity=1.5).receive_ratio(SHAPE, 64, 8) == 1.0
    assert ExpertLoad(capacity=0.5).receive_ratio(SHAPE, 64, 8) == 0.5


def test_padded_experts_get_whole_tokens_alike_whatever_the_router_does() -> None:
    # 62 x 2 / 8 x 1.25 = 19.4: 20 tokens for each of 8 experts, of 124 copies.
    assert PADDED.send_ratio(SHAPE, 62) == 160 / 124
    assert replace(PADDED, imbalance=2.0).receive_ratio(SHAPE, 62, 8) == 160 / 124


def test_flags_say_the_limit_and_below_zero_is_none() -> None:
    words = ["--moe-expert-capacity-factor", "1.25", "--moe-pad-expert-input-to-capacity"]
    assert parse_expert_load(Flags(words)) == PADDED
    assert parse_expert_load(Flags(["--moe-expert-capacity-factor", "-1"]), 1.3) == ExpertLoad(1.3)
    with pytest.raises(ValueError, match="factor nan is not a finite number above 0; use"):
        parse_expert_load(Flags(["--moe-expert-capacity-factor", "nan"]))
    with pytest.raises(ValueError, match="contradicts --moe-router-force-load"):
        parse_expert_load(Flags(["--moe-router-force-load-balancing"]), 1.3)


@pytest.mark.parametrize(
    ("groups", "taken", "places", "reached"),
    [
        (1, 1, 4, 4 * (1 - 0.75**2)),  # 1.75
        (8, 1, 8, 1.0),
        (4, 2, 8, 4 * (1 - 0.75**2)),  # Two groups lie on four of eight ranks,
        (4, 2, 4, 1.5),  # each on one of four,
        (4, 2, 2, 2 * (1 - 0.5**1.5)),  # and 1.5 of them on some of two.
        (4, 2, 1, 1.0),
    ],
)
def test_a_token_goes_to_the_places_of_its_groups(
    groups: int, taken: int, places: int, reached: float
) -> None:
    load = ExpertLoad(groups=groups, groups_per_token=taken)
    assert load.expected_destinations(SHAPE, places) == pytest.approx(reached)


def test_groups_of_experts_are_read_from_flags_and_more_than_there_are_is_refused() -> None:
    words = ["--moe-router-num-groups", "4", "--moe-router-group-topk"]
    assert parse_expert_load(Flags([*words, "2"])) == ExpertLoad(groups=4, groups_per_token=2)
    assert parse_expert_load(Flags(words[:2])) == BALANCED
    with pytest.raises(ValueError, match="is 5 and --moe-router-num-groups is 4; use 1 or more"):
        parse_expert_load(Flags([*words, "5"]))
