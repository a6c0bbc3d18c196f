import os
from pathlib import Path

import pytest

from parakit.config.flags import Flags
from parakit.launch.initial_checkpoint import _compose_writer
from parakit.launch.job import parse_target
from parakit.launch.options import Options, Wandb, options_from_texts
from parakit.launch.train import compose_job, format_command_line


def test_wandb_is_off_unless_asked_for() -> None:
    assert options_from_texts({"WANDB_API_KEY": "k", "WANDB_PROJECT": "p"}).wandb is None
    assert options_from_texts({"WANDB": "0"}).wandb is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Wandb(mode="offline")),
        ({"WANDB_API_KEY": "k"}, Wandb(mode="online")),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, Wandb(mode="offline")),
        ({"WANDB_PROJECT": "p", "WANDB_ENTITY": "e"}, Wandb("p", "e", "offline")),
    ],
)
def test_a_key_in_the_environment_means_online(
    variables: dict[str, str], expected: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NETRC": str(tmp_path / "none"), **variables}.items():
        monkeypatch.setenv(name, value)
    assert options_from_texts({"WANDB": "1", **variables}).wandb == expected


@pytest.mark.parametrize(
    ("service", "mode"), [("", "online"), ("https://wandb.example.com", "offline")]
)
def test_a_login_to_the_service_in_netrc_means_online(
    tmp_path: Path, service: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", service)
    logged = options_from_texts({"WANDB": "1"}).wandb
    assert logged is not None
    assert logged.mode == mode


def test_a_logged_run_is_named_after_its_folder_and_writes_tensorboard_events() -> None:
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    options = Options(wandb=Wandb("p", "e", "online"))
    launch = compose_job(target.with_options(options))
    flags = Flags(launch.arguments("runs/R"))
    assert flags.text("--wandb-project") == "p"
    assert flags.text("--wandb-entity") == "e"
    assert flags.text("--wandb-exp-name") == "R"
    assert flags.text("--wandb-save-dir") == "runs/R"
    assert flags.text("--tensorboard-dir") == "runs/R/tensorboard"
    assert launch.environment["WANDB_MODE"] == "online"


def test_a_mode_that_wandb_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="WANDB_MODE=onlin is not online, offline or disabled"):
        options_from_texts({"WANDB": "1", "WANDB_MODE": "onlin"})


def test_the_shared_start_is_not_logged() -> None:
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    options = Options(wandb=Wandb())
    launch = compose_job(target.with_options(options))
    assert launch.initial_checkpoint is not None
    writer = _compose_writer(launch, launch.initial_checkpoint)
    assert "--wandb-project" not in writer.flags


def test_the_key_is_in_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-key")
    monkeypatch.setenv("WANDB", "1")
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    launch = compose_job(target.with_options(options_from_texts(os.environ)))
    assert "WANDB_MODE=online" in format_command_line(launch)
    assert "s3cret" not in format_command_line(launch) + repr(launch)
