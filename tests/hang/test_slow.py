"""The rank that slows the iterations of a run: `time.json` of a run folder, and the last line of the run."""

from pathlib import Path

import msgspec
import pytest

from parakit.artifacts.measurements import RankTime, TimeRecord
from parakit.artifacts.run import RUN_FILE, TIME_FILE, Status, StatusRecord
from parakit.costs import Phase
from parakit.hang import find_slow_rank
from parakit.launch import format_outcome

RUNS = Path(__file__).parents[1] / "golden/runs"


def write_times(folder: Path, strategy: str, own_seconds: list[float], iterations: int = 8) -> Path:
    """Write a run folder whose ranks compute for these seconds of each iteration, and wait for the slowest."""
    run = min(RUNS.glob(f"*-{strategy}-gpt2-tiny-*cpu"))
    (folder / RUN_FILE).write_bytes((run / RUN_FILE).read_bytes())
    longest = max(own_seconds)
    ranks = [
        RankTime(
            rank=rank,
            iteration_seconds=longest + 0.01,
            phase_seconds={Phase.FORWARD: longest + 0.01},
            communication_seconds={Phase.FORWARD: longest + 0.01 - seconds},
            processor_seconds=(seconds,) * iterations,
        )
        for rank, seconds in enumerate(own_seconds)
    ]
    (folder / TIME_FILE).write_bytes(msgspec.json.encode(TimeRecord(tuple(ranks))))
    return folder


@pytest.mark.parametrize(
    ("strategy", "own_seconds", "slow_rank"),
    [
        ("dp2", [0.1, 0.2], 1),
        ("dp2", [0.2, 0.23], None),
        # Stages of a pipeline have unequal work.
        ("pp2", [0.1, 0.3], None),
        ("tp2pp2", [0.1, 0.1, 0.2, 0.4], 3),
    ],
)
def test_rank_that_computes_longer_than_its_peers_is_named(
    tmp_path: Path, strategy: str, own_seconds: list[float], slow_rank: int | None
) -> None:
    slow = find_slow_rank(write_times(tmp_path, strategy, own_seconds))
    assert (slow.rank if slow else None) == slow_rank


def test_few_iterations_name_no_rank(tmp_path: Path) -> None:
    assert find_slow_rank(write_times(tmp_path, "dp2", [0.1, 0.3], iterations=3)) is None


def test_last_line_of_run_that_ended_well_names_slow_rank(tmp_path: Path) -> None:
    write_times(tmp_path, "dp2", [0.1, 0.2])
    line = format_outcome(tmp_path, StatusRecord(Status.OK, 0, "", wall_seconds=12.0))
    assert line.startswith(
        "ok after 12 s: rank 1 slows iterations by 48%: it computes for 200 ms of each, and the other ranks "
        "of its stage for 100 ms → "
    )


def test_last_line_without_times_is_as_before(tmp_path: Path) -> None:
    line = format_outcome(tmp_path, StatusRecord(Status.OK, 0, "", wall_seconds=12.0))
    assert line.startswith("ok after 12 s → ")
