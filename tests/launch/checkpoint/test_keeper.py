import shutil
from pathlib import Path

import pytest

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.launch import checkpoints as keepers
from parakit.launch.checkpoints import CheckpointKeeper
from tests.launch.checkpoint.conftest import Write, damage, iterations
from tests.patience import until
from tests.reporting.factory import iteration_line


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.touch()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def say(log: Path, iteration: int, loss: float = 7.5) -> None:
    with log.open("a") as file:
        file.write(iteration_line(iteration, loss=loss) + "\n")


def test_it_proves_what_is_saved_and_at_a_good_end_lets_old_ones_go(
    folder: Path, log: Path, write: Write
) -> None:
    for iteration in (1, 2, 3):
        with CheckpointKeeper(folder, 2, log) as keeper:
            say(log, iteration)
            write(folder, iteration)
            keeper.mark_ended_well()
        assert keeper.problems == []
    assert iterations(folder) == [3, 2]
    assert all(checkpoint.is_verified for checkpoint in find_checkpoints(folder))


def test_it_lets_nothing_go_for_a_checkpoint_that_cannot_be_read(
    folder: Path, log: Path, write: Write
) -> None:
    with CheckpointKeeper(folder, 1, log) as keeper:
        say(log, 2)
        write(folder, 1)
        damage(write(folder, 2))
        keeper.mark_ended_well()
    assert iterations(folder) == [2, 1]
    assert "iter_0000002 cannot be read back" in keeper.problems[0]


def test_the_newest_counts_only_once_the_next_iteration_gave_a_loss(
    folder: Path, log: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "LOOK_SECONDS", 0.01)
    with CheckpointKeeper(folder, 1, log):
        say(log, 4)
        write(folder, 2)
        write(folder, 4)
        wait_until_proven(folder, 4)
        assert iterations(folder) == [4, 2]
        say(log, 5)
    assert iterations(folder) == [4]


def test_the_disk_is_looked_at_before_an_old_checkpoint_frees_room(
    folder: Path, log: Path, write: Write
) -> None:
    seen: list[list[int]] = []
    with CheckpointKeeper(folder, 1, log, lambda: seen.append(iterations(folder))) as keeper:
        write(folder, 2)
        write(folder, 4)
        say(log, 5)
        keeper.mark_ended_well()
    assert seen[-1] == [4, 2]
    assert iterations(folder) == [4]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_after_a_nan_nothing_goes_even_at_a_good_end(
    folder: Path, log: Path, write: Write, loss: float
) -> None:
    with CheckpointKeeper(folder, 1, log) as keeper:
        say(log, 4)
        write(folder, 2)
        say(log, 5, loss)
        write(folder, 5)
        keeper.mark_ended_well()
    assert iterations(folder) == [5, 2]


def test_what_was_logged_before_it_began_counts_for_nothing(
    folder: Path, log: Path, write: Write
) -> None:
    say(log, 9)
    with CheckpointKeeper(folder, 1, log):
        write(folder, 2)
        write(folder, 4)
    assert iterations(folder) == [4, 2]


def test_the_end_does_not_wait_for_the_last_checkpoint_to_be_verified(
    folder: Path, log: Path, write: Write
) -> None:
    with CheckpointKeeper(folder, 2, log):
        say(log, 4)
        write(folder, 4)
    [checkpoint] = find_checkpoints(folder)
    assert not checkpoint.is_verified


def test_an_iteration_that_is_saved_again_is_proven_again(
    folder: Path, log: Path, write: Write
) -> None:
    shutil.rmtree(write(folder, 8))  # Megatron's own word for the newest stays.
    with CheckpointKeeper(folder, 2, log) as keeper:
        say(log, 8)
        write(folder, 8)
        keeper.mark_ended_well()
    [checkpoint] = find_checkpoints(folder)
    assert checkpoint.is_verified


def wait_until_proven(folder: Path, iteration: int) -> None:
    until(
        lambda: all(checkpoint.is_verified for checkpoint in find_checkpoints(folder)),
        f"{iteration} was not verified",
    )
