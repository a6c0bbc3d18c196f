import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.spec.files import ROOT


@pytest.fixture
def bare_kit(tmp_path: Path) -> Path:
    """A clone with no .venv, and a PATH with the shell's own tools but no Python."""
    (tmp_path / "kit" / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "kit" / "tools")
    shutil.copy(ROOT / "requirements.txt", tmp_path / "kit")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "sha256sum", "cat", "rm"):
        (tools / name).symlink_to(shutil.which(name) or "")
    return tmp_path


def fake_python(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def set_up(kit: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(kit / "bin"), "HOME": str(kit / "home")}
    bash = shutil.which("bash") or ""
    command = (bash, str(kit / "kit/tools/setup.sh"))
    # `env bash` in the stand-ins needs env itself.
    if not (kit / "bin/env").exists():
        (kit / "bin/env").symlink_to(shutil.which("env") or "")
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_python_311_alone_is_refused_in_one_sentence(bare_kit: Path) -> None:
    fake_python(bare_kit / "bin/python3", "exit 1  # as 3.11 answers the version question")
    answer = set_up(bare_kit)
    assert answer.returncode == 1
    assert answer.stderr.startswith("CPython 3.12 or 3.13 with venv is needed, and none was found")
    assert answer.stderr.count("\n") == 1
    assert not (bare_kit / "kit/.venv").exists()


def test_a_shim_that_answers_not_found_is_passed_over_for_pyenvs_own(
    bare_kit: Path,
) -> None:
    fake_python(
        bare_kit / "bin/python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127"
    )
    log = bare_kit / "called"
    # Stands for a fitting interpreter: answers the question, then shows that it was chosen.
    answers = "-c) exit 0;; --version) echo Python 3.12.1;;"
    body = f'case "$1" in {answers} *) echo "$@" >> {log}; exit 1;; esac'
    fake_python(bare_kit / "home/.pyenv/versions/3.12.1/bin/python", body)
    set_up(bare_kit)
    assert log.read_text().startswith("-m venv --clear .venv")


def test_nothing_is_done_when_the_requirements_are_installed(bare_kit: Path) -> None:
    digest = subprocess.run(
        ("sha256sum", "requirements.txt"),
        cwd=bare_kit / "kit",
        capture_output=True,
        text=True,
        check=True,
    )
    (bare_kit / "kit/.venv").mkdir()
    (bare_kit / "kit/.venv/.requirements.sha256").write_text(digest.stdout)
    answer = set_up(bare_kit)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_in_the_kits_image_nothing_is_set_up(
    bare_kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(bare_kit / "kit/tools/setup.sh")
    environment = {"PATH": str(bare_kit / "bin"), "KIT_IMAGE": "25.06-py3"}
    answer = subprocess.run(
        (shutil.which("bash") or "", script),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
    assert not (bare_kit / "kit/.venv").exists()


def test_the_python_that_setup_would_take_can_be_asked_for(bare_kit: Path) -> None:
    fake_python(bare_kit / "bin/python3.13", "exit 0")
    script = str(bare_kit / "kit/tools/setup.sh")
    answer = subprocess.run(
        (shutil.which("bash") or "", script, "--python"),
        env={"PATH": f"{bare_kit / 'bin'}:/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (0, "python3.13\n")
    assert not (bare_kit / "kit/.venv").exists()


def test_an_unknown_make_target_gets_the_near_names() -> None:
    answer = subprocess.run(
        ("make", "-s", "train-tp2-gpt2-tinny-2cpu"),
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode != 0
    assert "There is no model 'gpt2-tinny'; did you mean gpt2-tiny" in answer.stdout
