"""Checks on machines that are simulated by fake programs and a fake NVML."""

import re
import shutil
import sys
from pathlib import Path

import pynvml
import pytest

from parakit.cluster.checks import devices, docker, host, network
from parakit.cluster.checks.result import FAIL, PASS, WARN, CheckResult, run_program
from parakit.config.files import ROOT
from parakit.launch.devices import all_gpus, describe_machine
from tests.launch.fake_nvml import FakeNvml

WITH_NVIDIA = """echo '{"runtimes":{"nvidia":{}},"is":[]}'"""


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def statuses(results: list[CheckResult]) -> dict[str, str]:
    return {result.subject: result.status for result in results}


def test_two_gpus_over_nvlink_pass(two_h200: FakeNvml) -> None:
    results = devices.check_description(describe_machine())
    assert statuses(results) == {"Driver": PASS, "GPUs": PASS, "Topology": PASS}
    assert results[0].finding == "580.82.07"
    assert results[1].finding == "0: NVIDIA H200, 143771 MiB; 1: NVIDIA H200, 143771 MiB"
    assert results[2].finding == "NVLink (18 links), peer access, between GPUs"


def test_gpus_without_nvlink_get_a_warning_about_the_published_numbers(
    two_h200: FakeNvml,
) -> None:
    two_h200.nvlink = False
    topology = devices.check_description(describe_machine())[2]
    assert topology.status == WARN
    assert topology.finding.startswith("PCIe, one NUMA node")
    assert "made over NVLink" in topology.fix


def test_gpus_whose_connection_nvml_does_not_report_are_a_warning(two_h200: FakeNvml) -> None:
    two_h200.gpus[0].refuses = {"nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor"}
    topology = devices.check_description(describe_machine())[2]
    assert (topology.status, topology.finding) == (WARN, "NVML does not report it")


def test_a_busy_gpu_and_a_single_one_are_warned_about(two_h200: FakeNvml) -> None:
    two_h200.gpus[0].used_bytes = 80161 << 20
    busy = devices.check_description(describe_machine())[2]
    assert (busy.status, busy.subject) == (WARN, "GPU 0")
    assert "choose others with CUDA_VISIBLE_DEVICES=1" in busy.fix
    two_h200.gpus.pop(0)
    all_gpus.cache_clear()
    assert "-2cpu targets" in devices.check_description(describe_machine())[1].fix


def test_missing_driver_is_no_failure_but_a_broken_driver_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(code: int) -> dict[str, object]:
        def init() -> None:
            raise pynvml.NVMLError(code)

        monkeypatch.setattr(pynvml, "nvmlInit", init)
        all_gpus.cache_clear()
        return describe_machine()

    none = devices.check_description(fail(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert statuses(none) == {"Driver": WARN}
    (driver,) = devices.check_description(fail(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    assert driver.status == FAIL
    assert driver.finding.startswith("NVML fails: ")
    all_gpus.cache_clear()


def test_only_the_driver_is_checked_before_setup(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "kit_python", lambda: None)
    assert devices.check_devices()[0].finding == "no NVIDIA driver"
    program(bin_folder, "nvidia-smi", "echo 'GPU 0: NVIDIA H200'; echo 'GPU 1: NVIDIA H200'")
    (driver,) = devices.check_devices()
    assert (driver.status, driver.fix) == (WARN, "run 'make setup'")
    assert driver.finding == "2 GPU(s), not examined before setup"
    program(bin_folder, "nvidia-smi", "echo 'Driver/library version mismatch'; exit 18")
    (driver,) = devices.check_devices()
    assert (driver.status, driver.finding) == (
        FAIL,
        "nvidia-smi fails: Driver/library version mismatch",
    )


@pytest.mark.ranks
def test_devices_are_queried_with_the_python_of_the_kit() -> None:
    (driver, *_) = devices.check_devices()
    assert driver.subject == "Driver"
    assert not driver.finding.startswith("cannot be asked")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, {"Docker": WARN}),
        ("echo 'permission denied' >&2; exit 1", {"Docker": WARN}),
        ('echo \'{"runtimes":{"runc":{}},"is":[]}\'', {"Docker": PASS, "NVIDIA runtime": WARN}),
        (
            f'case "$1" in info) {WITH_NVIDIA};; *) echo other:1;; esac',
            {"Docker": PASS, "Image": WARN},
        ),
        (
            f'case "$1" in info) {WITH_NVIDIA};; *) echo megatron-parallelism-kit:1;; esac',
            {"Docker": PASS, "Image": PASS},
        ),
    ],
)
def test_docker_checks_stop_at_the_first_missing_part(
    bin_folder: Path, body: str | None, expected: dict[str, str]
) -> None:
    if body is not None:
        program(bin_folder, "docker", body)
    results = docker.check_docker()
    assert statuses(results) == expected
    assert all(result.fix for result in results if result.status != PASS)


def test_packages_before_setup_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "kit_python", lambda: None)
    row = host.check_packages()
    assert (row.status, row.finding) == (WARN, "not installed yet")


