import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from parakit.config.files import ROOT

SHELLS_TOOLS = (
    *("bash", "env", "dirname", "sha256sum", "cat", "cp", "rm", "mkdir", "touch"),
    *("flock", "readlink", "chmod"),
)


@pytest.fixture
def bare_kit(tmp_path: Path) -> Path:
    """Return a clone without .venv, and a PATH with the shell's tools but without Python."""
    (tmp_path / "kit" / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "kit" / "tools")
    shutil.copy(ROOT / "requirements.txt", tmp_path / "kit")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in SHELLS_TOOLS:
        (tools / name).symlink_to(shutil.which(name) or "")
    return tmp_path


def fake_python(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def begin_set_up(kit: Path) -> "subprocess.Popen[str]":
    environment = {"PATH": str(kit / "bin"), "HOME": str(kit / "home")}
    command = (shutil.which("bash") or "", str(kit / "kit/tools/setup.sh"))
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def set_up(kit: Path) -> subprocess.CompletedProcess[str]:
    begun = begin_set_up(kit)
    out, complaint = begun.communicate()
    return subprocess.CompletedProcess(begun.args, begun.returncode, out, complaint)


def test_machine_with_only_python_311_is_refused_in_one_sentence(bare_kit: Path) -> None:
    fake_python(bare_kit / "bin/python3", "exit 1  # as 3.11 answers the version question")
    answer = set_up(bare_kit)
    assert answer.returncode == 1
    assert answer.stderr.startswith("CPython 3.12 or 3.13 with venv is needed, and none was found")
    assert answer.stderr.count("\n") == 1
    assert not (bare_kit / "kit/.venv").exists()


def test_failing_shim_is_skipped_for_an_interpreter_of_pyenv(
    bare_kit: Path,
) -> None:
    fake_python(
        bare_kit / "bin/python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127"
    )
    log = bare_kit / "called"
    # The fake interpreter answers the version check, then records that it was chosen.
    answers = "-c) exit 0;; --version) echo Python 3.12.1;;"
    body = f'case "$1" in {answers} *) echo "$@" >> {log}; exit 1;; esac'
    fake_python(bare_kit / "home/.pyenv/versions/3.12.1/bin/python", body)
    set_up(bare_kit)
    assert log.read_text().startswith("-m venv --clear .venv")


PYTHON_WITH_VENV = """
log() {{ echo "$*" >> {log}; }}
case "$1 $2 $3" in
  "-c "*) exit 0 ;;
  "--version "*) echo Python 3.12.1 ;;
  "-m venv --clear")
    log venv
    rm -rf "$4"; mkdir -p "$4/bin" "$4/lib/python3.12/site-packages"
    touch "$4/pyvenv.cfg"; cp "$0" "$4/bin/python" ;;
  "tools/install.py "*)
    log "$@"
    {install} ;;
esac"""
INSTALLED = ["venv", "tools/install.py requirements.txt"]


def installs(kit: Path, install: str = "exit 0") -> None:
    """Put a fake CPython 3.12 on PATH, which installs with the given shell commands."""
    body = PYTHON_WITH_VENV.format(log=kit / "called", install=install)
    fake_python(kit / "bin/python3.12", body)


def called(kit: Path) -> list[str]:
    lines = (kit / "called").read_text().splitlines()
    (kit / "called").unlink()
    return lines


def test_finished_setup_is_not_repeated(bare_kit: Path) -> None:
    installs(bare_kit)
    first = set_up(bare_kit)
    assert (first.returncode, called(bare_kit)) == (0, INSTALLED)
    assert first.stderr.startswith("Setting up .venv with Python 3.12.1, once: up to 2.8 GB")
    second = set_up(bare_kit)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert not (bare_kit / "called").exists()


def test_parakit_of_the_environment_runs_its_clone(bare_kit: Path) -> None:
    installs(bare_kit)
    set_up(bare_kit)
    environment = bare_kit / "kit/.venv"
    (environment / "bin/parakit").unlink()  # An environment that was set up before has this file.
    assert set_up(bare_kit).returncode == 0
    for name in ("src/parakit", "elsewhere/parakit"):
        package = bare_kit / "kit" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text("import sys; print(__file__, sys.argv[1:])")
    (environment / "bin/python").unlink()
    (environment / "bin/python").symlink_to(sys.executable)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if version != "python3.12":
        (environment / "lib/python3.12").rename(environment / "lib" / version)
    answer = subprocess.run(
        (environment / "bin/parakit", "plan", "a b"),
        cwd=bare_kit / "kit/elsewhere",
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == f"{bare_kit}/kit/src/parakit/__main__.py ['plan', 'a b']\n"


@pytest.mark.parametrize("end", ["echo 'ERROR: no route'; exit 1", "kill -9 $(cat {pid})"])
def test_unfinished_setup_is_repeated(bare_kit: Path, end: str) -> None:
    installs(bare_kit)
    set_up(bare_kit)
    called(bare_kit)
    (bare_kit / "kit/requirements.txt").write_text("six==1.17.0\n")
    install = "touch {venv}/half; " + end
    setup = "echo $$ > {pid}; exec bash {kit}/tools/setup.sh"
    names = {"kit": bare_kit / "kit", "venv": bare_kit / "kit/.venv", "pid": bare_kit / "pid"}
    # The environment of old requirements is updated to new ones, and the update ends half-way.
    (bare_kit / "kit/.venv/bin/python").write_text(
        "#!/usr/bin/env bash"
        + PYTHON_WITH_VENV.format(log=bare_kit / "called", install=install.format(**names))
    )
    cut = subprocess.run(
        (shutil.which("bash") or "", "-c", setup.format(**names)),
        env={"PATH": str(bare_kit / "bin"), "HOME": str(bare_kit)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert cut.returncode != 0
    assert (bare_kit / "kit/.venv/half").exists()
    called(bare_kit)
    shutil.copy(
        ROOT / "requirements.txt", bare_kit / "kit"
    )  # These requirements were installed completely before.
    assert (set_up(bare_kit).returncode, called(bare_kit)) == (0, INSTALLED)
    assert not (bare_kit / "kit/.venv/half").exists()


def test_failed_installation_is_reported_with_what_to_do_after_the_output_of_the_installer(
    bare_kit: Path,
) -> None:
    installs(bare_kit, install="echo 'error: no route' >&2; exit 1")
    answer = set_up(bare_kit)
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-2] == "error: no route"
    assert answer.stderr.splitlines()[-1].startswith("Packages of requirements.txt could not be")
    assert not (bare_kit / "kit/.venv/.requirements.sha256").exists()


def test_environment_without_its_python_is_created_again(bare_kit: Path) -> None:
    installs(bare_kit)
    set_up(bare_kit)
    called(bare_kit)
    (bare_kit / "kit/.venv/bin/python").unlink()
    (bare_kit / "kit/.venv/bin/python").symlink_to("/removed/python3.12")
    answer = set_up(bare_kit)
    assert (answer.returncode, called(bare_kit)[0]) == (0, "venv")
    assert "is gone: .venv is made anew" in answer.stderr


def test_folder_that_is_no_environment_is_not_removed(bare_kit: Path) -> None:
    installs(bare_kit)
    (bare_kit / "kit/.venv").mkdir()
    (bare_kit / "kit/.venv/mine").touch()
    answer = set_up(bare_kit)
    assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)
    assert answer.stderr.startswith(".venv is there and is no virtual environment; move it away")
    assert (bare_kit / "kit/.venv/mine").exists()


def test_linked_environment_is_never_removed(bare_kit: Path) -> None:
    installs(bare_kit)
    set_up(bare_kit)
    called(bare_kit)
    (bare_kit / "kit/.venv").rename(bare_kit / "shared")
    (bare_kit / "kit/.venv").symlink_to(bare_kit / "shared")
    assert (set_up(bare_kit).returncode, set_up(bare_kit).stderr) == (0, "")
    (bare_kit / "shared/.unfinished").touch()
    answer = set_up(bare_kit)
    assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)
    assert answer.stderr.startswith(".venv is a link to an environment that was not installed")
    assert (bare_kit / "shared/bin/python").exists()


def test_a_second_make_waits_for_the_first(bare_kit: Path) -> None:
    installs(bare_kit)
    folder = os.open(bare_kit / "kit", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with begin_set_up(bare_kit) as second, ExitStack() as first:
        first.callback(os.close, folder)
        assert second.stderr is not None
        message = second.stderr.readline()
        assert message.startswith("Another make is setting up .venv; waiting")
        time.sleep(0.5)
        assert not (bare_kit / "called").exists()
        first.close()
        second.communicate()
    assert second.returncode == 0
    assert (bare_kit / "called").exists()


def test_nothing_is_set_up_in_the_image_of_the_kit(
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


def test_python_for_setup_can_be_printed(bare_kit: Path) -> None:
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


def test_unknown_make_target_suggests_similar_names() -> None:
    answer = subprocess.run(
        ("make", "-s", "train-tp2-gpt2-tinny-2cpu"),
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode != 0
    assert "There is no model 'gpt2-tinny'; did you mean gpt2-tiny" in answer.stderr
