"""Which of several strategies is taken where their predicted times differ by less than is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parakit.config.run import RunSpec
from parakit.planner.verdict import memory_error

TIE_RATIO = 1.03
"""Times of the fastest within which strategies are tied: of published pairs that differ in strategy
alone and are predicted as near, which one is faster is said rightly of 56%, and of 69% at 3 to 5%."""


def are_tied(one: float, other: float) -> bool:
    """Whether two times differ by less than is known."""
    faster, slower = sorted((one, other))
    return slower <= TIE_RATIO * faster


def choose_preferred(seconds: Mapping[RunSpec, float], held: Callable[[RunSpec], int]) -> RunSpec:
    """Of runs tied with the fastest the one with the least memory; where that too differs by less than
    its error, with the fewest dimensions of parallelism.

    Args:
        seconds: Predicted, of each run.
        held: Bytes of a run's fullest rank; asked of those that are tied.
    """
    fastest = min(seconds.values())
    tied = {spec: held(spec) for spec, time in seconds.items() if are_tied(time, fastest)}
    least = min(tied.values())
    light = [spec for spec, size in tied.items() if size <= least * (1 + memory_error(spec))]
    return min(light, key=lambda spec: (*_dimensions(spec), seconds[spec], tied[spec]))


def _dimensions(spec: RunSpec) -> tuple[int, int]:
    """Dimensions of parallelism, a sharding that wraps modules being one; those that split the model or
    its sequence."""
    split = spec.parallelism
    degrees = (split.tensor, split.context, split.pipeline, split.expert)
    splits = sum(degree > 1 for degree in degrees) + split.sharding.wraps_modules
    return splits + (split.data > 1), splits
