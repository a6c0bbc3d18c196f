"""The doctor on machines simulated by programs on PATH, and on the oldest available Python."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from parakit.cluster.checks.result import PASS, WARN, CheckResult
from parakit.cluster.doctor.__main__ import format_results
from parakit.config.files import ROOT


def test_table_shows_fixes_below_rows_and_fits_the_width() -> None:
    rows = [
        CheckResult(PASS, "Python", "3.12"),
        CheckResult(WARN, "Hub", "is out of reach " * 6, "name one"),
    ]
    text = format_results(rows, 60, colour=False)
    assert text.splitlines()[0] == "pass  Python  3.12"
    assert text.splitlines()[-1] == " " * 14 + "→ name one"
    assert max(map(len, text.splitlines())) <= 60
    assert "\x1b[33mwarn\x1b[0m" in format_results(rows, 60, colour=True)


def pythons() -> list[str]:
    """Return interpreters older than the kit's, on PATH or in pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    pythons = [str(path) for path in sorted(root.glob("versions/3.*/bin/python"))]
    return [path for path in pythons if re.search(r"versions/3\.(6|8)\.", path)]


OLD = pythons()


@pytest.mark.skipif(not OLD, reason="no Python 3.6 or 3.8 in pyenv to run the doctor with")
@pytest.mark.parametrize("python", OLD, ids=lambda path: path.split("/")[-3])
def test_doctor_runs_on_a_bare_clone_with_an_old_python(python: str, tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    for folder in ("src/parakit/cluster", "src/parakit/config", "tools"):
        (kit / folder).mkdir(parents=True)
    for name in (
        "src/parakit/__init__.py",
        "src/parakit/lazy.py",
        "src/parakit/cluster/__init__.py",
        "src/parakit/config/__init__.py",
        "src/parakit/config/reachable.py",
        "tools/any_python.sh",
        "tools/doctor.sh",
        "tools/setup.sh",
    ):
        shutil.copy(ROOT / name, kit / name)
    for name in ("checks", "doctor"):
        shutil.copytree(ROOT / "src/parakit/cluster" / name, kit / "src/parakit/cluster" / name)
    shutil.copytree(ROOT / "docker", kit / "docker")
    shutil.copy(ROOT / "requirements.txt", kit)
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "1"}
    answer = subprocess.run(
        (str(kit / "tools/doctor.sh"),),
        env={
            "PATH": "/usr/bin:/bin",
            "KIT_PYTHON": python,
            "LC_ALL": "C",
            **unreachable,
            **nowhere,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in answer.stderr, answer.stderr
    assert answer.returncode == int("fail  " in answer.stdout)
    assert "Packages        not installed yet" in answer.stdout
    for subject in ("Python", "Programs", "Docker", "Driver", "Shared memory", "Limits", "Disk"):
        assert re.search(rf"^(pass|warn|fail)  {subject} ", answer.stdout, re.MULTILINE), subject
    assert re.search(r"\d+ pass, \d+ warn, \d+ fail$", answer.stdout.strip())


def test_missing_python_is_reported_by_the_shell_with_what_to_install(bin_folder: Path) -> None:
    for name in ("dirname",):
        (bin_folder / name).symlink_to(f"/usr/bin/{name}")
    script = (ROOT / "tools/any_python.sh").read_text().replace(".venv/bin/python", "no-venv")
    kit = bin_folder.parent / "kit/tools"
    kit.mkdir(parents=True)
    (kit / "any_python.sh").write_text(script.replace("/usr/libexec/platform-python", "none"))
    answer = subprocess.run(
        ("bash", str(kit / "any_python.sh"), "-m", "x"),
        env={"PATH": str(bin_folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("fail  Python  none from 3.6 on was found")


def test_an_unknown_launcher_is_refused_before_any_check() -> None:
    answer = subprocess.run(
        (str(ROOT / "tools/doctor.sh"),),
        env={"PATH": "/usr/bin:/bin", "LAUNCHER": "slurmm"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr == (
        "LAUNCHER=slurmm is not torchrun or slurm; LAUNCHER=slurm checks a cluster's nodes.\n"
    )
