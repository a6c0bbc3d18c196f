from pathlib import Path

import pytest

from parakit.artifacts.checkpoints import (
    check_unchanged,
    find_checkpoints,
    remove_old_checkpoints,
    verify_and_record,
)
from parakit.artifacts.torch_dist import DamagedCheckpointError
from tests.launch.checkpoint.conftest import Write, damage, iterations


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
    verify_and_record(checkpoint)
    check_unchanged(checkpoint)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=r"\.distcp is not what was saved"):
        check_unchanged(checkpoint)


def test_one_that_was_never_proven_is_proven_when_it_is_asked_for(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path, 5)
    [checkpoint] = find_checkpoints(tmp_path)
    assert not checkpoint.is_verified
    check_unchanged(checkpoint)
    assert checkpoint.is_verified


def test_only_what_is_older_than_the_newest_proven_ones_goes(tmp_path: Path, write: Write) -> None:
    for iteration in (1, 2, 3, 4):
        write(tmp_path, iteration)
    stored = find_checkpoints(tmp_path)
    assert remove_old_checkpoints(stored, keep=2) == ()
    for checkpoint in stored[1:3]:
        verify_and_record(checkpoint)
    assert [checkpoint.iteration for checkpoint in remove_old_checkpoints(stored, keep=2)] == [1]
    assert iterations(tmp_path) == [4, 3, 2]
