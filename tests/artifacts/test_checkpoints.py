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


def test_checkpoints_are_listed_from_the_newest_without_other_folders(
    tmp_path: Path, write: Write
) -> None:
    for iteration in (5, 20, 10):
        write(tmp_path, iteration)
    (tmp_path / "damaged-iter_0000030").mkdir()
    assert iterations(tmp_path) == [20, 10, 5]


def test_changed_file_of_a_verified_checkpoint_is_refused_by_name(
    tmp_path: Path, write: Write
) -> None:
    path = write(tmp_path, 5)
    [checkpoint] = find_checkpoints(tmp_path)
    verify_and_record(checkpoint)
    check_unchanged(checkpoint)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=r"\.distcp is not what was saved"):
        check_unchanged(checkpoint)


def test_unverified_checkpoint_is_verified_on_request(tmp_path: Path, write: Write) -> None:
    write(tmp_path, 5)
    [checkpoint] = find_checkpoints(tmp_path)
    assert not checkpoint.is_verified
    check_unchanged(checkpoint)
    assert checkpoint.is_verified


def test_only_checkpoints_older_than_the_newest_verified_ones_are_removed(
    tmp_path: Path, write: Write
) -> None:
    for iteration in (1, 2, 3, 4):
        write(tmp_path, iteration)
    stored = find_checkpoints(tmp_path)
    assert remove_old_checkpoints(stored, keep=2) == ()
    for checkpoint in stored[1:3]:
        verify_and_record(checkpoint)
    assert [checkpoint.iteration for checkpoint in remove_old_checkpoints(stored, keep=2)] == [1]
    assert iterations(tmp_path) == [4, 3, 2]
