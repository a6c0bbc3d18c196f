"""The rule by which all commands decide whether a run fits its devices and may be recommended."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from parakit.config.experts import max_imbalance
from parakit.config.run import RunSpec
from parakit.costs import PredictedMemory, activation_bytes, layer_activation_bytes
from parakit.formatting.units import GIB, gib, joined
from parakit.planner.time.cluster import Cluster

MOST_RECOMMENDED_FRACTION = 0.95
"""Fraction of a device's memory above which no strategy is recommended."""
CLOSE_FRACTION = 0.90
"""Fraction of a device's memory above which a run is close."""
GRAPH_POOL_BYTES = 4 * GIB
"""Bytes of the pools of CUDA graphs, which no formula has: "a few gigabytes" in Megatron-Bridge's guide."""
USUAL_IMBALANCE = 1.2
"""Tokens of the busiest expert-parallel rank over the mean. Routers of real data reach 1.2 to 2."""
MEMORY_RESERVE = 0.03
"""Fraction of a device's memory that is unusable, because it lies in gaps between allocated blocks."""


class Fit(StrEnum):
    """Verdict on whether a run fits its devices."""

    FITS = "fits"
    CLOSE = "close"
    """Only a try tells whether the run fits."""
    DOES_NOT_FIT = "does not fit"


def memory_error(spec: RunSpec) -> float:
    """Return the expected error of the predicted peak memory for a run of this kind, as a fraction.

    For 80% of the published measurements of the kind, the error is smaller (`make validate`). For sharded weights only
    measurements of Megatron are used, because other trainers gather weights earlier.
    """
    has_large_error = spec.fp8_recipe or spec.shape.blocks
    if has_large_error or spec.parallelism.sharding.shards_weights:
        return 0.12
    return 0.05 if spec.shape.experts else 0.03


def recommended_bytes(device_bytes: int) -> int:
    """Return the most bytes per rank of a recommended strategy, on a device with `device_bytes`."""
    return int(device_bytes * MOST_RECOMMENDED_FRACTION)


def judge_fit_on_cluster(spec: RunSpec, memory: PredictedMemory, cluster: Cluster) -> Fit:
    """Return the verdict on a run on a device of the cluster; `memory` is that of its peak rank.

    A run that fits by itself is close if it no longer fits with the bytes that the prediction leaves out
    (`uncounted_bytes`).
    """
    verdict = judge_fit(spec, memory, cluster.device.memory_bytes)
    if verdict is not Fit.FITS:
        return verdict
    free = cluster.device.memory_bytes * (1 - MEMORY_RESERVE) - memory.needed
    return Fit.CLOSE if uncounted_bytes(spec, cluster) > free else Fit.FITS


def uncounted_bytes(spec: RunSpec, cluster: Cluster) -> int:
    """Return bytes that a run may need in addition to its predicted memory.

    They are the pools of CUDA graphs, the activations of one more layer if the communication of experts overlaps
    (Megatron then runs the forward of a layer beside the backward of another: `combined_1f1b.py`), and the tokens of
    the busiest rank if nobody stated how evenly a router loads the experts.
    """
    execution = cluster.execution
    uncounted = 0
    if execution.graphs or execution.captured:
        uncounted += GRAPH_POOL_BYTES
    if execution.overlap_experts:
        uncounted += layer_activation_bytes(spec)
    if spec.shape.experts and spec.parallelism.expert > 1 and spec.expert_load.imbalance == 1:
        uncounted += _imbalanced_token_bytes(spec)
    return uncounted


def _imbalanced_token_bytes(spec: RunSpec) -> int:
    """Return the bytes by which the peak grows if the busiest rank receives `USUAL_IMBALANCE` times the mean tokens."""
    imbalance = min(USUAL_IMBALANCE, max_imbalance(spec.shape, spec.parallelism.expert))
    imbalanced = replace(spec, expert_load=replace(spec.expert_load, imbalance=imbalance))
    return activation_bytes(imbalanced) - activation_bytes(spec)


def judge_fit(spec: RunSpec, memory: PredictedMemory, device_bytes: int) -> Fit:
    """Return whether a run fits on devices with `device_bytes` of memory, is close to the limit, or does not fit.

    A run fits if two conditions hold. It needs at most `CLOSE_FRACTION` of the device. It also stays below the usable
    memory if the prediction is too low by its expected error. A run does not fit if it needs more than the device's
    memory, not counting reclaimable blocks of the allocator. Predictions for sharded weights may be too high. The limit
    for such runs is therefore higher by this error.

    Args:
        spec: The run.
        memory: Predicted memory of the rank with the peak memory.
        device_bytes: Memory of one device.
    """
    if memory.needed > device_bytes * (1 + _overestimate_fraction(spec)):
        return Fit.DOES_NOT_FIT
    usable = device_bytes * (1 - MEMORY_RESERVE) * (1 - memory_error(spec))
    if memory.total <= device_bytes * CLOSE_FRACTION and memory.needed <= usable:
        return Fit.FITS
    return Fit.CLOSE


def leaves_reserve(spec: RunSpec, memory: PredictedMemory, cluster: Cluster) -> bool:
    """Return True if a run leaves the reserve of its device free, as tuned and published runs do."""
    usable = cluster.device.memory_bytes * (1 - MEMORY_RESERVE)
    return memory.needed <= usable * (1 + _overestimate_fraction(spec))


def _overestimate_fraction(spec: RunSpec) -> float:
    """Return the fraction by which predictions for this kind of run may be too high."""
    return memory_error(spec) if spec.parallelism.sharding.shards_weights else 0.0


def explain_close_fit(spec: RunSpec, memory: PredictedMemory, device_bytes: int) -> str:
    """Return the reason why only a test run shows if a run close to the limit fits, as a phrase without full stop."""
    error = f"predictions miss by up to {memory_error(spec):.0%}"
    if memory.needed <= device_bytes < memory.total:
        return (
            f"{gib(memory.reclaimable)} GiB are blocks that PyTorch gives back only when memory runs out, "
            f"and {error}"
        )
    free = device_bytes - memory.total
    if free <= 0:
        return error
    uncounted = ["fragments", "CUDA graphs", *(["uneven experts"] if spec.shape.experts else [])]
    return f"{gib(free)} GiB are left for {joined(uncounted)}, and {error}"
