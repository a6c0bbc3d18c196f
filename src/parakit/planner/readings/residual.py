"""Prediction of published measurements, and the errors of the predictions.

A "residual" is a measurement with its prediction and the error of the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import inf

from parakit.config.hardware import Device
from parakit.config.run import RunSpec
from parakit.costs import (
    WITH_RECOMPUTE,
    PredictedMemory,
    UnevenSplitError,
    estimate_rank_memory,
    find_peak_device_memory,
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

_LEAST_MFU = 1e-8
"""Fraction of the peak below which a figure is no training, or has another unit."""


@dataclass(frozen=True)
class Residual:
    """Published measurement and its prediction, both in the measurement's unit."""

    measured_run: MeasuredRun
    predicted: float
    error: float
    """Predicted over published, less 1. For a rate it is the error of the time: positive means predicted too slow.
    For memory, positive means predicted too much."""
    seconds: float | None = None
    """Predicted seconds per iteration; None for memory and for rates of single products."""
    unstated: tuple[str, ...] = ()
    """Sizes that the source leaves out. The prediction is that of the fastest run that fits."""
    ranged: tuple[float, float] | None = None
    """Least and most prediction of all runs that fit, if a size is unstated; else None."""

    @property
    def measurement(self) -> PublishedMeasurement:
        """Published measurement that the prediction is compared with."""
        return self.measured_run.measurement

    @property
    def published_seconds(self) -> float:
        """Published seconds per iteration, computed from the figure; 0 for memory."""
        if self.measurement.metric == "step_time_s":
            return self.measurement.value
        return (self.seconds or 0.0) / (1 + self.error)


@dataclass(frozen=True)
class Residuals:
    """All measurements of a file in its order: those that are predicted, and those that cannot be."""

    predicted: tuple[Residual, ...]
    refused: tuple[Refusal, ...]


def compute_residuals(
    measurements: Iterable[PublishedMeasurement],
    unreadable: Iterable[Refusal] = (),
    without: str | None = None,
    calibrate: Callable[[Device], Calibration] = lambda device: Calibration(),
) -> Residuals:
    """Predict all measurements. Return the predictions, and a reason for each measurement without a prediction.

    Args:
        measurements: Measurements of a file.
        unreadable: Rows of the file that cannot be read. They are added to the measurements without a prediction.
        without: Source that is left out of the fit of the constants. None leaves out each measurement's own source.
        calibrate: Function that returns the constants of a device. Constants that were measured on this machine are
            used for measurements that were made here.
    """
    measurements = tuple(measurements)
    flops_by_run = _stated_flops_per_token(measurements)
    predicted: list[Residual] = []
    refused = list(unreadable)
    for measurement in measurements:
        source = measurement.source if without is None else without
        try:
            run = use_constants_without_source(convert_measurement(measurement), source)
            calibration = calibrate(run.cluster.device)
            if calibration != Calibration():
                run = replace(run, cluster=replace(run.cluster, calibration=calibration))
            predicted.append(compute_residual(run, flops_by_run.get(_run_key(measurement))))
        except (RefusedError, UnevenSplitError, NoPeakError) as error:
            refused.append(Refusal(measurement.line, measurement.source, str(error)))
    return Residuals(tuple(predicted), tuple(sorted(refused, key=lambda item: item.line)))


def use_constants_without_source(run: MeasuredRun, source: str) -> MeasuredRun:
    """Return a measured run whose prediction uses constants that were fitted without the measurements of `source`.

    Measurements of other sources that repeat figures of `source` are left out of the fit, too.
    """
    return replace(run, cluster=_refit_cluster(run.cluster, origin_of_source(source)))


@lru_cache(maxsize=4096)
def _refit_cluster(cluster: Cluster, without: str) -> Cluster:
    """Return the cluster with constants that were fitted without a source; unchanged if these are the same."""
    generation = cluster.device.generation
    constants, full_fit = load_constants(generation, without), load_constants(generation)
    return cluster if constants == full_fit else replace_constants(cluster, constants)


def replace_constants(cluster: Cluster, constants: Constants) -> Cluster:
    """Return a cluster with these constants in place of those of its generation."""
    return replace(cluster, calibration=Calibration(**asdict(constants)))


