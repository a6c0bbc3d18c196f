import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.config.experts import BALANCED, ExpertLoad
from parakit.config.run import Fp8Recipe, TokenDispatcher
from parakit.costs.flops import flops_by_convention
from parakit.costs.memory import find_peak_rank
from parakit.planner.readings import command
from parakit.planner.readings.facts import origin_of_source
from parakit.planner.readings.reading_to_spec import RefusedError, convert_measurement
from parakit.planner.readings.residual import Residual, compute_residual, compute_residuals
from parakit.planner.readings.summary import collect_errors, encode_summary, evaluate_choices
from parakit.planner.readings.table import (
    COLUMNS,
    MEASUREMENTS_FILE,
    OPTIONAL_COLUMNS,
    MeasurementsError,
    PublishedMeasurement,
    read_measurements,
)
from parakit.planner.verdict import Fit
from tests.planner.readings.fit import fitted_readings
from tests.program import run_plan as main

ROW = {
    "source": "mine",
    "url_or_path": "runs/1",
    "model": "gpt-1b",
    "layers": "16",
    "hidden": "2048",
    "heads": "16",
    "seq": "1024",
    "gpu": "A100-80GB",
    "gpus": "8",
    "tp": "2",
    "pp": "1",
    "dp": "4",
    "mbs": "1",
    "gbs": "32",
    "dtype": "BF16",
    "metric": "step_time_s",
    "value": "1.0",
}


