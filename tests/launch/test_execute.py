"""A launcher whose run folder is removed while its ranks, a shell here, still run."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from rich.console import Console

from parakit.artifacts.run import LOG_FILE
from parakit.config.errors import LaunchError
from parakit.config.run import DeviceKind
from parakit.launch.compose import Launch
from parakit.launch.execute import run_ranks
from parakit.launch.options import Options
from parakit.launch.progress import RunProgress

pytestmark = pytest.mark.ranks


def test_a_run_whose_folder_was_removed_is_ended_and_said_in_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    launch = SimpleNamespace(
        command=lambda _: ("bash", "-c", f"echo begun; rm -r {folder}; sleep 3600"),
        environment={},
        runtime=SimpleNamespace(container=None),
        job=SimpleNamespace(options=Options()),
        time_limit_seconds=None,
        warm=None,
        spec=SimpleNamespace(device=DeviceKind.CPU),
    )
    progress = RunProgress(Console(file=io.StringIO()), "run", 1)
    with pytest.raises(LaunchError) as refused:
        run_ranks(cast(Launch, launch), folder / LOG_FILE, progress)
    assert str(refused.value) == (
        f"{folder} was removed while its run was on; its ranks were ended, and what they had measured "
        "is gone."
    )
    lines = (
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )
    assert not any(str(folder) in line for line in lines)
