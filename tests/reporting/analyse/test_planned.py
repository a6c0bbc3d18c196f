import io
import platform
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.io import write_record
from parakit.config.hardware import device_by_key
from parakit.planner.calibration import calibration_path
from parakit.planner.readings.table import read_measurements
from parakit.reporting.build import BuildOptions, build
from tests.reporting.factory import log_text, run_record, write_run


def made(
    root: Path, strategies: tuple[str, ...], unsteady: str = "", short: str = ""
) -> tuple[str, str]:
    """Return what a report of such runs prints, and its Markdown."""
    for strategy in strategies:
        record = run_record(f"run-{strategy}", strategy)
        record = replace(record, host=replace(record.host, name=platform.node()))
        spread = 400 if strategy == unsteady else 4
        count = 5 if strategy == short else 20
        times = [400.0, 250.0, *(90.0 + (k * 37) % spread for k in range(count))]
        write_run(root / "runs", record, log_text(times, micro=True))
    output = io.StringIO()
    options = BuildOptions(
        name="r",
        runs_root=root / "runs",
        reports_root=root / "reports",
        readings=root / "mine.csv",
    )
    assert build(options, Console(file=output, width=400, highlight=False)) == 0
    return output.getvalue(), (root / "reports" / "r" / "report.md").read_text()


def calibrated(root: Path) -> None:
    path = calibration_path(root / "runs", device_by_key("cpu"))
    path.parent.mkdir(parents=True)
    write_record(path, {"matmul": 1.0, "source": "a test"})


def test_runs_become_readings_once_and_those_that_scatter_do_not(tmp_path: Path) -> None:
    text, _ = made(tmp_path, ("baseline", "dp2", "tp2"), unsteady="tp2")
    assert " has 2 rows, " in text
    assert "mine.csv has 2 rows, 2 of them new" in text
    readings, unreadable = read_measurements(tmp_path / "mine.csv")
    assert not unreadable
    assert [(r.where, r.dp, r.value) for r in readings] == [
        (f"{platform.node()}:run-baseline", 1, 0.0915),
        (f"{platform.node()}:run-dp2", 2, 0.0915),
    ]
    again, _ = made(tmp_path, ())
    assert " has 2 rows, " in again
    assert "0 of them new" in again


def test_runs_with_too_few_iterations_for_an_interval_are_listed_as_left_out(
    tmp_path: Path,
) -> None:
    text, _ = made(tmp_path, ("baseline", "dp2"), short="dp2")
    assert "mine.csv has 1 row, 1 of them new" in text
    assert "mine.csv: run-dp2 (fewer than 6 measured iterations)." in text


def test_cpu_ranks_are_predicted_once_the_machine_is_calibrated_and_say_that_nothing_is_near(
    tmp_path: Path,
) -> None:
    text, page = made(tmp_path / "one", ("baseline",))
    assert "planner" not in text + page
    calibrated(tmp_path / "two")
    text, page = made(tmp_path / "two", ("baseline", "dp2"))
    assert "The planner's times have an error of" in page
    assert "nothing near was measured" in page
    _, page = made(tmp_path / "two", ("tp2", "cp2", "pp2"))
    # By now two runs of one's own correct each other, too few for an interval; then there are five.
    assert "Corrected by 1 run of your own" in page
    _, page = made(tmp_path / "two", ())
    assert "Corrected by 4 runs of your own" in page
    assert page.count("nothing near was measured") == 0
