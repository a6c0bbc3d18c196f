"""The program `parakit`: commands that run anywhere, commands that need a clone, and the wheel by itself."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from parakit.cli import program
from parakit.cli.commands import COMMANDS
from parakit.config.files import ROOT

WHEEL_MEGABYTES = 120
LOG = ROOT / "tests/reporting/logs/megatron-0.19.0.log"


def test_clone_is_recognised_from_any_of_its_folders(tmp_path: Path) -> None:
    assert program.find_clone(ROOT / "tests" / "planner") == ROOT
    assert program.find_clone(tmp_path) is None


def test_training_command_outside_of_a_clone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "find_clone", lambda folder: None)
    assert program.main(["train", "tp2-gpt2-tiny-2cpu"]) == program.REFUSED
    assert "takes a clone of the kit" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_train_without_a_name_shows_an_example_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert program.main(["train"]) == program.REFUSED
    assert (
        capsys.readouterr().err == "Name a target, for example: parakit train tp2-gpt2-tiny-2cpu\n"
    )


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    absent = ("torch",)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n in absent else find_spec(n)
    )
    assert program.main(["dryrun"]) == program.REFUSED
    assert "'parakit dryrun' needs torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [command.name for command in COMMANDS if command.packages is not None]
)
def test_help_of_every_tool_has_the_name_of_its_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: parakit {name} ")


def test_inspect_needs_no_packages_of_training() -> None:
    absent = "import sys; sys.modules.update(psutil=None, pynvml=None, packaging=None)"
    code = f"{absent}; from parakit.cli.program import main; sys.exit(main(['inspect', '--help']))"
    ended = subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_help_of_a_clone_command_lists_the_variables_of_its_target(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        program.main(["verify", "--help"])
    text = capsys.readouterr().out
    assert "--reference" in text
    assert "--save-every" not in text


def test_help_shows_options_instead_of_make_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--help"])
    told = [line for line in capsys.readouterr().out.splitlines() if "=" in line]
    assert told == []
    assert program.main(["plan"]) == program.REFUSED
    assert "parakit plan --model gpt2-large --gpus 2" in capsys.readouterr().err


def test_version_is_that_of_the_wheel(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--version"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"parakit {project['version']}\n"


@pytest.mark.parametrize(
    ("arguments", "target", "variables"),
    [
        (
            ("train", "dp2-gpt2-tiny-2cpu", "--iters", "5", "--dry-run"),
            "train-dp2-gpt2-tiny-2cpu",
            {"ITERS": "5", "DRY_RUN": "1"},
        ),
        (
            ("train-dp2-gpt2-tiny-2cpu", "SEED=2", "--seed=3"),
            "train-dp2-gpt2-tiny-2cpu",
            {"SEED": "3"},
        ),
        (("resume", "runs/one", "--runs", "x"), "resume", {"RUN": "runs/one", "RUNS": "x"}),
    ],
)
def test_options_of_a_clone_command_are_the_variables_of_its_target(
    arguments: tuple[str, ...],
    target: str,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, dict[str, str]]] = []

    def start(name: str, written: tuple[str, ...], **_: object) -> int:
        started.append((name, {variable: os.environ[variable] for variable in written}))
        return 0

    for variable in variables:
        monkeypatch.setenv(
            variable, ""
        )  # Environment variables that the program sets are removed after the test.
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(program, "run_target", start)
    assert program.main(arguments) == 0
    assert started == [(target, variables)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("resume", "RUN is required, for example: parakit resume runs/…"),
        ("import-hf", "--hf is required, for example: parakit import-hf --hf folder"),
        ("train tp2-gpt2-tiny-2cpu --iters x", "--iters x is not a whole number above 0."),
        ("compare-zero --dtype bf16", "--dtype applies only to the prediction"),
        ("plann", "did you mean 'plan'? 'parakit --help' lists them."),
        ("hlep", "did you mean 'help'? 'parakit --help' lists them."),
        ("plan --model gpt2-larg --gpus 2 --gpu h200", "or give --model the path of"),
    ],
)
def test_refusals_name_options_where_the_user_wrote_options(
    arguments: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("MAKELEVEL", "ITERS", "DTYPE"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.chdir(ROOT)
    assert program.main(arguments.split()) == program.REFUSED
    assert sentence in capsys.readouterr().err


def test_refusals_name_variables_where_make_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")
    assert program.main(["resume"]) == program.REFUSED
    assert capsys.readouterr().err == "RUN= is required, for example: make resume RUN=runs/…\n"


@pytest.mark.parametrize(
    ("level", "launch"),
    [
        ("", r"^ *parakit train-\S+-gpt2-large-2gpu --global-batch 128\b"),
        ("1", r"^ *make train-\S+-gpt2-large-2gpu GLOBAL_BATCH=128\b"),
    ],
)
def test_next_command_of_a_plan_is_written_as_the_caller_writes(
    level: str,
    launch: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {"MODEL": "gpt2-large", "GPUS": "2", "GPU": "h200", "GLOBAL_BATCH": "128"}
    if level:
        for name, value in {"MAKELEVEL": level, **variables}.items():
            monkeypatch.setenv(name, value)
        arguments = ["plan"]
    else:
        monkeypatch.delenv("MAKELEVEL", raising=False)
        arguments = ["plan"]
        for name, value in variables.items():
            arguments += [f"--{name.lower().replace('_', '-')}", value]
    assert program.main(arguments) == 0
    assert re.search(launch, capsys.readouterr().out, re.MULTILINE)


def test_argument_that_is_no_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["train", "dp2-gpt2-tiny-2cpu", "-j"]) == program.REFUSED
    assert capsys.readouterr().err == "'-j' is no option; see --help.\n"


def test_program_of_another_clone_is_started_in_that_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Makefile", "src/parakit/__main__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    started: list[tuple[str, ...]] = []
    monkeypatch.chdir(tmp_path / "src")
    monkeypatch.setattr(os, "execvp", lambda _, command: started.append(command))
    program.main(["status"])
    assert Path.cwd() == tmp_path
    assert started[0][-2:] == ("parakit", "status")


def test_clone_command_runs_at_the_root_from_any_folder_of_the_clone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Path] = []
    monkeypatch.chdir(ROOT / "tests" / "planner")

    def start(*_: object, **__: object) -> int:
        started.append(Path.cwd())
        return 0

    monkeypatch.setattr(program, "run_target", start)
    assert program.main(["status"]) == 0
    assert started == [ROOT]


def test_module_starts_the_program() -> None:
    command = (sys.executable, "-m", "parakit", "plan", "--help")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("usage: parakit plan ")


@pytest.mark.parametrize("module", ["plan", "report", "cli"])
def test_modules_of_earlier_versions_name_the_current_command(module: str) -> None:
    command = (sys.executable, "-m", f"tools.{module}")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == program.REFUSED
    assert f"'python -m tools.{module}' is 'parakit" in ended.stderr


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--iters", "--iters has no value; see --help.\n"),
        ("--itres=5", "There is no option --itres; did you mean --iters?\n"),
    ],
)
def test_option_of_a_clone_command_must_be_known_and_have_a_value(
    option: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert program.main(["train", "dp2-gpt2-tiny-2cpu", option]) == program.REFUSED
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

    def prints(program: str, *arguments: str) -> str:
        command = (str(environment / "bin" / program), *arguments)
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in ended.stderr
        return ended.stdout + ended.stderr

    def parakit_prints(*arguments: str) -> str:
        return prints("parakit", *arguments)

    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {
        "megatron_patches",
        "parakit",
    }
    assert not any("__pycache__" in name or "/tests/" in name for name in names)
    assert "Alpa" in parakit_prints("plan", "--model", "gpt2-large", "--gpus", "2", "--alpa")
    assert "1F1B" in parakit_prints("schedules")
    assert "12 iterations" in parakit_prints("report", "scrape", str(LOG))
    assert "reports/one/report.html" in parakit_prints("report", "--name", "one", str(LOG))
    assert (tmp_path / "reports/one/report.html").is_file()
    assert "measurements are predicted" in parakit_prints("validate")
    assert "takes a clone of the kit" in parakit_prints("status")
    assert "parakit[train]" in parakit_prints("dryrun", "--model", "gpt2-tiny")
    assert "takes a clone of the kit" in parakit_prints("prepare-ds", "--name", "x")
    data = ROOT / "examples/notebooks/data"
    shutil.copytree(data / "stacks", tmp_path / "stacks")
    assert "Rank 2 is in data loading" in parakit_prints("why-hang", "--dumps", "stacks")
    assert "parakit[train]" in parakit_prints("inspect", "--ckpt", str(data / "gpt2-one-layer"))
    code = "import parakit; print(parakit.plan('llama3-8b', gpus=8, gpu='h100'))"
    assert "Use sp2dp4-zero1: " in prints("python", "-c", code)
    assert "parakit[charts]" in parakit_prints(
        "plan", "--model", "gpt2-large", "--gpus", "2", "--svg", "plan.svg"
    )


def _pip(python: Path, command: str) -> tuple[str, ...]:
    return (str(python), "-m", "pip", command, "--quiet", "--disable-pip-version-check")


def _megabytes(folder: Path) -> float:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_blocks * 512 for path in files) / 2**20
