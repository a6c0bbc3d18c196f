import os
import subprocess
import sys
from pathlib import Path

import pytest

from parakit.cluster.container.docker import bind_mount
from parakit.cluster.container.image import build_image
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.run import RuntimeName
from parakit.launch.options import Options
from parakit.launch.runtime import (
    find_named_folders,
    module_container,
    prepare_dataset,
    run_module,
)
from tests.given import run
from tests.machines import FakeDocker

DOCKER = Options(runtime=RuntimeName.DOCKER)


def started(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "parakit", "module", *arguments),
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_on_the_host_a_module_runs_as_it_would_by_itself() -> None:
    answer = started("tools.preprocess", "--help", RUNTIME="host")
    assert answer.returncode == 0
    assert "sample" in answer.stdout


def test_in_docker_it_runs_in_the_image_as_the_caller_without_gpus(docker: FakeDocker) -> None:
    answer = started(
        *("tools.preprocess", "--input", "a 'b' $c.jsonl"),
        RUNTIME="docker",
        HF_TOKEN="s3cret",
        HF_ENDPOINT="http://mirror",
    )
    assert answer.returncode == 0, answer.stderr
    argv = docker.call("run")
    assert argv[-5:] == ["python3", "-m", "tools.preprocess", "--input", "a 'b' $c.jsonl"]
    assert "--gpus" not in argv
    assert argv[argv.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert {"HF_TOKEN", "HF_ENDPOINT"} <= set(argv)
    assert "s3cret" not in " ".join(argv)
    assert docker.environment("run")["HF_TOKEN"] == "s3cret"


def test_its_exit_status_is_the_modules(docker: FakeDocker) -> None:
    docker.answer("run", code=3)
    assert started("tools.preprocess", RUNTIME="docker").returncode == 3


def test_without_the_image_nothing_is_started(docker: FakeDocker) -> None:
    docker.answer("image inspect", code=1)
    with pytest.raises(LaunchError, match="is not built; run 'make image"):
        run_module(("tools.preprocess",), DOCKER)
    assert "run" not in [call[0] for call in docker.calls]


def test_ones_own_cache_of_the_hub_is_seen_in_the_container(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    command = module_container(("tools.preprocess", "hub", "some/name"), DOCKER).wrap((), ())
    assert "HF_HOME" in command
    assert f"type=bind,source={tmp_path},target={tmp_path}" in command


def test_text_for_a_target_that_has_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INPUT", "mine.jsonl")
    with pytest.raises(LaunchError, match=r"use 'make prepare-ds INPUT=mine.jsonl NAME=…'"):
        prepare_dataset(("sample",), DOCKER, "prepare-ds-sample")


def test_folders_that_the_arguments_name_are_seen_in_the_container(
    docker: FakeDocker, tmp_path: Path
) -> None:
    real, linked = tmp_path / "real", tmp_path / "linked"
    real.mkdir()
    linked.symlink_to(real)
    (real / "text.jsonl").touch()
    arguments = ("tools.preprocess", "--input", f"{linked}/*.jsonl", "--output-prefix", "owt-ds/x")
    command = module_container(arguments, DOCKER).wrap((), ())
    mounts = [command[index + 1] for index, argument in enumerate(command) if argument == "--mount"]
    assert mounts == [bind_mount(ROOT), bind_mount(linked), bind_mount(real)]


def test_a_word_that_is_no_path_does_not_mount_the_whole_machine() -> None:
    assert list(find_named_folders(("/no-such-folder-here", "--flag", "gpt2"))) == []


def test_a_dry_run_prints_and_starts_nothing(
    docker: FakeDocker, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(runtime=RuntimeName.DOCKER, dry_run=True)
    assert run_module(("tools.preprocess", "hub", "a/b"), options) == 0
    assert capsys.readouterr().out.startswith("docker run --rm")
    assert "run" not in [call[0] for call in docker.calls]


def test_a_missing_text_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execvp", lambda *command: pytest.fail(str(command)))
    asked = {"INPUT": str(tmp_path / "none.txt"), "NAME": "x", "RUNTIME": "host"}
    with pytest.raises(LaunchError, match=r"^INPUT=.*none.txt matches nothing; check the path"):
        run("prepare-ds", asked)


def test_a_dry_run_refuses_what_the_run_would(
    docker: FakeDocker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"INPUT": str(tmp_path / "none.jsonl"), "NAME": "x", "RUNTIME": "host", "DRY_RUN": "1"}
    with pytest.raises(LaunchError, match=r"^INPUT=.*none.jsonl matches nothing; check the path"):
        run("prepare-ds", asked)
    assert "--input" in capsys.readouterr().out, "the command comes first"
    docker.answer("info", code=1)
    with pytest.raises(LaunchError, match="docker"):
        build_image(None, dry_run=True)
    assert capsys.readouterr().out.startswith("docker build")


@pytest.mark.parametrize(
    "target", ["prepare-ds-sample", "prepare-ds-openwebtext-10k", "image", "reproduce"]
)
def test_make_hands_its_targets_over(docker: FakeDocker, target: str) -> None:
    answer = subprocess.run(
        ("make", "-s", target),
        cwd=ROOT,
        env={**os.environ, "RUNTIME": "docker", "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # After its commands a dry run says what would be refused here: two GPUs are not there.
    assert answer.returncode == 0 or target == "reproduce", answer.stderr
    assert "docker build" in answer.stdout if target == "image" else "docker run" in answer.stdout