def file_of(folder: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    path = folder / "mine.csv"
    columns += tuple(name for name in OPTIONAL_COLUMNS if any(name in row for row in rows))
    lines = [",".join(columns)]
    lines += [",".join((ROW | row).get(name, "") for name in columns) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def parse_single_row(folder: Path, **changes: str) -> PublishedMeasurement:
    readings, _ = read_measurements(file_of(folder, changes))
    return readings[0]


def test_every_published_measurement_is_read() -> None:
    readings, unreadable = read_measurements()
    assert len(readings) > 3000
    assert not unreadable


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = file_of(tmp_path, {}, columns=tuple(name for name in COLUMNS if name != "gpus"))
    with pytest.raises(MeasurementsError, match=r"row 1 lacks gpus"):
        read_measurements(path)


def test_text_in_a_number_is_named_by_row_and_column_and_the_other_rows_are_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, {}, {"tp": "two"}, {"value": "fast"}, {"value": "nan"})
    assert main(["validate", "--readings", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in data["rows"]] == [2]
    reasons = [(item["line"], item["reason"].split(" is ")[0]) for item in data["refused"]]
    assert reasons == [
        (3, "row 3, column tp: 'two'"),
        (4, "row 4, column value: 'fast'"),
        (5, "row 5, column value: 'nan'"),
    ]


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_cells_may_be_divided_by_semicolons_or_tabs(tmp_path: Path, delimiter: str) -> None:
    path = file_of(tmp_path, {})
    path.write_text(path.read_text().replace(",", delimiter))
    assert read_measurements(path)[0][0].gpus == 8


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path, {}, columns=(*COLUMNS, "gpus"))
    with pytest.raises(MeasurementsError, match="row 1 names the column gpus twice"):
        read_measurements(path)


def test_integers_may_be_written_as_floats_and_empty_rows_are_skipped(
    tmp_path: Path,
) -> None:
    path = file_of(tmp_path, {"gpus": "8.0", "tp": "2.0"})
    path.write_text(path.read_text() + "," * (len(COLUMNS) - 1) + "\n")
    (measurement,), unreadable = read_measurements(path)
    assert (measurement.gpus, measurement.tp, unreadable) == (8, 2, ())


def test_tables_fit_80_columns_and_name_causes_of_memory_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "wide_console", lambda: Console(width=80))
    memory = {"metric": "peak_memory_allocated_bytes", "value": "1e9", "source": "a " * 30}
    assert main(["validate", "--readings", str(file_of(tmp_path, {}, memory))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all("≤15%" in line for line in lines if line.startswith(" By "))
    text = " ".join(" ".join(lines).split())
    assert "mostly host launches" in text
    assert text.count("· mostly") == 2
    assert lines[-1] == "2 of 2 measurements are predicted."


def test_leave_out_option_removes_a_public_source_from_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["validate", "--readings", str(file_of(tmp_path, {})), "--json"]
    errors = []
    for more in ([], ["--leave-out", "InternEvo"]):
        assert main([*arguments, *more]) == 0
        errors.append(json.loads(capsys.readouterr().out)["rows"][0]["error"])
    assert errors[0] != errors[1]
    assert main([*arguments, "--leave-out", "nobody"]) == 2


def test_time_per_step_without_a_global_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="does not state the global batch"):
        convert_measurement(parse_single_row(tmp_path, gbs=""))
    rate = parse_single_row(tmp_path, gbs="", metric="tokens_per_s_per_gpu")
    assert convert_measurement(rate).spec.batch.global_batch_size == 4


def test_file_without_readable_rows_exits_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--readings", str(file_of(tmp_path, {"value": "fast"}))]) == 2
    assert "row 2, column value: 'fast' is not a number above 0" in capsys.readouterr().err


MIXTRAL = {"model": "mixtral-8x7b", "tp": "1"}
SAID = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": "5000"}, "width of an attention head is 0"),
        (
            MIXTRAL | {"ep": "16", "gpus": "16", "dp": "16"},
            "8 experts, which EP 16 does not divide",
        ),
        (MIXTRAL | {"ep": "8", "gpus": "1", "dp": "1"}, "EP 8 lies inside DP x CP = 1"),
        ({"tp": "1", "dp": "1", "pp": "8", "layers": "4"}, "a stage between the ends has no layer"),
        (
            {"tp": "1", "dp": "1", "pp": "8", "vpp": "10000"},
            "a stage between the ends has no layer",
        ),
        ({"dtype": "int3"}, "'int3' is none of bf16"),
        ({"recompute": "sometimes"}, "'sometimes' is none of none, full"),
        ({"recompute": "full block"}, "'full block' is neither full nor full uniform 2"),
        ({"value": "1e-9"}, "of the peak of A100"),
        ({"value": "1e308"}, "of the peak of A100"),
        ({"metric": "mfu_percent", "value": "400"}, "of the peak of A100"),
        ({"flags": f"{SAID} --micro-batch-size 0 --global-batch-size 8"}, "micro batch is 0"),
        (
            {"flags": f"{SAID} --micro-batch-size 1 --tensor-model-parallel-size 0"},
            "= 0 does not divide 8",
        ),
        (
            {"flags": f"{SAID} --micro-batch-size 1 --hybrid-layer-pattern MQ"},
            "has the unknown block 'Q'",
        ),
    ],
)
def test_impossible_run_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    (refused,) = compute_residuals(*read_measurements(file_of(tmp_path, changes))).refused
    assert reason in refused.reason


def test_memory_of_trainer_with_uncounted_buffers_gets_no_verdict() -> None:
    chosen = [row for row in read_measurements()[0] if row.line in (425, 570)]
    residuals = compute_residuals(chosen)
    by_recipe, maxtext = encode_summary(residuals, collect_errors(residuals), {})["rows"]
    assert by_recipe["fits"] in set(Fit)
    assert maxtext["fits"] is None
    assert maxtext["memory_bytes"]


def test_number_of_layers_may_be_very_large(tmp_path: Path) -> None:
    changes = {"layers": str(10**9), "metric": "peak_memory_gib"}
    (residual,) = compute_residuals(*read_measurements(file_of(tmp_path, changes))).predicted
    assert residual.predicted > 10**8


