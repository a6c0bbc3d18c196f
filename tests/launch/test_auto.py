import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from parakit.artifacts import run as records
from parakit.config.errors import LaunchError
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import ModelShape, load_model
from parakit.config.run import DeviceKind, RunSpec, flags_from_spec, spec_from_flags
from parakit.config.stages import StageSplit
from parakit.config.strategy import Batch, Parallelism
from parakit.launch import auto, calibrate
from parakit.launch.auto import build_request, options_for_candidate, plan_for_machine, train_auto
from parakit.launch.calibrate import (
    GPU_LAYER,
    MEGATRON_LAYER,
    build_calibration,
    calibration_conditions,
)
from parakit.launch.job import parse_target
from parakit.launch.microbenchmark import Figures
from parakit.launch.options import Options
from parakit.launch.runtime import Runtime
from parakit.planner.calibration import calibration_path, load_calibration
from parakit.planner.readings.local_readings import add_rows, build_measurement_row
from parakit.planner.readings.table import MeasurementsError
from parakit.planner.search import search_configurations
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.compute import layer_seconds, product_seconds
from parakit.planner.time.rates import compute_device_rates

CPU, GLOO = device_by_key("cpu"), link_by_key("gloo")
TINY = parse_target("train-baseline-gpt2-tiny-2cpu")
FIGURES = Figures(
    matmul_flops=150e9,
    attention_flops=40e9,
    copy_bytes_per_second=12e9,
    layer_seconds=0.0008,
    all_reduce_bytes_per_second=1.5e9,
    all_reduce_latency_seconds=0.0004,
)
"""Two ranks on two cores of a small virtual machine."""
QUIET = Console(quiet=True)


def test_measured_rates_become_shares_of_the_nominal_ones() -> None:
    calibration = build_calibration(FIGURES, DeviceKind.CPU, CPU, GLOO)
    assert calibration.matmul == 1.5
    assert calibration.attention == 0.4
    assert calibration.memory == 1.2
    assert calibration.link == 1.5
    assert calibration.link_latency_seconds == 0.0004
    assert calibration.layer_launch_seconds == MEGATRON_LAYER * 0.0008


def test_what_is_planned_has_the_vocabulary_of_the_data_that_is_trained() -> None:
    target = parse_target("train-baseline-llama3-8b-2cpu")
    asked = build_request(target, CPU, Calibration())
    assert asked.template.shape.vocabulary == 50257
    request = build_request(
        target.with_options(Options(data="owt-ds/mine_text_document")), CPU, Calibration()
    )
    assert request.template.shape.vocabulary == 128256


@pytest.mark.parametrize("engine", [True, False])
def test_a_gpu_without_transformer_engine_is_planned_with_pytorchs_kernels(
    monkeypatch: pytest.MonkeyPatch, engine: bool
) -> None:
    here = Runtime(transformer_engine=engine, apex=engine)
    monkeypatch.setattr(auto, "choose_runtime", lambda *_: here)
    target = parse_target("train-baseline-gpt2-large-1gpu")
    options = Options(fused=("gradient_gemm",))
    request = build_request(target.with_options(options), device_by_key("h200"), Calibration())
    execution = request.cluster.execution
    assert execution.torch_kernels is execution.unfused_rotary is not engine
    assert not execution.unfused_gradients  # The patch takes its flag away.
    assert (request.template.fused, request.template.fused_norms) == (("gradient_gemm",), engine)


def test_nothing_hides_behind_arithmetic_on_a_cpu_rank() -> None:
    on_cpu = build_calibration(FIGURES, DeviceKind.CPU, CPU, GLOO)
    assert (on_cpu.contention, on_cpu.launch_beside_work) == (1.0, False)
    h200 = device_by_key("h200")
    on_gpu = build_calibration(FIGURES, DeviceKind.GPU, h200, link_by_key(h200.link))
    assert (on_gpu.contention, on_gpu.launch_beside_work) == (Calibration().contention, True)


