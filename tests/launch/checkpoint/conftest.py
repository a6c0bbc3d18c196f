"""Checkpoints in torch's distributed format, written by torch itself."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from parakit.artifacts.checkpoints import find_checkpoints

Write = Callable[[Path, int], Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from torch.distributed import checkpoint

    folder = tmp_path_factory.mktemp("saved") / "iter"
    states = {"weight": torch.arange(4096.0), "bias": torch.ones(8), "step": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That this is a single process.
        checkpoint.save(states, storage_writer=checkpoint.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


@pytest.fixture
def write(saved: Path) -> Write:
    """Puts a checkpoint of an iteration into a folder, as Megatron names and announces it."""

    def write_checkpoint(folder: Path, iteration: int) -> Path:
        path = folder / f"iter_{iteration:07d}"
        shutil.copytree(saved, path)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return path

    return write_checkpoint


def iterations(folder: Path) -> list[int]:
    return [checkpoint.iteration for checkpoint in find_checkpoints(folder)]


def damage(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
