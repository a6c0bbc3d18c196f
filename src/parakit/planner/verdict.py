"""Whether a run fits its devices, and whether a plan may recommend it: the one rule of all commands."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from parakit.config.run import RunSpec
from parakit.costs import PredictedMemory
from parakit.formatting.units import gib
from parakit.planner.time.cluster import Cluster

MOST_RECOMMENDED_FRACTION = 0.95
"""The fraction of a device's memory above which no plan is recommended."""
CLOSE_FRACTION = 0.90
"""The fraction of a device's memory above which a run is close."""
MEMORY_RESERVE = 0.03
"""The fraction of a device's memory that lies unusable between blocks in use."""


class Fit(StrEnum):
    """A verdict on a run's memory."""

    FITS = "fits"
    CLOSE = "close"
    """Only a try tells whether the run fits."""
    DOES_NOT_FIT = "does not fit"


def memory_error(spec: RunSpec) -> float:
    """Of predictions of the peak, what eight of ten published measurements of the kind stay within
    (`make validate`). Of sharded weights those of Megatron: another trainer gathers them further
    ahead."""
    if spec.fp8_recipe or spec.shape.blocks or spec.parallelism.sharding.shards_weights:
        return 0.12
    return 0.05 if spec.shape.experts else 0.03


def recommended_bytes(device_bytes: int) -> int:
    """Return the most bytes of a device that a recommended plan may hold."""
    return int(device_bytes * MOST_RECOMMENDED_FRACTION)


def needed_bytes(memory: PredictedMemory, cluster: Cluster) -> int:
    """Return the bytes without which a rank runs out of memory."""
    return _trained(memory, cluster).needed


def _trained(memory: PredictedMemory, cluster: Cluster) -> PredictedMemory:
    """Return the memory of what is trained: frozen weights have neither gradients nor states."""
    if not cluster.execution.frozen:
        return memory
    return replace(memory, gradients=0, main_parameters=0, optimizer_state=0)


def judge_fit_on_cluster(spec: RunSpec, memory: PredictedMemory, cluster: Cluster) -> Fit:
    """Return the verdict on a run whose fullest rank holds this on a device of the cluster."""
    return judge_fit(spec, _trained(memory, cluster), cluster.device.memory_bytes)


def judge_fit(spec: RunSpec, memory: PredictedMemory, device_bytes: int) -> Fit:
    """Return the verdict on a run whose fullest rank holds this and has so many bytes.

    A run fits up to `CLOSE` of the device, if the error of such predictions leaves it below the usable
    memory too. It does not fit if it needs more than the device without the blocks that the allocator
    gives back. Predictions for sharded weights may be too high by their error, so their runs are close
    up to that much more.
    """
    if memory.needed > device_bytes * (1 + _error_above(spec)):
        return Fit.DOES_NOT_FIT
    usable = device_bytes * (1 - MEMORY_RESERVE) * (1 - memory_error(spec))
    if memory.total <= device_bytes * CLOSE_FRACTION and memory.needed <= usable:
        return Fit.FITS
    return Fit.CLOSE


def leaves_reserve(spec: RunSpec, memory: PredictedMemory, cluster: Cluster) -> bool:
    """Return whether a run leaves the reserve of its device free, as tuned and published runs did."""
    usable = cluster.device.memory_bytes * (1 - MEMORY_RESERVE)
    return needed_bytes(memory, cluster) <= usable * (1 + _error_above(spec))


def _error_above(spec: RunSpec) -> float:
    """Return by how much predictions for such a run may be too high."""
    return memory_error(spec) if spec.parallelism.sharding.shards_weights else 0.0


def explain_close_fit(spec: RunSpec, memory: PredictedMemory, device_bytes: int) -> str:
    """Return why only a try tells whether a close run fits."""
    error = f"predictions of its kind are missed by up to {memory_error(spec):.0%}"
    if memory.needed <= device_bytes < memory.total:
        return (
            f"{gib(memory.reclaimable)} GiB are blocks that PyTorch gives back only when memory runs out, "
            f"and {error}"
        )
    free = device_bytes - memory.total
    if free <= 0:
        return error
    return f"{gib(free)} GiB are left for fragments and CUDA graphs, which are not counted, and {error}"
