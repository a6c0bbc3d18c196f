import json
import subprocess
import sys

import pytest

from parakit.cluster.container.versions import _format_cudnn_version, installed_versions
from parakit.config.files import ROOT


def test_versions_on_the_host_are_read_from_metadata_without_importing_torch() -> None:
    code = (
        "import sys; from parakit.cluster.container.versions import installed_versions as i; i();"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"


def test_versions_leave_out_packages_that_are_missing() -> None:
    versions = installed_versions()
    assert {"python", "torch", "megatron-core", "numpy"} <= versions.keys()
    assert "transformer-engine" not in versions
    assert all(versions.values())


def test_library_versions_in_the_image_are_read_from_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("parakit.cluster.container.versions._package_version", lambda package: None)
    monkeypatch.setenv("NCCL_VERSION", "2.27.3")
    assert "nccl" not in installed_versions()
    monkeypatch.setenv("KIT_IMAGE", "25.06-py3")
    assert installed_versions()["nccl"] == "2.27.3"


@pytest.mark.parametrize(
    ("number", "version"), [(91002, "9.10.2"), (8907, "8.9.7"), (92600, "9.26.0"), (None, "")]
)
def test_cudnn_number_is_converted_to_a_version(number: int | None, version: str) -> None:
    assert _format_cudnn_version(number) == version


@pytest.mark.slow
def test_torch_reports_the_same_versions() -> None:
    command = (sys.executable, "-m", "parakit.cluster.container.versions")
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told, known = json.loads(answer.stdout), installed_versions()
    assert told["cuda"] == known["cuda"]
    assert known["cudnn"].startswith(told["cudnn"])
