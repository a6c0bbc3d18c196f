import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from parakit.artifacts.run import Status, read_status
from parakit.launch import execute as execute_module
from parakit.launch.compose import Launch
from parakit.launch.execute import execute_launch
from parakit.launch.train import compose_job
from tests.experiments.factory import cell

pytestmark = pytest.mark.ranks

LINE = " iteration        1/      25 | elapsed time per iteration (ms): 9.0 | lm loss: 1.0E+01 |"


@dataclass(frozen=True)
class Endless(Launch):
    """Logs one iteration, and trains on for an hour."""

    def command(self, run_folder: str = "") -> tuple[str, ...]:  # noqa: ARG002
        return ("bash", "-c", f"echo '{LINE}'; exec sleep 3600")


def endless(runs: Path, data: Path) -> Launch:
    launch = compose_job(cell("dp2", data=str(data), runs=runs).job)
    fields: Sequence[str] = list(launch.__dataclass_fields__)
    return Endless(**{name: getattr(launch, name) for name in fields})


def test_a_run_over_its_time_is_ended_and_what_it_logged_is_there(
    tmp_path: Path, sample_prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> float:
        """Time stands still until the iteration is logged, however long that takes here."""
        logged = any(LINE in log.read_text() for log in tmp_path.glob("*/log.txt"))
        return 2.0 if logged else 0.0

    clock = SimpleNamespace(monotonic=now, sleep=time.sleep)
    monkeypatch.setattr(execute_module, "time", clock)
    launch = replace(endless(tmp_path, sample_prefix), time_limit_seconds=1.0)
    folder, status = execute_launch(launch, tmp_path, Console(file=io.StringIO()), "endless")
    assert (status.status, status.reason) == (
        Status.INTERRUPTED,
        "It was not done in 1 s and was ended.",
    )
    assert read_status(folder) == status
    assert "iteration        1/" in (folder / "log.txt").read_text()
