"""Times of CPU ranks that other programs slowed down rank no strategy and are no measurements."""

import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.run import SAMPLE_COLUMNS, SAMPLES_FILE, Status
from parakit.costs.operations import Phase
from parakit.planner.readings.table import read_measurements
from parakit.reporting.build import BuildOptions, build
from tests.reporting.factory import log_text, run_record, write_run
from tests.reporting.ledger_factory import seconds, write_times
from tests.reporting.render.test_build import all_verdicts

TIMES = (400.0, 250.0, *(100.0 + k % 4 for k in range(40)))
"""Five seconds of training, whose first two iterations are warm-up."""


def folder(
    root: Path,
    strategy: str,
    times: Sequence[float] = TIMES,
    used: Mapping[int, float] | None = None,
    status: Status = Status.OK,
    name: str = "",
    cores: int = 2,
) -> Path:
    """A run folder of this machine, whose `samples.csv` has ranks that use so much of a core in %."""
    record = run_record(name or f"run-{strategy}", strategy)
    record = replace(record, host=replace(record.host, name=platform.node(), cores=cores))
    made = write_run(root / "runs", record, log_text(times, micro=True), status)
    if used is not None:
        lines = [",".join(SAMPLE_COLUMNS)]
        for second in range(1, 21):
            # Before the ranks train they import Megatron and wait for the disk.
            ranks = used if second > 15 else dict.fromkeys(used, 20.0)
            lines += [f"{second}.0,{rank},a cpu,{use},1000,,,," for rank, use in ranks.items()]
        (made / SAMPLES_FILE).write_text("\n".join(lines) + "\n")
    return made


def reported(root: Path) -> str:
    output = io.StringIO()
    options = BuildOptions(
        name="r",
        runs_root=root / "runs",
        reports_root=root / "reports",
        readings=root / "mine.csv",
    )
    assert build(options, Console(file=output, width=1000, highlight=False)) == 0
    return f"{output.getvalue()}\n{all_verdicts(root / 'reports' / 'r')}"


def measured(root: Path) -> list[str]:
    """The runs in the file of one's own measurements."""
    if not (root / "mine.csv").exists():
        return []
    return [reading.where.partition(":")[2] for reading in read_measurements(root / "mine.csv")[0]]


def test_undisturbed_runs_are_ranked_and_measured(tmp_path: Path) -> None:
    folder(tmp_path, "baseline", used={0: 95})
    folder(tmp_path, "dp2", [0.7 * ms for ms in TIMES], used={0: 70, 1: 68})
    # The first stage of a pipeline waits for the last, which computes the loss.
    folder(tmp_path, "pp2", [0.8 * ms for ms in TIMES], used={0: 33, 1: 88})
    text = reported(tmp_path)
    assert "dp2 ×2 is the fastest of 3 rows" in text
    assert "No speed is compared" not in text
    assert "Left out" not in text
    assert measured(tmp_path) == ["run-baseline", "run-dp2", "run-pp2"]


def test_a_row_says_which_runs_its_time_leaves_out(tmp_path: Path) -> None:
    folder(tmp_path, "baseline", used={0: 95})
    folder(tmp_path, "dp2", used={0: 30, 1: 34}, name="run-dp2-first")
    folder(tmp_path, "dp2", [0.7 * ms for ms in TIMES], used={0: 70, 1: 68}, name="run-dp2-second")
    text = reported(tmp_path)
    assert (
        "The time of dp2 ×2 leaves out 1 of 2 runs, which other programs slowed down (rank 1, the"
        " busiest, got 34% of a core)."
    ) in text
    assert "dp2 ×2 is the fastest of 2 rows" in text


def test_a_disturbed_run_is_not_ranked_and_is_no_measurement(tmp_path: Path) -> None:
    folder(tmp_path, "baseline", used={0: 95})
    folder(tmp_path, "tp2", [0.75 * ms for ms in TIMES], used={0: 60, 1: 61})
    folder(tmp_path, "dp2", [0.7 * ms for ms in TIMES], used={0: 17, 1: 35})
    text = reported(tmp_path)
    assert "dp2 ×2 is" not in text
    assert "tp2 ×2 is the fastest of 2 rows" in text
    assert (
        "No speed is compared with dp2 ×2 (rank 1, the busiest, got 35% of a core): other programs used"
        " the cores. Close them and run again." in text
    )
    assert "mine.csv: run-dp2 (other programs used its cores)." in text
    assert measured(tmp_path) == ["run-baseline", "run-tp2"]


