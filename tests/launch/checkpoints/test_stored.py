from pathlib import Path

import pytest

from tests.launch.checkpoints.conftest import Write
from tools.launch.checkpoints.choose import choose_checkpoint, set_aside
from tools.launch.checkpoints.keeper import Keeper
from tools.launch.checkpoints.readable import DamagedCheckpointError
from tools.launch.checkpoints.stored import check, find_checkpoints, prove, prune
from tools.launch.errors import LaunchError


def iterations(folder: Path) -> list[int]:
    return [checkpoint.iteration for checkpoint in find_checkpoints(folder)]


def damage(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_checkpoints_come_newest_first_and_other_folders_are_none(
    tmp_path: Path, write: Write
) -> None:
    for iteration in (5, 20, 10):
        write(tmp_path, iteration)
    (tmp_path / "damaged-iter_0000030").mkdir()
    assert iterations(tmp_path) == [20, 10, 5]


def test_a_proven_checkpoint_that_changes_is_refused_by_the_file(
    tmp_path: Path, write: Write
) -> None:
    path = write(tmp_path, 5)
    [checkpoint] = find_checkpoints(tmp_path)
    prove(checkpoint)
    check(checkpoint)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=r"\.distcp is not what was saved"):
        check(checkpoint)


def test_one_that_was_never_proven_is_proven_when_it_is_asked_for(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path, 5)
    [checkpoint] = find_checkpoints(tmp_path)
    assert not checkpoint.is_proven
    check(checkpoint)
    assert checkpoint.is_proven


def test_only_what_is_older_than_the_newest_proven_ones_goes(tmp_path: Path, write: Write) -> None:
    for iteration in (1, 2, 3, 4):
        write(tmp_path, iteration)
    stored = find_checkpoints(tmp_path)
    assert prune(stored, keep=2) == ()
    for checkpoint in stored[1:3]:
        prove(checkpoint)
    assert [checkpoint.iteration for checkpoint in prune(stored, keep=2)] == [1]
    assert iterations(tmp_path) == [4, 3, 2]


def test_a_keeper_proves_what_is_saved_and_then_lets_old_ones_go(
    tmp_path: Path, write: Write
) -> None:
    for iteration in (1, 2, 3):
        with Keeper(tmp_path, keep=2) as keeper:
            write(tmp_path, iteration)
        assert keeper.problems == []
    assert iterations(tmp_path) == [3, 2]
    assert all(checkpoint.is_proven for checkpoint in find_checkpoints(tmp_path))


def test_a_keeper_lets_nothing_go_for_a_checkpoint_that_cannot_be_read(
    tmp_path: Path, write: Write
) -> None:
    with Keeper(tmp_path, keep=1):
        write(tmp_path, 1)
    with Keeper(tmp_path, keep=1) as keeper:
        damage(write(tmp_path, 2))
    assert iterations(tmp_path) == [2, 1]
    assert "iter_0000002 cannot be read back" in keeper.problems[0]


def test_the_newest_whole_one_is_chosen_and_damaged_ones_make_way(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path, 5)
    damage(write(tmp_path, 10))
    (write(tmp_path, 15) / ".metadata").unlink()
    choice = choose_checkpoint(tmp_path)
    assert choice.checkpoint.iteration == 5
    assert [(c.iteration, why.split()[0]) for c, why in choice.damaged] == [
        (15, "it"),
        (10, choice.damaged[1][1].split()[0]),
    ]
    set_aside(tmp_path, choice.checkpoint.iteration)
    assert iterations(tmp_path) == [5]
    assert (tmp_path / "damaged-iter_0000010").is_dir()
    assert not list(tmp_path.glob("*15"))


def test_without_a_whole_checkpoint_it_says_what_is_wrong_with_each(
    tmp_path: Path, write: Write
) -> None:
    with pytest.raises(LaunchError, match="SAVE_EVERY="):
        choose_checkpoint(tmp_path)
    damage(write(tmp_path, 10))
    with pytest.raises(LaunchError, match=r"iter_0000010: .*damaged"):
        choose_checkpoint(tmp_path)
