import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_patches.cpu.variable_size_collectives import _convert_to_numpy, _replace_on_gloo
from parakit.config.files import ROOT
from tests.patience import OF_A_RUN

PROGRAM = Path(__file__).with_name("two_ranks_of_unequal_parts.py")


def test_two_ranks_gather_and_reduce_parts_of_one_and_two_rows(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, str(PROGRAM), str(tmp_path / "store"))
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, timeout=OF_A_RUN
    )
    by_rank = ast.literal_eval(done.stdout.decode().strip())
    whole = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert [gathered for gathered, *_ in by_rank] == [whole, whole]
    assert [listed for *_, listed in by_rank] == [whole, whole]
    # The sum of a rank's rows and twice the same rows of the other rank is three times 0 to 5.
    assert by_rank[0][1] == [[0.0, 3.0]]
    assert by_rank[1][1] == [[6.0, 9.0], [12.0, 15.0]]


@pytest.mark.parametrize(
    ("rows", "backend", "name"),
    [
        (None, "gloo", "Megatron's"),
        ([1, 3], "nccl", "Megatron's"),
        ([2, 2], "fake", "Megatron's"),
        ([1, 3], "gloo", "ours"),
        ([2, 2], "gloo", "ours"),
    ],
)
def test_equal_parts_and_other_backends_are_left_to_megatron(
    monkeypatch: pytest.MonkeyPatch, rows: list[int] | None, backend: str, name: str
) -> None:
    def ours(*_: object) -> object:
        return "ours"

    def megatrons(*_: object, **__: object) -> object:
        return "Megatron's"

    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    call = _replace_on_gloo(ours)(megatrons)  # type: ignore[arg-type]
    assert call(torch.zeros(4), None, rows) == name


def stays(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Stand-in for Megatron's function, which moves nothing on the host."""
    return tensor


def test_split_sizes_are_numpy_arrays_as_on_a_gpu() -> None:
    move = _convert_to_numpy(stays)
    sizes = move(torch.tensor([3, 1]), as_numpy=True)
    assert isinstance(sizes, np.ndarray)
    assert sizes.tolist() == [3, 1]


def test_split_sizes_stay_tensors_unless_numpy_is_asked_for() -> None:
    move = _convert_to_numpy(stays)
    tokens = torch.tensor([3, 1])
    assert move(tokens) is tokens
    assert move(None, as_numpy=True) is None