@pytest.mark.ranks
def test_packages_at_another_version_are_named() -> None:
    assert host.differing_packages(
        sys.executable, "rich==0.1\n# note\npytest==9.2.0  # x\nno_such-thing==1"
    ) == [
        "no-such-thing missing instead of 1",
        f"rich {version('rich')} instead of 0.1",
    ]


def version(package: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(package)


def test_disk_is_measured_and_unchanged(tmp_path: Path) -> None:
    result = host.check_disk(str(tmp_path))
    assert re.fullmatch(r"\d+ GiB free, writes \d+ MB/s", result.finding)
    assert list(tmp_path.iterdir()) == []


def test_readme_setup_and_doctor_state_the_same_disk_space() -> None:
    readme = re.search(
        r"(\d+) GB of disk \(([\d.]+) GB of it for packages", (ROOT / "README.md").read_text()
    )
    setup = re.search(r"([\d.]+) GB on the disk", (ROOT / "tools/setup.sh").read_text())
    assert readme is not None
    assert setup is not None
    assert float(readme[1]) * 1e9 == host.SETUP_BYTES
    assert readme[2] == setup[1]


def test_a_disk_that_cannot_be_written_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host, "write_rate", refuse)
    assert host.check_disk(str(tmp_path)).status == FAIL


def test_small_shared_memory_names_the_remount(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: usage)
    result = host.check_shared_memory()
    assert result.status == WARN
    assert "--ipc=host" in result.fix


def test_an_unreachable_hub_names_the_mirror_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = network.check_hub()
    assert result.status == WARN
    assert "127.0.0.1:9 is out of reach" in result.finding
    assert "HF_ENDPOINT=" in result.fix


@pytest.mark.parametrize(
    ("key", "netrc_text", "finding"),
    [
        ("s3cret", "", "a key in WANDB_API_KEY"),
        ("", "machine api.wandb.ai login user password s3cret\n", "logged in ('wandb login')"),
        ("", "", "not logged in"),
    ],
)
def test_wandb_check_depends_on_the_presence_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, netrc_text: str, finding: str
) -> None:
    (tmp_path / "netrc").write_text(netrc_text)
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_API_KEY", key)
    result = network.check_wandb()
    assert finding in result.finding
    assert "s3cret" not in str(result)


@pytest.mark.ranks
def test_hanging_or_missing_program_gives_a_result(bin_folder: Path) -> None:
    (bin_folder / "sleep").symlink_to("/bin/sleep")
    assert run_program(["sleep", "600"], seconds=0.1).problem == "no answer within 0 s"
    assert run_program(["no-such-program"]).code is None


def test_problem_of_a_traceback_is_its_exception(bin_folder: Path) -> None:
    program(
        bin_folder,
        "broken",
        "printf 'Traceback (most recent call last):\\n  x\\nE: no\\n' >&2; exit 1",
    )
    assert run_program(["broken"]).problem == "E: no"
