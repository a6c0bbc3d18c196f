import csv
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from parakit.config.experts import ExpertLoad
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import load_model
from parakit.config.run import (
    DeviceKind,
    RunSpec,
    flags_from_spec,
    spec_from_flags,
    spec_from_model,
)
from parakit.config.strategy import Batch, parse_strategy
from parakit.planner.readings.local_readings import (
    MeasurementRow,
    OwnRuns,
    add_rows,
    build_measurement_row,
    load_own_runs,
)
from parakit.planner.readings.neighbours import estimate_uncertainty
from parakit.planner.readings.reading_to_spec import RefusedError, convert_measurement
from parakit.planner.readings.table import MeasurementsError, read_measurements
from parakit.planner.search import (
    Request,
    evaluate_configuration,
    search_configurations,
    search_tied_strategies,
)
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.iteration import iteration_seconds
from tests.patience import PATIENCE

H200 = device_by_key("h200")
MODEL = load_model("gpt2-large")


def on(devices: int) -> Cluster:
    link = link_by_key(H200.link)
    return Cluster(H200, devices, devices, link, link)


def spec(strategy: str, devices: int = 2, micro: int = 4) -> RunSpec:
    planned = spec_from_model(MODEL, parse_strategy(strategy, devices), Batch(micro, 64))
    return spec_from_flags(
        (*MODEL.flags, *flags_from_spec(planned)), devices, planned.device, MODEL.name
    )


def measured(strategy: str, factor: float, devices: int = 2, micro: int = 4) -> MeasurementRow:
    """Return the row of a run that took `factor` times as long as predicted."""
    trained = spec(strategy, devices, micro)
    argv = (*MODEL.flags, *flags_from_spec(trained))
    seconds = factor * iteration_seconds(trained, on(devices)).total
    return build_measurement_row(trained, argv, H200, f"run-{strategy}", seconds)


def test_row_of_local_file_parses_back_to_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "mine.csv"
    wanted = ["tp2dp2-zero1", "sp2pp2", "dp4", "vpp2x2dp2"]
    add_rows(path, [measured(name, 1.0, 4) for name in wanted])
    readings, unreadable = read_measurements(path)
    assert not unreadable
    assert [convert_measurement(measurement).spec for measurement in readings] == [
        spec(name, 4) for name in wanted
    ]
    assert next((r.tp, r.pp, r.dp, r.mbs, r.gbs) for r in readings) == (2, 1, 2, 4, 64)


def test_rows_with_and_without_patches_stay_separate(tmp_path: Path) -> None:
    path, plain = tmp_path / "mine.csv", spec("dp2")
    patched = replace(plain, fused=("adamw", "norm"))
    argv = (*MODEL.flags, *flags_from_spec(plain))
    add_rows(
        path,
        [
            build_measurement_row(spec_of_run, argv, H200, "r", 1.0)
            for spec_of_run in (plain, patched)
        ],
    )
    assert [
        convert_measurement(measurement).spec for measurement in read_measurements(path)[0]
    ] == [
        plain,
        patched,
    ]


def test_run_that_its_flags_do_not_reproduce_is_not_recorded() -> None:
    trained = replace(spec("dp2"), dropout=0.5)
    argv = (*MODEL.flags, *flags_from_spec(trained))
    build_measurement_row(trained, argv, H200, "r", 1.0)
    odd = replace(trained, fused_attention=False)
    with pytest.raises(RefusedError, match="r: its flags alone do not say what was trained"):
        build_measurement_row(odd, argv, H200, "r", 1.0)


def test_row_records_the_expert_load() -> None:
    routed = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-expert-capacity-factor 1.5"
    model = load_model("mixtral-8x7b")
    argv = (*model.flags, *routed.split(), "--moe-pad-expert-input-to-capacity", "--bf16")
    trained = spec_from_flags(argv, 1, DeviceKind.GPU, model.name)
    row = build_measurement_row(trained, argv, H200, "r", 1.0)
    again = spec_from_flags(shlex.split(row["flags"]), 1, DeviceKind.GPU)
    assert again.expert_load == trained.expert_load == ExpertLoad(1.0, 1.5, True, 4, 2)


def test_new_measurement_of_a_configuration_replaces_only_its_row(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    assert add_rows(path, [measured("dp2", 1.0), measured("tp2", 1.0)]) == 2
    with path.open("a") as file:
        file.write("mine,by hand" + "," * 25 + "\n")
    assert add_rows(path, [measured("dp2", 1.5), measured("pp2", 1.0)]) == 1
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["url_or_path"].partition(":")[2] for row in rows] == [
        *("run-dp2", "run-tp2", "", "run-pp2")
    ]
    assert float(rows[0]["value"]) == pytest.approx(
        1.5 * iteration_seconds(spec("dp2"), on(2)).total, rel=1e-5
    )


def test_concurrent_reports_keep_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parakit.planner.readings.local_readings._LOCK_SECONDS", PATIENCE)
    path = tmp_path / "mine.csv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_rows(path, [measured("dp2", 1.0, micro=n)]), (1, 2, 4, 8) * 2))
    assert sorted(int(row.mbs or 0) for row in read_measurements(path)[0]) == [1, 2, 4, 8]


def known(path: Path, *rows: MeasurementRow) -> OwnRuns:
    add_rows(path, rows)
    return load_own_runs(path, on(2))


def test_own_run_corrects_its_configuration_fully_and_distant_ones_mostly(
    tmp_path: Path,
) -> None:
    own_runs = known(tmp_path / "mine.csv", measured("tp2", 1.5))
    assert own_runs.bias(spec("tp2")) == pytest.approx(-log(1.5), rel=0.03)
    far = replace(spec("dp2"), shape=replace(spec("dp2").shape, seq_length=1 << 20))
    assert own_runs.bias(far) == pytest.approx(-log(1.5) * 0.09 / 0.115, rel=0.02)
    assert OwnRuns().bias(far) == 0