@pytest.mark.parametrize(
    ("notes", "source", "line"),
    [('"a\nb"', "b", 4), ("a", "\nb", 4), ("a\u2028b", "b", 3), ("a\x0cb", "b", 3)],
)
def test_line_numbers_are_those_of_the_file_despite_multi_line_cells(
    tmp_path: Path, notes: str, source: str, line: int
) -> None:
    path = file_of(tmp_path, {"notes": notes}, {"value": "fast", "source": source})
    readings, unreadable = read_measurements(path)
    assert [row.line for row in unreadable] == [line]
    assert len(readings) == 1


def test_a_table_from_excel_is_read(tmp_path: Path) -> None:
    path = file_of(tmp_path, {})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert len(read_measurements(path)[0]) == 1


PACKED = gzip.compress(b"gpus,tp,pp\n8,2,1\n" * 50)


@pytest.mark.parametrize(
    "data",
    [
        PACKED[:-12],
        PACKED[:10] + b"\xff" + PACKED[11:],
        bytes(range(256)),
        b"gpus,tp,pp\n8,2," + b"x" * 200_000,
    ],
    ids=("cut", "damaged", "no text", "a huge cell"),
)
def test_a_damaged_file_is_named_by_the_loader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    assert main(["validate", "--readings", str(path)]) == 2
    assert capsys.readouterr().err.startswith(str(path))


def test_number_with_thousands_of_digits_is_refused_by_row_and_column(tmp_path: Path) -> None:
    with pytest.raises(MeasurementsError, match=r"row 2, column tp: '9{40}' is not"):
        read_measurements(file_of(tmp_path, {"tp": "9" * 5000}))


def test_degrees_that_do_not_multiply_to_the_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="TP 2 x PP 1 x CP 1 x DP 8 is not 8 GPUs"):
        convert_measurement(parse_single_row(tmp_path, dp="8"))


def test_an_unknown_gpu_is_refused_with_the_near_names(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="a100"):
        convert_measurement(parse_single_row(tmp_path, gpu="A1000"))


def test_time_and_rate_of_a_run_have_the_same_error_which_is_positive_if_predicted_too_slow(
    tmp_path: Path,
) -> None:
    # 32 samples of 1,024 tokens in 1 s on 8 devices.
    rate = str(32 * 1024 / 8)
    path = file_of(tmp_path, {}, {"metric": "tokens_per_s_per_gpu", "value": rate})
    residuals = compute_residuals(*read_measurements(path)).predicted
    assert residuals[0].error == pytest.approx(residuals[1].error)
    assert residuals[0].error == pytest.approx(residuals[0].predicted - 1)


