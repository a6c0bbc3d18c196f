"""The shared starting checkpoint, written by a stand-in for Megatron."""

import io
import os
import platform
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.checkpoints import read_verified_weights_hash
from parakit.config.errors import LaunchError
from parakit.config.flags import Flags
from parakit.launch import initial_checkpoint
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.train import compose_job
from tests.launch.checkpoint.conftest import Write, damage
from tests.launch.checkpoint.conftest import saved as saved  # noqa: PLC0414 - a fixture
from tests.launch.checkpoint.conftest import write as write  # noqa: PLC0414 - a fixture


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    return compose_job(target.with_options(Options(runs=tmp_path)))


def partials(launch: Launch) -> list[Path]:
    assert launch.initial_checkpoint is not None
    return list(launch.initial_checkpoint.parent.glob(".*.partial"))


def ensure(launch: Launch, tmp_path: Path) -> Path | None:
    return initial_checkpoint.ensure_initial_checkpoint(launch, Console(quiet=True))


def test_of_two_runs_that_start_together_one_writes_it_and_the_other_takes_it(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    path = launch.initial_checkpoint
    assert path is not None

    def written_twice(_: Launch, log: Path, *__: object) -> int:
        write(log.parent, 1)
        path.mkdir()  # the other run is done meanwhile
        (path / "theirs").touch()
        return 0

    monkeypatch.setattr(initial_checkpoint, "run_ranks", written_twice)
    assert ensure(launch, tmp_path) == path
    assert [file.name for file in path.iterdir()] == ["theirs"]
    assert partials(launch) == []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, write: Write) -> list[Path]:
    """Where the stand-in has written a checkpoint."""
    folders: list[Path] = []

    def run_ranks(_: Launch, log: Path, *__: object) -> int:
        write(log.parent, 1)
        folders.append(log.parent)
        return 0

    monkeypatch.setattr(initial_checkpoint, "run_ranks", run_ranks)
    return folders


def test_an_overwritten_initial_checkpoint_is_renamed_and_written_again(
    launch: Launch, tmp_path: Path, written: list[Path]
) -> None:
    output = io.StringIO()
    console = Console(file=output, width=1000)
    path = initial_checkpoint.ensure_initial_checkpoint(launch, console)
    assert path is not None
    weights = read_verified_weights_hash(path)
    initial_checkpoint.ensure_initial_checkpoint(launch, console)
    assert len(written) == 1  # it is as it was
    damage(path / "iter_0000001")
    assert initial_checkpoint.ensure_initial_checkpoint(launch, console) == path
    assert len(written) == 2
    assert (path.parent / f"damaged-{path.name}").is_dir()
    assert ".distcp is not what was saved" in output.getvalue()
    assert "is kept as damaged-" in output.getvalue()
    assert weights is not None
    assert read_verified_weights_hash(path) == weights


def test_a_run_that_resumes_needs_none(launch: Launch, tmp_path: Path, written: list[Path]) -> None:
    resumed = launch.resume_from(ResumePoint("before", tmp_path, 4))
    assert ensure(resumed, tmp_path) is None
    assert written == []


def test_one_without_a_manifest_is_read_back_against_its_own_checksums(
    launch: Launch, tmp_path: Path, written: list[Path], write: Write
) -> None:
    path = launch.initial_checkpoint
    assert path is not None
    write(path, 1)
    ensure(launch, tmp_path)
    assert written == []
    (path / "iter_0000001" / "manifest.json").unlink()
    damage(path / "iter_0000001")
    ensure(launch, tmp_path)
    assert len(written) == 1


def test_one_whose_tracker_names_another_iteration_is_written_anew(
    launch: Launch, tmp_path: Path, written: list[Path]
) -> None:
    path = ensure(launch, tmp_path)
    assert path is not None
    (path / "latest_checkpointed_iteration.txt").write_text("2")
    ensure(launch, tmp_path)
    assert len(written) == 2


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_is_not(
    launch: Launch, tmp_path: Path, written: list[Path]
) -> None:
    path = launch.initial_checkpoint
    assert path is not None
    here = f".{path.name}.{platform.node()}-"
    dead, living, elsewhere, other = (
        path.with_name(name)
        for name in (
            f"{here}{2**22 + 1}.partial",
            f"{here}{os.getppid()}.partial",
            f".{path.name}.far-1.partial",
            f"{here}2-77.partial",
        )
    )
    for folder in (dead, living, elsewhere, other):
        folder.mkdir(parents=True)
    ensure(launch, tmp_path)
    assert path.is_dir()
    assert len(written) == 1
    assert sorted(partials(launch)) == sorted([living, elsewhere, other])


def test_one_that_could_not_be_written_leaves_its_log_and_nothing_else(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(_: Launch, log: Path, *__: object) -> int:
        log.touch()
        return 1

    monkeypatch.setattr(initial_checkpoint, "run_ranks", run_ranks)
    path = launch.initial_checkpoint
    assert path is not None
    kept = path.with_name(f"{path.name}.log")
    with pytest.raises(LaunchError, match=f"Exit code 1.* The log is {kept}"):
        ensure(launch, tmp_path)
    assert list(path.parent.iterdir()) == [kept]


def test_weights_of_a_router_that_refuses_a_balancing_loss_are_written_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    target = parse_target("train-dp2-moe-tiny-2cpu")
    sinkhorn = ("--moe-router-load-balancing-type", "sinkhorn", "--moe-aux-loss-coeff", "0")
    options = Options(runs=tmp_path, extra=sinkhorn)
    flags: list[str] = []

    def run_ranks(writer: Launch, log: Path, *__: object) -> int:
        flags.extend(writer.flags)
        write(log.parent, 1)
        return 0

    monkeypatch.setattr(initial_checkpoint, "run_ranks", run_ranks)
    launch = compose_job(target.with_options(options))
    initial_checkpoint.ensure_initial_checkpoint(launch, Console(quiet=True))
    assert Flags(flags).text("--moe-aux-loss-coeff") == "0"
