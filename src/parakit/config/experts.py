"""How many tokens reach the experts of a rank, for the mean: a router's choices, and a limit on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from parakit.config.flags import Flags
from parakit.config.model import ModelShape

_FORCED = "--moe-router-force-load-balancing"
_CAPACITY = "--moe-expert-capacity-factor"
_PADDED = "--moe-pad-expert-input-to-capacity"
_GROUPS = "--moe-router-num-groups"
_GROUPS_TAKEN = "--moe-router-group-topk"


@dataclass(frozen=True)
class ExpertLoad:
    """The defaults are a balanced router that drops nothing: every rank gets the mean."""

    imbalance: float = 1.0
    """Tokens that the busiest rank of an expert-parallel group receives, for the mean: a statement about
    the router, which no flag gives."""
    capacity: float | None = None
    """Most that an expert takes of each rank's tokens, for the mean; further ones are dropped
    (`--moe-expert-capacity-factor`). None drops none."""
    pads_to_capacity: bool = False
    """Whether every expert gets as many, with zeros where tokens lack
    (`--moe-pad-expert-input-to-capacity`): all ranks are then alike."""
    groups: int = 1
    """Equal ones of neighbouring experts (`--moe-router-num-groups`)."""
    groups_per_token: int = 1
    """Groups that all experts of a token are in (`--moe-router-group-topk`)."""

    def send_ratio(self, shape: ModelShape, tokens: int) -> float:
        """What a rank with `tokens` tokens sends to experts, for each copy without a limit.

        Capacity counts in whole tokens of an expert (`moe_utils.py: get_capacity`).
        """
        if self.capacity is None:
            return 1.0
        copies = tokens * shape.experts_per_token
        if not self.pads_to_capacity:
            return min(1.0, self.capacity)
        return ceil(copies / shape.experts * self.capacity) * shape.experts / copies

    def receive_ratio(self, shape: ModelShape, tokens: int, ranks: int) -> float:
        """What the busiest of `ranks` ranks receives, for the mean of a router without limit."""
        if self.pads_to_capacity:
            return self.send_ratio(shape, tokens)
        received = min(self.imbalance, max_imbalance(shape, ranks))
        return received if self.capacity is None else min(received, self.capacity)

    def expected_destinations(self, shape: ModelShape, places: int) -> float:
        """How many of `places` ranks or nodes, with equal shares of the experts, have one of a token's:
        its choices fall on each place of its groups, or on each of its groups, alike."""
        chosen, taken = shape.experts_per_token, self.groups_per_token
        if places >= self.groups:
            return _filled(chosen, taken * places / self.groups)
        return _filled(_filled(chosen, taken), places)


def _filled(balls: float, boxes: float) -> float:
    """Boxes that hold something when each ball falls into one of them at random."""
    return float(boxes * (1 - (1 - 1 / boxes) ** balls))


BALANCED = ExpertLoad()


def max_imbalance(shape: ModelShape, ranks: int) -> float:
    """The most that one of `ranks` ranks can receive, for the mean: all tokens go to
    each of its experts, or with all their copies to some of them."""
    if not shape.experts:
        return 1.0
    own = shape.experts // ranks
    return ranks * min(shape.experts_per_token, own) / shape.experts_per_token


def parse_expert_load(flags: Flags, imbalance: float = 1.0) -> ExpertLoad:
    """What the flags and a stated imbalance make of it; a capacity below 0 is none.

    Raises:
        ValueError: The flags balance the load and an imbalance is stated, the capacity is none, or a
            token takes more groups of experts than there are.
    """
    if imbalance != 1 and flags.has(_FORCED):
        raise ValueError(f"IMBALANCE={imbalance:g} contradicts {_FORCED}; leave one of them out.")
    load = ExpertLoad(imbalance)
    if (taken := flags.integer(_GROUPS_TAKEN)) != 0:
        groups = flags.integer(_GROUPS)
        if not 0 < taken <= groups:
            raise ValueError(
                f"{_GROUPS_TAKEN} {taken} needs a {_GROUPS} of as many or more; it is {groups}."
            )
        load = replace(load, groups=groups, groups_per_token=taken)
    capacity = flags.number(_CAPACITY, -1.0)
    if capacity < 0:
        return load
    if not 0 < capacity < inf:
        raise ValueError(f"{_CAPACITY} {capacity:g} is no share of the mean; use a number above 0.")
    return replace(load, capacity=capacity, pads_to_capacity=flags.has(_PADDED))
