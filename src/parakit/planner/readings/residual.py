"""Every reading predicted, and by how much each prediction misses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from parakit.config.hardware import Device
from parakit.config.run import RunSpec
from parakit.costs import (
    WITH_RECOMPUTE,
    PredictedMemory,
    UnevenSplitError,
    estimate_rank_memory,
    find_peak_rank,
    flops_by_convention,
    model_flops,
    placeholder_bytes,
    residual_bytes,
    workspace_bytes,
)
from parakit.formatting.units import GIB
from parakit.planner.readings.facts import origin_of_source, source_facts
from parakit.planner.readings.reading_to_spec import MeasuredRun, RefusedError, convert_measurement
from parakit.planner.readings.table import PublishedMeasurement, Refusal
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.constants import Constants, load_constants
from parakit.planner.time.iteration import iteration_seconds
from parakit.planner.time.rates import NoPeakError, compute_device_rates
from parakit.planner.verdict import leaves_reserve

_LEAST_USE = 1e-8
"""Of the peak; what is slower is no training, or a figure in another unit."""


@dataclass(frozen=True)
class Residual:
    """A reading beside its prediction, both in the reading's unit."""

    measured_run: MeasuredRun
    predicted: float
    error: float
    """A ratio less 1. Of time, also where the figure is a rate: positive is predicted too slow. Of
    memory: positive is predicted too much."""
    seconds: float | None = None
    """Predicted, of an iteration; None of memory."""
    unstated: tuple[str, ...] = ()
    """What its source leaves out: the fastest run that fits is taken for it."""
    ranged: tuple[float, float] | None = None
    """Then least and most of those predicted that fit, in the reading's unit."""

    @property
    def measurement(self) -> PublishedMeasurement:
        """What was published."""
        return self.measured_run.measurement

    @property
    def published_seconds(self) -> float:
        """Of an iteration, as its figure has it; 0 of memory."""
        if self.measurement.metric == "step_time_s":
            return self.measurement.value
        return (self.seconds or 0.0) / (1 + self.error)


@dataclass(frozen=True)
class Residuals:
    """All readings of a file, in its order."""

    predicted: tuple[Residual, ...]
    refused: tuple[Refusal, ...]


def compute_residuals(
    readings: Iterable[PublishedMeasurement],
    unreadable: Iterable[Refusal] = (),
    without: str | None = None,
    measured: Callable[[Device], Calibration] = lambda device: Calibration(),
) -> Residuals:
    """Predict every reading that can be expressed.

    Args:
        readings: Of a file.
        unreadable: Its rows that are none.
        without: The source that is left out of the fit of the constants; None leaves each measurement's
            own out.
        measured: Constants of this machine's devices, for readings that were made on it.
    """
    readings = tuple(readings)
    flops = _stated_flops(readings)
    found: list[Residual] = []
    refused = list(unreadable)
    for measurement in readings:
        try:
            measured_run = use_constants_without_source(
                convert_measurement(measurement), measurement.source if without is None else without
            )
            if (found_here := measured(measured_run.cluster.device)) != Calibration():
                cluster = replace(measured_run.cluster, calibration=found_here)
                measured_run = replace(measured_run, cluster=cluster)
            found.append(compute_residual(measured_run, flops.get(_run(measurement))))
        except (RefusedError, UnevenSplitError, NoPeakError) as error:
            refused.append(Refusal(measurement.line, measurement.source, str(error)))
    return Residuals(tuple(found), tuple(sorted(refused, key=lambda item: item.line)))


def use_constants_without_source(measured_run: MeasuredRun, source: str) -> MeasuredRun:
    """The same on a cluster whose constants were fitted without a source."""
    return replace(measured_run, cluster=_without(measured_run.cluster, origin_of_source(source)))


@lru_cache(maxsize=4096)
def _without(cluster: Cluster, source: str) -> Cluster:
    generation = cluster.device.generation
    constants, own = load_constants(generation, source), load_constants(generation)
    return cluster if constants == own else replace_constants(cluster, constants)


def replace_constants(cluster: Cluster, constants: Constants) -> Cluster:
    """The cluster with these constants in place of its generation's."""
    return replace(cluster, calibration=Calibration(**asdict(constants)))


def compute_residual(measured_run: MeasuredRun, flops_a_token: float | None = None) -> Residual:
    """One reading beside its prediction, with its source's FLOPs a token where it also prints the run's
    tokens, else those of the closed form.

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
        NoPeakError: The device has no rate in the run's dtype.
        RefusedError: No device can have run so fast, or nobody trains so slowly.
    """
    if measured_run.unstated:
        # What is published is tuned: of the rows that state both, the fastest that fits is the one.
        every = [
            (compute_residual(one, flops_a_token), one) for one in measured_run.candidate_runs()
        ]
        fitting = [found for found, one in every if _fits(one)] or [found for found, _ in every]
        chosen = min(
            fitting, key=lambda found: _seconds(found.measured_run.spec, measured_run.cluster)
        )
        ends = sorted(found.predicted for found in fitting)
        return replace(chosen, unstated=measured_run.unstated, ranged=(ends[0], ends[-1]))
    measurement, spec, cluster = measured_run.measurement, measured_run.spec, measured_run.cluster
    metric, value = measurement.metric, measurement.value
    if "memory" in metric:
        predicted = _memory(spec, cluster, metric)
        return Residual(measured_run, predicted, predicted / value - 1)
    if metric == "matmul_tflops":
        predicted = compute_device_rates(cluster, spec.dtype).flops / 1e12
        return Residual(measured_run, predicted, value / predicted - 1)
    predicted, measured = (seconds := _seconds(spec, cluster)), value
    if metric != "step_time_s":
        predicted = _rate(measured_run, seconds, flops_a_token)
        measured = seconds * predicted / value
    peak = cluster.devices * max(cluster.device.peak_tflops.values()) * 1e12
    used = model_flops(spec.shape, spec.batch.global_batch_size) / peak / max(measured, 1e-30)
    # CPU cores have no datasheet, so that their peak bounds nothing.
    if cluster.device.key != "cpu" and not _LEAST_USE < used <= 1:
        raise RefusedError(f"its value would be {used:.3g} of the peak of {cluster.device.name}")
    return Residual(measured_run, predicted, seconds / measured - 1, seconds)


