"""The one command: what runs anywhere, what needs a clone, and the wheel in an empty environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from parakit.cli import parakit
from parakit.cli.commands import COMMANDS
from parakit.config.files import ROOT

WHEEL_MEGABYTES = 120
LOG = ROOT / "tests/reporting/logs/megatron-0.19.0.log"


def test_a_clone_is_found_from_any_folder_in_it(tmp_path: Path) -> None:
    assert parakit.clone_around(ROOT / "tests" / "planner") == ROOT
    assert parakit.clone_around(tmp_path) is None


def test_a_command_that_trains_outside_of_a_clone_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parakit.main(["train", "tp2-gpt2-tiny-2cpu"]) == parakit.REFUSED
    assert "takes a clone of the kit" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_train_without_a_name_shows_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert parakit.main(["train"]) == parakit.REFUSED
    assert capsys.readouterr().err == "Name what, for example: parakit train tp2-gpt2-tiny-2cpu\n"


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    absent = ("torch",)
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in absent else found(n))
    assert parakit.main(["dryrun"]) == parakit.REFUSED
    assert "'parakit dryrun' needs torch" in capsys.readouterr().err


@pytest.mark.parametrize("name", [one.name for one in COMMANDS if one.packages is not None])
def test_the_help_of_every_tool_has_the_commands_own_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parakit.main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: parakit {name} ")


def test_inspect_needs_nothing_that_only_training_does() -> None:
    absent = "import sys; sys.modules.update(psutil=None, pynvml=None, packaging=None)"
    code = f"{absent}; from parakit.cli.door import main; sys.exit(main(['inspect', '--help']))"
    ended = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_tool_is_a_command_of_its_own() -> None:
    command = (sys.executable, "-m", "parakit.cli.door", "plan", "--help")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("usage: parakit plan ")


def test_the_help_of_a_command_of_a_clone_has_the_variables_of_its_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parakit.main(["verify", "--help"])
    text = capsys.readouterr().out
    assert "--reference" in text
    assert "--save-every" not in text


def test_help_is_in_the_words_of_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parakit.main(["--help"])
    told = [line for line in capsys.readouterr().out.splitlines() if "=" in line]
    assert told == []
    assert parakit.main(["plan"]) == parakit.REFUSED
    assert "parakit plan --model gpt2-large --gpus 2" in capsys.readouterr().err


def test_the_version_is_the_wheels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parakit.main(["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"parakit {project['version']}\n"


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (("train", "dp2-gpt2-tiny-2cpu", "--iters", "5", "--dry-run"), ["ITERS=5", "DRY_RUN=1"]),
        (
            ("train", "dp2-gpt2-tiny-2cpu", "-j", "SEED=2", "--seed=3"),
            ["-j", "SEED=2", "SEED=3"],
        ),
        (("resume", "runs/one", "--runs", "x"), ["RUN=runs/one", "RUNS=x"]),
        (("resume", "runs/one", "--extra", "$(shell ls)"), ["EXTRA=$$(shell ls)"]),
    ],
)
def test_options_of_a_command_of_a_clone_are_makes_variables(
    words: tuple[str, ...], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[tuple[str, ...]] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "execvp", lambda _, command: executed.append(command))
    parakit.main(words)
    assert list(executed[0][-len(made) :]) == made


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--iters", "--iters has no value; see --help.\n"),
        ("--itres=5", "There is no option --itres; did you mean --iters?\n"),
    ],
)
def test_an_option_of_a_command_of_a_clone_is_known_and_has_a_value(
    option: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert parakit.main(["train", "dp2-gpt2-tiny-2cpu", option]) == parakit.REFUSED
    assert capsys.readouterr().err == told


@pytest.mark.slow
def test_the_wheel_works_from_another_folder_in_an_empty_environment(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    built = (*_pip(python, "wheel"), "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    subprocess.run(built, check=True)
    (wheel,) = tmp_path.glob("parakit-*.whl")
    subprocess.run((*_pip(python, "install"), str(wheel)), check=True)
    assert _megabytes(environment) < WHEEL_MEGABYTES

    def parakit_prints(*words: str) -> str:
        command = (str(environment / "bin/parakit"), *words)
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in ended.stderr
        return ended.stdout + ended.stderr

    assert "Alpa" in parakit_prints("plan", "--model", "gpt2-large", "--gpus", "2", "--alpa")
    assert "1F1B" in parakit_prints("schedules")
    assert "12 iterations" in parakit_prints("scrape", str(LOG))
    assert "reports/one/report.html" in parakit_prints("report", "--name", "one", str(LOG))
    assert (tmp_path / "reports/one/report.html").is_file()
    table = tmp_path / "table.csv"
    table.write_text("model,gpus,tokens_per_second,tokens_per_second_per_gpu\nm,2,100,90\n")
    assert "1 of them contradict" in parakit_prints("audit", str(table))
    assert "measurements are predicted" in parakit_prints("validate")
    assert "takes a clone of the kit" in parakit_prints("status")
    assert "parakit[train]" in parakit_prints("dryrun", "--model", "gpt2-tiny")
    assert "parakit[data]" in parakit_prints("prepare", "--input", "x.jsonl")
    assert "parakit[charts]" in parakit_prints(
        "plan", "--model", "gpt2-large", "--gpus", "2", "--svg", "plan.svg"
    )


def _pip(python: Path, command: str) -> tuple[str, ...]:
    return (str(python), "-m", "pip", command, "--quiet", "--disable-pip-version-check")


def _megabytes(folder: Path) -> float:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_blocks * 512 for path in files) / 2**20
