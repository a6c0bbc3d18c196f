import importlib.metadata
import os
import re
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.launch.bench_gpu import ceilings, wheels
from tools.spec.files import ROOT

REQUIREMENTS = """\
matplotlib==3.11.2 \\
    --hash=sha256:00
    # via -r requirements.in
cycler==0.12.1 \\
    --hash=sha256:00
    # via matplotlib
mpmath==1.4.0 \\
    # via sympy
pillow==13.0.0 \\
    # via
    #   matplotlib
    #   tensorboard
sympy==1.14.0 \\
    # via torch
torch==2.15.0 \\
    # via
    #   -r requirements.in
    #   matplotlib
winonly==1.0 ; sys_platform == 'win32' \\
    # via matplotlib
"""


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(wheels, "_installed", lambda name: name in names)


def test_what_is_missing_brings_what_it_needs_but_nothing_of_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, *(name for name in wheels.NEEDED if name != "matplotlib"))
    assert wheels.missing(REQUIREMENTS) == (
        "matplotlib==3.11.2",
        "cycler==0.12.1",
        "pillow==13.0.0",
    )


def test_what_is_installed_needs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, *wheels.NEEDED)
    assert wheels.missing(REQUIREMENTS) == ()


def test_the_wheels_for_a_bare_machine_are_all_that_their_packages_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch)
    pins = dict(pin.split("==") for pin in wheels.missing())
    assert wheels.TORCH not in pins
    assert not [name for name in pins if name.startswith(("nvidia-c", "cuda", "triton"))]
    for name in sorted(set(pins) - {wheels.JUST_FILES}):
        asked = map(Requirement, importlib.metadata.requires(name) or ())
        here = (r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""}))
        names = {re.sub(r"[-_.]+", "-", r.name).lower() for r in here}
        assert names - {wheels.TORCH} <= set(pins), name


def test_every_version_is_the_one_that_setup_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "requirements.txt").read_text()
    installed(monkeypatch)
    for pin in wheels.missing():
        assert re.search(rf"^{re.escape(pin)}[ ;]", text, re.MULTILINE), pin


def test_nothing_is_missing_here() -> None:
    assert wheels.missing() == ()
    assert wheels.torch_problem() is None


@pytest.mark.parametrize(
    ("folder", "reason"),
    [(Path("none"), "WHEELS=none is no folder"), (None, "Not installed: msgspec")],
)
def test_without_a_folder_it_says_what_to_fetch(
    folder: Path | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, *(name for name in wheels.NEEDED if name != "msgspec"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=rf"{reason}.*'pip download .* msgspec=="):
        wheels.install(folder)


@pytest.mark.parametrize(("version", "fits"), [("2.8.1", False), ("2.9.0+cu130", True)])
def test_an_old_torch_is_refused(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.metadata, "version", lambda name: version)
    assert (wheels.torch_problem() is None) == fits


def write_wheel(folder: Path, pin: str) -> None:
    """A wheel of this name and version with nothing in it."""
    name, version = pin.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Requires-Dist: not-there\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{info}/{file}", text)


@pytest.mark.slow  # It makes a virtual environment.
def test_a_new_python_installs_all_of_it_from_the_folder_and_from_nowhere_else(
    tmp_path: Path,
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python, folder = tmp_path / "venv/bin/python", tmp_path / "wheels"
    folder.mkdir()
    write_wheel(tmp_path, "torch==2.11.0")
    alone = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (str(python), "-m", *arguments),
            cwd=ROOT,
            env=alone,
            capture_output=True,
            text=True,
            check=False,
        )

    install = ("tools.launch.bench_gpu.wheels", str(folder))
    assert "torch is not installed" in run(*install).stderr
    torch_wheel = str(next(tmp_path.glob("torch-*.whl")))
    assert run("pip", "install", "--no-index", "--no-deps", torch_wheel).returncode == 0
    asked = run(*install).stderr
    pins = re.findall(r"[\w.-]+==[\w.]+", asked)
    assert "pip could not install" in asked
    for pin in dict.fromkeys(pins):
        write_wheel(folder, pin)
    done = run(*install)
    assert (done.returncode, done.stderr) == (0, "")
    assert run("tools.launch.bench_gpu.wheels").returncode == 0  # Nothing is missing any more.


def test_ceilings_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "SECONDS_EACH", 0.01)
    assert ceilings.matmul_flops(64, "cpu") > 1e6
    assert ceilings.copy_bytes_per_second(1 << 16, "cpu") > 1e6
