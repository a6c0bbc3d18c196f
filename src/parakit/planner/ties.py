"""The choice among strategies whose predicted times are too close to tell which one is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

from parakit.config.run import RunSpec
from parakit.config.strategy import Parallelism
from parakit.costs import PredictedMemory
from parakit.planner.time.cluster import Cluster
from parakit.planner.verdict import Fit, judge_fit_on_cluster

TIE_RATIO = 1.03
"""Largest ratio of two predicted times that counts as a tie.

Of published pairs that differ in strategy alone and are predicted within this ratio, the faster one is predicted
rightly for 56%; for pairs at 3 to 5% it is 69%.
"""


ROOMY_FRACTION = 0.6
"""Fraction of a device's memory up to which a tied strategy leaves room for a longer sequence or a larger batch.

In published groups of strategies, the choice loses 3.8% of the time with this fraction, and 3.8 to 4.6% with other
fractions from 0.5 to 0.8.
"""


class Usualness(IntEnum):
    """Kinds of strategies in the order in which practitioners try them.

    A strategy that combines several kinds counts as the last of them. Experts over the ranks of data parallelism (EP)
    do not count, because a model with experts has no simpler way to split them.
    """

    DATA = 0
    """Data parallelism alone, with a full optimizer on each rank."""
    SHARDED_OPTIMIZER = 1
    """ZeRO-1."""
    TENSOR = 2
    """Tensor and sequence parallelism inside a node."""
    PIPELINE = 3
    CONTEXT = 4
    UNUSUAL = 5
    """Tensor parallelism without sequence parallelism or across nodes, and a split model whose optimizer is not
    sharded. A single replica cannot shard the optimizer."""
    SHARDED_WEIGHTS = 6
    """ZeRO-2 and ZeRO-3."""


def are_tied(one_time: float, other_time: float) -> bool:
    """Return True if two predicted times are too close to tell which one is shorter."""
    faster, slower = sorted((one_time, other_time))
    return slower <= TIE_RATIO * faster


class Preference(NamedTuple):
    """Sort key of a tied run, with its fields in the order in which they decide. The smallest is preferred."""

    is_close: bool
    """True if the run is close to the device's memory, so that only a try can tell whether it fits."""
    is_unusual: bool
    lacks_room: bool
    """True if the run holds more than `ROOMY_FRACTION` of the device."""
    usualness: Usualness
    num_kinds: int
    """Number of kinds of parallelism that split the model or its sequence."""
    seconds: float


def rank_preferences(
    seconds: Mapping[RunSpec, float],
    memory_of: Callable[[RunSpec], PredictedMemory],
    cluster: Cluster,
) -> dict[RunSpec, Preference]:
    """Return the preference of each run that is tied with the fastest.

    Args:
        seconds: Predicted seconds per run.
        memory_of: Function from a run to the memory of its peak rank. It is called only for tied runs.
        cluster: The devices and their nodes.
    """
    fastest = min(seconds.values())
    splits = [spec.parallelism for spec in seconds]
    # A trainer without sequence parallelism or without ZeRO offers no more usual strategies.
    has_sequence = any(split.sequence_parallel for split in splits)
    has_sharding = any(split.sharding for split in splits)
    roomy_bytes = ROOMY_FRACTION * cluster.device.memory_bytes
    preferences = {}
    for spec, time in seconds.items():
        if not are_tied(time, fastest):
            continue
        memory, split = memory_of(spec), spec.parallelism
        usualness = classify_usualness(split, cluster.per_node)
        is_unusual = usualness is Usualness.UNUSUAL
        if is_unusual and not _has_usual_variant(split, has_sequence, has_sharding):
            usualness = _classify_last_kind(split)
        preferences[spec] = Preference(
            is_close=judge_fit_on_cluster(spec, memory, cluster) is not Fit.FITS,
            is_unusual=usualness >= Usualness.UNUSUAL,
            lacks_room=memory.total > roomy_bytes,
            usualness=usualness,
            num_kinds=_count_kinds(split),
            seconds=time,
        )
    return preferences


def choose_preferred(
    seconds: Mapping[RunSpec, float],
    memory_of: Callable[[RunSpec], PredictedMemory],
    cluster: Cluster,
) -> RunSpec:
    """Return the run with the smallest `Preference` among those that are tied with the fastest.

    The arguments are those of `rank_preferences`.
    """
    preferences = rank_preferences(seconds, memory_of, cluster)
    return min(preferences, key=preferences.__getitem__)


def find_deciding_field(preferred: Preference, other: Preference | None) -> str:
    """Return the name of the `Preference` field that puts the preferred run before another run.

    Args:
        preferred: Preference of the preferred run.
        other: Preference of the other run. None for a run that is tied with the preferred run, but not with the fastest
            run.
    """
    if other is None:
        return "seconds"
    fields = zip(Preference._fields, preferred, other, strict=True)
    return next((name for name, value, other_value in fields if value != other_value), "seconds")


def classify_usualness(split: Parallelism, ranks_per_node: int) -> Usualness:
    """Return how usual a strategy is on nodes with `ranks_per_node` devices."""
    if split.sharding.wraps_modules:
        return Usualness.SHARDED_WEIGHTS
    spans_nodes = split.tensor > ranks_per_node
    if spans_nodes or _lacks_sequence(split) or _lacks_sharding(split):
        return Usualness.UNUSUAL
    return _classify_last_kind(split)


def _has_usual_variant(split: Parallelism, has_sequence: bool, has_sharding: bool) -> bool:
    """Return True if an unusual strategy would be usual with sequence parallelism or ZeRO-1, which the trainer has.

    The result is also True if the strategy lacks neither of them.
    """
    lacks_sequence, lacks_sharding = _lacks_sequence(split), _lacks_sharding(split)
    if not lacks_sequence and not lacks_sharding:
        return True
    return (lacks_sequence and has_sequence) or (lacks_sharding and has_sharding)


def _lacks_sequence(split: Parallelism) -> bool:
    """Return True for tensor parallelism without sequence parallelism."""
    return split.tensor > 1 and not split.sequence_parallel


def _lacks_sharding(split: Parallelism) -> bool:
    """Return True for a split model whose optimizer is not sharded."""
    splits_model = split.tensor * split.context * split.pipeline > 1
    return splits_model and not split.sharding


def _classify_last_kind(split: Parallelism) -> Usualness:
    """Return the last kind of parallelism of a strategy without sharded weights."""
    if split.context > 1:
        return Usualness.CONTEXT
    if split.pipeline > 1:
        return Usualness.PIPELINE
    if split.tensor > 1:
        return Usualness.TENSOR
    return Usualness.SHARDED_OPTIMIZER if split.sharding else Usualness.DATA


def _count_kinds(split: Parallelism) -> int:
    """Return the number of kinds of parallelism that split the model or its sequence."""
    return sum(degree > 1 for degree in (split.tensor, split.context, split.pipeline, split.expert))
