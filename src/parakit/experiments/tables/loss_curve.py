"""What `FUSED=` does to the loss curve, beside what another seed does to it.

Three runs: Megatron alone, Megatron alone from another seed, the patches from the first seed. Patches
round elsewhere, and what rounds elsewhere diverges in the end, so a curve is not compared with a
tolerance but with the scatter that is there anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.experiments.engine import Output, Study
from parakit.formatting.terminal import say

WINDOW = 25
"""Iterations. A single loss is its batch's more than its weights': of seeds that read different batches
the mean over a window leaves what would move a curve."""


def mean_curve_distance(
    one: Mapping[int, float], other: Mapping[int, float], window: int = WINDOW
) -> float:
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
    ends = range(window, len(both) + 1)
    means = (
        [statistics.fmean(curve[i] for i in both[end - window : end]) for end in ends]
        for curve in (one, other)
    )
    return statistics.fmean(abs(left - right) for left, right in zip(*means, strict=True))


def compare_curves(study: Study) -> int:
    """One sentence of both distances; 0 if the patches move the curve no further than a seed does.

    Raises:
        LaunchError: A run did not end well, or the curves share fewer iterations than a window.
    """
    study.refuse_failed()
    alone, seed, patches = (row.losses for row in study.rows)
    one, other, patched = (result.launch for result in study.results)
    patched_by, seeds_by = mean_curve_distance(alone, patches), mean_curve_distance(alone, seed)
    said = (
        f"Losses over {WINDOW} iterations, mean distance to Megatron alone with SEED={one.spec.seed}: "
        f"{patched_by:.2g} with FUSED={patched.environment[variables.FUSED]}, "
        f"{seeds_by:.2g} with SEED={other.spec.seed}: "
    )
    within = patched_by <= seeds_by
    end = "within the scatter of seeds." if within else "the patches move the curve."
    say(study.console, said + end)
    return int(not within)


OUTPUT = Output(compare_curves)