@pytest.mark.slow
def test_every_published_measurement_is_predicted_or_refused_with_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["validate", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    lines = [row["line"] for part in ("rows", "refused") for row in data[part]]
    assert sorted(lines) == list(range(2, len(lines) + 2))
    assert all(item["reason"] for item in data["refused"])
    counted = sum(group["readings"] for group in data["sources"].values())
    assert counted == len(lines)
    assert MEASUREMENTS_FILE.stat().st_size < 100_000


def test_one_third_of_configurations_and_all_later_additions_are_held_out_of_fits() -> None:
    readings, _ = read_measurements()
    added, before = [], []
    for measurement in readings:
        is_added = measurement.notes.endswith(("added 2026-11-23", "added 2026-11-29"))
        (added if is_added else before).append(measurement)
    kept = [measurement for measurement in before if measurement.is_held_out]
    assert len(kept) / len(before) == pytest.approx(1 / 3, abs=0.03)
    assert all(replace(item, value=1.0, where="", notes="").is_held_out for item in kept[:50])
    assert len(added) == 496 + 124
    assert all(item.is_held_out for item in added)
    assert not fitted_readings([*kept, *added])
    assert fitted_readings(before[::10])


@pytest.mark.parametrize(
    ("source", "other"),
    [
        ("NVIDIA/Megatron-LM README (= arXiv:2205.05198 Table 5)", "arXiv:2205.05198"),
        ("NVIDIA-NeMo/Megatron-Bridge verification cards", "NVIDIA-NeMo/Megatron-Bridge"),
        ("mine", "mine"),
    ],
)
def test_duplicate_source_names_are_left_out_together(source: str, other: str) -> None:
    assert origin_of_source(source) == origin_of_source(other) == other


def test_memory_between_iterations_includes_last_input_and_gradient_per_virtual_stage() -> None:
    wanted = "gpt3_7b_tp1_pp4_memory_speed/golden_values_dev_dgx_gb200.json"
    (measurement,) = (
        measurement
        for measurement in read_measurements()[0]
        if wanted in measurement.where and measurement.metric == "memory_allocated_bytes"
    )
    (residual,) = compute_residuals([measurement]).predicted
    assert residual.measured_run.spec.parallelism.virtual_stages == 8
    assert abs(residual.predicted - measurement.value) < 2**20  # of 22.9 GiB


def test_source_may_overlap_tp_and_use_cuda_graphs_in_some_rows_only(
    tmp_path: Path,
) -> None:
    titan = {"source": "pytorch/torchtitan", "gpu": "H100"}
    vanilla, hidden = (
        convert_measurement(
            parse_single_row(tmp_path, **titan, notes=way)
        ).cluster.execution.overlap_tensor
        for way in ("vanilla TP", "async TP")
    )
    assert (vanilla, hidden) == (False, True)
    card = {"source": "NVIDIA-NeMo/Megatron-Bridge verification cards", "model": "llama3-8b"}
    graphs = [
        convert_measurement(
            parse_single_row(tmp_path, **card, gpu=gpu, url_or_path=path)
        ).cluster.execution.graphs
        for gpu, path in (
            ("B200", "card.yaml sft/B200"),
            ("B200", "card.yaml pretrain_performance/B200"),
            ("H100", "card.yaml pretrain_performance/H100"),
        )
    ]
    assert graphs == [False, True, False]


def published_measurement(line: int) -> PublishedMeasurement:
    return next(measurement for measurement in read_measurements()[0] if measurement.line == line)


def test_settings_of_a_source_depend_on_model_device_precision_and_release() -> None:
    # GPT-OSS 120B on GB200: BF16 of 26.02 and 26.04, MXFP8 of 26.06.
    exchanged, beside, graphs = (
        convert_measurement(published_measurement(line)).cluster.execution
        for line in (365, 238, 80)
    )
    assert (exchanged.deduplicated, exchanged.overlap_experts) == (False, False)
    assert (beside.overlap_experts, beside.graphs, beside.deduplicated) == (True, False, True)
    assert (graphs.graphs, graphs.overlap_experts, graphs.fused_experts) == (True, True, True)
    # Qwen3 235B on B300, 26.02.01 and 26.04.01.
    assert [
        convert_measurement(published_measurement(line)).cluster.execution.deduplicated
        for line in (322, 176)
    ] == [
        False,
        True,
    ]
    with pytest.raises(RefusedError, match="cudnn-frontend issue 256"):
        convert_measurement(published_measurement(41))
    # Nemotron-4 of NeMo 1 (24.12) and 2 (25.04), Grok 1 of the latter.
    assert [
        convert_measurement(published_measurement(line)).cluster.execution.eager_activation
        for line in (580, 665, 655)
    ] == [False, True, False]
    # In BigScience's table of the Hugging Face trainer, DP counts all GPUs.
    assert convert_measurement(published_measurement(933)).spec.name == "dp64-zero3"


def test_rows_that_drop_tokens_use_all_to_all_with_mean_expert_load() -> None:
    # Qwen3 on B200: 235B in 25.09, 30B in 25.11.
    dropped, kept = (convert_measurement(published_measurement(line)) for line in (438, 414))
    assert dropped.spec.expert_load == ExpertLoad(capacity=1.0, pads_to_capacity=True)
    assert not dropped.cluster.execution.deduplicated
    assert not dropped.cluster.execution.overlap_experts
    assert kept.spec.expert_load == BALANCED


def test_router_that_prefers_neighbouring_experts_is_known_per_model_and_source() -> None:
    # DeepSeek V3; Automodel's GPT-OSS 120B, whose router gives a token four neighbours.
    deepseek, neighbours = (
        convert_measurement(published_measurement(line)).spec.expert_load for line in (3, 687)
    )
    assert (deepseek.groups, deepseek.groups_per_token) == (8, 4)
    assert (neighbours.groups, neighbours.groups_per_token) == (32, 1)


def test_deepseek_v3_has_an_mtp_layer_unless_its_row_disables_it() -> None:
    assert [
        convert_measurement(published_measurement(line)).spec.shape.mtp_layers for line in (3, 390)
    ] == [1, 0]


def test_published_configuration_is_corrected_to_that_of_the_recipe() -> None:
    # Qwen3 30B on 16 H100 in 26.02.01: printed as PP 2 and EP 8.
    run = convert_measurement(published_measurement(3171)).spec.parallelism
    assert (run.pipeline, run.virtual_stages, run.expert, run.data) == (1, 1, 16, 16)
    # In 25.11: printed as VP 24 and micro batch 2. GPT-OSS 120B of Automodel is printed without EP.
    spec = convert_measurement(published_measurement(3209)).spec
    assert (spec.parallelism.virtual_stages, spec.batch.micro_batch_size) == (12, 1)
    assert convert_measurement(published_measurement(687)).spec.parallelism.expert == 64


def test_experts_are_split_over_tp_if_their_source_states_it() -> None:
    # Grok 1 on GB200 and H100, both TP 4 and EP 8.
    ways = [
        convert_measurement(published_measurement(line)).spec.parallelism.effective_expert_tensor
        for line in (655, 3318)
    ]
    assert ways == [4, 1]


def test_attention_without_a_kernel_in_its_release_is_unfused_and_recomputed() -> None:
    # DeepSeek V3 of dgxc on GB200 and H100.
    blackwell, hopper = (
        convert_measurement(published_measurement(line)).spec for line in (3309, 3308)
    )
    assert (blackwell.fused_attention, hopper.fused_attention) == (False, True)
    assert blackwell.recompute.recomputes("core_attn")
    assert hopper.recompute.recomputes("mla_up_proj")


def test_gpt_oss_has_the_expert_parallelism_of_the_automodel_recipes() -> None:
    assert [
        convert_measurement(published_measurement(line)).spec.parallelism.expert
        for line in (685, 687)
    ] == [
        8,
        64,
    ]


def test_fp8_recipe_that_a_row_omits_is_that_of_its_source() -> None:
    assert (
        convert_measurement(published_measurement(424)).spec.fp8_recipe is Fp8Recipe.TENSORWISE
    )  # Megatron-Bridge, 25.09
    assert (
        convert_measurement(published_measurement(534)).spec.fp8_recipe is Fp8Recipe.DELAYED
    )  # NeMo 24.12, FP8
    assert (
        convert_measurement(published_measurement(400)).spec.fp8_recipe is Fp8Recipe.TENSORWISE
    )  # FP8-CS (FP8-MX)


def test_token_dispatcher_and_optimizer_sharding_of_a_source_apply_to_its_rows() -> None:
    dispatchers = {
        convert_measurement(published_measurement(line)).spec.token_dispatcher
        for line in (3423, 3429)
    }
    assert dispatchers == {TokenDispatcher.ALL_GATHER}  # Qwen3 30B on 8 GH200
    # GPT-OSS by NCCL on GB200 and by DeepEP on H100, Qwen3 by HybridEP on GB200, and on H100 as it says.
    token_dispatchers = [
        convert_measurement(published_measurement(line)).spec.token_dispatcher
        for line in (365, 687, 42, 3698)
    ]
    plain, hybrid = TokenDispatcher.ALL_TO_ALL, TokenDispatcher.HYBRID_EP
    assert token_dispatchers == [plain, TokenDispatcher.DEEP_EP, hybrid, hybrid]
    zero = [item for item in read_measurements()[0] if "Lucie" in item.source and item.gpus == 8]
    stages = [item for item in zero if item.gbs == 192 and item.tp == 2 and item.pp == 1]
    assert len(stages) == 2
    assert len({convert_measurement(item).spec for item in stages}) == 1


def test_configurations_of_different_releases_form_a_choice_only_on_request() -> None:
    lines = (534, 611)  # 70B on 64 H100: NeMo 24.12 and 25.02
    residuals = compute_residuals([published_measurement(line) for line in lines])
    assert evaluate_choices(residuals) == []
    (mixed,) = evaluate_choices(residuals, across_releases=True)
    assert mixed.readings == 2


def predict_row(folder: Path, **changes: str) -> Residual:
    (residual,) = compute_residuals(*read_measurements(file_of(folder, changes))).predicted
    return residual


def test_unstated_virtual_stages_are_those_of_the_fastest_prediction_with_a_range(
    tmp_path: Path,
) -> None:
    split = {"tp": "1", "pp": "4", "dp": "2", "gbs": "64"}
    stated = [predict_row(tmp_path, **split, vpp=virtual) for virtual in ("1", "2", "4")]
    residual = predict_row(tmp_path, **split, vpp="")
    times = [item.predicted for item in stated]
    assert residual.unstated == ("virtual stages",)
    assert (residual.predicted, residual.ranged) == (min(times), (min(times), max(times)))
    assert all((item.unstated, item.ranged) == ((), None) for item in stated)


def test_unstated_micro_batch_is_the_fastest_that_fits(tmp_path: Path) -> None:
    stated = [predict_row(tmp_path, mbs=micro) for micro in ("1", "2", "4", "8")]
    residual = predict_row(tmp_path, mbs="")
    assert residual.unstated == ("micro batch",)
    fitting = [
        item.predicted
        for item in stated
        if find_peak_rank(item.measured_run.spec)[1].needed <= 1.07 * 80 * 2**30
    ]
    assert residual.predicted == min(fitting)
    assert residual.ranged == (min(fitting), max(fitting))


def test_rows_with_unstated_settings_are_summarised_separately_with_intervals_over_their_range(
    tmp_path: Path,
) -> None:
    path = file_of(tmp_path, {}, {"mbs": ""})
    residuals = compute_residuals(*read_measurements(path))
    data = encode_summary(residuals, collect_errors(residuals), {})
    assert sorted(data["sources"]) == ["mine", "mine, micro batch not stated"]
    stated, unstated = data["rows"]
    assert (stated["unstated"], stated["range"]) == ([], None)
    assert unstated["unstated"] == ["micro batch"]
    lowest, highest = unstated["range"]
    assert unstated["interval_80"][0] < lowest <= highest < unstated["interval_80"][1]


def test_hardware_flops_include_recomputation(tmp_path: Path) -> None:
    run = {"recompute": "full", "value": "100"}
    model = predict_row(tmp_path, **run, metric="model_tflops_per_gpu")
    hardware = predict_row(tmp_path, **run, metric="hardware_tflops_per_gpu")
    again = flops_by_convention(hardware.measured_run.spec, {"recomputed"})
    assert hardware.predicted / model.predicted == pytest.approx(
        again / flops_by_convention(model.measured_run.spec, ())
    )
    assert 1.2 < hardware.predicted / model.predicted < 4 / 3
    # This also holds if the source states FLOPs per token, because these are those of the model.
    assert compute_residual(hardware.measured_run, 1e9).predicted == hardware.predicted


def test_row_states_how_its_flops_are_counted(tmp_path: Path) -> None:
    flops = {"metric": "model_tflops_per_gpu", "value": "100"}
    half = predict_row(tmp_path, **flops)
    whole = predict_row(tmp_path, **flops, counts="whole-attention")
    assert whole.predicted > half.predicted
    _, (refused,) = read_measurements(file_of(tmp_path, flops, flops | {"counts": "some"}))
    assert "column counts: 'some' is not made of" in refused.reason
