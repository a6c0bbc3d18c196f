"""Whether a run fits its devices, with the error that predictions of memory like it have."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from tools.plan.memory import PredictedMemory
from tools.plan.time.cluster import Cluster
from tools.spec.run import RunSpec
from tools.text.units import gib


class Fit(StrEnum):
    """What is said of a run's memory."""

    FITS = "fits"
    CLOSE = "close"
    """It needs the device's memory within the error of such predictions: only a try will tell."""
    DOES_NOT_FIT = "does not fit"


MEMORY_RESERVE = 0.03
"""Of a device's memory, what no plan counts on: what lies between blocks in use."""


def memory_error(spec: RunSpec) -> float:
    """Of predictions of the peak, what eight of ten published measurements of the kind stay within
    (`make validate`). Of sharded weights those of Megatron: another trainer gathers them further
    ahead."""
    if spec.fp8_recipe or spec.shape.blocks or spec.parallelism.sharding.shards_weights:
        return 0.12
    return 0.05 if spec.shape.experts else 0.03


def needed_bytes(memory: PredictedMemory, cluster: Cluster) -> int:
    """What a rank runs out of memory without; weights that are not trained have neither gradients nor
    states."""
    if not cluster.execution.frozen:
        return memory.needed
    return replace(memory, gradients=0, main_parameters=0, optimizer_state=0).needed


def given_back(memory: PredictedMemory, cluster: Cluster) -> str:
    """In brackets, what of a rank's memory the device would not hold and the rank does not need."""
    if not memory.needed <= cluster.device.memory_bytes < memory.total:
        return ""
    return f" ({gib(memory.returned)} of them in blocks that are given back before memory runs out)"


def fit_of(spec: RunSpec, memory: PredictedMemory, cluster: Cluster) -> Fit:
    """The verdict on a run whose fullest rank holds this.

    Where weights are not sharded, 19 of 20 published peaks are not below their prediction by 1%: what is
    predicted not to fit does not.
    """
    usable = cluster.device.memory_bytes * (1 - MEMORY_RESERVE)
    needed, error = needed_bytes(memory, cluster), memory_error(spec)
    above = error if spec.parallelism.sharding.shards_weights else 0.0
    if needed > usable * (1 + above):
        return Fit.DOES_NOT_FIT
    return Fit.FITS if needed <= usable * (1 - error) else Fit.CLOSE
