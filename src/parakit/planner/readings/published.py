"""Convert the published runs that the kit reproduces to the form of the other published measurements."""

from __future__ import annotations

from parakit.config.batch import choose_batch
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import load_model
from parakit.config.published import MAIN_SOURCE, Figure, load_published
from parakit.config.run import DeviceKind, RunSpec, spec_from_model
from parakit.config.strategy import count_devices, parse_strategy
from parakit.costs import total_parameters
from parakit.planner.readings.reading_to_spec import MeasuredRun
from parakit.planner.readings.table import PublishedMeasurement
from parakit.planner.time.cluster import Cluster

KIT = "examples/gpt3/published.yaml"
"""Source of the runs, as `constants.yaml` names it."""


def h200_figures() -> tuple[Figure, ...]:
    """Return the figures of the published gpt2-large runs on H200."""
    return load_published().figures_of(MAIN_SOURCE)


def h200_spec(strategy: str) -> RunSpec:
    """Return the published run of gpt2-large with a strategy such as `dp2`."""
    model, split = load_model("gpt2-large"), parse_strategy(strategy, count_devices(strategy))
    return spec_from_model(model, split, choose_batch(model, split, DeviceKind.GPU))


def usual_cluster(gpu: str, devices: int) -> Cluster:
    """Return a cluster of nodes with eight devices and the device's usual links; `gpu` is the device's key."""
    device = device_by_key(gpu)
    return Cluster(device, devices, 8, link_by_key(device.link), link_by_key(device.network))


def kit_runs() -> list[MeasuredRun]:
    """Return the six runs of gpt2-large on H200 whose times this kit has published."""
    runs = []
    for figure in h200_figures():
        assert figure.mean_iteration_ms is not None
        cluster, spec = usual_cluster("h200", figure.devices), h200_spec(figure.strategy)
        runs.append(build_measured_run(KIT, spec, cluster, figure.mean_iteration_ms / 1e3))
    return runs


def build_measured_run(source: str, spec: RunSpec, cluster: Cluster, seconds: float) -> MeasuredRun:
    """Return a run together with a measurement of its iteration time.

    Args:
        source: Name of the source.
        spec: The run.
        cluster: Cluster on which it was measured.
        seconds: Measured seconds per iteration.
    """
    split = spec.parallelism
    measurement = PublishedMeasurement(
        line=0,
        source=source,
        metric="step_time_s",
        value=seconds,
        model=spec.model,
        params_b=round(total_parameters(spec.shape) / 1e9, 2),
        seq=spec.shape.seq_length,
        gpu=cluster.device.key.upper(),
        gpus=split.world_size,
        tp=split.tensor,
        pp=split.pipeline,
        cp=split.context,
        dtype=spec.dtype,
    )
    return MeasuredRun(measurement, spec, cluster)
