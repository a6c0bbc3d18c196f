"""tools/install.py with a fake uv that records its arguments and environment."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from tools import install

LOCK = """# made by tools/pin.sh
six==1.17.0 \\
    --hash=sha256:0a
    # via megatron
torch==2.15.0 \\
    --hash=sha256:0b \\
    --hash=sha256:0c
nvidia-cublas==13.4 ; sys_platform == 'linux' \\
    --hash=sha256:0d
nvidia-ml-py==13.6 \\
    --hash=sha256:0e
"""
UV = """
import json, os, sys
if sys.argv[1:] == ["--version"]:
    print("uv {version}")
    sys.exit()
given = {{name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_"))}}
asked = [open(argument).read() if argument.endswith(".txt") else argument for argument in sys.argv[1:]]
with open({log!r}, "a") as file:
    print(json.dumps([asked, given]), file=file)
if "--no-index" in asked:
    sys.exit({lacks})
if "compile" in asked:
    open(sys.argv[sys.argv.index("--output-file") + 1], "w").write("six==1.16.0 --hash=sha256:00")
print("Downloading torch (500MiB)\\n + six==1.17.0\\nInstalled 4 packages", file=sys.stderr)
sys.exit(asked[-1].endswith("+cpu") and not {cpu})
"""


class Machine:
    """Folder of the installation, with a lock and a uv on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "asked"
        (folder / "requirements.txt").write_text(LOCK)

    def uv(self, version: str = "0.13.9", cpu: bool = False, lacks: bool = False) -> None:
        program = self.folder / "uv"
        body = UV.format(version=version, log=str(self.log), cpu=cpu, lacks=lacks)
        program.write_text(f"#!{sys.executable}\n{body}")
        program.chmod(0o755)

    def install(
        self, arguments: Sequence[str] = ("requirements.txt",), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "HOME": str(self.folder),
            **variables,
        }
        command = (sys.executable, ROOT / "tools/install.py", *arguments)
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )

    def asked(self) -> list[tuple[list[str], dict[str, str]]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_existing_uv_installs_every_package_with_its_hashes(machine: Machine) -> None:
    machine.uv()
    answer = machine.install()
    command, _ = machine.asked()[-1]
    assert answer.returncode == 0
    assert command[:4] == ["pip", "install", "--python", sys.executable]
    assert command[4:7] == ["--no-deps", "--require-hashes", "--requirement"]
    assert install.packages_of(command[7]) == install.packages_of(LOCK)
    assert "500MiB" in answer.stderr
    assert "Installed 4" in answer.stderr
    assert "+ six" not in answer.stderr


def test_uv_gets_the_configuration_of_pip(machine: Machine) -> None:
    machine.uv()
    (machine.folder / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\nextra-index-url = https://b/simple\n  https://c/simple\n"
        "[install]\nfind-links = /wheels /more\ntrusted-host = b\nno-index = yes\n"
    )
    machine.install(
        PIP_CONFIG_FILE=str(machine.folder / "pip.conf"), PIP_CERT="/ca.pem", PIP_TIMEOUT="7"
    )
    command, passed = machine.asked()[-1]
    assert passed == {
        "UV_DEFAULT_INDEX": "https://a/simple",
        "UV_INDEX": "https://b/simple https://c/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "b",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "7",
    }
    assert "--no-index" in command


def test_settings_for_uv_have_precedence_over_settings_for_pip(machine: Machine) -> None:
    machine.uv()
    machine.install(PIP_INDEX_URL="https://pip/simple", UV_DEFAULT_INDEX="https://uv/simple")
    assert machine.asked()[-1][1]["UV_DEFAULT_INDEX"] == "https://uv/simple"


def test_pip_installs_and_reports_it_if_uv_is_disabled(machine: Machine) -> None:
    machine.uv()
    answer = machine.install(
        INSTALLER="pip", PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("uv is not used (INSTALLER=pip): pip installs")
    assert "No matching distribution found for" in answer.stderr


def test_old_uv_is_skipped_and_an_unavailable_uv_is_named(machine: Machine) -> None:
    machine.uv(version="0.1.2")
    tools = machine.folder / "kit/tools"
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "tools/install.py", tools)
    (tools.parent / "requirements.txt").write_text("uv==0.13.9 --hash=sha256:00\n")
    # An environment without pip simulates an index without uv.
    bare = (sys.executable, "-m", "venv", "--without-pip", tools.parent / "venv")
    subprocess.run(bare, check=True)
    answer = subprocess.run(
        (tools.parent / "venv/bin/python", tools / "install.py", "requirements.txt"),
        cwd=machine.folder,
        env={"PATH": str(machine.folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("uv is not used (pip cannot install uv==0.13.9: ")
    assert "No module named pip): pip installs" in answer.stderr.splitlines()[0]


def test_torch_for_cpus_is_installed_without_a_gpu_if_an_index_has_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "torch_for_cpus_fits", lambda: True)
    monkeypatch.setenv("PATH", f"{machine.folder}:{os.environ['PATH']}")
    monkeypatch.chdir(machine.folder)
    without = {"six", "nvidia-ml-py"}
    for there, kept in ((True, without), (False, {*without, "torch", "nvidia-cublas"})):
        machine.uv(cpu=there)
        assert install.main(["requirements.txt"]) == 0
        first, last = machine.asked()[-2:]
        assert first[0][-1] == "torch==2.15.0+cpu"
        assert {package.split("==")[0] for package in install.packages_of(last[0][-1])} == kept


BESIDE = ("--beside", "ngc.txt", "asked.in", "requirements.txt")


def test_lock_is_applied_as_far_as_constraints_of_other_packages_allow(machine: Machine) -> None:
    machine.uv(lacks=True)
    (machine.folder / "ngc.txt").write_text("six==1.16.0\n")
    answer = machine.install(BESIDE)
    assert answer.returncode == 0
    _, (compiled, _), (installed, _) = machine.asked()
    assert compiled[:3] == ["pip", "compile", "--python"]
    assert compiled[4:7] == ["asked.in", "--constraint", "six==1.16.0\n"]
    preferred = install.packages_of(compiled[8])
    assert (
        preferred[0] == f"six=={version('six')}"
    )  # This version is installed, and is kept if it satisfies the constraints.
    assert installed[4:7] == ["--no-deps", "--require-hashes", "--requirement"]
    assert installed[7] == "six==1.16.0 --hash=sha256:00"
    assert "  Not as in requirements.txt: six==1.16.0" in answer.stderr.splitlines()


def test_no_index_is_queried_if_no_package_is_missing(machine: Machine) -> None:
    machine.uv()
    (machine.folder / "ngc.txt").write_text("six\n")
    assert machine.install(BESIDE).returncode == 0
    ((command, passed),) = machine.asked()
    assert "--no-index" in command
    assert passed["UV_FIND_LINKS"] == ""