def _fits(measured_run: MeasuredRun) -> bool:
    memory = find_peak_rank(measured_run.spec)[1]
    return leaves_reserve(measured_run.spec, memory, measured_run.cluster)


def _rate(measured_run: MeasuredRun, seconds: float, flops_a_token: float | None) -> float:
    """Tokens, FLOP or the share of peak, a second and device."""
    measurement, spec, cluster = measured_run.measurement, measured_run.spec, measured_run.cluster
    tokens = spec.tokens_per_iteration / seconds / cluster.devices
    if measurement.metric == "tokens_per_s_per_gpu":
        return tokens
    of_hardware = measurement.metric == "hardware_tflops_per_gpu"
    if flops_a_token is None or of_hardware:  # What a source prints beside tokens is the model's.
        counts = set((measurement.counts or source_facts(measurement)["counts"]).split())
        if of_hardware:
            counts.add(WITH_RECOMPUTE)
        flops_a_token = flops_by_convention(spec, counts)
    if measurement.metric == "mfu_percent":
        return 100 * tokens * flops_a_token / (cluster.device.peak_flops(spec.dtype) or 1.0)
    return tokens * flops_a_token / 1e12


@lru_cache(maxsize=4096)
def predicted_memory(spec: RunSpec, metric: str) -> PredictedMemory:
    """Of the rank that a metric is read on: Megatron logs the last one's bytes, others the fullest's."""
    if metric.endswith("_bytes"):
        return estimate_rank_memory(spec, spec.parallelism.pipeline - 1)
    return find_peak_rank(spec)[1]


def _memory(spec: RunSpec, cluster: Cluster, metric: str) -> float:
    execution, generation = cluster.execution, cluster.device.generation
    grouped = bool(spec.shape.experts) and execution.grouped_experts
    workspaces = workspace_bytes(generation, execution.deterministic, grouped)
    held, split = predicted_memory(spec, metric), spec.parallelism
    kept = placeholder_bytes(spec, split.pipeline - 1)
    if execution.unfused_gradients:
        held, kept = replace(held, temporaries=held.temporaries - kept), 0
    if metric == "memory_allocated_bytes":
        # Each virtual stage still has its last input when the iteration is logged
        # (`transformer_block.py: set_input_tensor`), and that input its gradient.
        inputs = 2 * (split.virtual_stages - 1) * residual_bytes(spec)
        messages = held.communication + inputs if split.pipeline > 1 else 0
        return held.state + messages + kept + workspaces
    if metric == "peak_memory_allocated_bytes":
        return held.live + workspaces
    if metric == "peak_memory_gib":
        return (held.live + workspaces) / GIB
    return held.total / 1e9


@lru_cache(maxsize=4096)
def _seconds(spec: RunSpec, cluster: Cluster) -> float:
    return iteration_seconds(spec, cluster).total


def _stated_flops(readings: Iterable[PublishedMeasurement]) -> dict[tuple[object, ...], float]:
    """FLOPs a token of runs whose rate is printed both in FLOPs and in tokens or steps."""
    tokens: dict[tuple[object, ...], float] = {}
    flops: dict[tuple[object, ...], float] = {}
    for measurement in readings:
        if measurement.metric == "tokens_per_s_per_gpu":
            tokens[_run(measurement)] = measurement.value
        elif (
            measurement.metric == "step_time_s"
            and measurement.gbs
            and measurement.seq
            and measurement.gpus
        ):
            tokens[_run(measurement)] = (
                measurement.gbs * measurement.seq / measurement.value / measurement.gpus
            )
        elif measurement.metric == "model_tflops_per_gpu":
            flops[_run(measurement)] = 1e12 * measurement.value
    return {run: flops[run] / tokens[run] for run in flops.keys() & tokens.keys()}


def _run(measurement: PublishedMeasurement) -> tuple[object, ...]:
    """What two figures of one run have in common."""
    layout = (
        measurement.tp,
        measurement.pp,
        measurement.vpp,
        measurement.cp,
        measurement.dp,
        measurement.ep,
    )
    batch = (measurement.mbs, measurement.gbs, measurement.seq, measurement.dtype)
    what = (
        measurement.source,
        measurement.where,
        measurement.model,
        measurement.gpu,
        measurement.gpus,
        measurement.notes,
    )
    return (*what, *layout, *batch)