def test_a_disturbed_baseline_leaves_no_ranking(tmp_path: Path) -> None:
    folder(tmp_path, "baseline", used={0: 31})
    folder(tmp_path, "dp2", [0.6 * ms for ms in TIMES], used={0: 70, 1: 68})
    folder(tmp_path, "tp2", [0.7 * ms for ms in TIMES], used={0: 70, 1: 68})
    text = reported(tmp_path)
    assert "fast" not in text
    assert (
        "• No speed is compared with baseline ×1 (rank 0, the busiest, got 31% of a core)" in text
    )
    assert measured(tmp_path) == ["run-dp2", "run-tp2"]


@pytest.mark.parametrize(
    ("processor", "is_told"), [(0.038, False), (0.020, True)], ids=["a core", "half a core"]
)
def test_the_time_ledger_tells_a_rank_that_waits_from_one_that_gets_no_core(
    tmp_path: Path, processor: float, is_told: bool
) -> None:
    folder(tmp_path, "baseline", used={0: 95})
    made = folder(tmp_path, "dp2", [0.7 * ms for ms in TIMES], used={0: 45, 1: 45})
    # Each rank waits for 60 of 100 ms.
    ranks = [seconds(rank, {Phase.FORWARD: 0.1}, {Phase.FORWARD: 0.06}) for rank in range(2)]
    got = (replace(ranks[0], processor_seconds=(0.04,) * 20),)
    write_times(made, *got, replace(ranks[1], processor_seconds=(processor,) * 20))
    text = reported(tmp_path)
    told = "(rank 1 got 50% of a core)"
    assert (told in text) is is_told
    assert ("run-dp2" in measured(tmp_path)) is not is_told


def test_a_run_that_is_repeated_undisturbed_counts_alone(tmp_path: Path) -> None:
    folder(tmp_path, "baseline", used={0: 95})
    folder(tmp_path, "dp2", [4 * ms for ms in TIMES], used={0: 20, 1: 20}, name="run-1")
    folder(tmp_path, "dp2", [0.7 * ms for ms in TIMES], used={0: 70, 1: 70}, name="run-2")
    text = reported(tmp_path)
    assert "dp2 ×2 is the fastest of 2 rows: 71" in text
    assert "mine.csv: run-1 (other programs used its cores)." in text
    assert measured(tmp_path) == ["run-baseline", "run-2"]


def test_a_time_below_the_baselines_share_is_not_believed(tmp_path: Path) -> None:
    """As `make demo` beside other work gave it: dp2 ×0.165, pp2 ×0.325, tp2 ×0.9 on two ranks."""
    folder(tmp_path, "baseline")
    for strategy, ratio in (("dp2", 0.165), ("pp2", 0.325), ("tp2", 0.9)):
        folder(tmp_path, strategy, [ratio * ms for ms in TIMES])
    text = reported(tmp_path)
    assert "fast" not in text
    assert (
        "dp2 ×2 against baseline ×1: no verdict on speed, ×0.165 the time on 2 times as many ranks is"
        " impossible (×0.500 is the least), so other programs slowed its reference down; close them and"
        " run both again." in text
    )
    assert "Left out of" in text
    assert measured(tmp_path) == ["run-tp2"]


def test_half_of_the_time_on_two_ranks_is_possible(tmp_path: Path) -> None:
    folder(tmp_path, "baseline")
    folder(tmp_path, "dp2", [0.47 * ms for ms in TIMES])
    assert "dp2 ×2 is the fastest of 2 rows" in reported(tmp_path)


@pytest.mark.parametrize(
    "status", [Status.INTERRUPTED, Status.CRASHED, Status.NAN, Status.OUT_OF_MEMORY]
)
def test_a_run_that_did_not_end_well_is_no_measurement(tmp_path: Path, status: Status) -> None:
    folder(tmp_path, "baseline")
    folder(tmp_path, "dp2", [0.7 * ms for ms in TIMES], status=status)
    assert f"mine.csv: run-dp2 ({status.replace('_', ' ')})." in reported(tmp_path)
    assert measured(tmp_path) == ["run-baseline"]


def test_more_ranks_than_cores_is_said_and_is_no_disturbance(tmp_path: Path) -> None:
    folder(tmp_path, "baseline", used={0: 95})
    folder(tmp_path, "dp2", [0.7 * ms for ms in TIMES], used={0: 45, 1: 45}, cores=1)
    text = reported(tmp_path)
    assert (
        "No speed is compared with dp2 ×2 (2 ranks on 1 core): with more ranks than cores, times say"
        " nothing about speed." in text
    )
    assert "other programs" not in text
