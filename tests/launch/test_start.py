"""The shared starting checkpoint, written by a stand-in for Megatron."""

import os
import platform
from pathlib import Path

import pytest
from rich.console import Console

from tools.launch import start
from tools.launch.compose import Launch
from tools.launch.options import Options
from tools.launch.target import parse_target
from tools.launch.train import compose_target, flags_of_grammar


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    target = parse_target("train-dp2-gpt2-tiny-2cpu")
    return compose_target(target, flags_of_grammar(target), Options(runs=tmp_path))


def partials(launch: Launch) -> list[Path]:
    assert launch.start_checkpoint is not None
    return list(launch.start_checkpoint.parent.glob("*.partial*"))


def ensure(launch: Launch, tmp_path: Path) -> Path | None:
    return start.ensure_start_checkpoint(launch, Options(runs=tmp_path), Console(quiet=True))


def test_of_two_runs_that_start_together_one_writes_it_and_the_other_takes_it(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = launch.start_checkpoint
    assert path is not None

    def write(_: Launch, log: Path, *__: object) -> int:
        (log.parent / "mine").touch()
        path.mkdir()  # the other run is done meanwhile
        (path / "theirs").touch()
        return 0

    monkeypatch.setattr(start, "run_ranks", write)
    assert ensure(launch, tmp_path) == path
    assert [file.name for file in path.iterdir()] == ["theirs"]
    assert partials(launch) == []


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_is_not(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = launch.start_checkpoint
    assert path is not None
    here = f"{path.name}.partial-{platform.node()}-"
    dead, living, elsewhere, other = (
        path.with_name(name)
        for name in (
            f"{here}{2**22 + 1}",
            f"{here}{os.getppid()}",
            f"{path.name}.partial-far-1",
            f"{here}2-77",
        )
    )
    for folder in (dead, living, elsewhere, other):
        folder.mkdir(parents=True)
    monkeypatch.setattr(start, "run_ranks", lambda *_: 0)
    ensure(launch, tmp_path)
    assert path.is_dir()
    assert sorted(partials(launch)) == sorted([living, elsewhere, other])