def test_with_what_a_gpu_reached_the_formulas_give_its_kernels_the_time_they_took() -> None:
    h100 = device_by_key("h100")
    link, work = link_by_key(h100.link), calibrate.WORKLOADS[DeviceKind.GPU]
    assert work.matmul_size is not None
    assert work.attention_shape is not None
    took = Figures(matmul_flops=700e12, attention_flops=400e12, copy_bytes_per_second=2.9e12)
    calibration = build_calibration(replace(took, layer_seconds=1e-3), DeviceKind.GPU, h100, link)
    assert calibration.layer_launch_seconds == GPU_LAYER * 1e-3
    assert calibration.memory == pytest.approx(2.9 / 3.35)
    rate = compute_device_rates(Cluster(h100, 1, 1, link, link, calibration), "bf16")
    size = work.matmul_size
    product = product_seconds(size, size, size, 2, rate)
    assert 2 * size**3 / product == pytest.approx(700e12)
    heads, length, width = work.attention_shape
    shape = ModelShape(1, heads * width, heads, heads, width, 0, length, 0)
    layer = layer_seconds(RunSpec(shape, Parallelism(), Batch(1, 1), dropout=0.0), rate)
    attention = layer.forward_attention + layer.backward_attention
    assert 6 * heads * length**2 * width / attention == pytest.approx(400e12)


def test_one_rank_has_no_link_to_measure() -> None:
    alone = replace(FIGURES, all_reduce_bytes_per_second=None, all_reduce_latency_seconds=None)
    calibration = build_calibration(alone, DeviceKind.CPU, CPU, GLOO)
    assert calibration.link == Calibration().link
    assert calibration.link_latency_seconds is None


def test_the_file_carries_the_machine_s_name_and_the_device_s(tmp_path: Path) -> None:
    assert calibration_path(tmp_path, CPU).name == f"calibration-{platform.node()}-cpu.json"


def test_on_two_cpu_ranks_nothing_is_worth_more_than_plain_data_parallelism() -> None:
    calibration = build_calibration(FIGURES, DeviceKind.CPU, CPU, GLOO)
    plan = search_configurations(build_request(TINY, CPU, calibration))
    assert plan.winner is not None
    by_name = {candidate.strategy: candidate.seconds.total for candidate in plan.ranked}
    assert by_name["dp2"] < 1.05 * plan.winner.seconds.total
    # Sharding the optimizer saves half of its update; gloo's reduce-scatter takes most of that back.
    assert by_name["dp2-zero1"] == pytest.approx(by_name["dp2"], rel=0.02)


def test_cpu_ranks_are_planned_as_they_run() -> None:
    request = build_request(
        TINY.with_options(Options(dropout=0.1, global_batch_size=16)), CPU, Calibration()
    )
    assert request.template.dtype == "fp32"
    assert not request.template.fused_attention
    assert request.template.dropout == 0.1
    assert request.global_batch == 16
    assert request.cluster.nodes == 1


@pytest.mark.parametrize(("ranks", "measured_again"), [(2, False), (4, True)])
def test_what_was_measured_is_kept_until_its_conditions_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, measured_again: bool
) -> None:
    made_with = calibration_conditions(DeviceKind.CPU, 2)
    kept = replace(build_calibration(FIGURES, DeviceKind.CPU, CPU, GLOO), made_with=made_with)
    calibration_path(tmp_path, CPU).write_text(json.dumps(asdict(kept)))
    faster = replace(FIGURES, matmul_flops=200e9)
    monkeypatch.setattr("parakit.launch.microbenchmark.run_workload", lambda *_, **__: faster)
    target = parse_target(f"train-baseline-gpt2-tiny-{ranks}cpu")
    plan = plan_for_machine(target.with_options(Options(runs=tmp_path)), QUIET)
    assert plan.request.cluster.calibration.source == f"measured on {platform.node()}"
    assert plan.request.cluster.calibration.matmul == (2.0 if measured_again else 1.5)
    now = load_calibration(calibration_path(tmp_path, CPU))
    assert now.made_with == calibration_conditions(DeviceKind.CPU, ranks)


def test_what_was_planned_is_what_is_trained() -> None:
    calibration = build_calibration(FIGURES, DeviceKind.CPU, CPU, GLOO)
    plan = search_configurations(build_request(TINY, CPU, calibration))
    assert plan.winner is not None
    options = options_for_candidate(plan.winner, Options(extra=("--lr", "1e-3")))
    batch = plan.winner.spec.batch
    assert options.micro_batch_size == batch.micro_batch_size
    assert options.global_batch_size == batch.global_batch_size == 4
    assert options.extra[-2:] == ("--lr", "1e-3")
    uneven = replace(plan.winner.spec, stages=StageSplit(loss=True))
    extra = options_for_candidate(replace(plan.winner, spec=uneven), Options()).extra
    assert "--account-for-loss-in-pipeline-split" in extra


