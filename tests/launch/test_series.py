from pathlib import Path

import pytest
from rich.console import Console

from tools.launch import series as module
from tools.launch.compose import Launch
from tools.launch.options import Options
from tools.launch.run_folder import create_run_folder
from tools.launch.series import run_series
from tools.launch.target import parse_target
from tools.launch.train import compose_target, flags_of_grammar
from tools.records import run as records
from tools.records.io import write_record
from tools.records.run import Status, StatusRecord


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was trained; runs end well and leave their folder."""
    names: list[str] = []

    def execute(launch: Launch, runs: Path, *_: object) -> tuple[Path, StatusRecord]:
        names.append(launch.spec.name)
        folder = create_run_folder(launch, runs)
        status = StatusRecord(Status.OK, 0)
        write_record(folder / records.STATUS_FILE, status)
        return folder, status

    monkeypatch.setattr(module, "execute", execute)
    monkeypatch.setattr(module, "ensure_start_checkpoint", lambda *_: None)
    return names


def test_a_series_trains_again_unless_it_is_to_go_on(
    trained: list[str], sample_prefix: Path, tmp_path: Path
) -> None:
    options = Options(data=str(sample_prefix), runs=tmp_path / "runs")
    targets = [parse_target(f"train-{name}-gpt2-tiny-2cpu") for name in ("dp2", "tp2")]
    launches = [compose_target(target, flags_of_grammar(target), options) for target in targets]
    console = Console(quiet=True)
    first = run_series(launches[:1], options, console)
    assert run_series(launches, options, console, go_on=True)[0] == first[0]
    assert trained == ["dp2", "tp2"]
    assert run_series(launches[:1], options, console) != first
    assert trained == ["dp2", "tp2", "dp2"]
