"""Compare what `FUSED=` does to the loss curve with what another seed does to it.

There are three runs: Megatron, Megatron with another seed, and the patches with the first seed. The patches round
differently, and runs that round differently diverge in the end. The curve with patches is therefore not compared
with a tolerance, but with the scatter between seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.experiments.engine import Output, Study
from parakit.formatting.terminal import say

WINDOW = 25
"""Iterations of the moving mean.

A single loss depends on its batch more than on the weights, and seeds read different batches. The mean over a
window leaves the differences that would move a curve.
"""


def mean_curve_distance(
    curve: Mapping[int, float], other: Mapping[int, float], window: int = WINDOW
) -> float:
    """Return the mean absolute difference of the moving means of two curves, which are losses by iteration.

    Only iterations that both curves have count: fp16 skips some while its loss scale falls.

    Raises:
        LaunchError: The curves share fewer iterations than a window.
    """
    shared = sorted(set(curve) & set(other))
    if len(shared) < window:
        raise LaunchError(
            f"The curves share {len(shared)} iterations and a window has {window}; set ITERS= higher."
        )
    differences = []
    for end in range(window, len(shared) + 1):
        iterations = shared[end - window : end]
        mean = statistics.fmean(curve[iteration] for iteration in iterations)
        other_mean = statistics.fmean(other[iteration] for iteration in iterations)
        differences.append(abs(mean - other_mean))
    return statistics.fmean(differences)


def compare_curves(study: Study) -> int:
    """Print both distances; return 0 if the patches move the curve no further than another seed does.

    Raises:
        LaunchError: A run did not end well, or the curves share fewer iterations than a window.
    """
    study.refuse_failed()
    curve, seed_curve, patched_curve = (row.losses for row in study.rows)
    launch, seed_launch, patched_launch = (result.launch for result in study.results)
    patch_distance = mean_curve_distance(curve, patched_curve)
    seed_distance = mean_curve_distance(curve, seed_curve)
    distances = (
        f"Losses over {WINDOW} iterations, mean distance to Megatron alone with "
        f"SEED={launch.spec.seed}: "
        f"{patch_distance:.2g} with FUSED={patched_launch.environment[variables.FUSED]}, "
        f"{seed_distance:.2g} with SEED={seed_launch.spec.seed}: "
    )
    is_within = patch_distance <= seed_distance
    verdict = "within the scatter of seeds." if is_within else "the patches move the curve."
    say(study.console, distances + verdict)
    return int(not is_within)


OUTPUT = Output(compare_curves)
