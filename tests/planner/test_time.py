from dataclasses import replace

import pytest

from parakit.config.groups import Group
from parakit.config.hardware import device_by_key, link_by_key, load_hardware
from parakit.config.model import load_model
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec
from parakit.config.stages import StageSplit
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs.memory import find_peak_rank
from parakit.planner.readings.published import h200_figures, h200_spec
from parakit.planner.time.cluster import Calibration, Cluster, find_route
from parakit.planner.time.iteration import (
    IterationSeconds,
    exposed_seconds,
    iteration_seconds,
    pipeline_seconds,
)
from parakit.planner.time.rates import NoPeakError, compute_device_rates
from tests.docs.residuals import PublishedResidual, h200_residuals, paper_residuals
from tests.planner.papers import load_paper

LARGE = load_model("gpt2-large")


def cluster(gpu: str, devices: int, **changes: float) -> Cluster:
    device = device_by_key(gpu)
    links = link_by_key(device.link), link_by_key(device.network)
    return Cluster(device, devices, 8, *links, Calibration(**changes))  # type: ignore[arg-type]


def h200(strategy: str) -> IterationSeconds:
    spec = h200_spec(strategy)
    return iteration_seconds(spec, cluster("h200", spec.parallelism.world_size))


@pytest.mark.parametrize("residual", h200_residuals(), ids=lambda r: r.case)
def test_every_published_h200_time_is_predicted_within_5_percent(
    residual: PublishedResidual,
) -> None:
    assert abs(residual.error) < 0.05


def test_only_recomputed_layers_run_forward_twice() -> None:
    split = Parallelism(pipeline=2, virtual_stages=3, tensor=2)
    plain = RunSpec(LARGE.shape, split, Batch(4, 16))
    ranks = cluster("h100", 4, layer_launch_seconds=0.0)

    def compute(recompute: str) -> tuple[float, float]:
        slowest, _ = pipeline_seconds(replace(plain, recompute=Recompute.parse(recompute)), ranks)
        return slowest.matmul, slowest.tensor_parallel

    nothing, everything = compute("none"), compute("full")
    # Two of six layers are recomputed in each of three virtual stages.
    for none, some, full in zip(nothing, compute("full block 2"), everything, strict=True):
        assert some == pytest.approx(none + (full - none) * 6 / 18)
    assert compute("full block 6") == pytest.approx(everything)
    assert compute("full uniform 4") == everything


def test_published_order_of_strategies_is_predicted_with_tp_and_sp_equal() -> None:
    seconds = {name: h200(name).total for name in (f.strategy for f in h200_figures())}
    two = [name for name in sorted(seconds, key=lambda n: seconds[n]) if name != "baseline"]
    assert two == ["dp2", "cp2", "sp2", "tp2", "pp2"]
    assert seconds["tp2"] == pytest.approx(seconds["sp2"], rel=0.025)


@pytest.mark.parametrize("residual", paper_residuals(load_paper()), ids=lambda r: r.case)
def test_published_a100_times_are_predicted_within_10_percent(residual: PublishedResidual) -> None:
    assert abs(residual.error) < 0.10


def test_bubble_of_two_stages_and_a_single_micro_batch_is_a_full_stage() -> None:
    seconds = h200("pp2")
    assert seconds.bubble == pytest.approx(0.44 * seconds.total, rel=0.05)


def test_longest_pipeline_stage_determines_the_time_at_any_position() -> None:
    machines, plain = (
        cluster("h200", 5),
        RunSpec(LARGE.shape, Parallelism(pipeline=5), Batch(4, 64)),
    )
    layouts = (f"Et*4|{between}|t*4L" for between in ("t*20|t*4|t*4", "t*4|t*4|t*20"))
    second, fourth = (replace(plain, stages=StageSplit(layout=layout)) for layout in layouts)
    (slow, through), (later, same) = (pipeline_seconds(s, machines) for s in (second, fourth))
    assert slow == later
    assert through == pytest.approx(same)
    assert find_peak_rank(second)[0] == 1
    assert find_peak_rank(fourth)[0] == 3


def test_dense_layer_in_a_mixture_takes_the_time_of_a_dense_model() -> None:
    shape = load_model("mixtral-8x7b").shape
    spec = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 64))
    machines = cluster("h200", 8)

    def total(dense: int) -> float:
        layers = replace(shape, dense_layers=tuple(range(dense)))
        return pipeline_seconds(replace(spec, shape=layers), machines)[1]

    alone = pipeline_seconds(spec.with_dense_layers, machines)[1]
    layers = shape.layers
    assert total(2) == pytest.approx(total(0) + 2 * (total(1) - total(0)))
    assert total(layers) == pytest.approx(alone)
    assert total(0) > 1.2 * alone


def test_virtual_stages_shrink_the_bubble_by_their_number() -> None:
    plain = RunSpec(LARGE.shape, Parallelism(pipeline=2), Batch(4, 64))
    interleaved = replace(plain, parallelism=Parallelism(pipeline=2, virtual_stages=3))
    machines = cluster("h200", 2, layer_launch_seconds=0.0)
    bubbles = [iteration_seconds(c, machines).bubble for c in (plain, interleaved)]
    assert bubbles[1] == pytest.approx(bubbles[0] / 3)


def test_overlapped_communication_costs_only_contention() -> None:
    assert exposed_seconds(1.0, 4.0, 0.25) == 0.25
    assert exposed_seconds(5.0, 4.0, 0.25) == 2.0
    assert exposed_seconds(5.0, 0.0, 0.25) == 5.0


def test_the_distributed_optimizer_divides_the_optimizers_time() -> None:
    machines = cluster("h200", 2)
    plain = RunSpec(LARGE.shape, Parallelism(data=2), Batch(32, 64), "fp16")
    sharded = replace(plain, parallelism=Parallelism(data=2, sharding=Sharding.ZERO1))
    seconds = [iteration_seconds(c, machines) for c in (plain, sharded)]
    assert seconds[1].optimizer == pytest.approx(seconds[0].optimizer / 2, rel=0.05)
    assert seconds[1].gradient_sync == pytest.approx(seconds[0].gradient_sync, rel=0.05)


def test_a_dtype_the_device_lacks_is_refused() -> None:
    spec = RunSpec(LARGE.shape, Parallelism(), Batch(1, 1), dtype="fp8")
    with pytest.raises(
        NoPeakError, match=r"A100 SXM 80 GB has no fp8 rate; its rates are of [^8]*$"
    ):
        iteration_seconds(spec, cluster("a100", 1))


@pytest.mark.parametrize("name", load_hardware().devices)
def test_no_device_multiplies_faster_than_its_peak(name: str) -> None:
    peaks = device_by_key(name).peak_tflops
    dtype = next(iter(peaks))
    assert compute_device_rates(cluster(name, 1), dtype).flops <= peaks[dtype] * 1e12 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("group", "link", "ports"),
    [
        (Group.TENSOR, "nvlink4", 0),
        (Group.DATA_CONTEXT, "ib-400g", 2),
        (Group.PIPELINE, "ib-400g", 1),
    ],
)
def test_groups_get_the_link_they_span(group: Group, link: str, ports: int) -> None:
    machines = cluster("h200", 32, link=1.0)
    way = find_route(machines, Parallelism(data=4, tensor=4, pipeline=2), group)
    assert way.link == link
    expected = 450e9 if link == "nvlink4" else ports * 50e9
    assert way.bytes_per_second == expected
