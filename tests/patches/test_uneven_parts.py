import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_patches.uneven_parts import _where_uneven
from tools.recipe.model import ROOT

PROGRAM = Path(__file__).with_name("two_ranks_uneven.py")


def test_two_ranks_gather_and_reduce_parts_of_one_and_two_rows() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        (*torchrun, str(PROGRAM)), env=environment, check=True, capture_output=True, timeout=120
    )
    by_rank = ast.literal_eval(done.stdout.decode().strip())
    whole = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert [gathered for gathered, _ in by_rank] == [whole, whole]
    # One rank's rows and twice the same of the other: three times 0 to 5.
    assert by_rank[0][1] == [[0.0, 3.0]]
    assert by_rank[1][1] == [[6.0, 9.0], [12.0, 15.0]]


@pytest.mark.parametrize(("rows", "name"), [(None, "own"), ([2, 2], "own"), ([1, 3], "uneven")])
def test_equal_parts_are_left_to_megatron(rows: list[int] | None, name: str) -> None:
    def uneven(*_: object) -> object:
        return "uneven"

    def own(*_: object, **__: object) -> object:
        return "own"

    call = _where_uneven(uneven)(own)  # type: ignore[arg-type]
    assert call(torch.zeros(4), None, rows) == name
