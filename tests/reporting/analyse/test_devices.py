"""Speeds are judged per device where counts differ, and not at all where devices differ."""

import pytest

from parakit.artifacts.run import HostRecord
from parakit.config.hardware import device_by_key
from parakit.config.run import DeviceKind
from parakit.logs.runs import load_runs
from parakit.reporting.analyse.comparability import compare_speed
from parakit.reporting.analyse.configurations import group_into_rows
from parakit.reporting.analyse.statistics import TimeVerdict
from tests.reporting.analyse.test_foreign_logs import given, log, rows_of
from tests.reporting.factory import log_text, run_record, write_run
from tests.reporting.read.test_runs import ARGUMENTS
from tests.reporting.render.test_build import made, read_csv

MANY = given(world_size="56", data_parallel_size="28")
H100, V100, NPU = (
    "NVIDIA H100 80GB HBM3\n",
    "| 0  Tesla V100-SXM2-16GB  On |\n",
    "device: Ascend910B\n",
)
ASSUMED = "Neither log names its device; the same one is assumed (--device states it, or DEVICE= under make)."


def report_of(tmp_path, first, two, ms=2.0, **options):
    paths = log(tmp_path / "a.log", 1.0, first), log(tmp_path / "b.log", ms, two)
    _, text, folder = made(tmp_path, 400, paths=paths, **options)
    return rows_of(folder)[1]["speed"], text


def test_of_other_numbers_of_devices_the_verdict_is_per_device(tmp_path):
    # 56 devices take 0.05 of the time of 2: each of them is slower.
    speed, text = report_of(tmp_path, ARGUMENTS, MANY, 0.05)
    assert speed["per_token"]["ratio"] == pytest.approx(0.05, rel=0.02)
    assert speed["per_device_token"]["ratio"] == pytest.approx(1.4, rel=0.02)
    assert speed["per_device_token"]["verdict"] == "slower"
    assert speed["per_iteration"] is None
    assert "sp2dp28 ×56 takes 40% more device time per token than sp2 ×2" in text
    assert "with 56 devices instead of 2 it takes 95% less time per token than sp2 ×2" in text
    assert "sp2dp28 ×56 is slower per device than sp2 ×2 (" in text
    assert "95% less (faster)" not in text


def test_equal_numbers_of_devices_are_judged_as_ever(tmp_path):
    speed, text = report_of(tmp_path, ARGUMENTS, ARGUMENTS)
    assert speed["per_device_token"] is None
    assert "b.log takes 2 times the time per iteration of sp2 ×2 a.log" in text
    assert ASSUMED in text


def test_iteration_lines_alone_name_no_device(tmp_path):
    speed, text = report_of(tmp_path, "", "")
    assert speed["per_token"]["ratio"] == pytest.approx(2.0)
    assert ASSUMED in text
    assert "neither states its number of devices, so the same is assumed" in text


@pytest.mark.parametrize(
    ("first", "two", "reason"),
    [
        (H100, V100, "their devices differ (NVIDIA H100 80GB HBM3 | Tesla V100-SXM2-16GB)"),
        (NPU, V100, "their devices differ (Ascend910B | Tesla V100-SXM2-16GB)"),
        (H100, "", "only a.log names its device (NVIDIA H100 80GB HBM3); --device (make: DEVICE=)"),
        ("", V100, "only b.log names its device (Tesla V100-SXM2-16GB)"),
    ],
)
def test_other_or_unknown_devices_give_no_verdict(tmp_path, first, two, reason):
    speed, text = report_of(tmp_path, first + ARGUMENTS, two + ARGUMENTS)
    assert speed["per_token"] is None
    assert f"b.log against sp2 ×2 a.log: no verdict on speed, {reason}" in text
    assert ASSUMED not in text


def test_devices_of_hccl_are_no_gpus(tmp_path):
    _, text = report_of(tmp_path, given(distributed_backend="hccl"), V100 + ARGUMENTS)
    assert "their devices differ (Ascend NPU | Tesla V100-SXM2-16GB)" in text


def test_the_device_that_is_stated_is_that_of_both_logs(tmp_path):
    speed, text = report_of(tmp_path, H100 + ARGUMENTS, ARGUMENTS, device=device_by_key("h100"))
    assert speed["per_token"]["verdict"] == "slower"
    assert "device is assumed" not in text


def test_a_number_of_devices_that_one_log_alone_states_gives_no_verdict(tmp_path):
    sizes = "".join(
        line + "\n"
        for line in ARGUMENTS.splitlines()
        if "world" not in line and "parallel" not in line
    )
    speed, text = report_of(tmp_path, ARGUMENTS, sizes)
    assert speed["per_token"] is None
    assert "only a.log states its number of devices (2)" in text


def of_kit(tmp_path, device, host):
    runs = [("a", "baseline", 100.0), ("b", "dp2", 60.0)]
    folders = [
        write_run(
            tmp_path,
            run_record(name, strategy, device=device, host=host),
            log_text([900.0] + [ms + n % 3 / 10 for n in range(30)]),
        )
        for name, strategy, ms in runs
    ]
    rows = {row.newest.strategy: row for row in group_into_rows(load_runs(folders)[0])}
    return compare_speed(rows["baseline"], rows["dp2"])


def test_runs_of_the_kit_on_gpus_are_judged_per_device(tmp_path):
    host = HostRecord("here", "a processor", 2, 2**34, ("NVIDIA H200",) * 2)
    speed = of_kit(tmp_path, DeviceKind.GPU, host)
    assert speed.judged_time is speed.per_device_token
    assert speed.judged_time is not None
    assert speed.judged_time.verdict is TimeVerdict.SLOWER


def test_cpu_ranks_share_one_machine_and_are_judged_as_ever(tmp_path):
    speed = of_kit(tmp_path, DeviceKind.CPU, run_record("x").host)
    assert speed.judged_time is speed.per_iteration is speed.per_token
    assert speed.judged_time is not None
    assert speed.judged_time.verdict is TimeVerdict.FASTER


def test_a_log_is_compared_with_the_first_on_its_device(tmp_path):
    devices = {"a": H100, "b": V100, "c": V100, "d": H100}
    paths = [log(tmp_path / f"{name}.log", 1.0, line + ARGUMENTS) for name, line in devices.items()]
    _, _, folder = made(tmp_path, paths=tuple(paths))
    compared = {row["run"]: row["speed"] and row["speed"]["reference"] for row in rows_of(folder)}
    assert compared == {"a.log": None, "b.log": None, "c.log": "b.log", "d.log": "a.log"}
    assert read_csv(folder)["b.log"]["device"] == "Tesla V100-SXM2-16GB"
