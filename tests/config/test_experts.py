"""Number of tokens that the busiest rank of experts gets, with and without a capacity."""

from dataclasses import replace

import pytest

from parakit.config.experts import BALANCED, ExpertLoad, max_imbalance, parse_expert_load
from parakit.config.flags import Flags
from parakit.config.model import load_model

SHAPE = replace(load_model("moe-tiny").shape, experts=8, experts_per_token=2)
PADDED = ExpertLoad(capacity=1.25, pads_to_capacity=True)


def test_expert_load_is_balanced_by_default() -> None:
    assert BALANCED.send_ratio(SHAPE, 64) == BALANCED.receive_ratio(SHAPE, 64, 8) == 1.0


@pytest.mark.parametrize(("ranks", "limit"), [(1, 1.0), (2, 2.0), (4, 4.0), (8, 4.0)])
def test_received_tokens_are_at_most_all_tokens_times_experts_per_rank(
    ranks: int, limit: float
) -> None:
    assert max_imbalance(SHAPE, ranks) == limit
    assert ExpertLoad(100.0).receive_ratio(SHAPE, 64, ranks) == limit


def test_tokens_beyond_the_capacity_of_the_busiest_rank_are_dropped() -> None:
    limited = ExpertLoad(2.0, capacity=1.5)
    assert limited.receive_ratio(SHAPE, 64, 8) == 1.5
    assert limited.send_ratio(SHAPE, 64) == 1.0
    assert ExpertLoad(capacity=1.5).receive_ratio(SHAPE, 64, 8) == 1.0
    assert ExpertLoad(capacity=0.5).receive_ratio(SHAPE, 64, 8) == 0.5


def test_padded_experts_get_equal_integer_tokens_for_any_imbalance() -> None:
    # 124 copies over 8 experts with a capacity of 1.25 are 19.4, so each expert gets 20 tokens.
    assert PADDED.send_ratio(SHAPE, 62) == 160 / 124
    assert replace(PADDED, imbalance=2.0).receive_ratio(SHAPE, 62, 8) == 160 / 124


def test_capacity_is_read_from_flags_and_negative_means_no_limit() -> None:
    flags = ["--moe-expert-capacity-factor", "1.25", "--moe-pad-expert-input-to-capacity"]
    assert parse_expert_load(Flags(flags)) == PADDED
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
        (4, 2, 8, 4 * (1 - 0.75**2)),  # Two of four groups span four of eight ranks.
        (4, 2, 4, 1.5),  # Each of the two groups is on one of four ranks.
        (
            4,
            2,
            2,
            2 * (1 - 0.5**1.5),
        ),  # A token reaches 1.5 groups on average.
        (4, 2, 1, 1.0),
    ],
)
def test_token_is_sent_only_to_ranks_of_its_expert_groups(
    groups: int, taken: int, places: int, reached: float
) -> None:
    load = ExpertLoad(groups=groups, groups_per_token=taken)
    assert load.expected_destinations(SHAPE, places) == pytest.approx(reached)


def test_expert_groups_are_read_from_flags_and_too_many_are_refused() -> None:
    flags = ["--moe-router-num-groups", "4", "--moe-router-group-topk"]
    assert parse_expert_load(Flags([*flags, "2"])) == ExpertLoad(groups=4, groups_per_token=2)
    assert parse_expert_load(Flags(flags[:2])) == BALANCED
    with pytest.raises(ValueError, match="is 5 and --moe-router-num-groups is 4; use 1 or more"):
        parse_expert_load(Flags([*flags, "5"]))
