"""How many tokens the experts of a rank receive, relative to a balanced router.

The input is Megatron's router flags and a stated imbalance; the result is an `ExpertLoad`. Its
ratios multiply the number of token copies (tokens × experts per token) of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from parakit.config.flags import Flags
from parakit.config.model import ModelShape

_FORCED = "--moe-router-force-load-balancing"
_CAPACITY = "--moe-expert-capacity-factor"
_PADDED = "--moe-pad-expert-input-to-capacity"
_GROUPS = "--moe-router-num-groups"
_GROUPS_PER_TOKEN = "--moe-router-group-topk"


@dataclass(frozen=True)
class ExpertLoad:
    """Distribution of tokens over expert-parallel ranks by the router.

    The defaults mean a balanced router that drops no tokens.
    """

    imbalance: float = 1.0
    """Tokens of the busiest rank of an expert-parallel group, divided by the mean over its ranks.
    No flag states the imbalance; the user does (`IMBALANCE=`).
    """
    capacity: float | None = None
    """Maximum tokens that one expert takes from one rank, divided by the mean per expert; further
    tokens are dropped (`--moe-expert-capacity-factor`). None drops no token.
    """
    pads_to_capacity: bool = False
    """True if each expert's input is filled with zeros up to the capacity
    (`--moe-pad-expert-input-to-capacity`). All ranks then receive equally many tokens.
    """
    groups: int = 1
    """Number of equal groups of neighbouring experts (`--moe-router-num-groups`)."""
    groups_per_token: int = 1
    """Number of groups that the experts of one token may lie in (`--moe-router-group-topk`)."""

    def send_ratio(self, shape: ModelShape, tokens: int) -> float:
        """Return the fraction of token copies that a rank with `tokens` tokens sends under the
        router's capacity.

        A router without capacity sends one copy per token and chosen expert, and gives 1. If inputs are padded
        to the capacity, the capacity is rounded up to whole tokens per expert (`moe_utils.py: get_capacity`).
        The result may then exceed 1.
        """
        if self.capacity is None:
            return 1.0
        copies = tokens * shape.experts_per_token
        if not self.pads_to_capacity:
            return min(1.0, self.capacity)
        return ceil(copies / shape.experts * self.capacity) * shape.experts / copies

    def receive_ratio(self, shape: ModelShape, tokens: int, ranks: int) -> float:
        """Return the load of the busiest of `ranks` ranks, where 1 is the load of a balanced router.

        The load is the number of token copies that the rank receives. A balanced router without capacity sends
        equally many to all ranks. `tokens` is the number of tokens of one rank.
        """
        if self.pads_to_capacity:
            return self.send_ratio(shape, tokens)
        received = min(self.imbalance, max_imbalance(shape, ranks))
        return received if self.capacity is None else min(received, self.capacity)

    def expected_destinations(self, shape: ModelShape, destinations: int) -> float:
        """Return the mean number of destinations to which one token is sent.

        The experts of the token are assumed to be random. If the router has groups of experts, the groups are
        random too.

        Args:
            destinations: Number of ranks or nodes. All of them hold the same number of experts.
        """
        if destinations >= self.groups:
            # Each group is spread over several destinations. The token reaches only those of its
            # own groups.
            reachable = self.groups_per_token * destinations / self.groups
            return _mean_filled_boxes(shape.experts_per_token, reachable)
        # Each destination holds several groups, so it matters how many groups the token reaches.
        groups_reached = _mean_filled_boxes(shape.experts_per_token, self.groups_per_token)
        return _mean_filled_boxes(groups_reached, destinations)


def _mean_filled_boxes(balls: float, boxes: float) -> float:
    """Return the mean number of boxes that hold a ball if each ball falls into a random box."""
    return float(boxes * (1 - (1 - 1 / boxes) ** balls))


BALANCED = ExpertLoad()
"""The load of a balanced router without a capacity."""


def max_imbalance(shape: ModelShape, ranks: int) -> float:
    """Return the largest possible imbalance over `ranks` expert-parallel ranks.

    The imbalance is the load of the busiest rank divided by the mean load. It is largest if all tokens choose
    experts of the same rank. For a model without experts the result is 1.
    """
    if not shape.experts:
        return 1.0
    experts_per_rank = shape.experts // ranks
    return ranks * min(shape.experts_per_token, experts_per_rank) / shape.experts_per_token


def parse_expert_load(flags: Flags, imbalance: float = 1.0) -> ExpertLoad:
    """Return the router's load on expert-parallel ranks, from Megatron's flags and a stated imbalance.

    A capacity factor below 0 means no capacity, as in Megatron.

    Raises:
        ValueError: The flags force a balanced load although an imbalance is stated. Or the capacity factor is 0 or
            infinite, or a token takes more groups of experts than there are.
    """
    if imbalance != 1 and flags.has(_FORCED):
        raise ValueError(f"IMBALANCE={imbalance:g} contradicts {_FORCED}; leave one of them out.")
    load = ExpertLoad(imbalance)
    groups_per_token = flags.integer(_GROUPS_PER_TOKEN)
    if groups_per_token != 0:
        groups = flags.integer(_GROUPS)
        if not 0 < groups_per_token <= groups:
            raise ValueError(
                f"{_GROUPS_PER_TOKEN} is {groups_per_token} and {_GROUPS} is {groups}; use 1 or more "
                "groups per token, and at most as many as there are groups."
            )
        load = replace(load, groups=groups, groups_per_token=groups_per_token)
    capacity = flags.number(_CAPACITY, -1.0)
    if capacity < 0:
        return load
    if not 0 < capacity < inf:
        raise ValueError(
            f"{_CAPACITY} {capacity:g} is not a finite number above 0; use a number such as 1.25."
        )
    return replace(load, capacity=capacity, pads_to_capacity=flags.has(_PADDED))
