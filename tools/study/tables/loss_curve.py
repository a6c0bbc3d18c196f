"""What `FUSED=` does to the loss curve, beside what another seed does to it.

Three runs: Megatron alone, Megatron alone from another seed, the patches from the first seed. Patches
round elsewhere, and what rounds elsewhere diverges in the end, so a curve is not compared with a
tolerance but with the scatter that is there anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.launch.compose import Launch
from tools.spec import variables
from tools.spec.errors import LaunchError

WINDOW = 25
"""Iterations. A single loss is its batch's more than its weights': of seeds that read different batches
the mean over a window leaves what would move a curve."""


@dataclass(frozen=True)
class Distances:
    """Mean absolute differences to the unpatched curve, each point a mean over `WINDOW` iterations."""

    patched: float
    seeds: float

    @property
    def within(self) -> bool:
        """Whether the patches move the curve no further than a seed does."""
        return self.patched <= self.seeds


def distances(curves: Sequence[Mapping[int, float]]) -> Distances:
    """Of the three curves: alone, of another seed, patched.

    Raises:
        LaunchError: They share fewer iterations than a window.
    """
    alone, seed, patched = curves
    return Distances(distance(alone, patched), distance(alone, seed))


def distance(one: Mapping[int, float], other: Mapping[int, float], window: int = WINDOW) -> float:
    """Mean absolute difference of the moving means of two curves, losses by iteration.

    Only iterations that both have count: fp16 leaves some out while its loss scale falls.

    Raises:
        LaunchError: They share fewer than a window.
    """
    both = sorted(set(one) & set(other))
    if len(both) < window:
        raise LaunchError(
            f"The curves share {len(both)} iterations and a window has {window}; set ITERS= higher."
        )
    pairs = zip(*(_moving([curve[i] for i in both], window) for curve in (one, other)), strict=True)
    return statistics.fmean(abs(left - right) for left, right in pairs)


def sentence(found: Distances, launches: Sequence[Launch]) -> str:
    """Both distances and what follows."""
    one, other, patched = launches
    return (
        f"Losses over {WINDOW} iterations, mean distance to Megatron alone with SEED={one.spec.seed}: "
        f"{found.patched:.2g} with FUSED={patched.environment[variables.FUSED]}, "
        f"{found.seeds:.2g} with SEED={other.spec.seed}: "
        + ("within the scatter of seeds." if found.within else "the patches move the curve.")
    )


def _moving(losses: Sequence[float], window: int) -> list[float]:
    return [statistics.fmean(losses[end - window : end]) for end in range(window, len(losses) + 1)]
