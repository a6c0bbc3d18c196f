"""The host's time per layer, from one measured step: `CALIBRATE="200 ms on 231"`.

The step can have any configuration: a run of the tutorial, by its id, or variables of `make plan`. It tells the host's
time only if the device waits for the host in forward or in backward.
"""

from __future__ import annotations

import re
from dataclasses import replace

from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.run import RunSpec
from parakit.formatting.units import ms
from parakit.planner.calibration import bisect_threshold, calibrate_from_text, load_calibration
from parakit.planner.one_strategy import apply_what_if, time_strategy
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.readings.reading_to_spec import MeasuredRun, convert_measurement
from parakit.planner.readings.table import read_measurements
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.host import iteration_host_seconds
from parakit.planner.time.iteration import IterationSeconds, iteration_seconds

TUTORIAL_SOURCE = "vuiseng9/megatron-tutorials"
"""Source of the tutorial's published measurements, whose notes name each run with its id."""
_STEP = re.compile(
    r"\s*(?P<time>\d+\.?\d*)\s*(?P<unit>ms|s)\s+on\s+(?P<run>\S.*?)\s*", re.IGNORECASE | re.DOTALL
)
_MOST_LAYER_SECONDS = 0.05


def resolve_measured_step(options: PlanOptions) -> PlanOptions:
    """Return the options with a measured step in CALIBRATE= replaced by the host's time per layer that it implies.

    Options without a measured step are returned unchanged. The step is predicted on the GPU and the links of the
    options, with the rates of products that CALIBRATE= states besides.

    Raises:
        RequestError: CALIBRATE= has two steps, the step's run does not exist, or its time does not tell the host's.
        ValueError: The variables of the step are wrong, as for `time_strategy`.
    """
    parts = (options.calibrate or "").split(",")
    steps = [match for part in parts if (match := _STEP.fullmatch(part)) and "FLOP" not in part]
    if not steps:
        return options
    if len(steps) > 1:
        raise RequestError("CALIBRATE states two measured steps; leave one of them out.")
    step = steps[0]
    rates = ",".join(part for part in parts if part != step.string)
    seconds = float(step["time"]) * (1e-3 if step["unit"].lower() == "ms" else 1.0)
    spec, cluster = _find_run(replace(options, calibrate=rates or None), step["run"])
    layer = f"{1e3 * solve_layer_seconds(spec, cluster, seconds):.4g} ms per layer"
    return replace(options, calibrate=f"{rates},{layer}" if rates else layer)


def _find_run(options: PlanOptions, run: str) -> tuple[RunSpec, Cluster]:
    """Return the run of a measured step, and the cluster that it ran on.

    Args:
        options: Options of the plan. The step has their GPU, links and calibration.
        run: Id of a run of the tutorial, or text with variables of `make plan` such as `STRATEGY=tp8 MODEL=gpt3-13b`.

    Raises:
        RequestError: The tutorial has no such run, or the text sets no STRATEGY=.
    """
    if "=" in run:
        # Batch and flags of the plan are not those of the step.
        machine = PlanOptions(
            model=options.model,
            gpu=options.gpu,
            gpus_per_node=options.gpus_per_node,
            intra=options.intra,
            inter=options.inter,
            nics=options.nics,
            dtype=options.dtype,
            calibration=options.calibration,
            calibrate=options.calibrate,
        )
        stated = apply_what_if(machine, run, "CALIBRATE")
        if not stated.strategy:
            raise RequestError(
                f"CALIBRATE has a step of '{run}', which names no strategy; add STRATEGY=."
            )
        timed = time_strategy(stated)
        return timed.candidate.spec, timed.request.cluster
    tutorial_run = _tutorial_run(run)
    spec = tutorial_run.spec
    device = device_by_key(options.gpu)
    cluster = Cluster(
        device=device,
        devices=spec.parallelism.world_size,
        per_node=options.gpus_per_node or device.domain,
        intra=link_by_key(options.intra or device.link),
        inter=link_by_key(options.inter or device.network),
        calibration=load_calibration(options.calibration),
        execution=tutorial_run.cluster.execution,
    )
    if options.calibrate:
        calibration = calibrate_from_text(options.calibrate, cluster, spec.dtype)
        cluster = replace(cluster, calibration=calibration)
    return spec, cluster


def _tutorial_run(run_id: str) -> MeasuredRun:
    """Return the run of the tutorial with an id such as `231`.

    Raises:
        RequestError: The tutorial has no run with this id whose time was published.
    """
    for measurement in read_measurements()[0]:
        is_timed = measurement.source == TUTORIAL_SOURCE and measurement.metric == "step_time_s"
        if is_timed and f"; run {run_id}-" in measurement.notes:
            return convert_measurement(measurement)
    raise RequestError(
        f"CALIBRATE has a step of '{run_id}', which is no timed run of the tutorial; use an id such as 231, "
        'or variables such as "200 ms on STRATEGY=tp8 MODEL=gpt3-13b MICRO_BATCH=1".'
    )


def solve_layer_seconds(spec: RunSpec, cluster: Cluster, seconds: float) -> float:
    """Return the host's time per layer with which a run takes `seconds` per iteration.

    Raises:
        RequestError: The device alone takes longer than the step, the device never waits for the host in a micro
            batch, or no host is so slow.
    """

    def cluster_with(layer_seconds: float) -> Cluster:
        """Return the cluster with this host's time per layer."""
        calibration = replace(cluster.calibration, layer_launch_seconds=layer_seconds)
        return replace(cluster, calibration=calibration)

    def predict(layer_seconds: float) -> IterationSeconds:
        """Return the seconds of an iteration with this host's time per layer."""
        return iteration_seconds(spec, cluster_with(layer_seconds))

    stated, device = ms(seconds), cluster.device.name
    fastest = predict(0.0).total
    if fastest > seconds:
        raise RequestError(
            f"CALIBRATE states a step of {stated} ms, but {device} computes for {ms(fastest)} ms by the planner's "
            "rates; state the rate of a product too, or a step with a smaller micro batch."
        )

    _, high = bisect_threshold(
        lambda layer_seconds: predict(layer_seconds).total >= seconds, _MOST_LAYER_SECONDS
    )
    with_solution = predict(high)
    outside = iteration_host_seconds(spec, cluster_with(high), with_solution.optimizer)
    if with_solution.host_launches <= outside * (1 + 1e-9) or high > 0.99 * _MOST_LAYER_SECONDS:
        raise RequestError(
            f"CALIBRATE states a step of {stated} ms in which {device} hardly waits for the host, so it does not "
            "tell the host's time; state a step with a smaller micro batch."
        )
    return high