def test_own_runs_on_another_device_correct_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    add_rows(path, [measured("tp2", 1.5) | {"gpu": "h100"}])
    assert load_own_runs(path, on(2)) == OwnRuns()
    assert load_own_runs(tmp_path / "none.csv", on(2)) == OwnRuns()


def test_plan_chooses_the_strategy_that_own_runs_measured_as_fastest(tmp_path: Path) -> None:
    request = Request(MODEL, on(2), 64, spec("dp2"))
    before = search_configurations(request)
    assert before.winner is not None
    assert before.winner.strategy == "dp2"
    slower = [measured(name, 2.0) for name in ("dp2", "dp2-zero1", "dp2-zero2", "dp2-zero3")]
    own_runs = known(tmp_path / "mine.csv", *slower, measured("tp2", 1.0), measured("pp2", 1.0))
    after = search_configurations(replace(request, own_runs=own_runs))
    assert after.winner is not None
    assert "dp2" not in after.winner.strategy
    assert evaluate_configuration(after.request, after.winner.spec) == after.winner
    plain = evaluate_configuration(request, after.winner.spec)
    ratio = after.winner.seconds.total / plain.seconds.total
    assert after.winner.tokens_per_second == pytest.approx(plain.tokens_per_second / ratio)
    # The corrected times decide which strategies are tied.
    tied = search_tied_strategies(after.request)
    assert tied[0] == after.winner
    assert {*tied[1:]} == {*after.tied}


def test_interval_is_the_remaining_error_of_own_runs_corrected_by_each_other(
    tmp_path: Path,
) -> None:
    rows = [measured(name, 1.5) for name in ("dp2", "tp2", "sp2", "pp2")]
    own_runs = known(tmp_path / "mine.csv", *rows)
    uncertainty = estimate_uncertainty(spec("cp2"), on(2), own_runs)
    assert max(map(abs, uncertainty.own_errors)) < 0.05
    own_interval = uncertainty.interval()
    assert own_interval is not None
    assert own_interval[0] == uncertainty.seconds / (1 + max(uncertainty.own_errors))
    truth = 1.5 * iteration_seconds(spec("cp2"), on(2)).total
    assert uncertainty.seconds == pytest.approx(truth, rel=0.05)
    assert "Corrected by 4 runs of your own on H200 SXM 141 GB" in str(uncertainty)
    assert "too fast" in str(uncertainty)


def test_prediction_of_a_run_is_not_corrected_by_the_run_itself(tmp_path: Path) -> None:
    own_runs = known(tmp_path / "mine.csv", measured("dp2", 1.5))
    assert own_runs.without(replace(spec("dp2"), seed=7)) == OwnRuns()


def test_time_without_near_measurements_has_no_interval() -> None:
    link = link_by_key(H200.link)
    unknown = estimate_uncertainty(
        spec("dp2"), Cluster(device_by_key("rtx6000ada"), 2, 2, link, link), OwnRuns()
    )
    assert unknown.interval() is None
    assert "No published measurement on RTX 6000 Ada 48 GB is near this" in str(unknown)


def test_published_runs_of_the_kit_are_the_nearest_measurements_of_their_model() -> None:
    uncertainty = estimate_uncertainty(spec("dp2", micro=32), on(2), OwnRuns())
    assert "The nearest measurement is 0.77B on 2 H200 in fp16 (" in str(uncertainty)
    assert "published.yaml): 0.4372 s (predicted" in str(uncertainty)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("hello\n")
    with pytest.raises(MeasurementsError, match=r"row 1 lacks "):
        load_own_runs(path, on(2))


def test_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("name,grade\nAda,1\n")
    with pytest.raises(
        MeasurementsError, match=r"notes.csv is no table of measurements; name another file"
    ):
        add_rows(path, [measured("dp2", 1.0)])
    assert path.read_text() == "name,grade\nAda,1\n"


def test_old_row_without_flags_column_is_refused_and_new_rows_are_appended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.csv"
    row = measured("dp2", 1.0)
    before = row | {"notes": f"flags: {row['flags']}"}
    columns = [name for name in before if name not in ("flags", "fused")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(before)
    assert add_rows(path, [row, measured("tp2", 1.0)]) == 2
    old, *new = read_measurements(path)[0]
    with pytest.raises(
        RefusedError, match=r"its notes hold flags, .* 'make report' writes it anew"
    ):
        convert_measurement(old)
    assert [convert_measurement(measurement).spec for measurement in new] == [
        spec("dp2"),
        spec("tp2"),
    ]


def test_additional_columns_of_the_user_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    add_rows(path, [measured("dp2", 1.0)])
    header, row = path.read_text().splitlines()
    path.write_text(f"{header},rack\n{row},7\n")
    add_rows(path, [measured("tp2", 1.0)])
    with path.open(newline="") as file:
        assert [row["rack"] for row in csv.DictReader(file)] == ["7", ""]


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": "1e-9"},
        {"flags": measured("dp2", 1.0)["flags"].replace("-batch-size 4", "-batch-size 0")},
        {"flags": "", "heads": "5000"},
        {"flags": "", "notes": f"flags: {measured('dp2', 1.0)['flags']}"},
    ],
)
def test_impossible_row_corrects_nothing(tmp_path: Path, wrong: MeasurementRow) -> None:
    assert known(tmp_path / "mine.csv", measured("dp2", 1.0) | wrong) == OwnRuns()
