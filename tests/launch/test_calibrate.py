from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.hardware import calibration_file_name, device_by_key
from parakit.config.run import DeviceKind
from parakit.launch import calibrate
from parakit.launch.calibrate import WORKLOADS, calibrate_machine
from parakit.planner.calibration import load_device_calibration
from tests.given import given

CPU = device_by_key("cpu")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("2", "DEVICES=2 is not a number of devices such as 2cpu or 8gpu."),
        ("0cpu", "DEVICES=0cpu is not a number of devices"),
        ("8gpu", "Needs 8 GPUs, found 0; DEVICES=2cpu measures CPU ranks"),
    ],
)
def test_devices_that_are_not_here_are_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: str, message: str
) -> None:
    monkeypatch.setattr(calibrate, "visible_gpus", tuple)
    with pytest.raises(LaunchError, match=message):
        calibrate_machine(devices, tmp_path, Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_rank_is_measured_shown_beside_what_is_shipped_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(
        WORKLOADS[DeviceKind.CPU],
        matmul_size=64,
        copy_bytes=1 << 20,
        head=(4, 8, 64),
        parameters=256,
        table=256,
        seconds_each=0.001,
    )
    monkeypatch.setitem(WORKLOADS, DeviceKind.CPU, small)
    assert calibrate_machine("1cpu", tmp_path, Console(width=100)) == 0
    output = capsys.readouterr().out
    kept = load_device_calibration(tmp_path, CPU)
    assert kept.matmul is not None
    assert [line.split()[:3] for line in output.splitlines() if "matmul" in line] == [
        ["matmul", "0.50", f"{kept.matmul:.2f}"]
    ]
    assert "link" not in output.partition("Kept in")[0]  # One rank sends nothing.


def test_a_plan_finds_the_constants_by_an_alias_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("parakit.cli.clone.ROOT", tmp_path)
    monkeypatch.setattr("parakit.cli.clone.USER_MEASUREMENTS_FILE", tmp_path / "mine.csv")
    kept = tmp_path / "runs" / calibration_file_name("h100")
    kept.parent.mkdir()
    kept.write_text("{}")
    asked = {"MODEL": "gpt2-large", "GPUS": "2"}
    assert given("plan", asked | {"GPU": "H100-SXM"}).calibration == Path(f"runs/{kept.name}")
    assert given("plan", asked | {"GPU": "a100"}).calibration is None