def compute_residual(run: MeasuredRun, flops_per_token: float | None = None) -> Residual:
    """Predict one measurement, and return the measurement with the prediction and its error.

    Args:
        run: The measured run.
        flops_per_token: Model FLOPs per token as the source counts them. None computes them by a formula.

    Raises:
        UnevenSplitError: A parallel size does not divide the dimension that it splits.
        NoPeakError: The device has no rate in the run's dtype.
        RefusedError: The published figure exceeds the device's peak, or is too slow for any training.
    """
    if run.unstated:
        return _residual_of_fastest(run, flops_per_token)
    measurement, spec, cluster = run.measurement, run.spec, run.cluster
    metric, value = measurement.metric, measurement.value
    if "memory" in metric:
        predicted = _predict_memory_figure(spec, cluster, metric)
        return Residual(run, predicted, predicted / value - 1)
    if metric == "matmul_tflops":
        predicted = compute_device_rates(cluster, spec.dtype).flops / 1e12
        return Residual(run, predicted, value / predicted - 1)
    seconds = _seconds_per_iteration(spec, cluster)
    predicted, measured_seconds = seconds, value
    if metric != "step_time_s":
        predicted = _predict_rate(run, seconds, flops_per_token)
        measured_seconds = seconds * predicted / value
    _refuse_impossible_rate(spec, cluster, measured_seconds)
    return Residual(run, predicted, seconds / measured_seconds - 1, seconds)


def _residual_of_fastest(run: MeasuredRun, flops_per_token: float | None) -> Residual:
    """Predict a measurement whose source does not state all sizes.

    Published runs are tuned, so the missing sizes are assumed to be those of the fastest run that fits into memory.
    If no run fits, the fastest of all possible runs is taken. The result also has the range of the predictions of all
    runs that fit.
    """
    residuals: list[Residual] = []
    fitting: list[Residual] = []
    for candidate in run.candidate_runs():
        residual = compute_residual(candidate, flops_per_token)
        residuals.append(residual)
        if _fits(candidate):
            fitting.append(residual)
    considered = fitting or residuals
    fastest = min(
        considered, key=lambda item: _seconds_per_iteration(item.measured_run.spec, run.cluster)
    )
    predictions = [residual.predicted for residual in considered]
    return replace(fastest, unstated=run.unstated, ranged=(min(predictions), max(predictions)))


def _refuse_impossible_rate(spec: RunSpec, cluster: Cluster, seconds: float) -> None:
    """Raise an error if a run of `seconds` per iteration exceeds the device's peak, or is far too slow.

    Runs on CPU cores are never refused, because no datasheet states the peak of a core.

    Raises:
        RefusedError: The rate is above the peak, or at most `_LEAST_MFU` of the peak.
    """
    if cluster.device.key == "cpu":
        return
    peak = cluster.devices * max(cluster.device.peak_tflops.values()) * 1e12
    flops = model_flops(spec.shape, spec.batch.global_batch_size)
    fraction = flops / peak / max(seconds, 1e-30)
    if not _LEAST_MFU < fraction <= 1:
        raise RefusedError(
            f"its value would be {fraction:.3g} of the peak of {cluster.device.name}"
        )


def _fits(run: MeasuredRun) -> bool:
    """Return True if a run fits into its device's memory and leaves the planner's reserve free."""
    memory = find_peak_rank(run.spec)[1]
    return leaves_reserve(run.spec, memory, run.cluster)


def _predict_rate(run: MeasuredRun, seconds: float, flops_per_token: float | None) -> float:
    """Return the predicted rate per device in a measurement's unit: tokens/s, TFLOP/s, or percent of the peak.

    Args:
        run: The measured run.
        seconds: Predicted seconds per iteration.
        flops_per_token: Model FLOPs per token as the source counts them. None computes them by a formula with the
            source's conventions.
    """
    measurement, spec, cluster = run.measurement, run.spec, run.cluster
    tokens = spec.tokens_per_iteration / seconds / cluster.devices
    if measurement.metric == "tokens_per_s_per_gpu":
        return tokens
    is_hardware_flops = measurement.metric == "hardware_tflops_per_gpu"
    # The FLOPs that a source prints beside tokens are the model's, without recomputation.
    if flops_per_token is None or is_hardware_flops:
        counts = set((measurement.counts or source_facts(measurement)["counts"]).split())
        if is_hardware_flops:
            counts.add(WITH_RECOMPUTE)
        flops_per_token = flops_by_convention(spec, counts)
    if measurement.metric == "mfu_percent":
        return 100 * tokens * flops_per_token / (cluster.device.peak_flops(spec.dtype) or 1.0)
    return tokens * flops_per_token / 1e12


