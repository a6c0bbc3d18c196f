"""The choice among strategies whose predicted times are too close to tell which one is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parakit.config.run import RunSpec
from parakit.planner.verdict import memory_error

TIE_RATIO = 1.03
"""Largest ratio of two predicted times that counts as a tie.

Of published pairs that differ in strategy alone and are predicted within this ratio, the faster one is predicted
rightly for 56%; for pairs at 3 to 5% it is 69%.
"""


def are_tied(one_time: float, other_time: float) -> bool:
    """Return True if two predicted times are too close to tell which one is shorter."""
    faster, slower = sorted((one_time, other_time))
    return slower <= TIE_RATIO * faster


def choose_preferred(
    seconds: Mapping[RunSpec, float], memory_of: Callable[[RunSpec], int]
) -> RunSpec:
    """Return the preferred run among those that are tied with the fastest.

    The preferred run has the least memory. If the memory of several runs differs by less than the error of predicted
    memory, the run with the fewest dimensions of parallelism is preferred among them.

    Args:
        seconds: Predicted seconds per run.
        memory_of: Function from a run to the bytes of its peak rank. It is called only for tied runs.
    """
    fastest = min(seconds.values())
    bytes_of_tied: dict[RunSpec, int] = {}
    for spec, time in seconds.items():
        if are_tied(time, fastest):
            bytes_of_tied[spec] = memory_of(spec)
    least_bytes = min(bytes_of_tied.values())
    light_specs = [
        spec
        for spec, size in bytes_of_tied.items()
        if size <= least_bytes * (1 + memory_error(spec))
    ]

    def rank_preference(spec: RunSpec) -> tuple[float, ...]:
        """Return a sort key: the number of dimensions of parallelism, then time, then memory."""
        return *_count_dimensions(spec), seconds[spec], bytes_of_tied[spec]

    return min(light_specs, key=rank_preference)


def _count_dimensions(spec: RunSpec) -> tuple[int, int]:
    """Return two numbers: all dimensions of parallelism, and the dimensions that split the model or its sequence.

    ZeRO-2, ZeRO-3 and FSDP2 count as a dimension that splits the model.
    """
    split = spec.parallelism
    degrees = (split.tensor, split.context, split.pipeline, split.expert)
    num_splits = sum(degree > 1 for degree in degrees) + split.sharding.wraps_modules
    return num_splits + (split.data > 1), num_splits