def test_the_target_says_why_and_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = Options(dry_run=True, runs=tmp_path)
    assert train_auto("train-auto-gpt2-tiny-2cpu", options, Console(width=200)) == 0
    output = capsys.readouterr().out
    assert "Predicted: " in output
    assert "'make calibrate' measures this machine's" in output
    assert "--nproc-per-node 2 -m megatron_patches" in output
    assert "--global-batch-size 4" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train-auto-gpt2-tinny-2cpu", "no model 'gpt2-tinny'; did you mean gpt2-tiny"),
        (
            "train-auto-gpt2-large-2gpu",
            "Needs 2 GPUs, found 0; run 'make plan MODEL=gpt2-la",
        ),
    ],
)
def test_what_cannot_be_planned_here_says_what_can(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr(calibrate, "visible_gpus", tuple)
    with pytest.raises(LaunchError, match=message):
        train_auto(name, Options(), QUIET)


def test_a_gpu_without_published_rates_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "visible_gpus", lambda: (SimpleNamespace(name="Tesla T4"),))
    with pytest.raises(
        LaunchError, match="no rates of 'Tesla T4'; add it to src/parakit/config/hardware"
    ):
        train_auto("train-auto-gpt2-large-1gpu", Options(), QUIET)


@pytest.mark.slow
def test_two_cpu_ranks_are_measured_planned_for_and_trained(
    tmp_path: Path, sample_prefix: Path
) -> None:
    options = Options(iterations=6, calibrate=True, data=str(sample_prefix), runs=tmp_path)
    assert train_auto("train-auto-gpt2-tiny-2cpu", options, QUIET) == 0
    measured = load_calibration(calibration_path(tmp_path, CPU))
    assert measured.matmul is not None
    assert measured.matmul > 0.01
    assert measured.link_latency_seconds is not None
    (run,) = (folder for folder in tmp_path.iterdir() if (folder / records.RUN_FILE).is_file())
    assert records.read_status(run).status is records.Status.OK
    again = plan_for_machine(TINY.with_options(replace(options, calibrate=False)), QUIET)
    assert again.request.cluster.calibration == measured


def test_ones_own_runs_correct_the_plan_of_train_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TINY.with_options(Options(runs=tmp_path, dry_run=True))
    plain = plan_for_machine(job, QUIET)
    measured, measurements_file = (
        next(candidate for candidate in plain.ranked if candidate.strategy == "dp2"),
        tmp_path / "mine.csv",
    )
    assert plan_for_machine(job, QUIET, measurements_file).ranked == plain.ranked
    argv = (*load_model("gpt2-tiny").flags, *flags_from_spec(measured.spec))
    trained = spec_from_flags(argv, 2, DeviceKind.CPU, "gpt2-tiny")
    add_rows(
        measurements_file,
        [build_measurement_row(trained, argv, CPU, "run", 3 * measured.seconds.total)],
    )
    corrected = plan_for_machine(job, QUIET, measurements_file)
    corrected_candidate = next(
        candidate
        for candidate in (*corrected.ranked, *corrected.examined)
        if candidate.spec == measured.spec
    )
    assert corrected_candidate.seconds.total == pytest.approx(3 * measured.seconds.total, rel=0.05)
    measurements_file.write_text("hello\n")
    monkeypatch.setattr("parakit.launch.auto.USER_MEASUREMENTS_FILE", measurements_file)
    with pytest.raises(MeasurementsError, match="row 1 lacks "):
        train_auto("train-auto-gpt2-tiny-2cpu", Options(runs=tmp_path, dry_run=True), QUIET)


def test_experts_are_planned_over_the_tensor_ranks_that_a_flag_states() -> None:
    usual = parse_target("train-baseline-moe-tiny-4cpu")
    whole = usual.with_options(Options(extra=("--expert-tensor-parallel-size", "1")))
    for job, is_stated in ((usual, False), (whole, True)):
        for candidate in search_configurations(build_request(job, CPU, Calibration())).ranked:
            split = candidate.spec.parallelism
            degrees = {1} if is_stated else {1, split.tensor}
            assert split.effective_expert_tensor in degrees
