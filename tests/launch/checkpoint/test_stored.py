import warnings
from pathlib import Path

import pytest

from tests.launch.checkpoint.conftest import Write, damage, iterations
from tools.launch.checkpoint.readable import DamagedCheckpointError, weights_hash
from tools.launch.checkpoint.stored import check, find_checkpoints, prune, verify


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
    verify(checkpoint)
    check(checkpoint)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=r"\.distcp is not what was saved"):
        check(checkpoint)


def test_one_that_was_never_proven_is_proven_when_it_is_asked_for(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path, 5)
    [checkpoint] = find_checkpoints(tmp_path)
    assert not checkpoint.is_verified
    check(checkpoint)
    assert checkpoint.is_verified


def test_only_what_is_older_than_the_newest_proven_ones_goes(tmp_path: Path, write: Write) -> None:
    for iteration in (1, 2, 3, 4):
        write(tmp_path, iteration)
    stored = find_checkpoints(tmp_path)
    assert prune(stored, keep=2) == ()
    for checkpoint in stored[1:3]:
        verify(checkpoint)
    assert [checkpoint.iteration for checkpoint in prune(stored, keep=2)] == [1]
    assert iterations(tmp_path) == [4, 3, 2]


def test_the_same_weights_have_one_hash_whatever_else_was_saved_with_them(tmp_path: Path) -> None:
    import torch
    from torch.distributed import checkpoint

    def saved(name: str, weight: float, note: str) -> str:
        states = {"weight": torch.full((8,), weight), "arguments": {"save": note}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That this is a single process.
            writer = checkpoint.FileSystemWriter(tmp_path / name)
            checkpoint.save(states, storage_writer=writer, no_dist=True)
        return weights_hash(tmp_path / name)

    first = saved("a", 1.0, "runs/a")
    assert saved("b", 1.0, "another/folder") == first
    assert saved("c", 1.0 + 2**-23, "runs/a") != first
