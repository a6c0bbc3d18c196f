"""Random healthy configurations: what their table counts, and that a seed means what its line says."""

import subprocess
import sys
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from tests.judged import read_judged
from tests.patience import OF_A_RUN
from tests.verify.random_healthy import COLUMNS, JUDGED, drawn, table


def test_judged_configurations_are_counted_by_dtype_and_strategy_with_the_worst_share() -> None:
    judged = (
        ("1", "held", "0.5", 'make verify-dp2-gpt2-tiny-2cpu EXTRA="--lr 1 --bf16"'),
        ("2", "differs", "3", 'make verify-dp2-gpt2-tiny-2cpu EXTRA="--lr 1"'),
        ("3", "not comparable", "", 'make verify-tp2-gpt2-tiny-2cpu EXTRA="--lr 1"'),
    )
    lines = list(table([dict(zip(COLUMNS, cells, strict=True)) for cells in judged]))
    assert lines[1:] == [
        "| all | 3 | 1 | 3.00 |",
        "| fp32 | 2 | 0 | 3.00 |",
        "| dp2 | 2 | 1 | 3.00 |",
        "| tp2 | 1 | 0 | 0.00 |",
        "| bf16 | 1 | 1 | 0.50 |",
    ]


def test_a_judged_seed_still_draws_the_configuration_of_its_line() -> None:
    lines = read_judged(JUDGED)[::2]
    assert len(lines) > 200
    for line in lines:
        assert drawn(int(line["seed"])).command == line["command"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [33, 72, 99, 118, 136, 164, 176])
def test_seed_that_was_once_called_wrong_holds(seed: int, tmp_path: Path) -> None:
    judged = tmp_path / "judged.csv"
    ended = subprocess.run(
        (
            sys.executable,
            "-m",
            "tests.verify.random_healthy",
            judged,
            "--seeds",
            f"{seed}",
            f"{seed}",
        ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=OF_A_RUN,
    )
    assert [line["verdict"] for line in read_judged(judged)] == ["held"], (
        ended.stdout + ended.stderr
    )
