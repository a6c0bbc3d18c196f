"""Command lines and checks of Podman and Apptainer, which run the same image as Docker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parakit.cluster.checks import apptainer as apptainer_checks
from parakit.cluster.checks import docker as docker_checks
from parakit.cluster.checks.podman import check_podman, check_podman_container
from parakit.cluster.checks.result import refusal_sentences
from parakit.cluster.container import docker as docker_module
from parakit.cluster.container.apptainer import EXEC_SCRIPT, ApptainerContainer
from parakit.cluster.container.docker import (
    PodmanContainer,
    bind_mount,
    query_container_end,
    remove_container,
)
from parakit.cluster.container.image import build_image, find_pair
from parakit.config.errors import LaunchError
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.run import RuntimeName
from parakit.launch.runtime import container_runtime

SIF_HEADER = b"#!/usr/bin/env run-singularity\n\0" + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(16)


def stand_in(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a shell script on PATH under a program's name; it writes its calls to `calls` beside it."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "$*" >>{folder}/calls\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "calls"


def podman(folder: Path, monkeypatch: pytest.MonkeyPatch, rootless: str = "true") -> Path:
    answers = (
        f'case "$1" in info) echo \'{{"rootless":{rootless}}}\';; '
        "image) [[ $2 == ls ]] && echo localhost/megatron-parallelism-kit:t || echo abc;; esac"
    )
    return stand_in(folder, "podman", answers, monkeypatch)


@pytest.fixture(autouse=True)
def no_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docker_module, "INFINIBAND", tmp_path / "infiniband")


def test_a_rootless_podman_gets_gpus_by_cdi_and_the_callers_user_and_limits() -> None:
    container = PodmanContainer("i:t", "7:8", inherited=("NCCL_DEBUG",), rootless=True)
    assert container.wrap(("python3", "-V"), ("SETTING",)) == (
        *("podman", "run", "--rm", "--init", "--user", "7:8", "--workdir", str(ROOT)),
        *("--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--security-opt=label=disable"),
        *("--userns", "keep-id", "--device=nvidia.com/gpu=all", "--ipc=host", "--ulimit", "host"),
        *("--mount", bind_mount(ROOT), "--env", "KIT_LEDGER", "--env", "KIT_RUN_MARK", "--env"),
        *("KIT_STACKS", "--env", "NCCL_DEBUG", "--env", "PYTHONUNBUFFERED", "--env", "SETTING"),
        *("--env", f"PYTHONPATH={PYTHON_PATH}", "i:t", "python3", "-V"),
    )


def test_podman_as_root_raises_limits_and_cpu_ranks_get_no_gpus() -> None:
    command = PodmanContainer("i:t", "7:8", gpus=False).wrap(("true",), ())
    assert "--ulimit" in command
    assert "memlock=-1" in command
    assert not {"--device=nvidia.com/gpu=all", "--userns", "--gpus"} & {*command}


def test_apptainer_executes_in_the_sif_file_with_variables_by_name() -> None:
    container = ApptainerContainer("i:t", "7:8", inherited=("NCCL_DEBUG",), host_network=True)
    assert container.wrap(("python3", "-V"), ("SETTING",)) == (
        *(str(EXEC_SCRIPT), "KIT_LEDGER", "KIT_RUN_MARK", "KIT_STACKS", "NCCL_DEBUG"),
        *("PYTHONUNBUFFERED", "SETTING", "--", "--cleanenv", "--nv", "--pwd", str(ROOT)),
        *("--mount", bind_mount(ROOT), "--env", f"PYTHONPATH={PYTHON_PATH}"),
        *("--env", "PYTHONNOUSERSITE=1", str(ROOT / "docker/i+t.sif"), "python3", "-V"),
    )
    assert "--nv" not in ApptainerContainer("i:t", "7:8", gpus=False).wrap(("true",), ())


def test_the_script_of_apptainer_passes_values_in_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in(tmp_path / "bin", "apptainer", "env | grep ^APPTAINERENV_", monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", "s3cret with spaces")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    command = (str(EXEC_SCRIPT), "NCCL_DEBUG", "WANDB_API_KEY", "--", "--nv", "i.sif", "true")
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "APPTAINERENV_WANDB_API_KEY=s3cret with spaces\n"
    assert calls.read_text() == "exec --nv i.sif true\n"


@pytest.mark.parametrize(
    ("rootless", "groups"), [("true", ("keep-groups",)), ("false", ("987", "4321"))]
)
def test_the_runtime_of_podman_follows_what_podman_reports(
    rootless: str, groups: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman(tmp_path / "bin", monkeypatch, rootless)
    monkeypatch.setattr(os, "getgroups", lambda: [987, os.getgid(), 4321])
    runtime = container_runtime(find_pair(None), name=RuntimeName.PODMAN)
    assert runtime.name is RuntimeName.PODMAN
    assert isinstance(runtime.container, PodmanContainer)
    assert runtime.container.rootless is (rootless == "true")
    assert runtime.container.groups == groups


def test_podman_without_a_cdi_specification_gives_no_gpus_but_runs_cpu_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman(tmp_path / "bin", monkeypatch)
    monkeypatch.setattr(docker_checks, "CDI_FOLDERS", (str(tmp_path / "cdi"),))
    (refusal,) = refusal_sentences(check_podman_container("i:t", "25.06-py3", gpus=True))
    assert "nvidia-ctk cdi generate" in refusal
    assert refusal_sentences(check_podman_container("i:t", "25.06-py3", gpus=False)) == []
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.yaml").touch()
    assert refusal_sentences(check_podman_container("i:t", "25.06-py3", gpus=True)) == []
    assert [result.finding for result in check_podman()] == [
        "rootless",
        "megatron-parallelism-kit:t",
    ]


def test_programs_that_are_missing_are_named_and_the_doctor_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (refusal,) = refusal_sentences(check_podman_container("i:t", "25.06-py3"))
    assert refusal.startswith("Podman is not installed (no 'podman' on PATH)")
    (refusal,) = refusal_sentences(apptainer_checks.check_apptainer_container("i:t", "25.06-py3"))
    assert refusal.startswith("Apptainer is not installed (no 'apptainer' on PATH)")
    assert check_podman() == apptainer_checks.check_apptainer() == []


def test_apptainer_needs_a_sif_file_whose_header_identifies_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "bin", "apptainer", "", monkeypatch)
    monkeypatch.setattr(apptainer_checks, "_FOLDER", tmp_path)
    file = tmp_path / "i+t.sif"
    (refusal,) = refusal_sentences(apptainer_checks.check_apptainer_container("i:t", "25.06-py3"))
    assert refusal.startswith(f"{file} is not there; make it where Docker is with 'make image")
    assert f"'apptainer build {file} docker-daemon:i:t'" in refusal
    file.write_bytes(b"a squash file")
    (refusal,) = refusal_sentences(apptainer_checks.check_apptainer_container("i:t", "25.06-py3"))
    assert refusal.startswith(f"{file} is no SIF file")
    file.write_bytes(SIF_HEADER[:-1] + b"\x07" + b"the rest")
    assert refusal_sentences(apptainer_checks.check_apptainer_container("i:t", "t")) == []
    assert ApptainerContainer("i:t", "7:8").image_id() == "00" * 15 + "07"


def test_podmans_events_say_that_a_container_was_killed_and_by_which_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As podman 4.3.1 prints them for `podman kill`.
    kill = {"Status": "kill", "Type": "container"}
    died = {"Status": "died", "Type": "container", "ContainerExitCode": 137}
    lines = "\n".join(json.dumps(event) for event in (kill, died))
    stand_in(tmp_path / "bin", "podman", f"[[ $1 == events ]] && echo '{lines}'", monkeypatch)
    end = query_container_end("abc", 0.0, "podman")
    assert (end.program, end.signals, end.out_of_memory) == ("podman", (9,), False)
    stand_in(tmp_path / "bin", "podman", f"echo '{json.dumps(died)}'", monkeypatch)
    assert query_container_end("abc", 0.0, "podman").signals == (), "nobody killed it"


def test_a_container_is_removed_by_the_program_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = podman(tmp_path / "bin", monkeypatch)
    file = tmp_path / "container.id"
    file.write_text("abc")
    assert remove_container(file, "podman")
    assert calls.read_text() == "rm --force abc\n"
    assert not file.exists()


def test_podman_builds_the_image_and_apptainer_names_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    podman(tmp_path / "bin", monkeypatch)
    assert build_image(None, dry_run=True, runtime=RuntimeName.PODMAN) == 0
    assert capsys.readouterr().out.startswith("podman build --build-arg=NGC_TAG=25.06-py3")
    with pytest.raises(
        LaunchError, match=r"apptainer build .*25.06-py3-f4fa7d6b.sif docker-daemon:"
    ):
        build_image(None, runtime=RuntimeName.APPTAINER)


def test_a_module_runs_in_apptainer_where_its_stand_in_executes_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'while [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"'
    calls = stand_in(tmp_path / "bin", "apptainer", script, monkeypatch)
    stand_in(tmp_path / "bin", "python3", f'exec {sys.executable} "$@"', monkeypatch)
    name = find_pair(None).name.replace(":", "+")
    code = (
        "import sys; from pathlib import Path; from parakit.cluster.checks import apptainer; "
        "apptainer._FOLDER = Path(sys.argv[1]); from parakit.cli.dispatch import run_target; "
        "sys.exit(run_target('module', ['tools.preprocess', '--help']))"
    )
    (tmp_path / f"{name}.sif").write_bytes(SIF_HEADER)
    answer = subprocess.run(
        (sys.executable, "-c", code, str(tmp_path)),
        cwd=ROOT,
        env={**os.environ, "RUNTIME": "apptainer"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "sample" in answer.stdout
    assert "--nv" not in calls.read_text()