@lru_cache(maxsize=4096)
def predicted_memory(spec: RunSpec, metric: str, device_bytes: float = inf) -> PredictedMemory:
    """Return the predicted memory of the rank whose memory a metric reports.

    Metrics in bytes come from Megatron's log, which prints the memory of the last rank. All other metrics report the
    rank with the peak memory. Only the memory of a device contains the gaps of PyTorch's allocator.

    Args:
        spec: The run.
        metric: Name of the metric.
        device_bytes: Memory of the device.
    """
    if metric.endswith("_bytes"):
        return estimate_rank_memory(spec, spec.parallelism.pipeline - 1)
    if metric == _DEVICE_MEMORY:
        return find_peak_device_memory(spec, device_bytes)[1]
    return find_peak_rank(spec)[1]


_DEVICE_MEMORY = "device_memory_gb"
"""Metric of a device's own reading, in which everything counts that the allocator has reserved."""


def _predict_memory_figure(spec: RunSpec, cluster: Cluster, metric: str) -> float:
    """Predict the value of a memory metric, in the metric's unit: bytes, GiB or GB.

    The metrics differ in what they count: all memory of a device, or only what PyTorch has allocated, at the peak or
    when Megatron logs an iteration.
    """
    execution, generation = cluster.execution, cluster.device.generation
    has_grouped_experts = bool(spec.shape.experts) and execution.grouped_experts
    workspaces = workspace_bytes(generation, execution.deterministic, has_grouped_experts)
    memory = predicted_memory(spec, metric, cluster.device.memory_bytes)
    split = spec.parallelism
    placeholders = placeholder_bytes(spec, split.pipeline - 1)
    if execution.unfused_gradients:
        memory = replace(memory, temporaries=memory.temporaries - placeholders)
        placeholders = 0
    if metric == "memory_allocated_bytes":
        # When Megatron logs an iteration, each virtual stage still has its last input
        # (`transformer_block.py: set_input_tensor`) with its gradient.
        inputs = 2 * (split.virtual_stages - 1) * residual_bytes(spec)
        messages = memory.communication + inputs if split.pipeline > 1 else 0
        return memory.state + messages + placeholders + workspaces
    if metric == "peak_memory_allocated_bytes":
        return memory.live + workspaces
    if metric == "peak_memory_gib":
        return (memory.live + workspaces) / GIB
    return memory.total / 1e9


@lru_cache(maxsize=4096)
def _seconds_per_iteration(spec: RunSpec, cluster: Cluster) -> float:
    """Return the predicted seconds per iteration."""
    return iteration_seconds(spec, cluster).total


def _stated_flops_per_token(
    measurements: Iterable[PublishedMeasurement],
) -> dict[tuple[object, ...], float]:
    """Return the FLOPs per token as sources count them, by run.

    The figure follows from two measurements of one run: its rate in FLOPs, and its rate in tokens or seconds per
    step. Runs without both are left out.
    """
    tokens: dict[tuple[object, ...], float] = {}
    flops: dict[tuple[object, ...], float] = {}
    for item in measurements:
        run = _run_key(item)
        if item.metric == "tokens_per_s_per_gpu":
            tokens[run] = item.value
        elif item.metric == "step_time_s" and item.gbs and item.seq and item.gpus:
            tokens[run] = item.gbs * item.seq / item.value / item.gpus
        elif item.metric == "model_tflops_per_gpu":
            flops[run] = 1e12 * item.value
    return {run: flops[run] / tokens[run] for run in flops.keys() & tokens.keys()}


def _run_key(measurement: PublishedMeasurement) -> tuple[object, ...]:
    """Return a key that is equal for all measurements of one run, whatever their metrics."""
    origin = (measurement.source, measurement.where, measurement.notes)
    job = (measurement.model, measurement.gpu, measurement.gpus)
    degrees = (
        measurement.tp,
        measurement.pp,
        measurement.vpp,
        measurement.cp,
        measurement.dp,
        measurement.ep,
    )
    batch = (measurement.mbs, measurement.gbs, measurement.seq, measurement.dtype)
    return (*origin, *job, *degrees, *batch)
